"""Options of a run from a file: TOML, or the run.json of another run; and the options as TOML."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from onfoot.cli.aliases import ALIASES, HINTS
from onfoot.cli.fields import explicit_options, set_in_file
from onfoot.formats.files import naming, plain_name, read_json, read_text
from onfoot.own_engine import is_own
from onfoot.train.options import default_warmup

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
    if path.suffix.lower() in (".yaml", ".yml"):
        raise ValueError(f"{path} is YAML; write the options as TOML (name = value), or use the run.json of a run")
    values = _toml(path) if path.suffix.lower() == ".toml" else read_json(path)
    if values.get("command", command) != command:
        raise ValueError(f"{path} has the options of onfoot {plain_name(str(values['command']))}, not of {command}")
    is_run, values_of_run = "made_with" in values, dict(values)
    if is_run:
        from onfoot.train.runs import chosen_in, located

        values |= located(values, values["made_with"])
    known = {f.name for f in fields(cls)}
    values = _named(path, {name: value for name, value in values.items() if name not in NOT_OPTIONS}, known)
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{path}: unknown option {plain_name(unknown[0])}; {_advice(unknown[0], known)}")
    if is_own(values.get("engine")):
        raise ValueError(f"{path}: engine is a file of Python code; name it on the command line with --engine")
    if is_run:
        for name in chosen_in(values_of_run):
            values.pop(name, None)  # chosen from the data and the model, so they are chosen anew
    if values.get("steps") and values.get("epochs"):
        if not is_run:
            raise ValueError(f"{path}: steps and epochs both set the length of the run; keep one of them")
        del values["epochs"]  # the steps were computed from them
    if values.get("epochs") and values.get("steps") == 0:  # as --print-config writes it
        del values["steps"]
    return values


def _toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        raise ValueError(f"{path}: TOML needs Python 3.11 or newer; write the same options as JSON") from None
    with naming(path):
        return tomllib.loads(read_text(path))


def _named(path: Path, values: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The values by our names of the options: hyphens, and the names of nanoGPT and transformers, are understood."""
    out: dict[str, Any] = {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in known:
            meant = ALIASES.get(given.replace("_", "-"), given).replace("-", "_")
            name = meant if meant in known else name
        if name in out:
            raise ValueError(f"{path}: {plain_name(given)} is given twice: {name} has several names")
        out[name] = value
    return out


def _advice(name: str, known: Collection[str]) -> str:
    from difflib import get_close_matches

    if name in ("out", "resume", "threads"):
        return f"give --{name} on the command line"
    if name.replace("_", "-") in HINTS:
        return HINTS[name.replace("_", "-")]
    close = get_close_matches(name, sorted(known), 1)
    return f"did you mean {close[0]}?" if close else "--print-config shows all options"


def with_config(context: typer.Context, path: Path | None, cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a command: given on the command line, else in the file, else the defaults."""
    if path is None:
        return given
    explicit = {*explicit_options(context)} | {name for name in ("texts", "data") if given.get(name)}
    values = read_config(path, cls.command, cls)
    _settle_length(values, explicit)
    used = {name: x for name, x in values.items() if name not in explicit}
    with naming(path):
        for name, x in used.items():
            cls.check_type(name, x)
    set_in_file(context, path, [name for name, x in used.items() if x != given.get(name)])
    return given | used


def _settle_length(values: dict[str, Any], explicit: Collection[str]) -> None:
    """Drops the length of the run in a file's values if the command line has one, and a warmup that belongs to it."""
    if not {"steps", "epochs"} & set(explicit):
        return
    if type(values.get("steps")) is int and values.get("warmup") == default_warmup(values["steps"]):
        del values["warmup"]
    for name in ("steps", "epochs"):
        values.pop(name, None)


def show_config(options: Any) -> None:
    """Prints options as TOML; those that are None are left out."""
    for name, value in asdict(options).items():
        if value is not None and name not in NOT_OPTIONS:
            print(f"{name} = {json.dumps(value, ensure_ascii=False)}")
