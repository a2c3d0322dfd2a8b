"""The Live view over a run: the loss of the text at each of its checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onfoot.explore.jobs import progress
from onfoot.explore.live import Predictions, check_step, difference, moved_from, predict
from onfoot.explore.study_context import StudyContext
from onfoot.formats.run_folder import checkpoints, step_of, validate_once

if TYPE_CHECKING:
    from onfoot.models.model import Model

MAX_CHECKPOINTS = 500


def run_checkpoints(model: Model) -> list[Path]:
    """The valid checkpoints of the run that a model was loaded from, oldest first; empty if it was not a run."""
    if model.source is None or not Path(model.source).is_dir():
        return []
    return [folder for folder in checkpoints(Path(model.source))[:MAX_CHECKPOINTS] if validate_once(folder) is None]


class Checkpoints:
    """The losses of one text at a run's checkpoints. Only the model of the first stays in memory."""

    def __init__(self, m: StudyContext, folders: list[Path]) -> None:
        self.folders, self.tokens, self.targets, self.divisor = folders, m.tokens, m.targets, m.divisor
        self.tokenizer = m.model.tokenizer
        self.losses: dict[int, float] = {}
        self._first: tuple[Model, Predictions] | None = None

    def steps(self) -> list[int]:
        return [step_of(folder) for folder in self.folders]

    def model_at(self, index: int) -> Model:
        """The model of the checkpoint with that index, in float64."""
        check_step(index, len(self.folders) - 1)
        from onfoot.explore.loading import load_model  # which imports the study

        model = load_model(self.folders[index])
        model.tokenizer = self.tokenizer
        return model

    def answer(self, index: int, known: int) -> dict[str, Any]:
        """The losses from checkpoint `known` to `index`, and how that one differs from the first."""
        check_step(index, len(self.folders) - 1)
        if self._first is None:
            first = self.model_at(0)
            self._first = first, predict(first, self.tokens, self.targets)
        for i in range(min(known, index), index + 1):
            progress("checkpoints", i, index + 1)
            if i not in self.losses:
                self.losses[i] = self._loss(self.model_at(i))
        model = self.model_at(index)
        return {
            "step": index,
            "known": known,
            "losses": [self.losses[i] for i in range(known, index + 1)],
            "ended": None,
            "most_steps": len(self.folders) - 1,
            "checkpoints": self.steps(),
            **difference(moved_from(self._first[0], model), predict(model, self.tokens, self.targets), self._first[1]),
        }

    def _loss(self, model: Model) -> float:
        loss = model.loss(self.tokens, self.targets, divisor=self.divisor)
        if not math.isfinite(loss):
            raise ValueError("the loss of a checkpoint is not finite; the run diverged")
        return loss
