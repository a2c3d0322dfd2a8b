"""`onfoot learn train`: trains a small GPT-2 with the learner's own gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onfoot.cli.options import Threads


def train(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Folder of exercises, if it is not the current one.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 300,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also train with what is wrong, and draw both curves.")
    ] = False,
    wrong: Annotated[
        Path | None,
        typer.Option(
            "--wrong",
            help="A file with a wrong solution to compare with, instead of the folder's own.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the weights and of the data order.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs; by default train/ in that of the exercises.", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    threads: Threads = None,
) -> None:
    """Train a small GPT-2 on the gradients that you have written, and on onfoot's for the rest.

    It shows which gradients are yours. With --compare it trains twice from the same initial values, with the right
    gradients and with your wrong ones, and draws both curves.
    """
    from onfoot.cli.console import show_text
    from onfoot.learn import train as runs
    from onfoot.learn.compare import compare as compare_both
    from onfoot.learn.folder import find_folder

    if wrong is not None and not wrong.is_file():
        raise ValueError(f"--wrong {wrong}: no such file; it takes a Python file with a wrong solution to compare with")
    options = runs.options_for(steps, seed, quiet=quiet)
    where = find_folder(folder)
    if compare or wrong is not None:
        compare_both(where, options, show_text, wrong, out)
    else:
        runs.train(where, options, show_text, out)
