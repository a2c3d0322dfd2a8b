"""Finds where the chain of a composite layer's backward pass breaks, from the gradients that were returned.

The backward pass is a graph of steps, the calls of a layer's pieces. If one step gives a wrong array U and all others
are right, then every returned gradient is an affine function of U, since backpropagation is linear. So a step can be
tested: is there a U for which the right pass, from that step on, returns what the function returned? The least squares
solution tells, and U itself tells how the step is wrong. Only what these numbers prove is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onfoot.check.case_sizes import FIRST, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, is_float_array
from onfoot.check.places import place_words
from onfoot.check.words import argument_words, formula, parameters_of, piece_words
from onfoot.terminal import listed

SMALL = {"batch": 2, "heads": 2, "tokens": 3, "head_dim": 2, "vocabulary": 5}
LARGEST = 150  # entries of a step that is tested
EXACT = 1e-8  # relative residual of a step that explains a gradient
WRONG = 1e-7  # relative error of a wrong gradient
MOST_ALONE = 2  # gradients that are wrong in their own last step as well

Call = tuple[str, int]  # a piece, and which of its calls


@dataclass(frozen=True)
class Chain:
    """Where a chain breaks. Without `steps`, the chain is right and only the gradients `alone` are wrong."""

    right: list[str]  # the right gradients above the break, the last ones computed before it
    steps: list[str] = field(default_factory=list)  # the first wrong step; several if no returned gradient is between
    formula: str = ""  # of the step, if it is one
    how: str = ""  # what is wrong with it, if that is simple
    follow: list[str] = field(default_factory=list)  # gradients that a right pass gives from the wrong array
    alone: list[str] = field(default_factory=list)  # gradients that are wrong in their own last step

    def __str__(self) -> str:
        if not self.steps:
            return f"The chain is right down to {listed(self.right)}. Wrong at their own ends: {listed(self.alone)}."
        above = f"Right down to {listed(self.right)}." if self.right else "No returned gradient is above the break."
        where = f"First wrong: {self.steps[0]}" if len(self.steps) == 1 else _one_of(self.steps)
        how = f", {self.how}" if self.how else ""
        text = f"{above} {where}{how}."
        if len(self.follow) == 1 and not self.alone:
            text += " No other gradient depends on it."
        if len(self.follow) > 1:
            text += f" {listed(self.follow)} follow from it: a right pass from there gives the same numbers."
        if self.alone:
            text += f" Wrong besides: {listed(self.alone)}."
        return text

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "text": str(self)}


def _one_of(steps: Sequence[str]) -> str:
    return f"First wrong: one of these steps, with no returned gradient between them: {'; '.join(steps)}"


def is_composite(layer: Layer) -> bool:
    """Whether the layer is a chain of parts, linear in its upstream gradient, that can be made small."""
    return bool(layer.parts and layer.sizes) and len(layer.gradients) >= 3 and layer.arguments[-1] == "dout"


def small_case(layer: Layer, options: Mapping[str, Any], sizes: Sizes) -> Case | None:
    """The layer's plain case with two sequences of three tokens, if it can be so small."""
    width = 2 * options["n_head"] if "n_head" in options else 4
    near = {size: (sizes.nearest(size, n),) for size, n in {**SMALL, "width": width}.items()}
    found = layer.cases(np.random.default_rng(1), sizes=Sizes(near, only=FIRST), **options)
    return found[0] if found and all(np.size(x) <= LARGEST for x in found[0].inputs) else None


def find_break(
    layer: Layer, options: Mapping[str, Any], case: Case, answer: Sequence[Array], named: Sequence[str] = ()
) -> Chain | None:
    """Where the chain breaks in this case; None if that is not certain. `named` are pieces that a diagnosis names."""
    right = layer.run(layer.pieces, case, options)
    if any(a.shape != r.shape or not np.isfinite(a).all() for a, r in zip(answer, right, strict=True)):
        return None
    wrong = [g for g, (a, r) in enumerate(zip(answer, right, strict=True)) if _off(a - r, r) > WRONG]
    return _Search(layer, options, case, answer, wrong).chain(named) if wrong else None


def _off(difference: Array, right: Array) -> float:
    return float(np.linalg.norm(difference) / max(np.linalg.norm(right), 1e-3))


