"""Mistakes with tokens that have no target, in the loss."""

from __future__ import annotations

import numpy as np

from onfoot.check.layer import Mistake
from onfoot.check.layers.cross_entropy import one_hot
from onfoot.learn.layers.own import mistake


def _ignored(name: str, explains: str, **pieces: object) -> Mistake:
    fix = "set the whole row to 0 where the target is −100"
    return mistake("softmax_cross_entropy", "CE.2", name, explains, fix, **pieces)  # type: ignore[arg-type]


MISTAKES = (
    _ignored(
        "rows without a target not set to 0",
        "A token without a target adds nothing to the loss, so its row is 0; here it is softmax(logits).",
        counted=lambda delta, targets: delta,
    ),
    _ignored(
        "a target of −100 taken for token 0",
        "A token without a target is treated as if token 0 were its target; it adds nothing to the loss.",
        counted=lambda delta, targets: delta,
        y_gt=lambda targets, n: one_hot(np.maximum(targets, 0), n),
    ),
)
