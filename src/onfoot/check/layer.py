"""What a known layer is: its contract, its test cases, its exact gradients, and its backward pass in named steps.

`Layer.steps` is the backward pass, written as calls to a table of small functions, the pieces. A known mistake replaces
one or two pieces; two mistakes replace the pieces of both. So every mistake is a wrong formula that can be run, alone
or with others. The rounding budget perturbs the inputs of every piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray
Gradients = tuple[Array, ...]
Piece = Callable[..., Any]
MAY_BE_ZERO = ("eps", "weight_decay")  # numeric options; all others must be positive


class Pieces(SimpleNamespace):
    """The functions that make up a backward pass, by name: `p.softmax_backward(...)`.

    A piece called `given`, if there is one, maps (case, options) to the inputs and options that the pass really uses;
    one called `route` has the steps of the pass in place of the layer's own.
    """

    def with_changes(self, changes: Mapping[str, Piece]) -> Pieces:
        return Pieces(**{**vars(self), **changes})

    def names(self) -> set[str]:
        return set(vars(self))


@dataclass(frozen=True)
class Case:
    """One set of inputs. Arrays are float64 or integer; Python numbers are passed unchanged."""

    name: str
    inputs: tuple[Any, ...]  # all arguments of the user's function, the upstream gradient last
    sizes: Mapping[str, float]  # quantities that may appear as a wrong factor: {"d_k": 5, "n": 7, ...}
    beyond: str = ""  # why the case goes beyond the contract: counted only if strict; empty for normal cases
    large: bool = False  # whether it has many tokens and features
    if_accepted: bool = False  # beyond the contract, but counted if the function returns all gradients in their shapes


@dataclass(frozen=True, eq=False)
class Mistake:
    """A known mistake: a wrong formula that can be run, with its name, explanation and fix."""

    name: str
    layer: str
    explains: str  # what the code does, and why it is wrong
    equation: str  # id of the violated equation
    fix: str
    apply: Callable[..., dict[str, Piece]]  # the correct pieces -> replacements
    errata: str = ""  # its entries in docs/errata.md
    parameter: str = ""  # name of an unknown number, such as a learning rate; then apply(pieces, value)
    needs: Mapping[str, Any] = field(default_factory=dict)  # options that must be set for it to occur
    cost: float = 1.0  # a catalogued mistake is likelier than a generated one
    per_case: bool = False  # then apply(pieces, case)
    replaces: frozenset[str] = frozenset()  # the pieces it replaces, if that is known without running it
    starts: tuple[float, ...] = (0.0,)  # where the search for the unknown number begins
    correct: float | None = None  # what the unknown number should be
    call: int | None = None  # of a generated mistake: the one call of its piece that is wrong, or None for all


@dataclass(frozen=True)
class Layer:
    """A layer that the checker knows: contract, test cases, exact gradients and steps."""

    name: str
    arguments: tuple[str, ...]  # with the upstream gradient last
    gradients: tuple[str, ...]
    contract: tuple[str, ...]  # lines describing the computation and the shapes
    cases: Callable[..., list[Case]]  # (rng, **options)
    reference: Callable[..., Gradients]  # (*inputs, **options) -> exact gradients
    steps: Callable[..., Gradients]  # (pieces, *inputs, **options) -> the same, through the pieces
    pieces: Pieces
    options: Mapping[str, Any] = field(default_factory=dict)  # name -> default
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # allowed values of string options
    assumes: Mapping[str, Any] = field(default_factory=dict)  # fixed options of its parts
    parts: tuple[str, ...] = ()  # layers whose mistakes can occur inside this one
    all_nan: str = ""  # the usual reason if every entry is nan
    upstream_optional: bool = False  # dout may be left out, and is then 1
    # (*inputs) -> the relative error of correct implementations beyond that of the steps, in roundings
    sensitivity: Callable[..., float] | None = None
    sizes: tuple[str, ...] = ()  # the sizes that can be chosen, which `cases` then takes as sizes=Sizes(...)
    mistakes: tuple[Mistake, ...] = ()  # known mistakes, of a layer that is not in the catalogue
    probed: bool = True  # whether unknown mistakes are searched for; in a whole network that takes minutes
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # piece -> words for each of its calls
    chosen: tuple[int, ...] = ()  # the places of its gradients among those of the steps, if they are not all of them

    @property
    def signature(self) -> str:
        return f"({', '.join(self.arguments)}) → {', '.join(self.gradients)}"

    def with_options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the default options updated with `overrides`; raises a ValueError if one is invalid."""
        unknown = set(overrides) - set(self.options)
        if unknown:
            has = f"its options are {', '.join(self.options)}" if self.options else "it has no options"
            raise ValueError(f"layer {self.name} has no option {', '.join(sorted(unknown))}; {has}")
        for name, value in overrides.items():
            known = self.choices.get(name)
            if known and value not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {value!r}")
            if not known and not isinstance(self.options[name], bool):
                if name in MAY_BE_ZERO and not value >= 0:
                    raise ValueError(f"{name} must be >= 0, got {value!r}")
                if name not in MAY_BE_ZERO and not value > 0:
                    raise ValueError(f"{name} must be > 0, got {value!r}")
        return {**self.options, **overrides}

    def only(self, gradients: Sequence[str]) -> Layer:
        """The same layer with only these of its gradients."""
        chosen = tuple(self.gradients.index(name) for name in gradients)

        def reference(*inputs: Any, **options: Any) -> Gradients:
            found = self.reference(*inputs, **options)
            return tuple(found[i] for i in chosen)

        return replace(self, gradients=tuple(gradients), reference=reference, chosen=chosen)

    def run(self, pieces: Pieces, case: Case, options: Mapping[str, Any]) -> Gradients:
        """Returns the gradients computed with these pieces."""
        with np.errstate(all="ignore"):
            inputs, options = pieces.given(case, options) if "given" in vars(pieces) else (case.inputs, options)
            found = getattr(pieces, "route", self.steps)(pieces, *inputs, **options)
            return tuple(found[i] for i in self.chosen) if self.chosen else found


def is_float_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def transposed(x: Array) -> Array:
    """xᵗ over the last two axes."""
    return np.swapaxes(x, -1, -2)


def distinct(rng: np.random.Generator, n: int, low: int = 2, high: int = 10) -> Any:
    """n different sizes, so that a wrong factor identifies the size it came from."""
    return [int(size) for size in rng.permutation(np.arange(low, high))[:n]]
