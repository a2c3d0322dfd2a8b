"""Explore: a page on which the forward and the backward pass of a text can be seen, number by number."""
