"""A step is recorded once, planned, and replayed.

`planned` has arrays with shapes and addresses but no values; `recorder` records the kernel calls that a model makes
with them; `plan` assigns every buffer an offset in one arena; `replay` runs the list natively on all threads. Nothing
here depends on the network: whatever kernels the model calls are recorded.
"""
