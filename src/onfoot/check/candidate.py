"""Candidate explanations of a wrong result: known mistakes, and changes of single gradients.

`Evidence` holds what a function returned, and tests whether a candidate, run on the same data, returns the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from onfoot.check.budget import allowed, distance, magnitudes_in_case, norm
from onfoot.check.layer import Array, Case, Gradients, Layer, Mistake, Pieces

GATE = {"float64": 1e-9, "float32": 1e-4}  # relative distance above which a candidate is rejected at once
FLOOR = 1 / 16  # of the correct gradient's budget: where a mistake cancels to 0 exactly, rounding remains
LARGE = 20_000  # entries; numbers are fitted on smaller cases
FAR = 1e-2  # squared relative distance: a number that leaves more does not explain the gradient
SETTLED = 1e-4  # share of the squared distance that the next step would take away: with less, the number is found
SHORTER = 8  # times that a step which leads away is tried again, a quarter as long
LONG = 8  # steps after which a search that is still far away ends
NEARLY = 1e4  # rounding budgets: a fit that is further off is not polished
TINY = 1e-100
HUGE = 1e12  # times the size of its terms: a gradient that large is a division by rounding noise


@dataclass(frozen=True)
class Change:
    """A change of a single gradient: a factor, a transpose, or another gradient in its place."""

    gradient: int
    name: str
    fix: str
    # (all gradients, case) -> the array returned for this gradient
    apply: Callable[[Gradients, Case], Array] = field(compare=False)
    kind: str = ""  # the name with {} for the gradient: "{} is 2 times too large"
    cost: float = 1.1


@dataclass(frozen=True)
class Candidate:
    """Known mistakes and changes that are assumed to occur together."""

    mistakes: tuple[Mistake, ...] = ()
    changes: tuple[Change, ...] = ()
    values: tuple[float, ...] = ()  # for the mistakes with a parameter, in their order

    @property
    def size(self) -> float:
        """The complexity; a catalogued mistake counts less than a bare factor, because it is likelier."""
        kinds = {c.kind or c.name: c.cost for c in self.changes}  # the same change of several gradients is one cause
        more = 0.02 * (len(self.changes) - len(kinds))
        return sum(m.cost for m in self.mistakes) + sum(kinds.values()) + more

    @property
    def floor(self) -> float:
        """The part of the correct gradient's budget that is always allowed.

        A generated mistake may take arrays from a correct pass, whose rounding is not in its own budget.
        """
        return 1.0 if self.changes or any(m.cost > 1 for m in self.mistakes) else FLOOR

    @property
    def names(self) -> list[str]:
        return [m.name for m in self.mistakes] + [c.name for c in self.changes]

    def combined(self, other: Candidate) -> Candidate:
        """Both candidates together."""
        mistakes = tuple(dict.fromkeys((*self.mistakes, *other.mistakes)))
        return Candidate(mistakes, tuple(dict.fromkeys((*self.changes, *other.changes))))


def _changed(grads: Gradients, candidate: Candidate, case: Case) -> Gradients:
    """The gradients after the candidate's changes."""
    changed = list(grads)
    for change in candidate.changes:
        changed[change.gradient] = change.apply(grads, case)
    return tuple(changed)


