"""The cost of private training: a private step against the ordinary one, in time and memory, here and with Opacus.

    python benchmarks/private.py [--rounds N] [--out FILE]

GPT-2-like, 6 blocks of width 384, 4 × 256 tokens. The two steps of a side alternate in one process, so that a busy
machine slows both, and the ratio is that of the best of each; the peak memory of each is that of a process of its own.
Opacus gets transformers' network with fused attention, fused AdamW and ghost clipping. It refuses tied embeddings
("Parameter tying is not supported with Ghost Clipping"), so both its steps have a head of their own, and GPT-2's Conv1D
layers are replaced by nn.Linear, for which it has its fastest formulas. It has none for LoRA.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import onfoot
from onfoot.bench.machine import describe, peak_bytes
from onfoot.models.inputs import no_step
from onfoot.models.model import Model
from onfoot.train.optimizer import AdamW
from onfoot.train.private_step import Settings, private_step
from onfoot.train.step import Microbatch, accumulated_step

REPEATS = 5
BATCH, TOKENS, WIDTH, BLOCKS, HEADS = 4, 256, 384, 6, 6
CASES = {  # vocabulary, LoRA rank
    "vocabulary of 50,257": (50257, 0),
    "vocabulary of 4,096": (4096, 0),
    "LoRA, r = 16": (50257, 16),
}
STEPS = ("ordinary", "private")


def ours(case: str) -> dict[str, Callable[[], Any]]:
    """The two steps on one model: clipped by the global norm, and private."""
    vocabulary, r = CASES[case]
    sizes = {"n_positions": TOKENS, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS}
    model: Model = onfoot.create(onfoot.GPT2Config(vocab_size=vocabulary, **sizes))
    if r:
        model.add_lora(r)
    optimizer = AdamW(model, lr=1e-4)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (BATCH, TOKENS + 1))
    batch = Microbatch(tokens[:, :-1], tokens[:, 1:])
    with_ = Settings(clip=1.0, noise=1.0, expected=BATCH, seed=0, step=0)
    return {
        "ordinary": lambda: accumulated_step(model, optimizer, [batch], BATCH * TOKENS, None, 1.0, no_step),
        "private": lambda: private_step(model, optimizer, [batch], None, with_, no_step),
    }


def theirs(case: str) -> dict[str, Callable[[], Any]]:
    """The two steps in PyTorch, each on its own model; a model is built when its step is first called."""
    import torch
    from opacus import PrivacyEngine
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    vocabulary, _ = CASES[case]
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (BATCH, TOKENS + 1)))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].flatten()
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS).contiguous()  # Opacus needs one row per example

    def network() -> Any:
        torch.manual_seed(0)
        sizes = {"n_positions": TOKENS, "n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        special = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
        config = GPT2Config(vocab_size=vocabulary, tie_word_embeddings=False, **sizes, **dropout, **special)
        model = GPT2LMHeadModel(config).train()
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, Conv1D):
                    setattr(parent, name, torch.nn.Linear(child.nx, child.nf))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def ordinary() -> Callable[[], Any]:
        model, optimizer = network()

        def step() -> None:
            optimizer.zero_grad()
            logits = model(tokens, position_ids=positions).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    def private() -> Callable[[], Any]:
        model, optimizer = network()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=BATCH)
        model, optimizer, loss, _ = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False, criterion=torch.nn.CrossEntropyLoss(), grad_sample_mode="ghost",
        )  # fmt: skip

        def step() -> None:
            optimizer.zero_grad()
            logits = model(tokens, position_ids=positions).logits
            loss(logits.flatten(0, 1), targets, shape=(BATCH, TOKENS, vocabulary)).backward()
            optimizer.step()

        return step

    made: dict[str, Callable[[], Any]] = {}

    def call(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        if name not in made:
            made[name] = make()
        made[name]()

    return {"ordinary": lambda: call("ordinary", ordinary), "private": lambda: call("private", private)}


def worker(side: str, case: str, only: str) -> None:
    """Prints the seconds of the best step of each kind, or the peak memory of one kind."""
    steps = (ours if side == "onfoot" else theirs)(case)
    if only != "both":
        for _ in range(2):
            steps[only]()
        print(json.dumps({"peak_bytes": peak_bytes()}))
        return
    best = dict.fromkeys(steps, math.inf)
    for i in range(REPEATS + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i:  # the first of each compiles and records
                best[name] = min(best[name], time.perf_counter() - start)
    print(json.dumps(best))


def measure(side: str, case: str, only: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", side, case, only]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--worker", nargs=3)
    asked = parser.parse_args()
    if asked.worker:
        worker(*asked.worker)
        return
    results: dict[str, Any] = {"machine": describe(), "cases": {}}
    for case, (_, r) in CASES.items():
        sides = ["onfoot"] if r else ["onfoot", "opacus"]
        rounds = {side: [measure(side, case, "both") for _ in range(asked.rounds)] for side in sides}
        for side in sides:
            seconds = {name: min(one[name] for one in rounds[side]) for name in STEPS}
            peaks = {name: measure(side, case, name)["peak_bytes"] for name in STEPS}
            results["cases"].setdefault(case, {})[side] = {"seconds": seconds, "peak_bytes": peaks}
            print(
                f"{case:22} {side:8} ordinary {seconds['ordinary']:6.2f} s {peaks['ordinary'] / 1e6:6.0f} MB   "
                f"private {seconds['private']:6.2f} s {peaks['private'] / 1e6:6.0f} MB   "
                f"{seconds['private'] / seconds['ordinary']:.2f} x the time, "
                f"{peaks['private'] / peaks['ordinary']:.2f} x the memory",
                flush=True,
            )
    asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