@dataclass(frozen=True)
class Term:
    """An array that a step adds, or could have added by mistake."""

    name: str
    array: Array
    belongs: bool  # whether it is a term of the right result


def _whole(c: float) -> int:
    return round(c) if abs(c - round(c)) < 1e-7 else 0


class _Pass:
    """The right backward pass, with the result of one call replaced."""

    def __init__(self, layer: Layer, options: Mapping[str, Any], case: Case) -> None:
        self.layer, self.options, self.case = layer, options, case

    def run(self, case: Case, each: Callable[[Call, tuple[Any, ...], Any], Any]) -> Gradients:
        """Runs the pass; `each` maps a call, its arguments and its result to the result that is used."""
        counts: dict[str, Iterator[int]] = {}

        def wrapped(name: str, piece: Callable[..., Any]) -> Callable[..., Any]:
            count = counts.setdefault(name, itertools.count())
            return lambda *arguments: each((name, next(count)), arguments, piece(*arguments))

        pieces = Pieces(**{name: wrapped(name, piece) for name, piece in vars(self.layer.pieces).items()})
        return self.layer.run(pieces, case, self.options)

    def recorded(self, factor: float = 1.0) -> tuple[dict[Call, tuple[tuple[Any, ...], Any]], Gradients]:
        """Arguments and result of every call, with dout times a factor; and the gradients."""
        found: dict[Call, tuple[tuple[Any, ...], Any]] = {}

        def keep(call: Call, arguments: tuple[Any, ...], result: Any) -> Any:
            found[call] = arguments, result
            return result

        *inputs, dout = self.case.inputs
        case = self.case if factor == 1 else Case(self.case.name, (*inputs, factor * dout), self.case.sizes)
        grads = self.run(case, keep)
        return found, grads

    def replaced(self, call: Call, array: Array) -> Gradients:
        return self.run(self.case, lambda one, arguments, result: array if one == call else result)


