"""`onfoot bench --ranks`: data-parallel training steps on 1, 2, ... ranks of this machine, one mpiexec per count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onfoot.bench.ranks import check_mpi, run_measure
from onfoot.cli.console import Sheet, show_sheet, show_text

SIZES: dict[str, Any] = {  # a step takes tenths of a second, and its gradients fill more than one bucket
    "layers": 4, "width": 256, "heads": 4, "vocab": 1024, "context": 64, "rows": 8, "bucket_mb": 2.0,
}  # fmt: skip


def bench_ranks(ranks: str, rounds: int = 3, out: Path | None = None, **sizes: Any) -> None:
    """Measures training steps for each number of ranks, such as "1,2,4", and prints a table. `sizes` override SIZES."""
    parts = ranks.replace(",", " ").split()
    counts = [int(word) for word in parts if word.isdecimal() and int(word) > 0]
    if not counts or len(counts) != len(parts):
        raise ValueError(f'--ranks must be positive integers such as "1,2,4", got {ranks}')
    if rounds < 1:
        raise ValueError(f"--rounds must be >= 1, got {rounds}")
    if max(counts) > 1:
        check_mpi()
    settings = {**SIZES, **sizes}
    settings["rows"] = max(settings["rows"], *counts, 1)  # at least one per rank, and the same batch for every count
    results: list[dict[str, Any]] = []
    for n in counts:
        for shard in (False, True) if n > 1 else (False,):
            show_text(f"{n} rank{'s' * (n > 1)}{', sharded optimizer' * shard} ...", "dim")
            results.append(run_measure(n, rounds=rounds, shard=shard, **settings))
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show_sheet(sheet(results))


def sheet(results: list[dict[str, Any]]) -> Sheet:
    """The results as a table; the speedup is relative to the first row."""
    out = Sheet(
        f"{results[0]['parameters']:,} parameters, {results[0]['tokens']:,} tokens per step",
        [
            ">ranks", "optimizer", ">gradients", ">update", ">tokens/s", ">speedup",
            ">wait, after", ">overlapped", ">hidden", ">memory per rank",
        ],
        notes=[
            "wait: ms spent waiting for the gradient sums, started after the backward pass or overlapped with it",
            "hidden: fraction of the wait removed by overlapping; memory: peak of the process, Python included",
        ],
    )  # fmt: skip
    first = None
    for result in results:
        seconds = result["seconds"]
        step_time = seconds["alone: gradients" if result["ranks"] == 1 else "during: gradients"] + seconds["update"]
        speed = result["tokens"] / step_time
        first = first or speed
        waits = ("–", "–", "–")
        if result["ranks"] > 1:
            after, during = 1e3 * seconds["after: waiting"], 1e3 * seconds["during: waiting"]
            waits = (f"{after:.1f}", f"{during:.1f}", f"{result['hidden']:.0%}")
        row = (str(result["ranks"]), "sharded" if result["shard"] else "replicated")
        times = (f"{1e3 * (step_time - seconds['update']):,.0f} ms", f"{1e3 * seconds['update']:,.0f} ms")
        out.rows.append(
            (*row, *times, f"{speed:,.0f}", f"{speed / first:.2f}×", *waits, f"{result['memory_mb']:,.0f} MB")
        )
    return out
