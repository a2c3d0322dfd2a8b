"""Reads gradients by name, wherever people put them: dicts, named tuples, attributes, lists beside the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from onfoot.check.forms.form import Expected
from onfoot.check.forms.names import gradient_named

DICTS = ("grads", "gradients", "grad", "dparams", "gparams", "param_grads", "d", "_grads", "gradient")


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def named(returned: Any, expected: Expected) -> Any:
    """What was returned, with the layer's names where it has names; else unchanged."""
    if isinstance(returned, Mapping):
        return by_name(returned, expected)
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return by_name(dict(zip(returned._fields, returned, strict=True)), expected)
    if is_dataclass(returned) and not isinstance(returned, type):
        return by_name({f.name: getattr(returned, f.name) for f in fields(returned)}, expected)
    if isinstance(returned, (tuple, list)) and any(isinstance(part, Mapping) for part in returned):
        return _with_dicts(returned, expected)
    if type(returned).__name__ == "SimpleNamespace":
        return by_name(vars(returned), expected)
    return returned


def by_name(given: Mapping[Any, Any], expected: Expected) -> dict[str, Any]:
    """The same dict with the layer's names for its keys; unknown keys stay."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        gradient = gradient_named(str(key), expected.gradients)
        found[gradient if gradient is not None and gradient not in found else str(key)] = value
    return found


def _with_dicts(returned: Iterable[Any], expected: Expected) -> Any:
    """`dx, {"W": dW, "b": db}`: the names first, the rest in the order of the gradients that are left."""
    found: dict[str, Any] = {}
    rest = []
    for part in returned:
        if isinstance(part, Mapping):
            found |= by_name(part, expected)
        else:
            rest.append(part)
    left = [g for g in expected.gradients if g not in found]
    if len(rest) > len(left):
        return returned
    return {**dict(zip(left, rest, strict=False)), **found}


def from_object(layer: Any, expected: Expected, wanted: Iterable[str], arrays: Mapping[str, str]) -> dict[str, Any]:
    """The gradients that an object holds after its backward pass.

    `arrays` maps the attributes that hold its parameters to the arguments they are: `self.W.grad` belongs to `self.W`.
    """
    wanted = list(wanted)
    found: dict[str, Any] = {}
    attributes = attributes_of(layer)
    for name, value in attributes.items():
        gradient = gradient_named(name, wanted)
        bare = name in arrays  # the parameter itself, not its gradient
        if gradient is not None and gradient not in found and is_array(value) and not bare and _has_word(name):
            found[gradient] = value
    for name in DICTS:
        value = attributes.get(name)
        if isinstance(value, Mapping):
            for key, part in value.items():
                gradient = gradient_named(str(key), wanted)
                if gradient is not None and is_array(part):
                    found.setdefault(gradient, part)
        elif isinstance(value, (list, tuple)) and not found and len(value) == len(wanted):
            found |= dict(zip(wanted, value, strict=True))
    for name, argument in arrays.items():
        gradient = expected.gradient_of(argument)
        held = getattr(layer, name, None)
        if gradient in wanted and gradient not in found and is_array(getattr(held, "grad", None)):
            found[gradient] = held.grad  # type: ignore[union-attr]
    return found


def attributes_of(layer: Any) -> dict[str, Any]:
    """The attributes of an object, those of its class included, without methods."""
    own = dict(getattr(layer, "__dict__", {}))
    for name in getattr(type(layer), "__slots__", ()):
        if hasattr(layer, name):
            own[name] = getattr(layer, name)
    return own


def _has_word(name: str) -> bool:
    """Whether an attribute's name says that it is a gradient."""
    plain = name.lower().strip("_")
    return plain.startswith(("d", "g", "grad")) or plain.endswith(("grad", "_g", "bar"))
