"""Benchmarks: onfoot against PyTorch, torch.compile, transformers and PEFT, in the same run on the same machine."""
