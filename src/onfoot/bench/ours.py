"""onfoot's side of each job."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy as np

import onfoot
from onfoot.bench.jobs import Job

Step = Callable[[], float]


def trainer(job: Job, lora: bool) -> Step:
    model = onfoot.create(job.config, seed=0)
    if lora:
        model.add_lora(r=16, alpha=16)  # on all linear layers of the blocks
    optimizer = onfoot.AdamW(model, lr=3e-4)
    rng = np.random.default_rng(0)
    shape = (job.batch, job.tokens)
    tokens, targets = rng.integers(0, job.config.vocab_size, shape), rng.integers(0, job.config.vocab_size, shape)
    return lambda: model.train_step(optimizer, tokens, targets, clip=job.clip)


def generator(job: Job, int8: bool) -> Step:
    """Generation from a model folder, as users run it; with int8, the weights are quantized while loading."""
    with tempfile.TemporaryDirectory() as folder:
        write = f"import onfoot; onfoot.create(onfoot.{job.config!r}, seed=0).save({folder!r})"
        subprocess.run([sys.executable, "-c", write], check=True, capture_output=True)  # its memory is not counted
        model = onfoot.load(folder, quantized=int8)
    tokens = np.random.default_rng(0).integers(0, job.config.vocab_size, (job.batch, job.tokens))

    def step() -> float:
        return float(model.generate(tokens, job.new_tokens, temperature=0, stop_ids=()).shape[1])

    return step
