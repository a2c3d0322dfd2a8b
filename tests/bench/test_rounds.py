"""`onfoot bench` takes the best of its rounds, runs what was asked for, and measures in the units that it says."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onfoot.bench import machine, report, worker
from onfoot.bench.jobs import JOBS, SMALL, find
from onfoot.bench.report import Result, chosen, rows, run_job, share

PER_BLOCK = 12 * 768 * 768
WEIGHTS = 12 * PER_BLOCK + 768 * 50257


def test_the_best_time_and_the_least_memory_of_all_rounds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS["lora-4x256"]
    seconds = {"onfoot-lora": iter([3.0, 1.0, 2.0]), "peft": iter([4.0, 6.0, 5.0])}
    peaks = {"onfoot-lora": iter([30, 10, 20]), "peft": iter([40, 60, 50])}
    order: list[str] = []

    def measured(name: str, contender: str, threads: int) -> dict[str, Any]:
        assert (name, threads) == (job.name, 7)
        order.append(contender)
        return {"seconds": next(seconds[contender]), "peak_bytes": next(peaks[contender])}

    monkeypatch.setattr(report, "measure_apart", measured)
    said: list[str] = []
    results = run_job(job, 3, 7, said.append)
    assert results == [Result("onfoot-lora", 1.0, 10), Result("peft", 4.0, 40)]
    assert order == ["onfoot-lora", "peft"] * 3 and len(said) == 6 and "round 3/3  peft  5,000.0 ms" in said[-1]


def test_generation_is_told_in_tokens_and_shares_of_the_bandwidth() -> None:
    job = JOBS["generate-int8"]
    assert job.unit == "tokens/s" and JOBS["full-4x256"].unit == "ms per step"
    result = Result("onfoot-int8", 0.5, 3_500_000)
    assert result.rate(job) == 64 / 0.5 and result.rate(replace(job, batch=3)) == 3 * 64 / 0.5
    assert share(job, result, 1.0, 20.0) == pytest.approx(64 * WEIGHTS * (1 + 2 / 32) / 0.5 / 20e9)
    assert share(job, Result("transformers", 0.5, 1), 1.0, 20.0) == pytest.approx(64 * WEIGHTS * 4 / 0.5 / 20e9)
    ours, theirs = rows(job, [result, Result("transformers", 2.0, 7_000_000)], 1.0, 20.0)
    assert ours[2] == "128.0 tokens/s" and ours[4] == "4 MB" and theirs[4] == "7 MB"
    assert theirs[-2:] == ("4.00 ×", "0.50 ×")


def test_a_lora_step_has_two_thirds_of_the_products_on_both_sides() -> None:
    job = JOBS["lora-4x256"]
    for contender in job.contenders:
        assert share(job, Result(contender, 2.0, 1), 100.0, 1.0) == pytest.approx(4 * WEIGHTS * 1024 / 2.0 / 100e9)


def test_what_was_asked_for_is_run() -> None:
    assert chosen(["generate", "grow-2x1x8"]) == [JOBS["generate"], find("grow-2x1x8")]
    assert chosen([]) == list(JOBS.values())
    assert (SMALL.n_layer, SMALL.n_embd, SMALL.n_head) == (4, 128, 4)
    grown = find("grow-3x2x64")
    assert (grown.config.n_layer, grown.batch, grown.tokens, grown.config.n_embd) == (3, 2, 64, 512)


def clock(monkeypatch: pytest.MonkeyPatch, module: Any, times: list[float]) -> None:
    """Each measurement takes these seconds, the last again and again."""
    ticks = chain.from_iterable((0.0, t) for t in chain(times, repeat(times[-1])))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))


def test_a_worker_measures_as_often_as_the_job_says_after_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    job = find("grow-1x1x8")
    steps: list[int] = []
    monkeypatch.setattr(worker, "prepare", lambda *_: lambda: steps.append(1) or 1.5)
    clock(monkeypatch, worker, [0.5, 0.25, 0.75])
    found = worker.measure(job, "onfoot", 1)
    assert (found["seconds"], found["result"]) == (0.25, 1.5) and len(steps) == 2 + job.repeats == 5


def test_memory_is_counted_in_bytes() -> None:
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("the peak of a process is read from /proc")
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()
    assert peak[2] == "kB" and worker.peak_bytes() >= int(peak[1]) * 1024


def test_the_machines_limits_are_work_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, machine, [9.0, 0.5, 0.25, 1.0])  # the first warms up
    assert machine.sgemm_gflops(8, 16, rounds=3) == pytest.approx(2 * 8 * 768 * 16 / 0.25 / 1e9)
    clock(monkeypatch, machine, [9.0, 0.5, 0.25, 1.0])
    assert machine.read_gbytes(1, rounds=3) == pytest.approx(2**20 / 0.25 / 1e9)
    assert f"NumPy {np.__version__}" in machine.describe()
