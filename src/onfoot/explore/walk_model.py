"""`onfoot walk MODEL`: the arrays of one's own model and text, in the order of the computation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onfoot.explore.proof import ScoresProbe
from onfoot.explore.study import LARGE, Study
from onfoot.explore.walk import Line, Section

if TYPE_CHECKING:
    import numpy as np

    from onfoot.explore.step import Step
    from onfoot.models.model import Model

SUMMED = ("ρ", "y_pred", "Δ_causal", "Δ_scaled", "Δ_raw", "Δ_12")  # shown with the sum of each row


class ModelWalk:
    """The steps of the page's map as a walk: forward from top to bottom, then backward from bottom to top.

    `errors` and `failed` fill up while `sections` is iterated. Gradients are checked if the model is not large.
    """

    def __init__(self, model: Model, tokens: np.ndarray, seed: int = 0) -> None:
        self.model, self.config, self.tokens, self.seed = model, model.config, tokens, seed
        self.study = Study(model, tokens)
        self.divisor, self.loss = self.study.divisor, self.study.loss
        self.probe = ScoresProbe(self.study._perturbed_model, tokens, self.study.targets, self.divisor, seed + 1)
        self.errors: list[float] = []
        self.failed: list[str] = []

    @property
    def unchecked(self) -> str:
        """Why gradients are not checked, or ""."""
        if not self.study.is_large:
            return ""
        return f"gradients are not checked: the model has {self.model.n_params:,} parameters, the limit is {LARGE:,}"

    def sections(self) -> Iterator[Section]:
        groups = [list(group) for _, group in itertools.groupby(self.study.steps, lambda s: (s.block, s.head))]
        shown: set[str] = set()
        for group in groups:
            ids = [step.forward for step in group if step.forward not in shown]
            shown.update(ids)
            if ids:
                yield self._section(group[0], "forward", ids)
        for group in reversed(groups):
            ids = []
            for step in reversed(group):
                found = [step.backward, *(gradient for _, gradient in step.parameters)]
                ids += [id for id in found if id is not None and id not in shown]
                shown.update(ids)
            if ids:
                yield self._section(group[0], "backward", ids)

    def _section(self, first: Step, direction: str, ids: list[str]) -> Section:
        c = self.config
        title = "embedding" if first.id == "input" else "logits and loss"
        if first.block is not None:
            head = "" if first.head is None else f", head {first.head + 1} of {c.n_head}"
            title = f"block {first.block + 1} of {c.n_layer}{head}"
        return Section(title, direction, first.block, first.head, [self._line(id, title) for id in ids])

    def _line(self, id: str, title: str) -> Line:
        tensor = self.study.tensors[id]
        checked = tensor.measure is not None and not self.unchecked
        check = tensor.measure(self.probe) if checked and tensor.measure is not None else None
        if check is not None:
            self.errors.append(check.error)
            if not check.passed:
                self.failed.append(f"{tensor.symbol} ({title})")
        name = f"{tensor.parameter}, {tensor.part}" if tensor.part else tensor.parameter
        value = self.tokens[0] if id == "a_0" else tensor.value
        line = Line(tensor.symbol, tensor.formula, value, check, name if tensor.is_gradient else None)
        if tensor.symbol in SUMMED and value.ndim == 2 and tensor.columns is None:
            line.margin = "Σ", value.sum(axis=-1)
        return line
