"""Tokens whose replacement lowers the loss: the actual change of every swap that can be tried in a moment."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.attribution import Swap
from onfoot.explore.jobs import tracked
from onfoot.explore.study_context import StudyContext
from onfoot.explore.texts import special_ids
from onfoot.models.params import token_table
from onfoot.ops.cross_entropy import IGNORE

MAX_TRIED = 1024
WORK = 2e10  # multiplications: about a second
BATCH = 64
LOGITS = 4_000_000  # of a batch
MIN_TRIED = 32


def input_delta(m: StudyContext) -> np.ndarray:
    """Δ_0 of the whole vocabulary, (T, V)."""
    if 0 in m.trace.delta:
        return to_numpy(m.trace.delta[0])[0]
    return m.trace.blocks[0].delta[1][0] @ m.params[token_table(m.config)].T  # eq EMB.1


def tried_swaps(m: StudyContext) -> list[Swap]:
    """The swaps with the lowest predicted loss, in that order, with their actual change; no special tokens."""
    ids, delta_0 = m.tokens[0], input_delta(m)
    predicted = delta_0 - delta_0[np.arange(len(ids)), ids][:, None]  # (T, V)
    predicted[np.arange(len(ids)), ids] = np.inf  # the same token
    predicted[:, special_ids(m.model)] = np.inf
    n = min(MAX_TRIED, max(int(WORK / (m.model.n_params * len(ids))), MIN_TRIED), int(np.isfinite(predicted).sum()))
    best = np.argsort(predicted, axis=None, kind="stable")[:n]
    places, new = np.unravel_index(best, predicted.shape)
    swapped = np.repeat(m.tokens, n, axis=0)  # (n, T)
    swapped[np.arange(n), places] = new
    together = min(BATCH, max(LOGITS // (m.n_tokens * m.config.vocab_size), 1))
    parts = tracked([swapped[i : i + together] for i in range(0, n, together)], "swaps of tokens")
    losses = np.concatenate([_losses(m, part) for part in parts])  # (n,)
    changes = (losses - m.trace.loss).tolist()
    return [
        Swap(int(t), int(ids[t]), int(id), float(predicted[t, id]), change)
        for t, id, change in zip(places, new, changes, strict=True)
    ]


def _losses(m: StudyContext, tokens: np.ndarray) -> np.ndarray:
    """The loss of each row, with the targets of the text."""
    logits = to_numpy(m.model.logits(tokens))  # (n, T, V)
    counts = np.flatnonzero(m.targets[0] != IGNORE)
    kept = logits[:, counts] - logits[:, counts].max(axis=-1, keepdims=True)
    log_p = kept - np.log(np.exp(kept).sum(axis=-1, keepdims=True))
    at_target = log_p[:, np.arange(len(counts)), m.targets[0, counts]]  # (n, targets)
    return -at_target.sum(axis=1) / m.divisor
