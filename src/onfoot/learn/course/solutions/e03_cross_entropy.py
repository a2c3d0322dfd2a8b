"""Exercise 3: softmax and cross-entropy. The page is e03_cross_entropy.md; check with: onfoot learn check 3"""

import numpy as np

IGNORE = -100  # the target of a token that has none


def softmax(scores):
    """rho = exp(scores) over its sum along the last axis: each row of rho sums to 1. Given."""
    top = np.max(scores, axis=-1, keepdims=True)  # the same is subtracted from all: exp cannot overflow
    weights = np.exp(scores - top)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_gradient(drho, rho):
    """The gradient of the scores, from drho, the gradient of rho; all have the shape (..., V)."""
    return (drho - (drho * rho).sum(axis=-1, keepdims=True)) * rho


def cross_entropy_forward(logits, targets, divisor):
    """The loss: the sum of −log softmax(logits)[target] over the tokens that have a target, over the divisor. Given.

    logits (..., V), targets (...) with an id below V, or −100 where a token has none; divisor is a number.
    """
    flat, target = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)  # (N, V), (N,)
    counts = target != IGNORE
    top = np.max(flat, axis=-1, keepdims=True)
    lse = np.log(np.exp(flat - top).sum(axis=-1)) + top[:, 0]  # log Σ exp(logits), (N,)
    picked = flat[np.arange(len(flat)), np.where(counts, target, 0)]  # the logit of each target
    loss = ((lse - picked) * counts).sum() / divisor
    return loss, (logits, lse, target, divisor)


def cross_entropy_backward(dloss, saved):
    """The gradient of the logits, from dloss, the gradient of the loss (a number)."""
    logits, lse, target, divisor = saved  # (..., V), (N,), (N,), a number
    flat, counts = logits.reshape(-1, logits.shape[-1]), target != IGNORE
    dlogits = np.exp(flat - lse[:, None])  # (N, V)
    dlogits[np.arange(len(flat)), np.where(counts, target, 0)] -= 1
    dlogits = np.where(counts[:, None], dlogits * (dloss / divisor), 0)
    return dlogits.reshape(logits.shape)
