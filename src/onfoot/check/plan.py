"""Chooses how an object is called: its form, the kind of arrays, their layout and the order of what it returns.

One small case with distinct sizes decides. The contract's layout comes first. Another layout, in which the object
returns the right shapes, is taken in three cases:

- In the contract's layout the call raises an error.
- There it returns wrong shapes, and no gradient has the right numbers. If one has, but is transposed, flattened or has
  an axis too many, that is a mistake of the function and not another layout.
- There no gradient is right, and the other layout is tokens before heads, the only one with the same shapes.

In the last two cases a gradient must be right in the other layout, or all must resemble the right ones clearly more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onfoot.check.budget import distance, norm
from onfoot.check.call import ARRAYS, Answer, call, is_installed
from onfoot.check.forms import Form
from onfoot.check.isolated import RemoteForm
from onfoot.check.layer import Array, Case, Gradients, Layer, is_float_array
from onfoot.check.layouts import NAMES, Layout, argument_of, contract, layouts, named_layout
from onfoot.check.narrow import NARROW, rounded

SAME = 1e-3  # relative error below which a gradient counts as right here; float32 inside a function is well below
SAME_NARROW = 0.1
PARALLEL = 1 - 1e-6  # cosine of two arrays that differ by a factor only
CLEARER = 0.25  # by so much, another layout must resemble the right gradients more
PACKAGES = {"torch": ("PyTorch", 'pip install "onfoot[torch]"'), "jax": ("JAX", "pip install jax")}
ABOUT_ARRAYS = ("ndarray", "Tensor", "numpy", "torch.")  # words of errors that tell that the kind of array is wrong


@dataclass(frozen=True)
class Plan:
    """How the object is called."""

    form: Form | RemoteForm
    arrays: str
    layout: Layout
    order: tuple[int, ...] | None = None  # which gradient each returned value is

    def call(
        self, layer: Layer, inputs: Sequence[Any], options: Mapping[str, Any], dtype: str, right: Gradients
    ) -> Answer:
        """Calls the object once, or once per sequence, and returns the gradients in the contract's layout."""
        if self.layout.name == "contract" and not self.layout.transposed:
            expected = [(name, g.shape) for name, g in zip(layer.gradients, right, strict=True)]
            return call(self.form, inputs, layer.arguments, expected, options, self.arrays, dtype, self.order)
        answers = []
        for given in self.layout.calls(inputs):
            shapes = dict(zip(layer.arguments, map(np.shape, given), strict=False))
            expected = [(name, shapes[argument_of(layer, name)]) for name in layer.gradients]
            answer = call(self.form, given, layer.arguments, expected, options, self.arrays, dtype, self.order)
            answers.append(answer)
            if answer.gradients is None:
                break
        return self._joined(layer, answers, right)

    def _joined(self, layer: Layer, answers: Sequence[Answer], right: Gradients) -> Answer:
        first = answers[0]
        problems = {(p.kind, p.message): p for answer in answers for p in answer.problems}
        joined = Answer(None, list(problems.values()), first.given, first.shapes)
        found = [answer.gradients for answer in answers if answer.gradients is not None]
        if len(found) == len(answers):
            joined.gradients = [
                self.layout.joined(argument_of(layer, name), [one[g] for one in found], right[g].shape)
                for g, name in enumerate(layer.gradients)
            ]
        return joined

    @property
    def sentence(self) -> str:
        """What was recognised, if it is not what the contract says."""
        said = [self.form.sentence, self.layout.words]
        return "; ".join(one for one in said if one)


