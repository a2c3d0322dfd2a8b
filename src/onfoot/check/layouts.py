"""Layouts of arrays other than the contract's: tokens before heads, rows, single sequences, transposed weights.

A layout turns a layer's inputs into those of one or several calls, and the gradients of these calls back into the
contract's. It only moves entries, so a gradient that is wrong stays wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onfoot.check.case_sizes import FIRST, Sizes
from onfoot.check.layer import Array, Case, Layer, is_float_array

BASE = {"batch": 2, "heads": 2, "tokens": 3, "width": 8, "head_dim": 4, "vocabulary": 9}
MORE = {"batch": 5, "tokens": 7, "heads": 6, "width": 12, "head_dim": 6, "vocabulary": 11}
USUAL = 2048  # sizes up to here are not estimated
USUALLY = {"batch": 8, "heads": 8, "tokens": 16, "width": 16, "head_dim": 16, "vocabulary": 16}
OTHER = 16  # an axis that is none of the sizes
MOST_ENTRIES = 6e7  # in all arguments of a case: half a gigabyte
Axes = dict[str, tuple[str, ...]]  # argument -> the name of each axis, "" if it is none of the sizes

WORDS = {
    "contract": "",
    "bthd": "arrays (batch, tokens, heads, head_dim)",
    "rows": "rows (batch · tokens, features)",
    "sequence": "one sequence at a time, without the batch axis",
    "single_head": "one head of one sequence at a time, (tokens, head_dim)",
}
NAMES = tuple(WORDS)
TRANSPOSED = "transposed"


def axes_of(layer: Layer, options: Mapping[str, Any]) -> Axes:
    """The axes of every argument, found by changing one size at a time."""

    def shapes(sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        allowed = Sizes({name: (n,) for name, n in sizes.items()}, only=FIRST)
        case = layer.cases(np.random.default_rng(0), sizes=allowed, **options)[0]
        return [tuple(np.shape(x)) for x in case.inputs]

    if not layer.sizes:
        return dict.fromkeys(layer.arguments, ())
    base = shapes(BASE)
    found = [[""] * len(shape) for shape in base]
    for size in layer.sizes:
        if size == "heads" and "n_head" in options:
            continue
        for one, before, after in zip(found, base, shapes({**BASE, size: MORE[size]}), strict=True):
            for i, (a, b) in enumerate(zip(before, after, strict=True)):
                if a != b and not one[i]:
                    one[i] = size
    return {name: tuple(one) for name, one in zip(layer.arguments, found, strict=True)}


def refuse_huge(layer: Layer, options: Mapping[str, Any], sizes: Sizes) -> None:
    """Raises a ValueError if the largest case would take gigabytes, before anything is drawn."""
    chosen = {name: max(numbers) for name, numbers in sizes.allowed.items()}
    if max(chosen.values(), default=0) <= USUAL:
        return
    largest = {**USUALLY, **chosen}
    shapes = [math.prod(largest.get(axis, OTHER) for axis in axes) for axes in axes_of(layer, options).values()]
    has = {axis for axes in axes_of(layer, options).values() for axis in axes}
    if "heads" in has or "causal" in options:  # the scores
        shapes.append(largest["batch"] * largest["heads"] * largest["tokens"] ** 2)
    entries = sum(shapes)
    if entries > MOST_ENTRIES:
        said = ", ".join(f"{name}={n}" for name, n in chosen.items())
        raise ValueError(
            f"{said}: the arrays of one case would have about {entries:.0e} entries; at most {MOST_ENTRIES:.0e} are "
            "checked; choose smaller sizes"
        )


@dataclass(frozen=True)
class Layout:
    """How the arrays of a function lie; `axes` are those of the contract."""

    name: str
    axes: Axes
    arguments: tuple[str, ...]
    transposed: tuple[str, ...] = ()  # the weights that are (out, in)

    @property
    def words(self) -> str:
        turned = f"weights (out, in): {', '.join(self.transposed)}" if self.transposed else ""
        return "; ".join(words for words in (WORDS[self.name], turned) if words)

    @property
    def option(self) -> str:
        """The name of the layout as an option."""
        parts = [self.name] if self.name != "contract" or not self.transposed else []
        return "+".join([*parts, *([TRANSPOSED] if self.transposed else [])])

    def _looped(self) -> tuple[str, ...]:
        return {"sequence": ("batch",), "single_head": ("batch", "heads")}.get(self.name, ())

    def _n_looped(self, argument: str) -> int:
        """The number of leading axes of an argument that are looped over."""
        return sum(axis in self._looped() for axis in self.axes[argument])

    def calls(self, inputs: Sequence[Any]) -> list[list[Any]]:
        """The inputs of each call."""
        given = dict(zip(self.arguments, inputs, strict=False))
        leading = next((x.shape[: self._n_looped(n)] for n, x in given.items() if self._n_looped(n)), ())
        return [
            [self._given(name, x, index) for name, x in given.items()]
            for index in itertools.product(*(range(n) for n in leading))
        ]

    def _given(self, name: str, x: Any, index: tuple[int, ...]) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if self._n_looped(name):
            x = x[index[: self._n_looped(name)]]
        elif self.name == "rows" and self.axes[name][:2] == ("batch", "tokens"):
            x = x.reshape(-1, *x.shape[2:])
        elif self.name == "bthd" and self._swaps(name):
            x = np.swapaxes(x, 1, 2)
        if name in self.transposed:
            x = x.T
        return np.ascontiguousarray(x).reshape(x.shape)

    def _swaps(self, name: str) -> bool:
        return self.axes[name][1:3] == ("heads", "tokens")

    def joined(self, argument: str, gradients: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """The gradient of an argument from those of all calls; in its own shape if that is not the expected one."""
        first = gradients[0]
        if len({g.shape for g in gradients}) > 1:
            return first
        if argument in self.transposed and first.ndim == 2:
            gradients = [g.T for g in gradients]
        if self._n_looped(argument):
            stacked = np.stack(gradients)
            return stacked.reshape(shape) if stacked.size == int(np.prod(shape)) else first
        if len(gradients) > 1:
            return np.sum(gradients, axis=0)
        (found,) = gradients
        if self.name == "rows" and self.axes[argument][:2] == ("batch", "tokens") and found.ndim == len(shape) - 1:
            return found.reshape(shape) if found.size == int(np.prod(shape)) else found
        if self.name == "bthd" and self._swaps(argument) and found.ndim == len(shape):
            return np.swapaxes(found, 1, 2)
        return found


def contract(layer: Layer) -> Layout:
    """The layout of the contract."""
    return Layout("contract", dict.fromkeys(layer.arguments, ()), layer.arguments)


def layouts(layer: Layer, case: Case, options: Mapping[str, Any], wanted: Sequence[str] = NAMES) -> Iterator[Layout]:
    """The wanted layouts in which this layer can be computed, other than the contract's."""
    axes = axes_of(layer, options)
    weights = tuple(
        n
        for n, x in zip(layer.arguments, case.inputs, strict=True)
        if _is_matrix(layer, n, x, axes) and np.ndim(x) == 2
    )
    for name in wanted:
        if name != "contract" and not _possible(name, layer, case, axes, options):
            continue
        for turned in ((), weights) if weights else ((),):
            if name != "contract" or turned:
                yield Layout(name, axes, layer.arguments, turned)


