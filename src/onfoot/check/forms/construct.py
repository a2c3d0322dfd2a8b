"""Constructs a user's class for given inputs: weights, sizes and options by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from onfoot.check.forms.form import Expected, FormError
from onfoot.check.forms.function import parameters_of, required
from onfoot.check.forms.names import match, normal, option_named, size_named

CONFIG = ("config", "cfg", "args", "conf", "hparams", "hp")


class Config:
    """Answers `config.n_embd` and the like by the same names."""

    def __init__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._inputs, self._options = inputs, options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = size_named(name, self._inputs, self._options)
        if found is None and normal(name) in ("bias", "usebias", "affine", "elementwiseaffine"):
            return True
        if found is None:
            raise FormError(
                f"the class asks for config.{name}, whose value is not known; construct an instance yourself"
            )
        return found


def construct(
    kind: type, expected: Expected, inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, str, list[str]]:
    """Returns an instance, how it was constructed, and the inputs that its constructor got."""
    parameters = parameters_of(kind) or {}
    needed = required(parameters)
    given: dict[str, Any] = {}
    said: list[str] = []
    taken: list[str] = []
    for name, p in parameters.items():
        option = option_named(name, expected.options)
        if option is not None and option in options and not isinstance(p.default, bool | type(None)):
            given[name] = options[option]
        elif isinstance(p.default, bool):
            if option is not None and option in options:
                given[name] = options[option]
        elif name in needed and normal(name) in CONFIG:
            given[name] = Config(inputs, options)
            said.append(f"{name} with the sizes of the inputs")
        elif name in needed or _is_size(p):
            size = size_named(name, inputs, options)
            array = _array_named(name, expected, taken)
            if array is not None and (size is None or normal(name) in ("weight", "bias", "w", "gamma", "beta")):
                given[name], said = inputs[array], [*said, name]
                taken.append(array)
            elif size is not None and (name in needed or size_fits(p)):
                given[name], said = size, [*said, name]
            elif name in needed:
                given[name] = _only_size(needed, kind, name, inputs)
                said.append(name)
        elif (array := _array_named(name, expected, taken)) is not None and p.default is None:
            given[name], said = inputs[array], [*said, name]
            taken.append(array)
    first = [given.pop(n) for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY and n in given]
    return kind(*first, **given), f"{kind.__name__}({', '.join(said)})", taken


def _is_size(p: inspect.Parameter) -> bool:
    return isinstance(p.default, int | float) and not isinstance(p.default, bool)


def size_fits(p: inspect.Parameter) -> bool:
    """Whether a size may replace the default: a rate of dropout does, a base of 10000 does not."""
    return _is_size(p)


def _array_named(name: str, expected: Expected, taken: list[str]) -> str | None:
    left = tuple(n for n in expected.inputs if n not in taken)
    return match([name], left).arguments.get(name)


def _only_size(needed: list[str], kind: type, name: str, inputs: Mapping[str, Any]) -> Any:
    """The width of the input, if it is the only number that a constructor asks for."""
    if len(needed) == 1:
        first = next((x for x in inputs.values() if getattr(x, "ndim", 0) >= 2), None)
        if first is not None:
            return first.shape[-1]
    raise FormError(
        f"{kind.__name__}({', '.join(needed)}): {name} is neither an input nor a size of the layer by its name; "
        "construct an instance yourself"
    )