@dataclass
class Trial:
    """A plan, tried on one case."""

    plan: Plan
    layer: Layer  # with the gradients that were returned
    answer: Answer
    errors: list[float] = field(default_factory=list)  # relative, of the gradients in the right shape
    likeness: float = 0.0  # mean cosine between returned and right gradients, in the order of axes that is closest
    misshapen: int = 0  # gradients that are right, or a multiple of it, but for their shape
    dtype: str = "float64"
    absent: tuple[str, ...] = ()  # biases that the object does not have

    @property
    def runs(self) -> bool:
        return not self.answer.died and not any(p.kind in ("raises", "form") for p in self.answer.problems)

    @property
    def has_wrong_form(self) -> bool:
        """Whether it fails for a reason that other arrays do not change."""
        return any(p.kind == "form" and "NumPy arrays" not in p.message for p in self.answer.problems)

    @property
    def shaped(self) -> bool:
        """Whether it returned gradients, all in the right shapes."""
        return self.runs and self.answer.gradients is not None and len(self.errors) == len(self.layer.gradients)

    @property
    def n_right(self) -> int:
        return sum(error < (SAME_NARROW if self.dtype in NARROW else SAME) for error in self.errors)

    @property
    def all_right(self) -> bool:
        return self.shaped and self.n_right == len(self.layer.gradients)

    @property
    def failure(self) -> int:
        """How little its failure tells: 0 for an error in the user's code, 1 for a wrong form, 2 for a wrong array."""
        first = next((p for p in self.answer.problems if p.kind in ("raises", "form")), None)
        if first is None or self.answer.died:
            return 0
        return 1 if first.kind == "form" else 2 if any(word in first.message for word in ABOUT_ARRAYS) else 0


