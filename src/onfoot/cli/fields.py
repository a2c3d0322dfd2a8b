"""Command-line options made from the fields of a dataclass, so that a run's options are written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer


def options_from(cls: type, leave_out: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command one option for each field of the dataclass; it gets their values as keyword arguments."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(cls)
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        own_hints = get_type_hints(command, include_extras=True)
        parameters = [p.replace(annotation=own_hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
        for f in fields(cls):
            if f.name in leave_out:
                continue
            default = f.default if f.default is not MISSING else None
            info = typer.Option(help=f.metadata["help"], show_default=default is not None)
            annotation = _annotated(hints[f.name], info)
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def given(context: typer.Context) -> list[str]:
    """The names of the options that were typed, not left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def refuse_beside(context: typer.Context, first: str, others: Collection[str], because: str) -> None:
    """Refuses those of the other options that were typed: beside the first they would do nothing."""
    flags = {p.name: p.opts[0] if p.param_type_name == "option" else p.opts[0].upper() for p in context.command.params}
    typed = [flags[name] for name in given(context) if name in others]
    if typed:
        raise ValueError(f"{first} and {', '.join(typed)} do not go together: {because}")


def refuse_without(context: typer.Context, first: str, others: Collection[str]) -> None:
    """Refuses those of the other options that were typed: without the first they would do nothing."""
    flags = {p.name: p.opts[0] for p in context.command.params}
    typed = [flags[name] for name in given(context) if name in others]
    if typed:
        raise ValueError(f"{', '.join(typed)} would do nothing without {first}")


def _annotated(hint: Any, info: Any) -> Any:
    return Annotated[hint, info]
