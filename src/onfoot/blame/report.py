"""Results of `onfoot blame`: the ranked examples of one query, or of the sum of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onfoot.blame.examples import Examples
from onfoot.blame.query import Query
from onfoot.blame.scores import Scores
from onfoot.terminal import Shown

SHOWN = 10  # examples of each kind in a notebook


@dataclass(repr=False)
class Report(Shown):
    """The scores of one query, or of several whose losses were added."""

    queries: list[Query]
    loss: float  # in nats, summed over the completions
    scores: Scores
    retrained: dict[int, float] = field(default_factory=dict)  # example -> how much higher the loss is without it

    def facts(self) -> dict[str, str]:
        helped, hurt = self.helped(1), self.hurt(1)
        return {
            "loss": f"{self.loss:.6g} nats over {self.n_targets} tokens",
            "examples": f"{len(self.scores.totals):,}, {self.unseen:,} unseen",
            "helped most": self._scored(helped[0]) if helped else "none",
            "hurt most": self._scored(hurt[0]) if hurt else "none",
        }

    def _scored(self, number: int) -> str:
        return f"example {number} ({self.scores.totals[number]:+.3g})"

    def tables(self) -> list[list[list[str]]]:
        out = []
        for title, numbers in (("helped", self.helped(SHOWN)), ("hurt", self.hurt(SHOWN))):
            rows = [[str(i), f"{self.scores.totals[i]:+.4g}"] for i in numbers]
            out.append([[f"{title}: example", "score"], *rows])
        return out

    @property
    def n_targets(self) -> int:
        return sum(query.n_targets for query in self.queries)

    def helped(self, top: int) -> list[int]:
        """The examples with the highest positive scores, highest first."""
        totals = self.scores.totals
        return [int(i) for i in np.argsort(-totals, kind="stable")[:top] if totals[i] > 0]

    def hurt(self, top: int) -> list[int]:
        """The examples with the lowest negative scores, lowest first."""
        totals = self.scores.totals
        return [int(i) for i in np.argsort(totals, kind="stable")[:top] if totals[i] < 0]

    @property
    def unseen(self) -> int:
        """The number of examples that no step saw."""
        return len(self.scores.totals) - len(self.scores.by_step)

    def as_json(self, examples: Examples) -> list[dict[str, Any]]:
        """Every example with its score, highest first; those that no step saw have the score 0 and no steps."""
        order = np.argsort(-self.scores.totals, kind="stable")
        return [self._example(int(i), examples) for i in order]

    def _example(self, number: int, examples: Examples) -> dict[str, Any]:
        steps = sorted(step + 1 for step, _ in self.scores.by_step.get(number, ()))
        entry = {
            "example": number,
            "score": float(self.scores.totals[number]),
            **examples.as_json(number),
            "steps": steps,
        }
        return {**entry, "retrained": self.retrained[number]} if number in self.retrained else entry

    @property
    def out_of_range(self) -> bool:
        """Whether a score exceeds the loss itself, which a first-order prediction cannot be right about."""
        return bool(np.abs(self.scores.totals).max() > self.loss)


def added(reports: list[Report]) -> Report:
    """One report of the sum of several queries' losses."""
    queries = [query for report in reports for query in report.queries]
    scores = Scores.zeros(len(reports[0].scores.totals))
    for report in reports:
        scores.merge(report.scores)
    return Report(queries, sum(report.loss for report in reports), scores)
