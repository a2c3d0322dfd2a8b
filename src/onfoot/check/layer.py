"""What a known layer is: its contract, its test cases, its exact gradients, and its backward pass in named steps.

The steps are the point. `Layer.steps` is the backward pass written against a table of small functions, the pieces. A
known mistake exchanges a piece or two; two mistakes exchange the pieces of both; a rounding budget shakes what goes
into every piece. So each of them is a wrong formula that can be run, and can be run together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray
Gradients = tuple[Array, ...]
Piece = Callable[..., Any]


class Pieces(SimpleNamespace):
    """The functions that a backward pass is made of, by name: `p.softmax_backward(...)`."""

    def with_changes(self, changes: Mapping[str, Piece]) -> Pieces:
        return Pieces(**{**vars(self), **changes})

    def names(self) -> set[str]:
        return set(vars(self))


@dataclass(frozen=True)
class Case:
    """One set of inputs. Arrays are float64 or integers; numbers are passed on as they are."""

    name: str
    inputs: tuple[Any, ...]  # everything that the user's function is given, the upstream gradient last
    sizes: Mapping[str, float]  # quantities that may turn up as a factor: {"d_k": 5, "n": 7, ...}
    beyond: str = ""  # not empty: what a function must have in mind to be judged by it; counted only if strict


@dataclass(frozen=True, eq=False)
class Mistake:
    """A known mistake: an executable wrong formula, with its name, its explanation and its remedy."""

    name: str
    layer: str
    explains: str  # what the code does, and why it is wrong
    equation: str  # the id of the equation that it violates
    fix: str
    apply: Callable[..., dict[str, Piece]]  # the right pieces -> those that the mistake exchanges
    errata: str = ""  # where docs/errata.md measures it
    parameter: str = ""  # the name of an unknown number in it, such as a learning rate; then apply(pieces, value)
    needs: Mapping[str, Any] = field(default_factory=dict)  # options without which it cannot happen


@dataclass(frozen=True)
class Layer:
    """A layer that the checker knows."""

    name: str
    arguments: tuple[str, ...]  # with the upstream gradient last
    gradients: tuple[str, ...]
    contract: tuple[str, ...]  # lines that say what is computed, and the shapes
    cases: Callable[..., list[Case]]  # (rng, **options)
    reference: Callable[..., Gradients]  # (*inputs, **options), exact
    steps: Callable[..., Gradients]  # (pieces, *inputs, **options), the same in pieces
    pieces: Pieces
    options: Mapping[str, Any] = field(default_factory=dict)  # and their defaults
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of options that are words
    assumes: Mapping[str, Any] = field(default_factory=dict)  # options of its parts that are fixed here
    parts: tuple[str, ...] = ()  # layers whose mistakes can happen inside this one
    all_nan: str = ""  # what makes every entry nan more often than not
    upstream_optional: bool = False  # a function of one argument less is given an upstream gradient of 1

    @property
    def signature(self) -> str:
        return f"({', '.join(self.arguments)}) → {', '.join(self.gradients)}"

    def with_options(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The layer's options with those that were asked for; a ValueError where it has none of that name."""
        unknown = set(asked) - set(self.options)
        if unknown:
            has = f"it has {', '.join(self.options)}" if self.options else "it has none"
            raise ValueError(f"the layer {self.name} has no option {', '.join(sorted(unknown))}; {has}")
        for name, value in asked.items():
            known = self.choices.get(name)
            if known and value not in known:
                raise ValueError(f"{name}={value!r}: {' or '.join(known)} is needed")
            if not known and not isinstance(self.options[name], bool) and not value > 0:
                raise ValueError(f"{name}={value!r}: a number above 0 is needed")
        return {**self.options, **asked}

    def run(self, pieces: Pieces, case: Case, options: Mapping[str, Any]) -> Gradients:
        """The gradients by these pieces."""
        with np.errstate(all="ignore"):
            return self.steps(pieces, *case.inputs, **options)


def transposed(x: Array) -> Array:
    """xᵗ, of the last two axes."""
    return np.swapaxes(x, -1, -2)


def distinct(rng: np.random.Generator, n: int, low: int = 2, high: int = 10) -> Any:
    """n different sizes, so that a factor names the size it came from."""
    return [int(size) for size in rng.permutation(np.arange(low, high))[:n]]
