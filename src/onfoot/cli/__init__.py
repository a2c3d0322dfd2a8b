"""The command line: `onfoot <command>`, one file per command."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onfoot.cli import (
    attribute,
    bench,
    blame,
    chat,
    check,
    curvature,
    evaluate,
    explore,
    export,
    finetune,
    generate,
    info,
    learn,
    merge,
    serve,
    table,
    train,
    walk,
)
from onfoot.cli.aliases import WithAliases
from onfoot.terminal import printable


class _Group(TyperGroup):
    """Reports user errors (a wrong value, a missing file) as one line on stderr, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader closed the pipe, as in `onfoot walk | head`
            raise
        except (ValueError, OSError, MemoryError) as error:
            if os.environ.get("ONFOOT_DEBUG"):
                raise
            print(f"error: {printable(_one_line(error))}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph and keeps [brackets]
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=WithAliases)(train.train)
app.command("finetune", cls=WithAliases)(finetune.finetune)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("eval")(evaluate.evaluate)
app.command("info")(info.info)
app.command("merge")(merge.merge)
app.command("export")(export.export)
app.command("explore")(explore.explore)
app.command("walk")(walk.walk)
app.command("table")(table.table)
app.command("attribute")(attribute.attribute)
app.command("check")(check.check)
app.add_typer(learn.app, name="learn")
app.command("blame")(blame.blame)
app.command("curvature")(curvature.curvature)
app.command("bench")(bench.bench)


def _one_line(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory ({error}); choose smaller sizes"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _version(requested: bool) -> None:
    if requested:
        from onfoot import __version__

        print(f"onfoot {__version__}")
        raise typer.Exit


@app.callback()
def onfoot(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Transformers with hand-written gradients: every gradient is a formula you can read."""


def main() -> None:
    """Runs the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and "utf" not in (stream.encoding or "").lower():
            # UTF-8 in a pipe keeps Δ and ρ; a terminal that cannot show them prints a replacement instead of failing
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    app()
