"""Runs jobs and reports the results: contenders in turn, several rounds, each in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onfoot.bench.jobs import JOBS, Job, find
from onfoot.models.params import linear_shapes


@dataclass
class Result:
    """The best of all rounds."""

    contender: str
    seconds: float
    peak_bytes: int

    def rate(self, job: Job) -> float:
        """The value in the table: milliseconds per step, or tokens per second."""
        return job.new_tokens * job.batch / self.seconds if job.new_tokens else 1000 * self.seconds


def run_job(job: Job, rounds: int, threads: int, say: Callable[[str], None]) -> list[Result]:
    """The best time and the least memory of all rounds; each round runs every contender once, so noise hits all."""
    best: dict[str, Result] = {}
    for round_ in range(rounds):
        for contender in job.contenders:
            got = measure_apart(job.name, contender, threads)
            say(f"{job.name}  round {round_ + 1}/{rounds}  {contender}  {got['seconds'] * 1000:,.1f} ms")
            old = best.get(contender)
            seconds = min(got["seconds"], old.seconds) if old else got["seconds"]
            peak = min(got["peak_bytes"], old.peak_bytes) if old else got["peak_bytes"]
            best[contender] = Result(contender, seconds, peak)
    return [best[c] for c in job.contenders]


def measure_apart(job: str, contender: str, threads: int) -> dict[str, Any]:
    """One contender's time and peak memory, measured in a separate process."""
    limits = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads)
    )
    command = [sys.executable, "-m", "onfoot.bench.worker", job, contender, str(threads)]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", env={**os.environ, **limits}
    )
    if done.returncode:
        raise ValueError(f"{contender} failed in {job}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rows(job: Job, results: list[Result], flops: float, bandwidth: float) -> list[tuple[str, ...]]:
    """Table rows per contender, with ours relative to each peer: speed above 1 is faster, memory below 1 is less."""
    ours = results[0]
    out: list[tuple[str, ...]] = []
    for result in results:
        speed, memory = result.seconds / ours.seconds, ours.peak_bytes / max(result.peak_bytes, 1)
        against = ("", "") if result is ours else (f"{speed:.2f} ×", f"{memory:.2f} ×")
        out.append((job.about if result is ours else "", result.contender, f"{result.rate(job):,.1f} {job.unit}",
                    f"{share(job, result, flops, bandwidth):.0%}", f"{result.peak_bytes / 1e6:,.0f} MB",
                    *against))  # fmt: skip
    return out


def share(job: Job, result: Result, flops: float, bandwidth: float) -> float:
    """The fraction of the machine's limit reached: of matrix products for training, of bandwidth for generation.

    Only products with weights are counted (per weight: one forward, one for the input gradient, and one for its own
    gradient if it trains), and the bytes of the weights that each new token has to read.
    """
    weights = sum(a * b for a, b in linear_shapes(job.config).values())
    if job.new_tokens:
        size = weights * (1 + 2 / 32 if result.contender.endswith("int8") else 4)
        return size * job.new_tokens / result.seconds / 1e9 / bandwidth
    times = 4 if result.contender in ("onfoot-lora", "peft") else 6
    return times * weights * job.batch * job.tokens / result.seconds / 1e9 / flops


def chosen(names: list[str]) -> list[Job]:
    return [find(name) for name in names or JOBS]
