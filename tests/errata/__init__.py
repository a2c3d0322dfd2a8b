"""The errata of docs/errata.md, as code: each formula as printed, the right one, and what an oracle says of both.

`attention`, `loss_and_embedding`, `norm_lora_network`, `note_with_listings` and `note_on_qk` hold the formulas as
printed and the traps beside them; the `measure_` module of the same name compares them with PyTorch's autograd.
"""
