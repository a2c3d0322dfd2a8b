"""The commands of `onfoot`, read from the commands themselves: usage, help, and every option with its default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from sphinx.util import logging

from onfoot.cli import app

logger = logging.getLogger(__name__)


def command_pages(_: str = "") -> Iterator[str]:
    group = typer.main.get_command(app)
    yield from _command(group, "onfoot", None, 2)  # type: ignore[arg-type]


def _command(command: Any, path: str, parent: Any, level: int) -> Iterator[str]:
    context = command.make_context(command.name, [], parent=parent, resilient_parsing=True)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []  # in the order of --help
    below = {name: command.get_command(context, name) for name in names}
    if parent is not None:
        usage = " ".join(command.collect_usage_pieces(context))
        yield from (f"{'#' * level} {path}", "", plain(command.help or ""), "", "```text", f"{path} {usage}", "```", "")
        if not command.help:
            logger.warning("the command %s has no help", path, type="docstring")
        yield from _options(command, path)
    for name, one in below.items():
        if not one.hidden:
            yield from _command(one, f"{path} {name}", context, min(level + (parent is not None), 4))


def _options(command: Any, path: str) -> Iterator[str]:
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    if not shown:
        return
    yield from ("| | default | |", "|---|---|---|")
    for one in shown:
        names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
        if one.param_type_name == "argument":
            names = f"`{one.metavar or (one.name or '').upper()}`"
        elif one.metavar:
            names += f" {code(one.metavar)}"
        text = getattr(one, "help", None) or ""
        if not text:
            logger.warning("%s: %s has no help", path, one.name, type="docstring")
        yield f"| {names} | {_default(one)} | {plain(text)} |"
    yield ""


def _default(one: Any) -> str:
    if one.required:
        return "required"
    value = one.default
    if value is None or value == () or callable(value) or value is False or "UNSET" in repr(value):
        return ""
    if value is True:
        return "yes"
    return code(" ".join(map(str, value)) if isinstance(value, tuple) else str(getattr(value, "value", value)))


def code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|") if text else ""


def plain(text: str) -> str:
    """Help text in a cell of a table: one line, in which nothing is Markdown."""
    joined = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"([|$*_<>\[\]])", r"\\\1", joined)
