"""Cross-entropy by autograd of PyTorch's own loss, then changed."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from planted.registry import autograd, plant

LAYER, NEXT = "softmax_cross_entropy", "next_token_loss"


def of_sum(logits: torch.Tensor, targets: torch.Tensor, dout: float) -> torch.Tensor:
    """The gradient of the sum of the losses, times dout."""
    return autograd(lambda x: F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="sum"), [logits], dout)[0]


def count(targets: torch.Tensor) -> int:
    return int((targets >= 0).sum())


@plant(LAYER, "a mean loss whose gradient is not divided")
def undivided(logits, targets, dout):
    return of_sum(logits, targets, dout)


@plant(LAYER, "a mean loss whose gradient is divided by the batch size only")
def by_batch(logits, targets, dout):
    return of_sum(logits, targets, dout) / logits.shape[0]


@plant(LAYER, "a mean loss whose gradient is divided by the tokens of one sequence")
def by_tokens(logits, targets, dout):
    return of_sum(logits, targets, dout) / logits.shape[1]


@plant(LAYER, "divided by all tokens")
def by_all(logits, targets, dout):
    return of_sum(logits, targets, dout) / (logits.shape[0] * logits.shape[1])


@plant(LAYER, "the mean of the sequences' means")
def mean_of_means(logits, targets, dout):
    def loss(x):
        return torch.stack([F.cross_entropy(one, t) for one, t in zip(x, targets, strict=True)]).mean()

    return autograd(loss, [logits], dout)[0]


@plant(LAYER, "divided by tokens and vocabulary")
def by_entries(logits, targets, dout):
    return of_sum(logits, targets, dout) / count(targets) / logits.shape[-1]


@plant(LAYER, "a gradient where there is no target")
def leftover(logits, targets, dout):
    delta = logits.softmax(-1)
    for b, t in (targets >= 0).nonzero().tolist():
        delta[b, t, targets[b, t]] -= 1
    return delta * dout / count(targets)


@plant(LAYER, "the target not subtracted")
def only_softmax(logits, targets, dout):
    return logits.softmax(-1) * (targets >= 0)[..., None] * dout / count(targets)


@plant(LAYER, "the gradient of the probabilities")
def at_probabilities(logits, targets, dout):
    y = np.exp(logits - logits.max(axis=-1, keepdims=True))
    y /= y.sum(axis=-1, keepdims=True)
    out = np.zeros_like(logits)
    with np.errstate(divide="ignore"):
        for b, t in zip(*np.nonzero(targets >= 0), strict=True):
            out[b, t, targets[b, t]] = -1 / y[b, t, targets[b, t]]
    return out * dout / (targets >= 0).sum()


@plant(LAYER, "dout ignored")
def without_upstream(logits, targets, dout):
    return of_sum(logits, targets, 1.0) / count(targets)


@plant(LAYER, "softmax over tokens")
def down_the_tokens(logits, targets, dout):
    hot = F.one_hot(targets.clamp(min=0), logits.shape[-1])
    return (logits.softmax(1) - hot) * (targets >= 0)[..., None] * dout / count(targets)


@plant(LAYER, "softmax twice")
def twice(logits, targets, dout):
    hot = F.one_hot(targets.clamp(min=0), logits.shape[-1])
    return (logits.softmax(-1).softmax(-1) - hot) * (targets >= 0)[..., None] * dout / count(targets)


@plant(LAYER, "softmax without subtracting the maximum")
def overflowing(logits, targets, dout):
    e = np.exp(logits)
    y = e / e.sum(axis=-1)[..., None]
    for b, t in zip(*np.nonzero(targets >= 0), strict=True):
        y[b, t, targets[b, t]] -= 1.0
    y[targets < 0] = 0
    return y * dout / (targets >= 0).sum()


# targets out of the tokens


def mean_over(logits: torch.Tensor, targets: torch.Tensor, dout: float) -> torch.Tensor:
    return of_sum(logits, targets, dout) / count(targets)


@plant(NEXT, "targets by a cyclic shift")
def rolled(logits, ids, dout):
    return mean_over(logits, torch.roll(ids, -1, 1), dout)


@plant(NEXT, "the id plus 1 as the target")
def next_id(logits, ids, dout):
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = (ids[:, :-1] + 1) % logits.shape[-1]
    return mean_over(logits, targets, dout)


@plant(NEXT, "no shift")
def unshifted(logits, ids, dout):
    return mean_over(logits, ids, dout)


@plant(NEXT, "shifted the wrong way")
def backwards(logits, ids, dout):
    targets = torch.full_like(ids, -100)
    targets[:, 1:] = ids[:, :-1]
    return mean_over(logits, targets, dout)
