"""`onfoot bench`: this machine, onfoot and its peers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.cli.fields import refuse_beside


def bench(
    context: typer.Context,
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="JOB…", help="Jobs; none: all.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds; each has every contender once, in its own process.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads for everybody.")] = 2,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…",
            help='Instead of the jobs: data-parallel training on so many MPI ranks of this machine, as in "1,2,4".',
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.", show_default=False)] = None,
) -> None:
    """Measure onfoot against PyTorch, torch.compile, transformers and PEFT on this machine, or ranks with --ranks."""
    if ranks is not None:
        from onfoot.cli.bench_ranks import bench_ranks

        each = "ranks are measured by themselves, each with cores ÷ ranks threads"
        refuse_beside(context, "--ranks", ("jobs", "threads"), each)
        bench_ranks(ranks, rounds, out)
        return
    from onfoot.bench import machine
    from onfoot.bench.report import chosen, rows, run_job

    try:
        import torch  # noqa: F401
    except ImportError:
        raise ValueError('the peers need PyTorch, transformers and PEFT: pip install "onfoot[test]"') from None
    work = chosen(jobs or [])
    flops, bandwidth = machine.sgemm_gflops(), machine.read_gbytes()
    show_text(f"{machine.describe()}\nsgemm {flops:,.0f} GFLOPS, reading memory {bandwidth:,.1f} GB/s\n")
    table: list[tuple[str, ...]] = []
    figures = {"machine": machine.describe(), "sgemm_gflops": flops, "read_gbytes": bandwidth, "jobs": {}}
    for job in work:
        results = run_job(job, rounds, threads, show_text)
        table += rows(job, results, flops, bandwidth)
        figures["jobs"][job.name] = [asdict(r) for r in results]  # type: ignore[index]
        if out is not None:
            out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    show_sheet(
        Sheet(
            "onfoot and its peers",
            ["job", "who", ">speed", ">of the limit", ">peak memory", ">faster", ">memory"],
            table,
        )
    )
