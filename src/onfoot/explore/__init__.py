"""Explore: a web page that shows every number of the forward and backward pass of a text."""
