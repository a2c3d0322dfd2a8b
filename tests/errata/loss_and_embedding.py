"""Loss and embedding: the paper's formulas as printed, and the traps beside them (E20 to E27).

Logits are (batch, tokens, vocabulary), ids (batch, tokens).
"""

from __future__ import annotations

import numpy as np

from onfoot.check.layers.cross_entropy import one_hot
from onfoot.check.mistakes.cross_entropy import (
    divisor_of_all_tokens,
    divisor_of_the_mean_of_means,
    targets_by_next_id,
    targets_by_roll,
)
from onfoot.ops.attention import softmax

Array = np.ndarray


# E20, E21, E22: Δ_12 = y_pred − y_gt


def delta_of_the_sum(logits: Array, targets: Array) -> Array:
    """y_pred − y_gt, not divided; a negative target has no row."""
    rows = softmax(logits) - one_hot(targets, logits.shape[-1])
    return np.where(targets[..., None] >= 0, rows, 0)


def delta_over_all_tokens(logits: Array, targets: Array) -> Array:
    """Divided by the number of tokens, where only some have a target."""
    return delta_of_the_sum(logits, targets) / divisor_of_all_tokens(targets, logits.shape[-1])


def delta_of_the_mean_of_means(logits: Array, targets: Array) -> Array:
    """Each sequence divided by its own number of targets, then by the number of sequences."""
    return delta_of_the_sum(logits, targets) / divisor_of_the_mean_of_means(targets, logits.shape[-1])


def delta_with_a_zero_row(logits: Array, ids: Array) -> Array:
    """y_gt has n_T − 1 rows; filled up with a row of zeros, the last token still gets y_pred as its error."""
    y_gt = np.zeros_like(logits)
    y_gt[:, :-1] = one_hot(ids[:, 1:], logits.shape[-1])
    return softmax(logits) - y_gt


def delta_with_a_roll(logits: Array, ids: Array) -> Array:
    """shiftByOne as a cyclic roll: the last token is asked to predict the first."""
    return softmax(logits) - one_hot(targets_by_roll(ids), logits.shape[-1])


def delta_of_the_next_id(logits: Array, ids: Array) -> Array:
    """y_gt(t*) = t* + 1 as arithmetic on ids; the last token, without a target, is left out."""
    return delta_of_the_sum(logits, targets_by_next_id(ids, logits.shape[-1]))


# E23: −log softmax in two steps


def loss_in_two_steps(logits: Array, targets: Array, shifted: bool) -> float:
    """−Σ log y_pred[target] with y_pred computed first; `shifted` takes each row's maximum off before exp."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True)) if shifted else np.exp(logits)
    y_pred = weights / weights.sum(axis=-1, keepdims=True)
    return float(-np.log(np.take_along_axis(y_pred, targets[..., None], -1)).sum())


# E24, E26, E27: gradients of tables


def position_gradient_as_printed(d1: Array, n_context: int) -> Array:
    """ohe(1:n_T)ᵗ Δ_1: one table for each sequence of the batch."""
    return one_hot(np.arange(d1.shape[-2]), n_context).T @ d1


def position_gradient_of_one_sequence(d1: Array, n_context: int) -> Array:
    return position_gradient_as_printed(d1, n_context)[-1]


def tied_gradient_of_the_embedding(ids: Array, d1: Array, a11: Array, d12: Array) -> Array:
    """oheᵗ Δ_1, as in the untied table of gradients: the path through the logits is lost."""
    n_vocab = d12.shape[-1]
    return one_hot(ids.ravel(), n_vocab).T @ d1.reshape(-1, d1.shape[-1])


def tied_gradient_of_the_logits(ids: Array, d1: Array, a11: Array, d12: Array) -> Array:
    """(a_11ᵗ Δ_12)ᵗ alone: the path through the embedding is lost."""
    return d12.reshape(-1, d12.shape[-1]).T @ a11.reshape(-1, a11.shape[-1])
