"""The cost of second order: H u and G u against a gradient, in time and memory, on the engine "numba" and in PyTorch.

python benchmarks/second_order.py [--rounds N] [--out FILE]. Every job runs in a process of its own, in turn: the best
of several calls after a warm-up, and the peak memory of the process. PyTorch's H u is a double backward of the same
network (transformers, eager attention: the fused one has no double backward), beside its gradient with fused attention.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import onfoot
from onfoot.bench.machine import describe, peak_bytes

REPEATS = 4
MODELS: dict[str, tuple[Any, int, int, int]] = {  # configuration, sequences, tokens, LoRA rank
    "gpt2, 6 blocks of width 384": (
        onfoot.GPT2Config(n_layer=6, n_head=6, n_embd=384, n_positions=256, vocab_size=8000), 4, 256, 0,
    ),
    "the same, LoRA": (
        onfoot.GPT2Config(n_layer=6, n_head=6, n_embd=384, n_positions=256, vocab_size=8000), 4, 256, 8,
    ),
    "llama, 6 blocks of width 384": (
        onfoot.LlamaConfig(
            vocab_size=8000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
            num_key_value_heads=2, tie_word_embeddings=True,
        ), 4, 256, 0,
    ),
    "gpt2, 4 blocks of width 128": (
        onfoot.GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=256), 12, 64, 0,
    ),
}  # fmt: skip
JOBS = ("gradient", "hessian", "gauss-newton", "dots", "torch gradient", "torch hessian")


def ours(name: str, job: str) -> Callable[[], Any]:
    config, b, t, lora = MODELS[name]
    model = onfoot.create(config)
    if lora:
        model.add_lora(r=lora)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, config.vocab_size, (2, b, t))
    u = {n: rng.standard_normal(model.params[n].shape, dtype=np.float32) for n in sorted(model.trainable)}
    if job == "gradient":
        return lambda: model.loss_and_grads(tokens, targets)
    if job == "dots":
        return lambda: model.example_dots(tokens, targets, u)
    return lambda: model.hvp(tokens, targets, u, kind=job)


def theirs(name: str, job: str) -> Callable[[], Any]:
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    config, b, t, _ = MODELS[name]
    attention = "eager" if job == "torch hessian" else "sdpa"
    with tempfile.TemporaryDirectory() as folder:
        onfoot.create(config).save(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    rng = np.random.default_rng(0)
    tokens, targets = (torch.tensor(x) for x in rng.integers(0, config.vocab_size, (2, b, t)))
    params = list(model.parameters())
    u = [torch.randn_like(p) for p in params]

    def step() -> Any:
        logits = model(tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        grads = torch.autograd.grad(loss, params, create_graph=job == "torch hessian")
        if job == "torch gradient":
            return grads
        return torch.autograd.grad(sum((g * d).sum() for g, d in zip(grads, u, strict=True)), params)

    return step


def worker(name: str, job: str) -> None:
    step = theirs(name, job) if job.startswith("torch") else ours(name, job)
    for _ in range(2):
        step()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": min(times), "peak_bytes": peak_bytes()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--worker", nargs=2)
    asked = parser.parse_args()
    if asked.worker:
        worker(*asked.worker)
        return
    results: dict[str, Any] = {"machine": describe(), "jobs": {}}
    for name, (*_, lora) in MODELS.items():
        best: dict[str, dict[str, float]] = {}
        for _ in range(asked.rounds):
            for job in JOBS:
                if lora and job.startswith("torch"):
                    continue
                command = [sys.executable, __file__, "--worker", name, job]
                done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                if job not in best or done["seconds"] < best[job]["seconds"]:
                    best[job] = done
        results["jobs"][name] = best
        base = best["gradient"]
        for job, one in best.items():
            of = best["torch gradient"] if job.startswith("torch") else base
            print(
                f"{name:32} {job:16} {one['seconds'] * 1e3:8.1f} ms {one['peak_bytes'] / 1e6:7.0f} MB   "
                f"{one['seconds'] / of['seconds']:5.2f} x the gradient's time, "
                f"{one['peak_bytes'] / of['peak_bytes']:.2f} x its memory",
                flush=True,
            )
    asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
