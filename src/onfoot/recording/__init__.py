"""A step is recorded once, planned, and replayed.

`planned` are arrays that have a place but no numbers yet; `recorder` notes the kernel calls that a model makes with
them; `plan` gives every buffer its place in one arena; `replay` runs the list, natively and on all threads. Nothing
here knows a network: what is recorded is whatever the readable model calls.
"""
