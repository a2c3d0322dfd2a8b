"""`onfoot bench`: onfoot against PyTorch, transformers and PEFT on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.cli.fields import reject_with


def bench(
    context: typer.Context,
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="JOB…", help="Jobs to run; by default all.", show_default=False)
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Number of rounds; each runs every implementation once, in its own process.")
    ] = 3,
    threads: Annotated[int, typer.Option(help="Number of threads for every implementation.")] = 2,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…",
            help='Measure data-parallel training instead, on these numbers of MPI ranks, as in "1,2,4".',
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.", show_default=False)] = None,
) -> None:
    """Benchmark onfoot against PyTorch, torch.compile, transformers and PEFT, or data-parallel ranks with --ranks."""
    if ranks is not None:
        from onfoot.cli.bench_ranks import bench_ranks

        reason = "it runs its own job, with cores ÷ ranks threads per rank"
        reject_with(context, "--ranks", ("jobs", "threads"), reason)
        bench_ranks(ranks, rounds, out)
        return
    from onfoot.bench import machine
    from onfoot.bench.report import chosen, rows, run_job

    try:
        import torch  # noqa: F401
    except ImportError:
        raise ValueError('the benchmark needs PyTorch, transformers and PEFT: pip install "onfoot[test]"') from None
    selected = chosen(jobs or [])
    flops, bandwidth = machine.sgemm_gflops(), machine.read_gbytes()
    show_text(f"{machine.describe()}\nsgemm {flops:,.0f} GFLOPS, memory bandwidth {bandwidth:,.1f} GB/s\n")
    table: list[tuple[str, ...]] = []
    figures = {"machine": machine.describe(), "sgemm_gflops": flops, "read_gbytes": bandwidth, "jobs": {}}
    for job in selected:
        results = run_job(job, rounds, threads, show_text)
        table += rows(job, results, flops, bandwidth)
        figures["jobs"][job.name] = [asdict(r) for r in results]  # type: ignore[index]
        if out is not None:
            out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    show_sheet(
        Sheet(
            "onfoot against other implementations",
            ["job", "implementation", ">speed", ">of the limit", ">peak memory", ">onfoot speedup", ">onfoot memory"],
            table,
        )
    )