class _Search:
    def __init__(
        self, layer: Layer, options: Mapping[str, Any], case: Case, answer: Sequence[Array], wrong: Sequence[int]
    ) -> None:
        self.layer, self.answer, self.wrong = layer, answer, list(wrong)
        self.passed = _Pass(layer, options, case)
        self.calls, self.right = self.passed.recorded()
        twice, _ = self.passed.recorded(2.0)
        self.order = [one for one in self.calls if self._depends(one, twice)]
        self.scale = [max(float(np.linalg.norm(r)), 1e-3) for r in self.right]
        self.reach = {one: self._reach(one) for one in self.order}

    def _depends(self, one: Call, twice: Mapping[Call, tuple[tuple[Any, ...], Any]]) -> bool:
        """Whether a call's result depends on dout: then it is a step of the backward pass."""
        result, other = self.calls[one][1], twice[one][1]
        is_comparable = is_float_array(result) and 0 < result.size <= LARGEST
        return is_comparable and not np.allclose(result, other, rtol=1e-9, atol=0)

    def _reach(self, one: Call) -> list[int]:
        """The gradients that depend on a step."""
        result = self.calls[one][1]
        moved = result + np.random.default_rng(2).standard_normal(result.shape)
        grads = self.passed.replaced(one, moved)
        return [g for g, (a, r) in enumerate(zip(grads, self.right, strict=True)) if not np.allclose(a, r, rtol=1e-9)]

    def producer(self, g: int) -> int:
        """The place in the order of the last step of gradient g."""
        return max(i for i, one in enumerate(self.order) if g in self.reach[one])

    def chain(self, named: Sequence[str]) -> Chain | None:
        found = self.breaks()
        if not found:
            return self.only_last_steps()
        alone = min(found.values(), key=len)
        steps = [one for one in found if len(found[one]) == len(alone)]
        alone = found[steps[-1]]
        steps = [one for one in steps if found[one] == alone]
        one, how = self.simplest(steps, alone)
        if one is None:
            one = next((s for s in reversed(steps) if s[0] in named), steps[0] if len(steps) == 1 else None)
        follow = [g for g in self.wrong if g in self.reach[steps[-1]] and g not in alone]
        names = self.layer.gradients
        return Chain(
            self.above(steps),
            list(dict.fromkeys(self.words(s) for s in ([one] if one else steps))),
            formula((one or steps[-1])[0], self.layer.name) if one or len(steps) == 1 else "",
            how,
            [names[g] for g in follow],
            [names[g] for g in alone],
        )

    def breaks(self) -> dict[Call, list[int]]:
        """The steps that explain wrong gradients, at least two, with the wrong gradients that they do not explain."""
        found: dict[Call, list[int]] = {}
        fewest = MOST_ALONE
        for one in self.order:
            beside = [g for g in self.wrong if g not in self.reach[one]]
            if len(beside) > fewest or len(self.wrong) - len(beside) < (1 if len(self.wrong) == 1 else 2):
                continue
            model = self.model(one)
            alone = next(
                (
                    [*beside, *left]
                    for n in range(fewest - len(beside) + 1)
                    for left in itertools.combinations([g for g in self.wrong if g in self.reach[one]], n)
                    if self.explains(one, model, left)
                ),
                None,
            )
            if alone is not None:
                found[one], fewest = sorted(alone), len(alone)
        return found

    def model(self, one: Call) -> tuple[list[Array], Gradients]:
        """The gradients as A U + b: one column of A per entry of U."""
        shape = self.calls[one][1].shape
        zero = self.passed.replaced(one, np.zeros(shape))
        columns = []
        for i in range(math.prod(shape)):
            unit = np.zeros(math.prod(shape))
            unit[i] = 1.0
            grads = self.passed.replaced(one, unit.reshape(shape))
            columns.append([a - z for a, z in zip(grads, zero, strict=True)])
        matrix = [np.stack([c[g].ravel() for c in columns], axis=1) for g in range(len(zero))]
        return matrix, zero

    def system(
        self, one: Call, model: tuple[list[Array], Gradients], left: Sequence[int]
    ) -> tuple[Array, Array, list[int]]:
        """The equations of all gradients that depend on the step, each relative to its size."""
        used = [g for g in self.reach[one] if g not in left] or self.reach[one]
        matrix = np.concatenate([model[0][g] / self.scale[g] for g in used])
        wanted = np.concatenate([(self.answer[g] - model[1][g]).ravel() / self.scale[g] for g in used])
        return matrix, wanted, used

    def explains(self, one: Call, model: tuple[list[Array], Gradients], left: Sequence[int]) -> bool:
        """Whether some array, as the step's result, gives all returned gradients but those left out."""
        matrix, wanted, used = self.system(one, model, left)
        if len(self.wrong) > 1 and len([g for g in used if g in self.wrong]) < 2:
            return False
        solution, _, rank, _ = np.linalg.lstsq(matrix, wanted, rcond=1e-11)
        if len(self.wrong) > 1 and rank >= len(wanted):
            return False  # any result would be explained
        return bool(np.linalg.norm(matrix @ solution - wanted) <= EXACT * max(1.0, float(np.linalg.norm(wanted))))

    def simplest(self, steps: Sequence[Call], alone: Sequence[int]) -> tuple[Call | None, str]:
        """The step whose result is wrong in a simple way, and how: a term missing, a sign, a factor."""
        for one in reversed(steps):
            matrix, wanted, _ = self.system(one, self.model(one), alone)
            for terms in (self.terms(one), [Term("", self.calls[one][1], True)]):
                if not terms:
                    continue
                basis = np.stack([matrix @ term.array.ravel() for term in terms], axis=1)
                factors, _, rank, _ = np.linalg.lstsq(basis, wanted, rcond=1e-11)
                exact = np.linalg.norm(basis @ factors - wanted) <= EXACT * max(1.0, float(np.linalg.norm(wanted)))
                how = _how([(term, float(c)) for term, c in zip(terms, factors, strict=True)])
                if exact and rank == len(terms) and how is not None:
                    return one, how
        return None, ""

    def terms(self, one: Call) -> list[Term]:
        """The arguments of a step that adds or concatenates some of them, as terms of its result."""
        arguments, result = self.calls[one]
        names = parameters_of(getattr(self.layer.pieces, one[0]), len(arguments))
        arrays = [(argument_words(one[0], name, self.layer.name), x) for name, x in zip(names, arguments, strict=True)]
        arrays = [(name, x) for name, x in arrays if isinstance(x, np.ndarray) and x.ndim == result.ndim]
        same = [(name, x) for name, x in arrays if x.shape == result.shape]
        for n in range(len(same), 0, -1):
            for chosen in itertools.combinations(range(len(same)), n):
                if np.allclose(sum(same[i][1] for i in chosen), result, rtol=1e-12):
                    return [Term(name, x, i in chosen) for i, (name, x) in enumerate(same)]
        if sum(x.shape[-1] for _, x in arrays) == result.shape[-1] and len(arrays) > 1:
            return _padded(arrays, result)
        return []

    def above(self, steps: Sequence[Call]) -> list[str]:
        """The right gradients next to the break: computed from arrays that lead to it, and from none before those."""
        known = [g for g in range(len(self.right)) if g not in self.wrong and g not in self.reach[steps[0]]]
        sources = {g: self._source(g, steps) for g in known}
        reached = {g: set(self.reach[one]) for g, one in sources.items() if one is not None}
        nearest = [g for g in reached if not any(other < reached[g] for other in reached.values())]
        if not nearest:  # from dout itself
            nearest = [g for g in known if self._takes(g, self.passed.case.inputs[-1])]
        return [self.layer.gradients[g] for g in nearest]

    def _source(self, g: int, steps: Sequence[Call]) -> Call | None:
        """The last step above the break whose result gradient g is computed from."""
        leading = [one for one in self.order if one not in steps and set(self.reach[one]) > set(self.reach[steps[0]])]
        return next((one for one in reversed(leading) if self._takes(g, self.calls[one][1])), None)

    def _takes(self, g: int, array: Any) -> bool:
        """Whether the last step of gradient g has this very array as an argument."""
        return any(x is array for x in self.calls[self.order[self.producer(g)]][0])

    def only_last_steps(self) -> Chain | None:
        """The chain itself is right, if the gradient of the first input is, which every step leads to."""
        names = self.layer.gradients
        if 0 in self.wrong or len(self.wrong) > MOST_ALONE:
            return None
        return Chain([names[0]], alone=[names[g] for g in self.wrong])

    def words(self, one: Call) -> str:
        name, place = one
        n = sum(other[0] == name for other in self.calls)
        where = f" ({place_words(self.layer, name, place, n)})" if n > 1 else ""
        return f"{piece_words(name, self.layer.name)}{where}"