def _is_matrix(layer: Layer, name: str, x: Any, axes: Axes) -> bool:
    """Whether an argument is the weight of a linear map, which some keep as (out, in)."""
    positions = {"batch", "tokens", "heads", "vocabulary"}
    return is_float_array(x) and not positions & set(axes[name]) and layer.name != "adamw"


def _possible(name: str, layer: Layer, case: Case, axes: Axes, options: Mapping[str, Any]) -> bool:
    """Whether the layout exists for this layer and computes the same gradients."""
    has = {axis for one in axes.values() for axis in one}
    if name == "bthd":
        return any(one[1:3] == ("heads", "tokens") for one in axes.values())
    if name == "rows" and ("heads" in has or not {"batch", "tokens"} <= has):
        return False
    if name == "sequence" and "batch" not in has:
        return False
    if name == "single_head" and "heads" not in has:
        return False
    return _same_gradients(Layout(name, axes, layer.arguments), layer, case, options)


def _same_gradients(layout: Layout, layer: Layer, case: Case, options: Mapping[str, Any]) -> bool:
    """Whether the exact gradients of the calls, joined, are those of the whole: not so for a mean over the batch."""
    if any(_axes_later(one, layout) for one in layout.axes.values()):
        return False
    right = layer.reference(*case.inputs, **options)
    try:
        found = [layer.reference(*_padded(layout, call, case), **options) for call in layout.calls(case.inputs)]
    except (ValueError, IndexError, AssertionError):
        return False
    for g, name in enumerate(layer.gradients):
        argument = argument_of(layer, name)
        shape = right[g].shape
        parts = [_without_padding(layout, argument, one[g]) for one in found]
        if not np.allclose(layout.joined(argument, parts, shape), right[g], rtol=1e-9, atol=1e-12):
            return False
    return True


def _axes_later(axes: tuple[str, ...], layout: Layout) -> bool:
    """Whether a looped axis is not among the first ones, or rows mix with another axis of tokens."""
    looped = layout._looped()
    leading = axes[: sum(axis in looped for axis in axes)]
    if any(axis not in looped for axis in leading):
        return True
    return layout.name == "rows" and ("tokens" in axes[2:] or (axes[:1] == ("tokens",)) or axes.count("tokens") > 1)


def _padded(layout: Layout, call: Sequence[Any], case: Case) -> list[Any]:
    """The inputs of a call with axes of one entry for those it lacks."""
    return [
        x.reshape((1,) * (np.ndim(whole) - np.ndim(x)) + np.shape(x)) if isinstance(x, np.ndarray) else x
        for x, whole in zip(call, case.inputs, strict=True)
    ]


def _without_padding(layout: Layout, argument: str, g: Array) -> Array:
    n = layout._n_looped(argument)
    if n == 0 and layout.name == "rows" and layout.axes[argument][:2] == ("batch", "tokens"):
        n = 1
    return g.reshape(g.shape[n:])


def argument_of(layer: Layer, gradient: str) -> str:
    """The argument whose gradient this is."""
    return gradient if gradient in layer.arguments else gradient.removeprefix("d")


def named_layout(option: str, layer: Layer, case: Case, options: Mapping[str, Any]) -> Layout:
    """The layout of that name; raises a ValueError if the layer has none."""
    found = {layout.option: layout for layout in layouts(layer, case, options)}
    found["contract"] = replace(contract(layer))
    if option not in found:
        raise ValueError(f"layer {layer.name} has no layout {option!r}; choose from auto, {', '.join(found)}")
    return found[option]
