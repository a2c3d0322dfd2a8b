"""Seconds of training until a loss is reached: `onfoot train` as it is, and nanoGPT's settings for a CPU in PyTorch.

python benchmarks/time_to_loss.py [--steps N] [--out FILE]. The text is the one of `onfoot train` (the Python language
reference), with the same held-out last tenth. nanoGPT's published settings for a CPU: 4 layers, 4 heads, width 128,
64 characters per window, 12 windows per step, AdamW with a learning rate of 1e-3, betas 0.9 and 0.99, weight decay 0.1,
100 warm-up steps, a cosine to 1e-4 over 2,000 steps, no dropout; here one token is one byte, with PyTorch's fused AdamW
and scaled_dot_product_attention, eager and compiled. The goal is the loss that PyTorch has after its last step. Only
training is timed: not evaluation, and not torch.compile's own time, but onfoot's tokenizer is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from onfoot.bench.machine import describe
from onfoot.data.compression import as_bytes
from onfoot.data.corpus import builtin_text
from onfoot.train import pretrain
from onfoot.train.options import TrainOptions

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 4, 128, 64, 12
PEAK, FLOOR, WARMUP = 1e-3, 1e-4, 100
EVERY = {"onfoot": 10, "PyTorch": 100}  # steps between evaluations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.attn(self.ln_1(x)).split(WIDTH, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.out(functional.gelu(self.fc(self.ln_2(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if last else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (steps - WARMUP)
    return FLOOR + 0.5 * (1 + math.cos(math.pi * done)) * (PEAK - FLOOR)


def nanogpt(train: np.ndarray, held_out: np.ndarray, steps: int, compiled: bool) -> list[tuple[float, float]]:
    """(seconds, nats per byte) in the course of the training."""
    torch.manual_seed(0)
    network = Network()
    decayed = [p for p in network.parameters() if p.dim() == 2]
    rest = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.99), fused=True)
    forward: Callable[..., Any] = torch.compile(network) if compiled else network
    data, rng = torch.from_numpy(train.astype(np.int64)), np.random.default_rng(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = rng.integers(0, len(data) - BLOCK, BATCH)
        return (
            torch.stack([data[i : i + BLOCK] for i in starts]),
            torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts]),
        )

    def step(lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        forward(*batch()).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3 if compiled else 0):
        step(0.0)  # compiles
    windows = len(held_out[:-1]) // BLOCK
    ids = torch.from_numpy(held_out[: windows * BLOCK].astype(np.int64)).view(windows, BLOCK)
    targets = torch.from_numpy(held_out[1 : windows * BLOCK + 1].astype(np.int64)).view(windows, BLOCK)

    def loss() -> float:
        with torch.no_grad():
            return network(ids, targets).item()

    curve, seconds = [], 0.0
    for i in range(steps):
        begin = time.perf_counter()
        step(rate(i, steps))
        seconds += time.perf_counter() - begin
        if (i + 1) % EVERY["PyTorch"] == 0 or i + 1 == steps:
            curve.append((seconds, loss()))
    return curve


def ours() -> list[tuple[float, float]]:
    """The same for `onfoot train`, from the tokenizer on."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        options = TrainOptions(sample_tokens=0, quiet=True, save_every=10**6)
        trainer = pretrain.start(Path(folder) / "run", options)
        curve, seconds = [], time.perf_counter() - begin
        source: Any = trainer.source
        tokens = source.held_out.tokens[: source.eval_windows * source.held_out.context + 1]
        per_byte = (len(tokens) - 1) / len(as_bytes(trainer.model.tokenizer, tokens[1:]))  # type: ignore[arg-type]
        for i in range(options.steps):
            begin = time.perf_counter()
            trainer.step(options.learning_rate(i))
            trainer.state.step += 1
            seconds += time.perf_counter() - begin
            if (i + 1) % EVERY["onfoot"] == 0 or i + 1 == options.steps:
                curve.append((seconds, float(trainer.evaluate().loss) * per_byte))
    return curve


def reached(curve: list[tuple[float, float]], goal: float) -> float:
    return next((seconds for seconds, loss in curve if loss <= goal), math.inf)


def when(seconds: float) -> str:
    return f"after {seconds:.1f} s" if math.isfinite(seconds) else "not reached"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of PyTorch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    text = np.frombuffer((builtin_text().text or "").encode(), np.uint8)
    n = len(text) - len(text) // 10
    curves = {"onfoot train": ours()}
    for name, compiled in (("PyTorch, eager", False), ("PyTorch, compiled", True)):
        curves[name] = nanogpt(text[:n], text[n:], args.steps, compiled)
    goal = min(curve[-1][1] for name, curve in curves.items() if name != "onfoot train")
    seconds = {name: reached(curve, goal) for name, curve in curves.items()}
    best = min(seconds[name] for name in seconds if name != "onfoot train")
    for name, curve in curves.items():
        print(
            f"{name:18} {curve[-1][1]:.3f} nats ({curve[-1][1] / math.log(2):.2f} bits) per byte after "
            f"{curve[-1][0]:.0f} s; {goal:.3f} nats per byte {when(seconds[name])}"
        )
    ratio = best / seconds["onfoot train"]
    print(f"onfoot train reaches {goal:.3f} nats per byte {ratio:.1f} times as fast as the faster PyTorch")
    if args.out:
        times = {name: took if math.isfinite(took) else None for name, took in seconds.items()}  # JSON has no infinity
        result = {"machine": describe(), "goal": goal, "seconds": times, "ratio": ratio, "curves": curves}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
