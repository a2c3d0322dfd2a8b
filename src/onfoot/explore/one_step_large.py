"""The One step view of a large model: its weights stay as they are, and a step is computed where it is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from onfoot.explore.factors import LazyGradients
from onfoot.explore.jobs import progress, tracked
from onfoot.explore.one_step import SYMBOLS, array_id, check_choice
from onfoot.explore.stepped import Replayed, Steps
from onfoot.explore.study_context import StudyContext
from onfoot.explore.tensors import FEATURE
from onfoot.models.params import HEAD, token_table
from onfoot.tables import Formula

MAX_LARGE_STEPS = 5  # step n is taken again from the first, so it takes n times as long


class LargeSteps:
    """AdamW steps at one learning rate; each is taken once."""

    def __init__(self, m: StudyContext, lr: float) -> None:
        check_choice(lr, 1, MAX_LARGE_STEPS)
        self.m, self.lr = m, lr
        self.steps = Steps(m.model, m.tokens, m.targets, m.divisor, lr)
        self.losses = [m.trace.loss]
        self.answers: dict[int, dict[str, Any]] = {}

    def answer(self, n: int) -> dict[str, Any]:
        """What the page shows of step n."""
        check_choice(self.lr, n, MAX_LARGE_STEPS)
        for k in range(1, n + 1):
            if k not in self.answers:
                self.answers[k] = self._take(k)
        return self.answers[n]

    def forget(self) -> None:
        """Removes the arrays from the study."""
        for answer in self.answers.values():
            for row in answer["parameters"]:
                for id in row["arrays"].values():
                    self.m.tensors.remove(id)

    def _take(self, n: int) -> dict[str, Any]:
        m, steps = self.m, self.steps
        if len(steps.gradients) < n:
            progress(f"step {n}: gradients", 0, 3)
            assert isinstance(m.grads, LazyGradients)
            steps.take(m.grads if n == 1 else None)
        progress(f"step {n}: the loss after it", 1, 3)
        if len(self.losses) <= n:
            self.losses.append(steps.loss())
        predicted = steps.predicted(lambda names: tracked(names, f"step {n}: the predicted change"))
        norms = [steps.gradients[-1].norm(name) for name in steps.gradients[-1]]
        return {
            "lr": self.lr,
            "steps": n,
            "most_steps": MAX_LARGE_STEPS,
            "betas": list(steps.adamw.betas),
            "eps": steps.adamw.eps,
            "weight_decay": steps.adamw.weight_decay,
            "losses": self.losses[: n + 1],
            "gradient_norm": math.hypot(*norms),
            "predicted": predicted,
            "actual": self.losses[n] - self.losses[n - 1],
            "parameters": self._parameters(n),
        }

    def _parameters(self, n: int) -> list[dict[str, Any]]:
        """Adds the arrays of every parameter to the study. They are computed when they are read, and not kept."""
        m, gradients = self.m, self.steps.gradients[:n]
        tables = {token_table(m.config), f"{HEAD}.weight"}

        @lru_cache(maxsize=1)  # the six arrays of one parameter are read one after another
        def replayed(name: str) -> Replayed:
            return self.steps.last(name, m.vocabulary.where if name in tables else ..., gradients)

        def array(name: str, key: str) -> Callable[[], np.ndarray]:
            parts = {"w": "w", "∂w": "gradient", "m": "m", "v": "v", "new": "new"}
            if key == "update":
                return lambda: replayed(name).new - replayed(name).w
            return lambda: getattr(replayed(name), parts[key])

        rows = []
        for name, value in m.params.items():
            is_table = name in tables and m.vocabulary.rows is not None
            shape = (m.vocabulary.n, value.shape[1]) if is_table else tuple(value.shape)
            ids = {}
            for key in ("w", "∂w", "m", "v", "new", "update"):
                id = array_id(n, self.lr, key, name)
                about: dict[str, Any] = {"known_shape": shape, "transient": True, "formula": Formula("")}
                if is_table:
                    about |= {"rows": m.vocabulary.rows, "note": m.vocabulary.note}
                axes = (FEATURE,) * len(shape)
                if id not in m.tensors:
                    m.add(id, SYMBOLS.get(key, key), array(name, key), axes, **about)
                ids[key] = id
            rows.append({"name": name, "arrays": ids})
        return rows
