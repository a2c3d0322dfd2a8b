"""The errata of docs/errata.md, as code: each formula as printed, the right one, and what an oracle says of both.

`attention`, `loss_and_embedding`, `norm_lora_network`, `note_with_listings` and `note_on_qk` hold the formulas as
printed and the traps beside them; those that a backward pass can be diagnosed with are in `onfoot.check.mistakes`. The
`measure_` module of the same name compares them with PyTorch's autograd.
"""
