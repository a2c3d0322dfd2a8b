"""Finds which tokens, sequences, heads or features count in a gradient, where all of them should.

Loops that stop one early, tiles that overwrite each other, a last partly filled tile: in each, the gradient is a sum
of which some terms are missing or counted twice. Where a gradient is linear in an array of the pass, the factor of each
index is fitted in one case. If the factors follow a rule, such as “only the last tile of 4”, the rule is a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.edits import AXES
from onfoot.check.layer import Array, Case, Mistake, Piece, Pieces, is_float_array
from onfoot.check.places import at_place, place_words
from onfoot.check.recording import Recordings
from onfoot.check.words import argument_words, formula, parameters_of, piece_words

TILES = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
EXACT = 1e-7  # relative residual of the fit
SCORES = ("weights", "dropped", "drho", "through_dropout", "dscores", "draw", "rho_for_softmax")
OF_SCORES = ("rho", "draw", "drho", "dscores")  # arguments that are (…, queries, keys)
COST = 1.27
GIVEN = "given"  # the piece that changes the inputs
PAIR = "pair of features"
PLURAL = {"query": "queries", PAIR: "pairs of features"}
MOST_GROUPS = 64
MOST_CALLS = 45  # a pass with more calls of pieces is not searched

Factors = Callable[[int], Array]


@dataclass(frozen=True)
class Rule:
    """A factor for each of n indices: 0 where it is left out."""

    says: str  # with {what}, {one} and {ones}
    factors: Factors
    fix: str
    cost: float = COST


def _where(test: Callable[[Array, int], Array]) -> Factors:
    return lambda n: np.asarray(test(np.arange(n), n), dtype=float)


LOOP = "the loop must run over all {ones}"
ADD = "add every {one} (+=), do not overwrite"


def rules() -> Iterator[Rule]:
    """The rules, the simplest first."""
    yield Rule("the last {one} of {what} is left out", _where(lambda i, n: i < n - 1), LOOP)
    yield Rule("the first {one} of {what} is left out", _where(lambda i, n: i > 0), LOOP)
    yield Rule("only the last {one} of {what} counts (overwritten, not added?)", _where(lambda i, n: i == n - 1), ADD)
    yield Rule("only the first {one} of {what} counts", _where(lambda i, n: i == 0), LOOP)
    yield Rule("the last two {ones} of {what} are left out", _where(lambda i, n: i < n - 2), LOOP)
    yield Rule("the first two {ones} of {what} are left out", _where(lambda i, n: i > 1), LOOP)
    yield Rule("first and last {one} of {what} are left out", _where(lambda i, n: (i > 0) & (i < n - 1)), LOOP)
    yield Rule("every second {one} of {what} is left out", _where(lambda i, n: i % 2 == 0), LOOP)
    yield Rule("the even {ones} of {what} are left out", _where(lambda i, n: i % 2 == 1), LOOP)
    yield Rule("the first {one} of {what} is counted twice", _where(lambda i, n: 1 + (i == 0)), LOOP)
    yield Rule("the last {one} of {what} is counted twice", _where(lambda i, n: 1 + (i == n - 1)), LOOP)
    yield Rule("the first {one} of {what} has the wrong sign", _where(lambda i, n: 1 - 2.0 * (i == 0)), LOOP)
    yield Rule("the last {one} of {what} has the wrong sign", _where(lambda i, n: 1 - 2.0 * (i == n - 1)), LOOP)
    yield Rule("only the first half of the {ones} of {what} counts", _where(lambda i, n: i < n // 2), LOOP)
    yield Rule("only the second half of the {ones} of {what} counts", _where(lambda i, n: i >= n // 2), LOOP)
    each = "do not divide or multiply by the index"
    yield Rule("{ones} of {what} are multiplied by their number, 1, 2, …", _where(lambda i, n: i + 1), each)
    yield Rule("{ones} of {what} are multiplied by their index, 0, 1, …", _where(lambda i, n: i), each)
    yield Rule("{ones} of {what} are divided by their number, 1, 2, …", _where(lambda i, n: 1 / (i + 1)), each)
    yield Rule("{ones} of {what} count as often as {ones} follow them", _where(lambda i, n: n - i), each)
    for k in TILES:
        yield from _tiles(k)


def _tiles(k: int) -> Iterator[Rule]:
    tile = f"tile of {k} {{ones}}"
    last = "the last tile may be partly filled: run to min(start + tile, n)"
    yield Rule(
        f"the last, partly filled {tile} of {{what}} is left out", _where(lambda i, n: i < n - n % k), last, COST + 0.01
    )
    yield Rule(
        f"only the last {tile} of {{what}} counts: each tile overwrites the one before",
        _where(lambda i, n: i // k == (n - 1) // k),
        "add every tile (+=), do not overwrite",
        COST + 0.01,
    )
    yield Rule(
        f"the last {tile} of {{what}} is left out", _where(lambda i, n: i // k < (n - 1) // k), last, COST + 0.015
    )
    yield Rule(f"only the first {tile} of {{what}} counts", _where(lambda i, n: i < k), LOOP, COST + 0.015)
    yield Rule(f"the first {tile} of {{what}} is left out", _where(lambda i, n: i >= k), LOOP, COST + 0.015)
    yield Rule(
        f"the first of every {tile} of {{what}} is counted twice: the tiles overlap",
        _where(lambda i, n: 1 + ((i % k == 0) & (i > 0))),
        "a tile ends before the next begins",
        COST + 0.01,
    )
    yield Rule(
        f"the last of every {tile} of {{what}} is left out",
        _where(lambda i, n: i % k != k - 1),
        "a tile ends where the next begins",
        COST + 0.01,
    )
    yield Rule(
        f"the last of every {tile} of {{what}} is left out, and of the last tile",
        _where(lambda i, n: (i % k != k - 1) & (i != n - 1)),
        "a tile ends where the next begins",
        COST + 0.012,
    )
    mean = "divide by the number of all {ones}, not by that of one tile"
    yield Rule(f"each {tile} of {{what}} is averaged by itself", _own_mean(k), mean, COST + 0.01)
    yield Rule(
        f"the means of {tile.replace('tile', 'tiles')} of {{what}} are averaged, though the last tile is smaller",
        lambda n: _own_mean(k)(n) / -(-n // k),
        mean,
        COST + 0.01,
    )
    yield Rule(f"only every {k}th {{one}} of {{what}} counts", _where(lambda i, n: i % k == 0), LOOP, COST + 0.015)
    if k > 2:
        yield Rule(f"all {{ones}} of {{what}} but the first {k} count twice", _where(lambda i, n: 1 + (i >= k)), LOOP)


def _own_mean(k: int) -> Factors:
    """n/(size of its tile): a mean over each tile in place of the mean over all."""
    return lambda n: n / np.minimum(k, n - np.arange(n) // k * k)


RULES = tuple(rules())


@cache
def rules_of(n: int) -> tuple[Array, tuple[Rule, ...]]:
    """The factors of the rules for n indices, (rules, n), and the rules that change something."""
    kept = [rule for rule in RULES if not np.array_equal(rule.factors(n), np.ones(n))]
    return np.stack([rule.factors(n) for rule in kept]), tuple(kept)


# rules about pairs of a query i and a key j

Pairs = Callable[[Array, Array, int], Array]  # (i, j, number of keys) -> which pairs count


def pair_rules() -> Iterator[tuple[str, Pairs, str, float]]:
    """(says, which pairs count, fix, cost)."""
    every = "every key up to the query's own counts"
    yield "the pairs of a token with itself are left out of {}", lambda i, j, n: i != j, every, COST
    yield "only the pairs of a token with itself count in {}", lambda i, j, n: i == j, every, COST
    yield "the pairs of a token with the one before are left out of {}", lambda i, j, n: i != j + 1, every, COST
    for k in TILES[:7]:
        yield from _pair_tiles(k, every)


def _pair_tiles(k: int, every: str) -> Iterator[tuple[str, Pairs, str, float]]:
    tile, cost = f"tiles of {k} queries and {k} keys", COST + 0.01
    yield f"in {{}}, {tile} on the diagonal are left out", lambda i, j, n: i // k != j // k, every, cost
    yield (
        f"in {{}}, only {tile} on the diagonal count: each tile overwrites the one before",
        lambda i, j, n: i // k == j // k,
        "add every tile (+=), do not overwrite",
        cost,
    )
    yield f"in {{}}, only keys less than {k} before the query count", lambda i, j, n: i - j < k, every, cost
    yield f"in {{}}, keys less than {k} before the query are left out", lambda i, j, n: i - j >= k, every, cost


@dataclass(frozen=True)
class PairRule:
    """Which pairs of a query and a key count, as a factor for every entry of the scores."""

    counts: Pairs

    def spread(self, shape: tuple[int, ...]) -> Array:
        return np.asarray(self.counts(np.arange(shape[-2])[:, None], np.arange(shape[-1]), shape[-1]), dtype=float)


@dataclass(frozen=True, eq=False)
class Place:
    """An array of the pass: the result of a piece (argument None) or one of its arguments, in one of its calls."""

    piece: str
    call: int | None  # None for all of them
    argument: int | None
    value: Array
    what: str
    names: tuple[str, ...]  # of the axes


@dataclass(frozen=True)
class Group:
    """The indices of one axis; or the rows of the first two axes, the heads or the pairs of features of the last."""

    axis: int
    one: str
    parts: int = 0  # of the last axis, which has so many heads

    def size(self, shape: tuple[int, ...]) -> int:
        if self.one == "row" and len(shape) == 3:
            return shape[0] * shape[1]
        return self.parts or (shape[-1] // 2 if self.one == PAIR else shape[self.axis])

    def spread(self, factors: Array, shape: tuple[int, ...]) -> Array:
        """The factors in a shape that multiplies the array."""
        if self.one == "row" and len(shape) == 3:
            return factors.reshape(*shape[:2], 1)
        if self.parts:
            return np.repeat(factors, shape[-1] // self.parts)
        if self.one == PAIR:
            return np.tile(factors, 2)
        return factors.reshape(-1, *(1,) * (len(shape) - 1 - self.axis))


def share_probes(evidence: Evidence, wrong: Sequence[int], recordings: Recordings) -> Iterator[Mistake]:
    """The rules that fit the factors of a gradient in its screening case."""
    by_case: dict[int, list[int]] = {}
    for g in wrong:
        if evidence.ever_informative(g):
            by_case.setdefault(evidence.screen(g), []).append(g)
    found: dict[tuple[str, str], Mistake] = {}
    for i, gradients in by_case.items():
        for mistake in _Fit(evidence, i, gradients, recordings).probes():
            found.setdefault((mistake.name, next(iter(mistake.replaces))), mistake)
    yield from found.values()


class _Fit:
    """Fits factors of one case."""

    def __init__(self, evidence: Evidence, i: int, gradients: Sequence[int], recordings: Recordings) -> None:
        self.evidence, self.i, self.recordings = evidence, i, recordings
        self.case, self.layer = evidence.cases[i], evidence.layer
        self.recording = recordings.of(self.case)
        right = evidence.run(Candidate(), i)
        assert right is not None
        self.right = right
        self.answers = {
            g: evidence.answers[i][g]
            for g in gradients
            if evidence.answers[i][g].shape == right[g].shape and np.isfinite(evidence.answers[i][g]).all()
        }

    def probes(self) -> Iterator[Mistake]:
        if sum(map(len, self.recording.calls.values())) > MOST_CALLS:
            return
        for place in self.places():
            linear = self.linear(place)
            for group in self.groups(place) if linear else ():
                if 2 <= group.size(place.value.shape) <= MOST_GROUPS:
                    yield from self.fitted(place, group, linear)
            if linear and place.names[-2:] == ("query", "key"):
                for says, counts, fix, cost in pair_rules():
                    shown = self.with_formula(place, fix)
                    yield self.mistake(place, PairRule(counts).spread, says.format(place.what), shown, cost)

    def places(self) -> Iterator[Place]:
        for j, (name, x) in enumerate(zip(self.layer.arguments, self.case.inputs, strict=False)):
            if _is_large(x) and x.ndim >= 3:
                yield Place(GIVEN, None, j, x, name, _axes(x, False))
        for name, calls in self.recording.calls.items():
            every = [None] if len(calls) == 1 else [None, *range(len(calls))]
            for call in every:
                arguments, result = calls[call or 0]
                where = "" if call is None else f" ({place_words(self.layer, name, call, len(calls))})"
                what = piece_words(name, self.layer.name)
                if _is_large(result):
                    yield Place(name, call, None, result, what + where, _axes(result, name in SCORES))
                parameters = parameters_of(getattr(self.layer.pieces, name), len(arguments))
                for j, (x, parameter) in enumerate(zip(arguments, parameters, strict=True)):
                    if _is_large(x):
                        words = argument_words(name, parameter, self.layer.name)
                        axes = _axes(x, parameter in OF_SCORES)
                        yield Place(name, call, j, x, f"{words} in {what}{where}", axes)

    def groups(self, place: Place) -> Iterator[Group]:
        shape = place.value.shape
        for axis in range(len(shape)):
            yield Group(axis, place.names[axis])
        if len(shape) == 3 and place.names[1] == "token":
            yield Group(0, "row")
        heads = int(self.case.sizes.get("H", 1))
        if "split" in self.recording.calls and 1 < heads < shape[-1] and shape[-1] % heads == 0 and len(shape) < 4:
            yield Group(len(shape) - 1, "head", heads)
        if "frequencies" in self.layer.pieces.names() and shape[-1] % 2 == 0:
            yield Group(len(shape) - 1, PAIR)

    def run(self, place: Place, factors: Array) -> tuple[Array, ...] | None:
        candidate = Candidate((self.mistake(place, lambda shape: factors),))
        found = self.evidence.run(candidate, self.i)
        self.evidence.forget(candidate)
        return found

    def linear(self, place: Place) -> list[int]:
        """The gradients that are proportional to the array."""
        none, twice = self.run(place, np.zeros(())), self.run(place, np.full((), 2.0))
        if none is None or twice is None:
            return []
        return [g for g in self.answers if self._proportional(g, none[g], twice[g])]

    def _proportional(self, g: int, none: Array, twice: Array) -> bool:
        right = self.right[g]
        if none.shape != right.shape or twice.shape != right.shape:
            return False
        size = np.abs(right).max()
        return bool(np.abs(none).max() <= 1e-12 * size and np.abs(twice - 2 * right).max() <= 1e-9 * size)

    def fitted(self, place: Place, group: Group, gradients: Sequence[int]) -> Iterator[Mistake]:
        """The rules that give the answer of a gradient: their factors times the share of each index."""
        n = group.size(place.value.shape)
        factors, kept = rules_of(n)
        runs = [self.run(place, group.spread(row, place.value.shape)) for row in np.eye(n)]
        found: dict[Rule, None] = {}
        for g in gradients:
            zeros, answer = np.zeros(self.right[g].shape), self.answers[g].ravel()
            usable = [zeros if run is None or run[g].shape != zeros.shape else run[g] for run in runs]
            shares = np.stack([one.ravel() for one in usable])  # (n, entries)
            size = np.linalg.norm(answer)
            if np.linalg.norm(shares.sum(axis=0) - self.right[g].ravel()) <= EXACT * np.linalg.norm(self.right[g]):
                off = np.linalg.norm(factors @ shares - answer, axis=1)
                found |= dict.fromkeys(rule for rule, one in zip(kept, off, strict=True) if one <= EXACT * size)
        for rule in found:
            yield self.named(place, group, rule)

    def named(self, place: Place, group: Group, rule: Rule) -> Mistake:
        words = {"one": group.one, "ones": PLURAL.get(group.one, f"{group.one}s")}
        says, fix = rule.says.format(what=place.what, **words), self.with_formula(place, rule.fix.format(**words))

        def spread(shape: tuple[int, ...]) -> Array:
            return group.spread(rule.factors(group.size(shape)), shape)

        return self.mistake(place, spread, says, fix, rule.cost - (0.004 if group.parts or group.one == PAIR else 0))

    def with_formula(self, place: Place, fix: str) -> str:
        right = formula(place.piece, self.layer.name) if place.piece != GIVEN else ""
        return f"{right}; {fix}" if right else fix

    def mistake(
        self,
        place: Place,
        spread: Callable[[tuple[int, ...]], Array],
        says: str = "",
        fix: str = "",
        cost: float = COST,
    ) -> Mistake:
        """The pass with an array multiplied by factors, which `spread` gives for its shape."""
        n = len(self.recording.calls.get(place.piece, ()))

        def apply(p: Pieces, case: Case) -> dict[str, Piece]:
            j = place.argument
            if place.piece == GIVEN:
                assert j is not None
                return {GIVEN: lambda case, options: (_scaled(case.inputs, j, spread), options)}
            right = getattr(p, place.piece)

            def changed(*a: Array) -> Array:
                if j is None:
                    result: Array = right(*a)
                    return result * spread(result.shape)
                return right(*_scaled(a, j, spread))

            return {place.piece: at_place(right, changed, place.call, n)}

        later = 0.0 if place.argument is None else -0.002 if place.piece == GIVEN else 0.005
        pieces = frozenset([place.piece])
        return Mistake(says, self.layer.name, "", "", fix, apply, cost=cost + later, per_case=True, replaces=pieces)


def _scaled(arrays: tuple[Any, ...], j: int, spread: Callable[[tuple[int, ...]], Array]) -> tuple[Any, ...]:
    """The arrays, with array j multiplied by its factors."""
    return (*arrays[:j], arrays[j] * spread(arrays[j].shape), *arrays[j + 1 :])


def _is_large(x: Any) -> bool:
    return is_float_array(x) and x.ndim >= 2 and x.size > 1


def _axes(x: Array, scores: bool) -> tuple[str, ...]:
    names = AXES.get(x.ndim, ("index",) * x.ndim)
    return (*names[:-2], "query", "key") if scores else names