@dataclass
class Evidence:
    """The gradients that a function returned in every case, and comparisons with candidates."""

    layer: Layer
    options: Mapping[str, Any]
    cases: list[Case]
    answers: list[list[Array]]
    magnitudes: list[list[float]]  # of the correct gradients, per case
    dtype: str
    work: int = 0  # gradients that were computed with candidates
    _runs: dict[tuple[Candidate, int], Gradients | None] = field(default_factory=dict)
    _budgets: dict[tuple[Candidate, int], list[float]] = field(default_factory=dict)

    @cached_property
    def order(self) -> list[int]:
        """The cases, the smallest first: most candidates are rejected there."""
        return sorted(range(len(self.cases)), key=lambda i: self._entries(i))

    def _entries(self, i: int) -> int:
        return sum(int(np.size(x)) for x in self.cases[i].inputs)

    @cached_property
    def small(self) -> list[int]:
        return [i for i in self.order if self._entries(i) <= LARGE] or self.order

    def screen(self, g: int) -> int:
        """A small case in which gradient g is wrong and its sizes differ, to reject candidates in one run."""

        def rank(i: int) -> tuple[bool, bool, bool, bool, int]:
            right, answer = self.run(Candidate(), i), self.answers[i][g]
            finite = bool(np.isfinite(answer).all())
            same = right is not None and right[g].shape == answer.shape
            off = not same or self.difference(Candidate(), i, g) > GATE[self.dtype] * self.norms[i][g]
            several = min((int(np.size(x)) for x in self.cases[i].inputs if np.ndim(x)), default=1) > 1
            several = several and all(size != 1 for size in self.cases[i].sizes.values())
            return not finite, not off, not self.informative(i, g), not several, self._entries(i)

        return min(range(len(self.cases)), key=rank)

    def passes_screen(self, candidate: Candidate, i: int, g: int) -> bool:
        """Whether the candidate may fit, by case i alone."""
        size = max(self.magnitudes[i][g], self.norms[i][g])
        return self.difference(candidate, i, g) <= GATE[self.dtype] * size or self.noise(candidate, i, g)

    def is_parallel(self, candidate: Candidate, i: int, g: int) -> bool:
        """Whether the candidate's gradient g in case i is the answer but for a factor."""
        ran, answer = self.run(candidate, i), self.answers[i][g]
        if ran is None or ran[g].shape != answer.shape:
            return False
        product, square = float(np.vdot(ran[g], answer)), float(np.vdot(ran[g], ran[g]))
        return product * product >= (1 - 1e-11) * square * self.norms[i][g] ** 2 > 0

    def pieces(self, candidate: Candidate, case: Case) -> Pieces:
        pieces, values = self.layer.pieces, iter(candidate.values)
        for m in candidate.mistakes:
            if m.per_case:
                changes = m.apply(pieces, case)
            else:
                changes = m.apply(pieces, next(values, 0.0)) if m.parameter else m.apply(pieces)
            pieces = pieces.with_changes(changes)
        return pieces

    def run(self, candidate: Candidate, i: int) -> Gradients | None:
        """Returns the candidate's gradients in case i, or None if it raises."""
        if (candidate, i) not in self._runs:
            self._runs[candidate, i] = self._run(candidate, i)
        return self._runs[candidate, i]

    def _run(self, candidate: Candidate, i: int) -> Gradients | None:
        try:
            if candidate.changes:  # apply them to the cached result of the mistakes alone
                grads = self.run(replace(candidate, changes=()), i)
                return None if grads is None else _changed(grads, candidate, self.cases[i])
            self.work += len(self.layer.gradients)
            return self.layer.run(self.pieces(candidate, self.cases[i]), self.cases[i], self.options)
        except Exception:  # mismatched shapes: real code with these mistakes raises too; a probe must not end the check
            return None

    def forget(self, candidate: Candidate) -> None:
        """Drops the cached results of a candidate that will not be asked for again."""
        for i in range(len(self.cases)):
            self._runs.pop((candidate, i), None)

    @cached_property
    def norms(self) -> list[list[float]]:
        return [[norm(g) for g in answer] for answer in self.answers]

    def informative(self, i: int, g: int) -> bool:
        """Whether gradient g is above rounding noise in case i."""
        return self.norms[i][g] > allowed(self.magnitudes[i][g], self.dtype)

    @cached_property
    def _finite(self) -> list[list[bool]]:
        return [[bool(np.isfinite(g).all()) for g in answer] for answer in self.answers]

    def ever_informative(self, g: int) -> bool:
        """Whether gradient g is above rounding noise in any case."""
        return any(self.informative(i, g) for i in range(len(self.cases)))

    def difference(self, candidate: Candidate, i: int, g: int) -> float:
        """Distance between candidate and answer; inf if the shapes or the positions of nan and inf differ."""
        ran = self.run(candidate, i)
        if ran is None or ran[g].shape != self.answers[i][g].shape:
            return math.inf
        got, answer = ran[g], self.answers[i][g]
        if np.isfinite(gap := got - answer).all():
            return norm(gap)
        return distance(got, answer) if np.array_equal(np.isfinite(got), np.isfinite(answer)) else math.inf

    def noise(self, candidate: Candidate, i: int, g: int) -> bool:
        """Whether gradient g in case i is divided by what should be 0, in the answer and in the candidate's result.

        Then rounding decides whether an entry is huge or not finite, and the two cannot be compared.
        """
        ran, answer = self.run(candidate, i), self.answers[i][g]
        if ran is None or (self._finite[i][g] and self.norms[i][g] <= HUGE * self.magnitudes[i][g]):
            return False
        huge = [norm(x) > HUGE * self.magnitudes[i][g] for x in (ran[g], answer)]
        return any(huge) and all(h or not np.isfinite(x).all() for h, x in zip(huge, (ran[g], answer), strict=True))

    def residual(self, candidate: Candidate, g: int, limit: float = math.inf) -> float:
        """The largest distance over all informative cases, relative to the larger of the answer and its terms.

        Returns inf as soon as it exceeds `limit`, without running further cases.
        """
        indices = self.order
        compared = [i for i in indices if self.informative(i, g)] or [i for i in indices if self.magnitudes[i][g]]
        largest = -1.0
        for i in compared:
            if self.noise(candidate, i, g):
                continue
            size = max(self.norms[i][g], self.magnitudes[i][g])
            largest = max(largest, self.difference(candidate, i, g) / size)
            if largest > limit:
                return math.inf
        return largest if compared else math.inf

    def fits(self, candidate: Candidate, g: int) -> bool:
        """Whether the candidate returns the same gradient up to rounding, in every case."""
        if not any(np.isfinite(answer[g]).any() for answer in self.answers):
            return False  # nan everywhere has many causes
        return self._within_gate(candidate, g) and self._within_budget(candidate, g)

    def _within_gate(self, candidate: Candidate, g: int) -> bool:
        """A cheap first test, without the rounding budget."""
        return all(
            self.difference(candidate, i, g) <= GATE[self.dtype] * max(self.magnitudes[i][g], self.norms[i][g])
            for i in self.order
            if not self.noise(candidate, i, g)
        )

    def _within_budget(self, candidate: Candidate, g: int) -> bool:
        for i in self.order:
            off = self.difference(candidate, i, g)
            if off <= candidate.floor * self.budget(Candidate(), i)[g] or self.noise(candidate, i, g):
                continue
            if off > self.budget(candidate, i)[g]:  # last, since it takes several runs
                return False
        return True

    def budget(self, candidate: Candidate, i: int) -> list[float]:
        """The allowed rounding error of each of the candidate's gradients in case i."""
        if (candidate, i) not in self._budgets:
            found = self.magnitudes[i] if candidate == Candidate() else self._magnitudes(candidate, self.cases[i])
            self._budgets[candidate, i] = [allowed(m, self.dtype) for m in found]
        return self._budgets[candidate, i]

    def _magnitudes(self, candidate: Candidate, case: Case) -> list[float]:
        def run(pieces: Pieces) -> Gradients:
            return _changed(self.layer.run(pieces, case, self.options), candidate, case)

        return magnitudes_in_case(run, self.pieces(candidate, case), self.layer, case)

    def same_as_right(self, candidate: Candidate, g: int) -> bool:
        """Whether the candidate leaves gradient g correct."""
        for i in range(len(self.cases)):
            got, right = self.run(candidate, i), self.run(Candidate(), i)
            if got is None or right is None or got[g].shape != right[g].shape:
                return False
            if not np.isfinite(got[g]).all() or distance(got[g], right[g]) > self.budget(Candidate(), i)[g]:
                return False
        return True

    def with_values(self, candidate: Candidate, gradients: Sequence[int]) -> Candidate | None:
        """Returns the candidate with its unknown number, if any, fitted to these gradients; None if that fails."""
        n = sum(bool(m.parameter) for m in candidate.mistakes)
        if n == 0:
            return candidate
        value = self._closest(candidate, gradients) if n == 1 else None
        return None if value is None else replace(candidate, values=(self._polished(candidate, gradients, value),))

    def _polished(self, candidate: Candidate, gradients: Sequence[int], value: float) -> float:
        """The fitted number, or a round one next to it that fits better: with large scores the last bit counts."""

        def off(number: float) -> float:
            """The largest distance in rounding budgets."""
            tried = replace(candidate, values=(number,))
            found = [
                self.difference(tried, i, g) / (self.budget(Candidate(), i)[g] or math.inf)
                for i in self.small
                for g in gradients
                if self.informative(i, g) and not self.noise(tried, i, g)
            ]
            return max(found, default=math.inf)

        if not off(value) <= NEARLY:  # it explains nothing, or is settled already
            return value
        return min(_round_numbers(value), key=off)

    def _closest(self, candidate: Candidate, gradients: Sequence[int]) -> float | None:
        """Gauss-Newton in one unknown; one step is exact if the gradients are linear in it."""
        (starts,) = (m.starts for m in candidate.mistakes if m.parameter)
        if len(starts) > 1:
            return self._closest_from(candidate, gradients, starts)
        value, step, first = 0.0, 1e-3, 0.0
        for n in range(12):
            along, square, left = self._slopes(candidate, gradients, value, step)
            if not (square > 0 and math.isfinite(along / square)):
                return None
            first = first or left
            if (n == 0 and left - along * along / square > left / 2) or (n == 2 and left > 1e-3 * first):
                return None  # no value fits
            value, step = value + along / square, 1e-6
            if abs(along / square) <= 1e-14 * abs(value):
                break
        return value

    def _closest_from(self, candidate: Candidate, gradients: Sequence[int], starts: Sequence[float]) -> float | None:
        """Gauss-Newton from the best of several starts: on two cases, and on the others as well if it fits these.

        A usual number that fits is taken as it is: eps = 1e-12 shows only where everything is close to 0.
        """
        for start in starts:
            if self._fits_small(replace(candidate, values=(start,)), gradients):
                return start
        gentle = self._gentle(candidate, gradients, starts[0])
        value, left = self._descend(candidate, gradients, starts, gentle[:2])
        if value is None or left > FAR:
            return None
        found = self._descend(candidate, gradients, [value], gentle)[0]
        steep = [i for i in self.small if i not in gentle]
        if found is None or not steep or self._fits_small(replace(candidate, values=(found,)), gradients):
            return found
        again = self._descend(candidate, gradients, [found, *starts], steep)[0]
        fits = again is not None and self._fits_small(replace(candidate, values=(again,)), gradients)
        return again if fits else found

    def _fits_small(self, candidate: Candidate, gradients: Sequence[int]) -> bool:
        """Whether these gradients are right up to rounding in every small case."""
        return all(
            self.difference(candidate, i, g) <= self.budget(Candidate(), i)[g] or self.noise(candidate, i, g)
            for i in self.small
            for g in gradients
        )

    def _descend(
        self, candidate: Candidate, gradients: Sequence[int], starts: Sequence[float], cases: Sequence[int]
    ) -> tuple[float | None, float]:
        """Gauss-Newton with shorter steps where the distance grows; the value, and the squared relative distance."""

        def at(value: float) -> tuple[float, float, float]:
            found = self._slopes(candidate, gradients, value, 1e-6 * abs(value) or 1e-12, cases)
            return found if math.isfinite(found[2]) and found[1] > 0 else (0.0, 0.0, math.inf)

        tried = [(at(start), start) for start in starts]
        (along, square, left), value = min(tried, key=lambda one: one[0][2])
        for n in range(30):
            if not square > 0 or (n == LONG and left > FAR):
                return None, math.inf
            if along * along < SETTLED * square * left:
                break  # a minimum, and what is left there is not the number's
            for step in (along / square / 4**times for times in range(SHORTER)):
                new = at(value + step)
                if new[2] < left:
                    (along, square, left), value = new, value + step
                    break
            else:
                break
        return value, left

    def _gentle(self, candidate: Candidate, gradients: Sequence[int], start: float) -> list[int]:
        """The small cases, those that depend on the number most first, without those that depend on it far more.

        With scores of thousands a temperature decides everything, and the way to it is full of other minima.
        """
        step = 1e-6 * abs(start) or 1e-12
        squares = {i: self._slopes(candidate, gradients, start, step, [i])[1] for i in self.small}
        usual = [square for square in squares.values() if square > 0 and math.isfinite(square)]
        limit = 100 * float(np.median(usual)) if usual else math.inf
        kept = [i for i, square in squares.items() if square <= limit] or self.small
        return sorted(kept, key=lambda i: -squares[i])

    def _slopes(
        self,
        candidate: Candidate,
        gradients: Sequence[int],
        value: float,
        step: float,
        cases: Sequence[int] | None = None,
    ) -> tuple[float, float, float]:
        """Sums of slope · gap, slope² and gap² over cases and gradients, relative to the size of the answer."""
        along, square, left = 0.0, 0.0, 0.0
        for i in self.small if cases is None else cases:
            a = self.run(replace(candidate, values=(value,)), i)
            b = self.run(replace(candidate, values=(value + step,)), i)
            for g in gradients:
                answer = self.answers[i][g]
                if a is None or b is None or a[g].shape != answer.shape or not self.informative(i, g):
                    continue
                slope, gap, weight = (b[g] - a[g]) / step, answer - a[g], self.norms[i][g] ** -2
                along += weight * float(np.sum(slope * gap))
                square += weight * float(np.sum(slope * slope))
                left += weight * float(np.sum(gap * gap))
        return along, square, left


def _round_numbers(value: float) -> list[float]:
    """The value, the numbers of few digits next to it, and those whose reciprocal, square or root has few digits."""
    found = [value]
    for digits in range(1, 13):
        form = f"%.{digits - 1}e"
        if value:
            found += [float(form % value), 1 / float(form % (1 / value))]
        if TINY < value < 1 / TINY:  # else its square, or the reciprocal of that, is 0 or infinite
            found += [math.sqrt(float(form % value**2)), 1 / math.sqrt(float(form % value**-2))]
    near = [one for one in found if abs(one - value) <= 1e-9 * abs(value)]
    return list(dict.fromkeys(near))