def _padded(chosen: Sequence[tuple[str, Array]], result: Array) -> list[Term]:
    """Parts of a concatenation, each with zeros in the place of the others."""
    found, start = [], 0
    for name, x in chosen:
        whole = np.zeros_like(result)
        whole[..., start : start + x.shape[-1]] = x
        found.append(Term(name, whole, True))
        start += x.shape[-1]
    return found


def _how(found: Sequence[tuple[Term, float]]) -> str | None:
    """What the factors of the terms mean; None if one is no simple number."""
    off = [(term, c) for term, c in found if abs(c - term.belongs) > 1e-7]
    missing = [term.name for term, c in off if abs(c) < 1e-7]
    added = [term.name for term, c in off if not term.belongs and _whole(c) == 1]
    if len(off) == len(missing) + len(added) and missing and added and all(missing):
        return f"{listed(added)} in place of {listed(missing)}"
    if len(off) > 1 and len(off) == len(missing) and all(missing):
        return f"{listed(missing)} are missing"
    texts = [_factor(term, c) for term, c in off]
    return None if None in texts else "; ".join(text for text in texts if text)


def _factor(term: Term, c: float) -> str | None:
    """What a wrong factor of a term means; None if it is no simple number."""
    whose = f"{term.name} " if term.name else "which "
    if not term.belongs:
        return {1: f"{whose}is added", -1: f"{whose}is subtracted"}.get(_whole(c))
    if abs(c) < 1e-7:
        return f"{whose}is missing" if term.name else "which is 0"
    if math.isclose(c, -1, rel_tol=1e-7):
        return f"{whose}has the wrong sign"
    for size, shown in ((abs(c), "large"), (1 / abs(c), "small")):
        if size > 1 and math.isclose(size, round(size * size) ** 0.5, rel_tol=1e-7) and round(size * size) <= 144:
            root = f"√{round(size * size)}" if round(size) ** 2 != round(size * size) else f"{round(size)}"
            sign = "has the wrong sign and " if c < 0 else ""
            return f"{whose}{sign}is {root} times too {shown}"
    return None
