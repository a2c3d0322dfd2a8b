"""Knock-outs: the loss without a head, a branch, a skip connection or the scale of the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from onfoot.explore.jobs import tracked
from onfoot.explore.study_context import StudyContext
from onfoot.explore.whatif import Intervention, scaled_scores


class Knockout(NamedTuple):
    """Something that can be left out: what the gradient promises, and how to compute the loss without it."""

    kind: str  # "head", "branch", "skip" or "scale"
    block: int
    name: str
    promised: float
    loss: Callable[[], float]


def set_to_zero(columns: slice) -> Callable[[np.ndarray], None]:
    def move(value: np.ndarray) -> None:
        value[..., columns] = 0

    return move


def knockouts_of(m: StudyContext, here: Intervention, blocks: Iterable[int]) -> Iterator[Knockout]:
    """Those of some blocks. The change is from the real values, so the promise is −Σ Δ ∘ what is left out."""
    for b in blocks:
        block = m.trace.blocks[b]
        a, d = block.a, block.delta
        width = a[3].shape[-1] // m.config.n_head
        for h in range(m.config.n_head):
            columns = slice(h * width, (h + 1) * width)
            promised = -float((d[3][..., columns] * a[3][..., columns]).sum())
            moves = {f"{b}.a_3": set_to_zero(columns)}
            yield Knockout("head", b, f"head {h + 1}", promised, partial(here.with_moves, moves))
        for i, name in ((4, "attention branch"), (9, "MLP branch")):
            moves = {f"{b}.a_{i}": set_to_zero(slice(None))}
            promised = -float((d[i] * a[i]).sum())
            yield Knockout("branch", b, name, promised, partial(here.with_moves, moves))
        for i, skipped, branch, name in ((5, 1, 4, "skip 1"), (10, 5, 9, "skip 2")):
            promised = -float((d[i] * a[skipped]).sum())
            moves = _branch_alone(f"{b}.a_{branch}", f"{b}.a_{i}")
            yield Knockout("skip", b, name, promised, partial(here.with_moves, moves))
        scores = scaled_scores(m, b)  # (H, T, T)
        seen = block.delta_causal[0] * scores  # the gradient is exactly 0 where the mask is
        promised = (math.sqrt(block.q.shape[-1]) - 1) * float(seen.sum())
        yield Knockout("scale", b, "scale 1/√d", promised, partial(here.without_scale, b))


def _branch_alone(branch: str, total: str) -> dict[str, Callable[[np.ndarray], None]]:
    """Moves that replace a sum of skip and branch by the branch."""
    kept: dict[str, np.ndarray] = {}

    def keep(value: np.ndarray) -> None:
        kept["branch"] = value.copy()

    def replace(value: np.ndarray) -> None:
        value[...] = kept["branch"]

    return {branch: keep, total: replace}


def knockouts(m: StudyContext, blocks: Iterable[int]) -> dict[str, Any]:
    """The promised and the true change of the loss for every knock-out of some blocks."""
    rows = []
    for one in tracked(list(knockouts_of(m, Intervention(m), blocks)), "knock-outs"):
        with np.errstate(all="ignore"):
            loss = one.loss()
        true = loss - m.trace.loss if math.isfinite(loss) else None
        rows.append({"kind": one.kind, "block": one.block, "name": one.name, "promised": one.promised, "true": true})
    return {"loss": m.trace.loss, "rows": rows}
