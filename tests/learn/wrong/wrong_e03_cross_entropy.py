"""Typical wrong answers to e03_cross_entropy, one mistake each."""

WRONG = [
    {
        "mistake": (
            "softmax_gradient takes only the case i = j, rho (1 − rho): that the other weights of the row react "
            "too is forgotten."
        ),
        "gradients": ["dscores"],
        "code": '''\
"""Exercise 3: softmax and cross-entropy. The page is e03_cross_entropy.md; check with: onfoot learn check 3"""

import numpy as np

IGNORE = -100  # the target of a token that has none


def softmax(scores):
    """rho = exp(scores) over its sum along the last axis: each row of rho sums to 1. Given."""
    top = np.max(scores, axis=-1, keepdims=True)  # the same is subtracted from all: exp cannot overflow
    weights = np.exp(scores - top)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_gradient(drho, rho):
    """The gradient of the scores, from drho, the gradient of rho; all have the shape (..., V). To write."""
    dscores = drho * rho * (1 - rho)
    return dscores


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
    """The gradient of the logits, from dloss, the gradient of the loss (a number). To write."""
    logits, lse, target, divisor = saved  # (..., V), (N,), (N,), a number
    flat = logits.reshape(-1, logits.shape[-1])
    counts = target != IGNORE
    d = np.exp(flat - lse[:, None])
    d[np.arange(len(flat)), np.where(counts, target, 0)] -= 1
    d[~counts] = 0
    dlogits = (d * (dloss / divisor)).reshape(logits.shape)
    return dlogits
''',
    },
    {
        "mistake": "softmax_gradient sums drho · rho over the whole array instead of over each row.",
        "gradients": ["dscores"],
        "code": '''\
"""Exercise 3: softmax and cross-entropy. The page is e03_cross_entropy.md; check with: onfoot learn check 3"""

import numpy as np

IGNORE = -100  # the target of a token that has none


def softmax(scores):
    """rho = exp(scores) over its sum along the last axis: each row of rho sums to 1. Given."""
    top = np.max(scores, axis=-1, keepdims=True)  # the same is subtracted from all: exp cannot overflow
    weights = np.exp(scores - top)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_gradient(drho, rho):
    """The gradient of the scores, from drho, the gradient of rho; all have the shape (..., V). To write."""
    inner = np.sum(drho * rho)
    dscores = rho * (drho - inner)
    return dscores


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
    """The gradient of the logits, from dloss, the gradient of the loss (a number). To write."""
    logits, lse, target, divisor = saved  # (..., V), (N,), (N,), a number
    V = logits.shape[-1]
    keep = target != IGNORE
    probs = np.exp(logits.reshape(-1, V) - lse.reshape(-1, 1))
    onehot = np.eye(V, dtype=logits.dtype)[np.where(keep, target, 0)]
    dlogits = (probs - onehot) * keep[:, None] * dloss / divisor
    return dlogits.reshape(logits.shape)
''',
    },
    {
        "mistake": (
            "softmax_gradient forgets the last factor rho: the difference drho − Σ drho rho is not multiplied by "
            "the weight."
        ),
        "gradients": ["dscores"],
        "code": '''\
"""Exercise 3: softmax and cross-entropy. The page is e03_cross_entropy.md; check with: onfoot learn check 3"""

import numpy as np

IGNORE = -100  # the target of a token that has none


def softmax(scores):
    """rho = exp(scores) over its sum along the last axis: each row of rho sums to 1. Given."""
    top = np.max(scores, axis=-1, keepdims=True)  # the same is subtracted from all: exp cannot overflow
    weights = np.exp(scores - top)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_gradient(drho, rho):
    """The gradient of the scores, from drho, the gradient of rho; all have the shape (..., V). To write."""
    weighted = (rho * drho).sum(-1, keepdims=True)
    dscores = drho - weighted
    return dscores


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
    """The gradient of the logits, from dloss, the gradient of the loss (a number). To write."""
    logits, lse, target, divisor = saved  # (..., V), (N,), (N,), a number
    flat = logits.reshape(-1, logits.shape[-1])
    counts = target != IGNORE
    d = np.exp(flat - lse[:, None])
    d[np.arange(len(flat)), np.where(counts, target, 0)] -= 1
    d[~counts] = 0
    dlogits = (d * (dloss / divisor)).reshape(logits.shape)
    return dlogits
''',
    },
    {
        "mistake": "cross_entropy_backward does not set the rows without a target (−100) to 0.",
        "gradients": ["dlogits"],
        "code": '''\
"""Exercise 3: softmax and cross-entropy. The page is e03_cross_entropy.md; check with: onfoot learn check 3"""

import numpy as np

IGNORE = -100  # the target of a token that has none


def softmax(scores):
    """rho = exp(scores) over its sum along the last axis: each row of rho sums to 1. Given."""
    top = np.max(scores, axis=-1, keepdims=True)  # the same is subtracted from all: exp cannot overflow
    weights = np.exp(scores - top)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_gradient(drho, rho):
    """The gradient of the scores, from drho, the gradient of rho; all have the shape (..., V). To write."""
    dscores = rho * (drho - (drho * rho).sum(axis=-1, keepdims=True))
    return dscores


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
    """The gradient of the logits, from dloss, the gradient of the loss (a number). To write."""
    logits, lse, target, divisor = saved
    flat = logits.reshape(-1, logits.shape[-1])
    rho = np.exp(flat - lse[:, np.newaxis])
    ids = np.where(target == IGNORE, 0, target)
    rho[np.arange(len(flat)), ids] -= 1
    dlogits = dloss * rho.reshape(logits.shape) / divisor
    return dlogits
''',
    },
    {
        "mistake": (
            "cross_entropy_backward forgets to divide by the divisor: it gives the gradient of the sum, not of "
            "the mean."
        ),
        "gradients": ["dlogits"],
        "code": '''\
"""Exercise 3: softmax and cross-entropy. The page is e03_cross_entropy.md; check with: onfoot learn check 3"""

import numpy as np

IGNORE = -100  # the target of a token that has none


def softmax(scores):
    """rho = exp(scores) over its sum along the last axis: each row of rho sums to 1. Given."""
    top = np.max(scores, axis=-1, keepdims=True)  # the same is subtracted from all: exp cannot overflow
    weights = np.exp(scores - top)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_gradient(drho, rho):
    """The gradient of the scores, from drho, the gradient of rho; all have the shape (..., V). To write."""
    s = np.einsum("...v,...v->...", drho, rho)[..., None]
    dscores = rho * drho - rho * s
    return dscores


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
    """The gradient of the logits, from dloss, the gradient of the loss (a number). To write."""
    logits, lse, target, divisor = saved
    dlogits = np.zeros_like(logits).reshape(-1, logits.shape[-1])
    for n, row in enumerate(logits.reshape(-1, logits.shape[-1])):
        if target[n] == IGNORE:
            continue
        dlogits[n] = np.exp(row - lse[n])
        dlogits[n, target[n]] -= 1
    dlogits = (dlogits * dloss).reshape(logits.shape)
    return dlogits
''',
    },
    {
        "mistake": (
            "cross_entropy_backward forgets the target's own logit: softmax stays as it is, without the −1 at the"
            " target."
        ),
        "gradients": ["dlogits"],
        "code": '''\
"""Exercise 3: softmax and cross-entropy. The page is e03_cross_entropy.md; check with: onfoot learn check 3"""

import numpy as np

IGNORE = -100  # the target of a token that has none


def softmax(scores):
    """rho = exp(scores) over its sum along the last axis: each row of rho sums to 1. Given."""
    top = np.max(scores, axis=-1, keepdims=True)  # the same is subtracted from all: exp cannot overflow
    weights = np.exp(scores - top)
    return weights / weights.sum(axis=-1, keepdims=True)


def softmax_gradient(drho, rho):
    """The gradient of the scores, from drho, the gradient of rho; all have the shape (..., V). To write."""
    dscores = rho * (drho - (drho * rho).sum(axis=-1, keepdims=True))
    return dscores


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
    """The gradient of the logits, from dloss, the gradient of the loss (a number). To write."""
    logits, lse, target, divisor = saved
    flat = logits.reshape(-1, logits.shape[-1])
    counts = (target != IGNORE)[:, None]
    dflat = np.where(counts, np.exp(flat - lse[:, None]), 0)
    dlogits = dloss / divisor * dflat.reshape(logits.shape)
    return dlogits
''',
    },
]
