"""The table of `onfoot bench --ranks`: speeds, fractions and waits computed from fixed measurements."""

from __future__ import annotations

from typing import Any

import pytest

from onfoot.cli import bench_ranks

ALONE = {
    "ranks": 1, "shard": False, "tokens": 1200, "parameters": 5000, "hidden": None, "memory_mb": 150.4,
    "seconds": {"alone: gradients": 0.25, "update": 0.05},
}  # fmt: skip
TWO = {
    "ranks": 2, "shard": True, "tokens": 1200, "parameters": 5000, "hidden": 0.75, "memory_mb": 1100.0,
    "seconds": {"during: gradients": 0.11, "update": 0.04, "after: waiting": 0.008, "during: waiting": 0.002},
}  # fmt: skip


def test_speed_is_tokens_over_the_whole_step_and_beside_the_first_row() -> None:
    sheet = bench_ranks.sheet([ALONE, TWO])
    assert "5,000 parameters" in sheet.title and "1,200 tokens" in sheet.title
    assert sheet.rows == [
        ("1", "replicated", "250 ms", "50 ms", "4,000", "1.00×", "–", "–", "–", "150 MB"),
        ("2", "sharded", "110 ms", "40 ms", "8,000", "2.00×", "8.0", "2.0", "75%", "1,100 MB"),
    ]


def test_all_ranks_have_a_row_and_all_runs_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Any, Any]] = []

    def measured(n: int, **options: Any) -> dict[str, Any]:
        asked.append((n, options["shard"], options["rows"]))
        return {**(ALONE if n == 1 else TWO), "ranks": n}

    monkeypatch.setattr(bench_ranks, "run_measure", measured)
    monkeypatch.setattr(bench_ranks, "check_mpi", lambda: None)
    bench_ranks.bench_ranks("1,12", 1)
    assert asked == [(1, False, 12), (12, False, 12), (12, True, 12)]
