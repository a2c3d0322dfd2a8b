"""Benchmarks: onfoot beside PyTorch, torch.compile, transformers and PEFT, in the same run on the same machine."""