class Chooser:
    """Tries plans on one case."""

    def __init__(
        self,
        layer: Layer,
        options: Mapping[str, Any],
        case: Case,
        dtype: str,
        more: Callable[[], Sequence[Case]] = tuple,
    ) -> None:
        self.layer, self.options, self.case, self.dtype = layer, options, case, dtype
        self.right = layer.reference(*case.inputs, **options)
        self.given = rounded_case(case, dtype)
        self.more = more  # further cases, where one does not decide
        self.late = False  # whether packages that are not imported yet are tried
        self.hint = ""  # the layout in which everything would be right

    def choose(self, forms: Sequence[Form | RemoteForm], arrays: str, layout: str) -> Trial:
        """The trial of the best plan; packages that the object's file has not imported are tried last."""
        found = self._choose(forms, arrays, layout)
        if found is not None and (found.runs or found.answer.died or found.has_wrong_form):
            return found
        self.late = True
        again = self._choose(forms, arrays, layout)
        assert again is not None
        return again

    def _choose(self, forms: Sequence[Form | RemoteForm], arrays: str, layout: str) -> Trial | None:
        if layout != "auto":
            wanted = named_layout(layout, self.layer, self.case, self.options)
            return _best(list(self._trials(forms, arrays, wanted)))
        natural = list(self._trials(forms, arrays, contract(self.layer)))
        best = _best(natural)
        if best is None or best.answer.died or best.all_right or (best.runs and best.misshapen):
            return best
        others: list[Trial] = []
        try:
            names = ("bthd",) if best.shaped else NAMES  # the only one with the same shapes
            for other_layout in layouts(self.layer, self.case, self.options, names):
                others += self._others(forms, arrays, other_layout, natural)
                if any(trial.answer.died or trial.all_right for trial in others):
                    break
        except (KeyError, ValueError):  # a layer whose axes cannot be found
            others = []
        usable = self._without_sequences([trial for trial in others if trial.shaped])
        if not usable:
            return best
        other = max(usable, key=lambda trial: (trial.n_right, round(trial.likeness, 2)))  # of equal ones, the first
        if self._better(other, best):
            return other
        if other.all_right:
            self.hint = other.plan.layout.option
        return best

    def _without_sequences(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials, without those sequence by sequence where rows run too and have as many right gradients.

        Such a function knows nothing of sequences: what it loses among the rows of one, it loses among all. In one
        case it may be right by chance.
        """
        rows = {trial.plan.layout.transposed: trial.n_right for trial in trials if trial.plan.layout.name == "rows"}

        def rivalled(trial: Trial) -> bool:
            layout = trial.plan.layout
            if layout.name != "sequence" or layout.transposed not in rows:
                return False
            others = (Chooser(self.layer, self.options, case, self.dtype).trial(trial.plan) for case in self.more())
            return any(one.n_right <= rows[layout.transposed] for one in itertools.chain([trial], others))

        return [trial for trial in trials if not rivalled(trial)]

    def _better(self, other: Trial, natural: Trial) -> bool:
        if not natural.runs:
            return True
        if natural.n_right:
            return False
        if natural.shaped and other.plan.layout.name != "bthd":
            return False
        return other.n_right > 0 or other.likeness > natural.likeness + CLEARER

    def _others(
        self, forms: Sequence[Form | RemoteForm], arrays: str, layout: Layout, natural: Sequence[Trial]
    ) -> Iterator[Trial]:
        """Trials in another layout, with the kind of arrays that works if one does."""
        working = {id(trial.plan.form): trial.plan.arrays for trial in natural if trial.runs}
        for form in forms:
            kind = working.get(id(form), arrays)
            yield from self._trials([form], kind, layout)

    def _trials(self, forms: Sequence[Form | RemoteForm], arrays: str, layout: Layout) -> Iterator[Trial]:
        """Every form with the first kind of arrays with which it does not raise, else with all of them."""
        for form in forms:
            for kind in kinds_of(form, arrays, self.dtype):
                if arrays == "auto" and kind not in form.loaded and not self.late:
                    continue
                trial = self.trial(Plan(form, kind, layout))
                yield trial
                if trial.answer.died or trial.all_right:
                    return
                if trial.runs:
                    break

    def trial(self, plan: Plan) -> Trial:
        """Calls the object once, or twice if it returns only some gradients or returns them in another order."""
        layer, answer = self.layer, self._call(plan, self.layer)
        if answer.given and len(answer.given) < len(layer.gradients):
            layer = layer.only(answer.given)
            answer = self._call(plan, layer)
        elif answer.parts and plan.layout.name == "contract":
            named = self._named(answer.parts)
            if named:
                layer = layer.only(named)
                answer = self._call(plan, layer)
        if any(p.kind == "shape" for p in answer.problems):
            order = _order(answer.shapes, self._shapes(plan, layer))
            if order is not None:
                plan = replace(plan, order=order)
                answer = self._call(plan, layer)
        absent = absent_biases(plan.form.takes, layer)
        if absent and not answer.died:
            return Chooser(self.layer, self.options, without(self.case, layer, absent), self.dtype)._judged(
                plan, layer, absent
            )
        return self._measured(Trial(plan, layer, answer, dtype=self.dtype))

    def _judged(self, plan: Plan, layer: Layer, absent: tuple[str, ...]) -> Trial:
        """The trial of an object without some of the biases, which are 0 then."""
        return self._measured(Trial(plan, layer, self._call(plan, layer), dtype=self.dtype, absent=absent))

    def _measured(self, trial: Trial) -> Trial:
        layer, answer = trial.layer, trial.answer
        right = [self.right[self.layer.gradients.index(name)] for name in layer.gradients]
        likeness = []
        for got, r in zip(answer.gradients or [], right, strict=False):
            if got.shape == r.shape and np.isfinite(got).all():
                trial.errors.append(distance(got, r) / (norm(r) or 1.0))
                likeness.append(abs(float(np.sum(got * r))) / ((norm(got) * norm(r)) or 1.0))
            elif got.shape == r.shape:
                trial.errors.append(np.inf)
            elif got.size == r.size and np.isfinite(got).all():
                likeness.append(_likeness(got, r))
                trial.misshapen += likeness[-1] > PARALLEL
        trial.likeness = float(np.mean(likeness)) if likeness else 0.0
        return trial

    def _named(self, parts: Sequence[Array]) -> list[str]:
        """The gradients that these arrays, too few and in no gradient's shape, are but for their shape; else none."""
        left = dict(zip(self.layer.gradients, self.right, strict=True))
        found = []
        for part in parts:
            name = next((name for name, r in left.items() if part.size == r.size and _likeness(part, r) > PARALLEL), "")
            if not name:
                return []
            found.append(name)
            left = dict(list(left.items())[list(left).index(name) + 1 :])  # in the order of the contract
        return found

    def _call(self, plan: Plan, layer: Layer) -> Answer:
        right = tuple(self.right[self.layer.gradients.index(name)] for name in layer.gradients)
        return plan.call(layer, self.given.inputs, self.options, self.dtype, right)

    def _shapes(self, plan: Plan, layer: Layer) -> list[tuple[int, ...]]:
        first = plan.layout.calls(self.given.inputs)[0]
        shapes = dict(zip(layer.arguments, map(np.shape, first), strict=False))
        return [shapes.get(argument_of(layer, name), ()) for name in layer.gradients]


def absent_biases(takes: Sequence[str] | None, layer: Layer) -> tuple[str, ...]:
    """The biases that an object neither takes nor has a gradient of: it is right if they are 0."""
    if takes is None:
        return ()
    biases = [name for name in layer.arguments if name.startswith("b_") or name.endswith("bias")]
    return tuple(name for name in biases if name not in takes and f"d{name}" not in layer.gradients)


def without(case: Case, layer: Layer, absent: Sequence[str]) -> Case:
    """The case with zeros for these inputs."""
    named = zip(layer.arguments, case.inputs, strict=False)
    return replace(case, inputs=tuple(0 * x if name in absent else x for name, x in named))


def _best(trials: Sequence[Trial]) -> Trial | None:
    """The first trial that is right, else in the right shapes, else one that runs, else the most telling failure."""
    if not trials:
        return None
    for good in (lambda t: t.answer.died, lambda t: t.all_right, lambda t: t.shaped and t.n_right, lambda t: t.shaped):
        found = next((trial for trial in trials if good(trial)), None)
        if found is not None:
            return found
    running = [trial for trial in trials if trial.runs]
    return running[0] if running else min(trials, key=lambda trial: trial.failure)


def _likeness(got: Array, right: Array) -> float:
    """The largest cosine between two arrays of the same size, over all orders of the axes."""
    size = norm(got) * norm(right)
    if not np.isfinite(got).all() or size == 0:
        return 0.0
    orders = itertools.permutations(range(right.ndim))
    return max(abs(float(got.ravel() @ right.transpose(axes).ravel())) for axes in orders) / size


def _order(got: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Which gradient each returned value is, by its shape; equal shapes stay in their order."""
    if len(got) != len(wanted) or sorted(got) != sorted(wanted):
        return None
    left = list(range(len(wanted)))
    order = []
    for shape in got:
        i = next(i for i in left if wanted[i] == shape)
        left.remove(i)
        order.append(i)
    return tuple(order)


def kinds_of(form: Form | RemoteForm, arrays: str, dtype: str) -> list[str]:
    """The kinds of arrays to try; raises a ValueError if the wanted kind cannot be."""
    if arrays not in ARRAYS:
        raise ValueError(f"arrays must be one of {', '.join(ARRAYS)}, got {arrays!r}")
    if arrays == "auto":
        kinds = [kind for kind in form.kinds if not (dtype == "bfloat16" and kind == "numpy")]
    else:
        kinds = [arrays]
        if arrays not in form.kinds and (arrays != "jax" or "numpy" not in form.kinds):
            raise ValueError(f"arrays={arrays!r}, but {form.sentence} takes {' or '.join(form.kinds)} arrays")
    if dtype == "bfloat16" and kinds == ["numpy"]:
        raise ValueError('NumPy has no bfloat16; give arrays="torch" or arrays="jax"')
    for kind in kinds:
        package, install = PACKAGES.get(kind, ("", ""))
        if package and not is_installed(kind):
            raise ValueError(f'arrays="{kind}" needs {package}: {install}')
    if not kinds:
        raise ValueError("bfloat16 needs PyTorch or JAX: NumPy has no such dtype")
    return kinds


def rounded_case(case: Case, dtype: str) -> Case:
    """The case with its floating-point arrays rounded to `dtype`; bfloat16 is held in float32."""
    return replace(case, inputs=tuple(rounded(x, dtype) if is_float_array(x) else x for x in case.inputs))
