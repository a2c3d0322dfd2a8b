"""Command-line options generated from the fields of a dataclass, so that each option is defined once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

IN_FILE = "onfoot.in_file"  # in a context's `meta`


def options_from(
    cls: type, exclude: Collection[str] = (), names: Mapping[str, Sequence[str]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds one option per field of the dataclass; the command gets the values as keyword arguments.

    `names` maps a field to its spellings, such as {"r": ("--r", "--lora-rank", "-r")}; error messages use the first.
    By default a field `batch_size` is `--batch-size`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(cls)
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        own_hints = inspect.get_annotations(command, eval_str=True)  # Python 3.10's get_type_hints adds Optional
        parameters = [p.replace(annotation=own_hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
        for f in fields(cls):
            if f.name in exclude:
                continue
            default = f.default if f.default is not MISSING else None
            spellings = (names or {}).get(f.name, ())
            info = typer.Option(*spellings, help=f.metadata["help"], show_default=default is not None)
            annotation = _annotated(hints[f.name], info)
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def explicit_options(context: typer.Context) -> list[str]:
    """The names of the options given on the command line, not left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def set_in_file(context: typer.Context, path: Path, names: Collection[str]) -> None:
    """Remembers which options a file of options has set to other values than their defaults."""
    context.meta[IN_FILE] = dict.fromkeys(names, f" (in {path})")


def _given(context: typer.Context, others: Collection[str], in_file: bool = True) -> list[str]:
    """Those of the others that were given, as the user has spelled them, and where if in a file."""
    flags = {p.name: p.opts[0] if p.param_type_name == "option" else p.opts[0].upper() for p in context.command.params}
    for p in context.command.params:
        if p.secondary_opts and context.params.get(p.name) is False:  # typed as --no-…
            flags[p.name] = p.secondary_opts[0]
    where = dict(context.meta.get(IN_FILE, {})) if in_file else {}
    where |= dict.fromkeys(explicit_options(context), "")
    return [f"{flags[name]}{where[name]}" for name in where if name in others]


def reject_with(
    context: typer.Context, option: str, others: Collection[str], reason: str, in_file: bool = True
) -> None:
    """Raises ValueError if one of the others was given: it conflicts with `option`."""
    found = _given(context, others, in_file)
    if found:
        raise ValueError(f"{option} cannot be used with {', '.join(found)}: {reason}")


def reject_without(context: typer.Context, option: str, others: Collection[str]) -> None:
    """Raises ValueError if one of the others was given: without `option` it would have no effect."""
    found = _given(context, others)
    if found:
        raise ValueError(f"{', '.join(found)}: only valid with {option}")


def _annotated(hint: Any, info: Any) -> Any:
    return Annotated[hint, info]
