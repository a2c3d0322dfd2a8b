"""Finds a change of one gradient, relative to a candidate.

A factor, a transpose, another shape, another gradient or array in its place, an array added or multiplied, a part
of it, shifted or reversed tokens, terms that were not summed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from onfoot.check.candidate import Candidate, Change, Evidence
from onfoot.check.edits import Edit, along_axes
from onfoot.check.factors import candidates, constant_words, recognise
from onfoot.check.layer import Array, Case, Gradients, transposed
from onfoot.check.recording import Recordings

GATE = {"float64": 1e-6, "float32": 1e-2}  # largest relative residual that a factor may leave
NOT_EXCHANGED = 1.35  # the cost of a gradient that equals another one, which is right

Apply = Callable[..., Array]  # (gradients, case) -> the array returned


def find_change(evidence: Evidence, base: Candidate, g: int, recordings: Recordings | None = None) -> Change | None:
    """Returns the change of gradient g that makes the candidate fit, or None; all changes if recordings are given."""
    found = _possible(evidence, base, g)
    if recordings is not None:
        found = itertools.chain(found, _General(evidence, base, g, recordings).changes())
    for change in found:
        if evidence.fits(Candidate(base.mistakes, (change,), base.values), g):
            return change
    return None


def _possible(evidence: Evidence, base: Candidate, g: int) -> Iterator[Change]:
    names = evidence.layer.gradients
    if not evidence.ever_informative(g):
        kind = "{} is 0 everywhere"
        yield Change(g, kind.format(names[g]), f"compute and return {names[g]}", _zeros(g), kind)
        return
    yield from _factor(evidence, base, g)
    kind = "{} is transposed"
    yield Change(g, kind.format(names[g]), f"transpose {names[g]}", lambda grads, case: transposed(grads[g]), kind)
    for h, other in enumerate(names):
        if h != g:
            fix = f"return the gradients in the order {', '.join(names)}"
            says, cost = f"{other} is returned in place of {names[g]}", 1.1
            if _is_right(evidence, h):
                says += ", or computed from the same arrays as it"
                fix, cost = f"compute {names[g]} from its own arrays and return it in its place", NOT_EXCHANGED
            yield Change(g, says, fix, _other(h), cost=cost)


def _is_right(evidence: Evidence, h: int) -> bool:
    """Whether gradient h is correct: then another that equals it has rather been computed from the same arrays."""
    cases = range(len(evidence.cases))
    return all(evidence.difference(Candidate(), i, h) <= evidence.budget(Candidate(), i)[h] for i in cases)


def _zeros(g: int) -> Apply:
    return lambda grads, case: np.zeros_like(grads[g])


def _other(h: int) -> Apply:
    return lambda grads, case: grads[h]


def _factor(evidence: Evidence, base: Candidate, g: int) -> Iterator[Change]:
    """A factor that is the same number or the same quantity in every case."""
    found = []
    gate = GATE[evidence.dtype]
    for i, answers in enumerate(evidence.answers):
        if not evidence.informative(i, g):
            continue
        ran, answer = evidence.run(base, i), answers[g]
        if ran is None or ran[g].shape != answer.shape or not np.isfinite(answer).all():
            return
        square = float(np.sum(ran[g] * ran[g]))
        factor = float(np.sum(ran[g] * answer)) / square if square else 0.0
        if factor == 0 or np.linalg.norm(answer - factor * ran[g]) > gate * evidence.norms[i][g]:
            return
        condition = evidence.magnitudes[i][g] / evidence.norms[i][g]
        found.append((condition, i, factor))
    measured = [(evidence.cases[i], factor) for _, i, factor in found]
    signs = {np.sign(factor) for _, factor in measured}
    if len(signs) != 1:
        return
    known = recognise([(case.sizes, abs(factor)) for case, factor in measured], 10 * gate)
    name, sign = evidence.layer.gradients[g], int(signs.pop())
    if known is not None:
        yield _named(g, name, sign, *known, measured[0][0])
    elif (
        not base.mistakes
        and len(measured) > 1
        and np.ptp([factor for _, factor in measured]) <= gate * abs(measured[0][1])
    ):
        yield _constant(g, name, min(found)[2])  # from the best-conditioned case


def _named(g: int, name: str, sign: int, quantity: str, times: bool, case: Case) -> Change:
    def value(case: Case) -> float:
        size = candidates(case.sizes)[quantity] if quantity else 1.0
        return sign * (size if times else 1 / size if size else math.inf)

    def apply(grads: Gradients, case: Case) -> Array:
        return value(case) * grads[g]

    parts = ["has the wrong sign"] if sign < 0 else []
    fix = [f"negate {name}"] if sign < 0 else []
    if quantity:
        size = candidates(case.sizes)[quantity]
        shown = quantity if quantity.isdigit() else f"{quantity} = {size:.3g}"
        parts.append(f"is {shown} times too {'large' if times else 'small'}")
        fix.append(f"{'divide' if times else 'multiply'} {name} by {quantity}")
    kind = "{} " + " and ".join(parts)
    return Change(g, kind.format(name), ", ".join(fix), apply, kind)


def _constant(g: int, name: str, factor: float) -> Change:
    shown = constant_words(factor)
    kind = f"{{}} is {shown} times the correct gradient in every case"
    if shown.startswith("log₂ e"):
        kind += ": exponents of 2 in place of e, without their factor ln 2"
    return Change(g, kind.format(name), f"divide {name} by {factor:.6g}", lambda grads, case: factor * grads[g], kind)


class _General:
    """Changes that need the other arrays of the pass, tried on one case first."""

    def __init__(self, evidence: Evidence, base: Candidate, g: int, recordings: Recordings) -> None:
        self.evidence, self.base, self.g, self.recordings = evidence, base, g, recordings
        self.i = evidence.screen(g)
        self.case, self.answer = evidence.cases[self.i], evidence.answers[self.i][g]
        self.name = evidence.layer.gradients[g]
        self.gate = max(GATE[evidence.dtype] * evidence.norms[self.i][g], evidence.budget(Candidate(), self.i)[g])

    def changes(self) -> Iterator[Change]:
        grads = self.evidence.run(self.base, self.i)
        if grads is None or not np.isfinite(self.answer).all():
            return
        self.grads, self.right = grads, grads[self.g]
        for cost, found in self.possible():
            for kind, fix, apply in found:
                if self.matches(apply):
                    yield Change(self.g, kind.format(self.name), fix, apply, kind, cost)

    def matches(self, apply: Apply) -> bool:
        try:
            with np.errstate(all="ignore"):
                got = np.asarray(apply(self.grads, self.case))
        except (ValueError, IndexError, TypeError, ArithmeticError):
            return False
        return got.shape == self.answer.shape and bool(np.linalg.norm(got - self.answer) <= self.gate)

    def possible(self) -> Iterator[tuple[float, Iterator[tuple[str, str, Apply]]]]:
        """(cost, changes), the likeliest first."""
        given = set(self.evidence.layer.arguments)
        inputs = {words: x for words, x in self.recordings.of(self.case).values.items() if words in given}
        inside = {words: x for words, x in self.recordings.of(self.case).values.items() if words not in given}
        yield 1.1, self.shapes()
        yield 1.1, self.unsummed()
        yield 1.12, self.sums({**inputs, **self.others()}, ones=True)
        yield 1.22, self.in_place_of()
        yield 1.28, self.products({**inputs, **self.others()})
        yield 1.29, self.parts()
        yield 1.3, self.values()
        yield 1.31, self.sums({**inputs, **self.others()}, ones=False)
        yield 1.33, self.sums(inside, ones=True)
        yield 1.34, self.products(inside)
        yield 1.36, self.sums(inside, ones=False)

    # the same numbers in another shape

    def shapes(self) -> Iterator[tuple[str, str, Apply]]:
        g, name = self.g, self.name
        if self.right.size != self.answer.size:
            yield from self.summed_shapes()
            return
        if self.right.shape != self.answer.shape:
            got, right = self.first_shapes()
            fixes = f"reshape {name} to {right}, the shape of {_argument_of(name)}"
            kind = f"{{}} is right but for its shape, {got} for {right}: a reshape is missing"
            if tuple(n for n in got if n > 1) == tuple(n for n in right if n > 1):
                kind = f"{{}} is right but for its shape, {got} for {right} (keepdims)"
            same = self.reshaped
            yield kind, fixes, lambda grads, case: grads[g].reshape(same(grads[g], case))
        for axes in itertools.permutations(range(self.right.ndim)):
            if axes != tuple(range(self.right.ndim)):
                moved = f"{{}} has its axes in the order {axes}"
                fix = f"transpose the axes of {name} back, from {axes}"
                if tuple(self.right.shape[a] for a in axes) == self.answer.shape:
                    yield moved, fix, lambda grads, case, axes=axes: grads[g].transpose(axes)
                yield (
                    f"{{}} is reshaped where its axes must be transposed, {axes}",
                    f"transpose the axes before the reshape, from {axes}",
                    lambda grads, case, axes=axes: grads[g].transpose(axes).reshape(self.reshaped(grads[g], case)),
                )
                yield (
                    f"{{}} is reshaped, then its axes are transposed, {axes}",
                    "reshape and transpose in the order of the forward pass, backwards",
                    lambda grads, case, axes=axes: _reshape_then_transpose(grads[g], axes),
                )

    def first_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What was returned and what is right in the first case with a wrong shape, which the report shows."""
        for i, answers in enumerate(self.evidence.answers):
            ran = self.evidence.run(self.base, i)
            if ran is not None and ran[self.g].shape != answers[self.g].shape:
                return answers[self.g].shape, ran[self.g].shape
        return self.answer.shape, self.right.shape

    def reshaped(self, right: Array, case: Case) -> tuple[int, ...]:
        """The shape that was returned in this case."""
        for i, one in enumerate(self.evidence.cases):
            if one is case:
                return self.evidence.answers[i][self.g].shape
        return right.shape

    def summed_shapes(self) -> Iterator[tuple[str, str, Apply]]:
        """An axis of the gradient was summed or averaged away."""
        g = self.g
        for n in range(1, self.right.ndim + 1):
            for axes in itertools.combinations(range(self.right.ndim), n):
                for verb, function in (("summed", np.sum), ("averaged", np.mean)):
                    for keep in (False, True):
                        over = f"over its own axis {', '.join(map(str, axes))} too{' (keepdims)' if keep else ''}"
                        yield (
                            f"{{}} is {verb} {'to one number' if n == self.right.ndim and not keep else over}",
                            f"return {self.name} with shape {self.right.shape}",
                            lambda grads, case, axes=axes, function=function, keep=keep: function(
                                grads[g], axis=axes, keepdims=keep
                            ),
                        )

    # terms of a sum

    def unsummed(self) -> Iterator[tuple[str, str, Apply]]:
        """One array per sequence or per token, where they must be summed: the gradient is linear in dout."""
        if self.answer.ndim <= self.right.ndim or self.evidence.layer.arguments[-1] != "dout":
            return
        if np.ndim(self.case.inputs[-1]) < 2:  # of a loss it is a number
            return
        fix = f"sum {self.name} over sequences and tokens"
        yield "{} is not summed over the batch (one per sequence)", fix, self.per(lambda shape: np.eye(shape[0]), 1)
        yield "{} is not summed over the tokens (one per position)", fix, self.per(self._tokens, 1)
        yield "{} is not summed over batch and tokens (one per token)", fix, self.per(self._each, 2)

    @staticmethod
    def _tokens(shape: tuple[int, ...]) -> Array:
        return np.eye(shape[-2])

    @staticmethod
    def _each(shape: tuple[int, ...]) -> Array:
        return np.eye(shape[0] * shape[1])

    def per(self, masks: Callable[[tuple[int, ...]], Array], axes: int) -> Apply:
        def apply(grads: Gradients, case: Case) -> Array:
            *rest, dout = case.inputs
            shape, found = dout.shape, []
            rows = masks(shape)
            for row in rows:
                if axes == 2:
                    mask = row.reshape(shape[:2])[..., None]
                else:
                    mask = (
                        row.reshape(-1, *(1,) * (dout.ndim - 1))
                        if len(row) == shape[0] and masks is not self._tokens
                        else row[:, None]
                    )
                part = replace(case, inputs=(*rest, dout * mask))
                layer, options = self.evidence.layer, self.evidence.options
                found.append(layer.run(self.evidence.pieces(self.base, part), part, options)[self.g])
            out = np.stack(found)
            return out.reshape(*shape[:2], *out.shape[1:]) if axes == 2 else out

        return apply

    # other arrays

    def sums(self, arrays: Mapping[str, Array], ones: bool) -> Iterator[tuple[str, str, Apply]]:
        """An array is added to the gradient: as it is, or multiplied by a number."""
        if self.right.shape != self.answer.shape:
            return
        gap = self.answer - self.right
        for words, value in arrays.items():
            if words != self.name and value.shape == self.right.shape:
                square = float(np.sum(value * value))
                c = float(np.sum(value * gap)) / square if square else 0.0
                is_one = abs(abs(c) - 1) < 1e-6
                if c and is_one == ones and np.linalg.norm(gap - c * value) <= self.gate:
                    yield self.added(words, math.copysign(1.0, c) if ones else c)

    def products(self, arrays: Mapping[str, Array]) -> Iterator[tuple[str, str, Apply]]:
        """The gradient is multiplied or divided by an array, or set to 0 where it is negative."""
        g = self.g
        if self.right.shape != self.answer.shape:
            return
        for words, value in arrays.items():
            if words != self.name and _broadcasts(value, self.right):
                yield (
                    f"{{}} is multiplied by {words} once too often",
                    f"do not multiply {self.name} by {words}",
                    lambda grads, case, words=words: grads[g] * self.value(words, grads, case),
                )
                yield (
                    f"{{}} is divided by {words}",
                    f"do not divide {self.name} by {words}; or multiply by it",
                    lambda grads, case, words=words: grads[g] / self.value(words, grads, case),
                )
                yield (
                    f"{{}} is set to 0 except where {words} > 0",
                    f"do not mask {self.name}",
                    lambda grads, case, words=words: grads[g] * (self.value(words, grads, case) > 0),
                )

    def others(self) -> dict[str, Array]:
        names = self.evidence.layer.gradients
        return {name: self.grads[h] for h, name in enumerate(names) if h != self.g}

    def value(self, words: str, grads: Gradients, case: Case) -> Array:
        names = self.evidence.layer.gradients
        return grads[names.index(words)] if words in names else self.recordings.of(case).values[words]

    def added(self, words: str, c: float) -> tuple[str, str, Apply]:
        g = self.g
        what = words if abs(c) == 1 else f"{abs(c):.6g} · {words}"
        if c == -1 and words not in (*self.evidence.layer.arguments, *self.evidence.layer.gradients):
            says, fix = f"{{}} lacks {what}: it is missing, or subtracted", f"add every term of {self.name} once"
        else:
            says = f"{{}} has {what} {'added to' if c > 0 else 'subtracted from'} it"
            fix = f"return the gradient alone; start from zeros, not from {words}"
        return (
            says,
            fix,
            lambda grads, case: grads[g] + c * self.value(words, grads, case),
        )

    def in_place_of(self) -> Iterator[tuple[str, str, Apply]]:
        """An array of the pass, or another gradient transposed, is returned as this gradient."""
        for words, value in self.recordings.of(self.case).values.items():
            fix = f"return {self.name}"
            if words != self.name and value.size == self.answer.size:
                yield (
                    f"{words} is returned in place of {{}}",
                    fix,
                    lambda grads, case, words=words: (
                        self.recordings.of(case)
                        .values[words]
                        .reshape(self.reshaped(self.recordings.of(case).values[words], case))
                    ),
                )
        for h, other in enumerate(self.evidence.layer.gradients):
            if h != self.g:
                order = ", ".join(self.evidence.layer.gradients)
                yield (
                    f"{other} is returned in place of {{}}, transposed",
                    f"return the gradients in the order {order}",
                    lambda grads, case, h=h: transposed(grads[h]),
                )

    # parts of the gradient, and functions of its entries

    def parts(self) -> Iterator[tuple[str, str, Apply]]:
        if self.right.shape != self.answer.shape:
            return
        g = self.g
        for edit in along_axes(self.right):
            yield edit.says, f"return {self.name} of every index", _edited(g, edit)
        if "split" in self.evidence.layer.pieces.names() and "H" in self.case.sizes:
            yield (
                "{} has heads and the features of a head in the wrong order: (features, heads) for (heads, features)",
                "reshape the last axis to (heads, features of a head), in this order",
                lambda grads, case: _heads_last(grads[g], int(case.sizes["H"])),
            )
        if self.right.shape[-1] % 2 == 0:
            yield (
                "{} has its halves exchanged",
                "exchange the halves of the last axis",
                lambda grads, case: _halves(grads[g]),
            )
            yield (
                "{} has the features of its two halves interleaved",
                "concatenate the halves",
                lambda grads, case: _interleaved(grads[g]),
            )
            yield (
                "{} has interleaved features taken apart into halves",
                "keep the order of the features",
                lambda grads, case: np.concatenate([grads[g][..., 0::2], grads[g][..., 1::2]], -1),
            )

    def values(self) -> Iterator[tuple[str, str, Apply]]:
        if self.right.shape != self.answer.shape:
            return
        g, top = self.g, float(np.abs(self.answer).max(initial=0))
        yield "{} is its absolute value", "keep the sign", lambda grads, case: np.abs(grads[g])
        yield "{} is only its sign", "return the value", lambda grads, case: np.sign(grads[g])
        yield "{} is squared", f"do not square {self.name}", lambda grads, case: grads[g] ** 2
        yield (
            f"{{}} is clipped to ±{top:.6g}",
            f"do not clip {self.name}",
            lambda grads, case: np.clip(grads[g], -top, top),
        )
        yield (
            "{} is divided by its own norm",
            f"do not normalise {self.name}",
            lambda grads, case: grads[g] / np.linalg.norm(grads[g]),
        )
        yield (
            "{} is divided by the norm of each of its rows",
            f"do not normalise {self.name}",
            lambda grads, case: grads[g] / np.linalg.norm(grads[g], axis=-1, keepdims=True),
        )
        yield (
            "{} lacks its mean over the last axis",
            f"do not centre {self.name}",
            lambda grads, case: grads[g] - grads[g].mean(axis=-1, keepdims=True),
        )


def _edited(g: int, edit: Edit) -> Apply:
    return lambda grads, case: edit.apply(grads[g], case)


def _reshape_then_transpose(x: Array, axes: tuple[int, ...]) -> Array:
    """x reshaped to the shape before a transpose by `axes`, then transposed: the right shape, the wrong order."""
    before = [0] * x.ndim
    for to, source in enumerate(axes):
        before[source] = x.shape[to]
    return x.reshape(before).transpose(axes)


def _argument_of(gradient: str) -> str:
    return gradient.removeprefix("d")


def _broadcasts(value: Array, right: Array) -> bool:
    try:
        return bool(np.broadcast_shapes(value.shape, right.shape) == right.shape)
    except ValueError:
        return False


def _heads_last(x: Array, heads: int) -> Array:
    return np.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -1, -2).reshape(x.shape)


def _halves(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([x[..., half:], x[..., :half]], -1)


def _interleaved(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.stack([x[..., :half], x[..., half:]], -1).reshape(x.shape)
