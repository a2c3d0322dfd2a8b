"""`onfoot bench --ranks`: data-parallel steps on 1, 2, ... ranks of this machine, each under its own mpiexec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onfoot.bench.ranks import check_mpi, run_measure
from onfoot.cli.console import Sheet, show_sheet, show_text

SIZES: dict[str, Any] = {  # a step of tenths of a second: small, but with more than one bucket to send
    "layers": 4, "width": 256, "heads": 4, "vocab": 1024, "context": 64, "rows": 8, "bucket_mb": 2.0,
}  # fmt: skip


def bench_ranks(ranks: str, rounds: int = 3, out: Path | None = None, **sizes: Any) -> None:
    """Measures steps over so many ranks, such as "1,2,4", and shows what they cost. Sizes are those of `measure`."""
    words = ranks.replace(",", " ").split()
    counts = [int(word) for word in words if word.isdecimal() and int(word) > 0]
    if not counts or len(counts) != len(words):
        raise ValueError(f'--ranks {ranks}: numbers of ranks are needed, such as "1,2,4"')
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: at least 1 is needed")
    if max(counts) > 1:
        check_mpi()
    asked = {**SIZES, **sizes}
    asked["rows"] = max(asked["rows"], *counts, 1)  # at least one for each rank, and the same step for all
    results: list[dict[str, Any]] = []
    for n in counts:
        for shard in (False, True) if n > 1 else (False,):
            show_text(f"{n} rank{'s' * (n > 1)}{', sharded optimizer' * shard} ...", "dim")
            results.append(run_measure(n, rounds=rounds, shard=shard, **asked))
            if out is not None:
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show_sheet(sheet(results))


def sheet(results: list[dict[str, Any]]) -> Sheet:
    """The results as a table; speed is beside that of the first row."""
    out = Sheet(
        f"{results[0]['parameters']:,} parameters, {results[0]['tokens']:,} tokens a step",
        [
            ">ranks", "optimizer", ">gradients", ">update", ">tokens/s", ">faster",
            ">sums, after", ">during", ">hidden", ">memory a rank",
        ],
        notes=[
            "sums: the wait for them, in ms, if they start after the backward pass, and if they start during it",
            "hidden: the share of that wait that is gone. Memory is the peak of a whole process, Python included",
        ],
    )  # fmt: skip
    first = None
    for result in results:
        seconds = result["seconds"]
        whole = seconds["alone: gradients" if result["ranks"] == 1 else "during: gradients"] + seconds["update"]
        speed = result["tokens"] / whole
        first = first or speed
        waits = ("–", "–", "–")
        if result["ranks"] > 1:
            after, during = 1e3 * seconds["after: waiting"], 1e3 * seconds["during: waiting"]
            waits = (f"{after:.1f}", f"{during:.1f}", f"{result['hidden']:.0%}")
        row = (str(result["ranks"]), "sharded" if result["shard"] else "on every rank")
        times = (f"{1e3 * (whole - seconds['update']):,.0f} ms", f"{1e3 * seconds['update']:,.0f} ms")
        out.rows.append(
            (*row, *times, f"{speed:,.0f}", f"{speed / first:.2f}×", *waits, f"{result['memory_mb']:,.0f} MB")
        )
    return out
