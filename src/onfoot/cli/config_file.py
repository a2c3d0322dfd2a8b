"""Options of a run from a file: TOML, or the run.json of another run; and the options as TOML."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from onfoot.cli.fields import explicit_options
from onfoot.formats.files import naming, plain_name, read_json, read_text
from onfoot.own_engine import is_own

NOT_OPTIONS = ("command", "made_with", "sha256", "changes")  # of a run.json

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file of options, or the run.json of another run; options on the command line win.",
        show_default=False,
    ),
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print all options as TOML, and do nothing else.")]


def read_config(path: Path, command: str, cls: type) -> dict[str, Any]:
    """The options in a file, by name; raises ValueError for one that the command does not have."""
    values = _toml(path) if path.suffix.lower() == ".toml" else read_json(path)
    if values.get("command", command) != command:
        raise ValueError(f"{path} has the options of onfoot {plain_name(str(values['command']))}, not of {command}")
    values = {name.replace("-", "_"): value for name, value in values.items() if name not in NOT_OPTIONS}
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        close = _closest(unknown[0], known)
        raise ValueError(f"{path}: unknown option {plain_name(unknown[0])}; did you mean {close}?")
    if is_own(values.get("engine")):
        raise ValueError(f"{path}: engine is a file of Python code; name it on the command line with --engine")
    if isinstance(values.get("betas"), list):
        values["betas"] = tuple(values["betas"])
    return values


def _toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        raise ValueError(f"{path}: TOML needs Python 3.11 or newer; use JSON") from None
    with naming(path):
        return tomllib.loads(read_text(path))


def _closest(name: str, known: Collection[str]) -> str:
    from difflib import get_close_matches

    return (get_close_matches(name, sorted(known), 1, 0) or ["--help"])[0]


def with_config(context: typer.Context, path: Path | None, cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a command: given on the command line, else in the file, else the defaults."""
    if path is None:
        return given
    explicit = {*explicit_options(context)} | {name for name in ("texts", "data") if given.get(name)}
    return given | {name: x for name, x in read_config(path, cls.command, cls).items() if name not in explicit}


def show_config(options: Any) -> None:
    """Prints options as TOML; those that are None are left out."""
    for name, value in asdict(options).items():
        if value is not None and name not in NOT_OPTIONS:
            print(f"{name} = {json.dumps(value, ensure_ascii=False)}")
