"""A bfloat16 model kept in 16 bits against the same files in float32: tokens per second and peak memory.

python benchmarks/sixteen_bit.py [--rounds N] [--out FILE]. The model has SmolLM2-360M's shape and random weights,
written in bfloat16 by transformers. Every job runs in a process of its own, in turn: the best of several calls after a
warm-up, and the peak memory of the process, loading included. transformers generates in float32. Only the frozen
weights shrink, so the ratio of a LoRA step's memory depends on what else it needs; larger ones are planned, not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import onfoot
from onfoot.bench.machine import describe, peak_bytes
from onfoot.memory import Job, plan

PROMPT, NEW, REPEATS = 16, 32, 3
SEQUENCES, TOKENS, RANK = 1, 128, 8  # of a LoRA step, with --recompute block
SHAPE: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 15, "num_key_value_heads": 5, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
PLANNED = {  # shape, sequences, tokens, rank
    "SmolLM2-360M, 1 × 512 tokens, rank 16": (SHAPE, 1, 512, 16),
    "Llama-3.2-1B, 1 × 512 tokens, rank 16": (LLAMA_1B, 1, 512, 16),
}
JOBS = (
    "generate, float32", "generate, bfloat16", "generate, transformers float32", "LoRA step, float32",
    "LoRA step, bfloat16",
)  # fmt: skip


def write_model(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)


def ours(folder: str, job: str) -> tuple[Callable[[], Any], int]:
    """A call of a job, and the tokens that it computes."""
    model = onfoot.load(folder, dtype="auto" if "bfloat16" in job else "float32")
    rng = np.random.default_rng(0)
    if job.startswith("generate"):
        prompt = rng.integers(0, SHAPE["vocab_size"], (1, PROMPT))
        return lambda: model.generate(prompt, NEW, temperature=0, stop_ids=()), NEW
    model.add_lora(r=RANK)
    model.recompute = True
    optimizer = onfoot.AdamW(model, lr=1e-4)
    tokens, targets = rng.integers(0, SHAPE["vocab_size"], (2, SEQUENCES, TOKENS))
    return lambda: model.train_step(optimizer, tokens, targets, clip=1.0), SEQUENCES * TOKENS


def theirs(folder: str) -> tuple[Callable[[], Any], int]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.from_numpy(np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, PROMPT)))
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

    def step() -> Any:
        with torch.no_grad():
            return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)

    return step, NEW


def planned(shape: dict[str, Any], sequences: int, tokens: int, rank: int) -> dict[str, float]:
    """The peak bytes of a LoRA step as `onfoot info --memory` plans it."""
    config = onfoot.LlamaConfig(**shape)
    peaks = [plan(Job(config, sequences, tokens, rank, recompute=True, half=half)).peak for half in (False, True)]
    return {"float32": peaks[0], "bfloat16": peaks[1], "ratio": peaks[1] / peaks[0]}


def worker(folder: str, job: str) -> None:
    step, n_tokens = theirs(folder) if "transformers" in job else ours(folder, job)
    step()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    print(json.dumps({"tokens_per_second": n_tokens / min(times), "peak_bytes": peak_bytes()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--write")
    asked = parser.parse_args()
    if asked.write:
        write_model(asked.write)
        return
    if asked.worker:
        worker(*asked.worker)
        return
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--write", folder], check=True, capture_output=True)
        for _ in range(asked.rounds):
            for job in JOBS:
                command = [sys.executable, __file__, "--worker", folder, job]
                done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                before = best.setdefault(job, done)
                best[job] = {
                    "tokens_per_second": max(done["tokens_per_second"], before["tokens_per_second"]),
                    "peak_bytes": min(done["peak_bytes"], before["peak_bytes"]),
                }
    speed = {job: one["tokens_per_second"] for job, one in best.items()}
    peak = {job: one["peak_bytes"] for job, one in best.items()}
    ratios = {
        "generation, bfloat16 / float32": speed["generate, bfloat16"] / speed["generate, float32"],
        "generation, bfloat16 / transformers": speed["generate, bfloat16"] / speed["generate, transformers float32"],
        "memory of generation, bfloat16 / float32": peak["generate, bfloat16"] / peak["generate, float32"],
        "memory of a LoRA step, bfloat16 / float32": peak["LoRA step, bfloat16"] / peak["LoRA step, float32"],
    }
    for job, one in best.items():
        print(f"{job:32} {one['tokens_per_second']:8.1f} tokens/s {one['peak_bytes'] / 1e6:7.0f} MB")
    for name, ratio in ratios.items():
        print(f"{name:42} {ratio:.2f}")
    plans = {name: planned(*job) for name, job in PLANNED.items()}
    for name, one in plans.items():
        print(f"planned: {name}: {one['ratio']:.2f}")
    sizes = {"prompt": PROMPT, "new_tokens": NEW, "lora": [SEQUENCES, TOKENS, RANK], **SHAPE}
    results = {"machine": describe(), "rounds": asked.rounds, "sizes": sizes, "jobs": best, "ratios": ratios}
    results["planned"] = plans
    asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
