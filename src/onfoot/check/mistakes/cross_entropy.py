"""Known mistakes in softmax cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.check.layers.cross_entropy import one_hot
from onfoot.ops.attention import softmax
from onfoot.ops.cross_entropy import IGNORE

# wrong divisors for a mean loss


def divisor_of_all_tokens(targets: Array, n_vocab: int) -> float:
    """The number of all tokens, although only some have a target."""
    return targets.size


def divisor_of_the_mean_of_means(targets: Array, n_vocab: int) -> Array:
    """Per sequence: its number of targets times the number of sequences."""
    return (targets >= 0).sum(axis=-1)[:, None, None] * len(targets)


# wrong next-token targets


def targets_by_roll(ids: Array) -> Array:
    """shiftByOne as a cyclic shift: the last token must predict the first."""
    return np.roll(ids, -1, axis=-1)


def targets_by_next_id(ids: Array, n_vocab: int) -> Array:
    """y_gt(t*) = t* + 1 as arithmetic on ids; the last token has no target."""
    targets = (ids + 1) % n_vocab
    targets[:, -1] = IGNORE
    return targets


def _mistake(
    name: str, explains: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str = "", mean: bool = True
) -> Mistake:
    needs = {"reduction": "mean"} if mean else {}
    return Mistake(name, "softmax_cross_entropy", explains, "CE.2", fix, apply, errata, needs=needs)


DIVIDE = "divide by the number of targets that are not ignored, as in the mean loss"

MISTAKES = (
    _mistake(
        "a mean loss whose gradient is not divided",
        "y_pred − y_gt is the gradient of the sum of the losses.",
        DIVIDE,
        lambda p: {"divisor": lambda targets, n_vocab: 1},
        "E20",
    ),
    _mistake(
        "a mean loss whose gradient is divided by the batch size only",
        "Divided by the number of sequences; the mean is taken over their tokens as well.",
        DIVIDE,
        lambda p: {"divisor": lambda targets, n_vocab: len(targets)},
    ),
    _mistake(
        "a mean loss whose gradient is divided by the tokens of one sequence",
        "Divided by the number of tokens of a sequence; the mean is taken over the sequences as well.",
        DIVIDE,
        lambda p: {"divisor": lambda targets, n_vocab: targets.shape[1]},
    ),
    _mistake(
        "divided by all tokens",
        "Tokens without a target are counted in the divisor.",
        DIVIDE,
        lambda p: {"divisor": divisor_of_all_tokens},
        "E20",
    ),
    _mistake(
        "the mean of the sequences' means",
        "Each sequence is divided by its own number of targets: if the numbers differ, that is a different loss.",
        DIVIDE,
        lambda p: {"divisor": divisor_of_the_mean_of_means},
        "E20",
    ),
    _mistake(
        "divided by tokens and vocabulary",
        "The mean is taken over the entries of the logits instead of the targets.",
        DIVIDE,
        lambda p: {"divisor": lambda targets, n_vocab: (targets != IGNORE).sum() * n_vocab},
    ),
    _mistake(
        "a gradient where there is no target",
        "A token without a target has a zero row in y_gt, but y_pred remains in its row of the gradient.",
        "set the rows of tokens without a target to 0",
        lambda p: {"counted": lambda delta, targets: delta},
        "E21",
        mean=False,
    ),
    _mistake(
        "the target not subtracted",
        "y_pred alone: the −1 at the target is missing.",
        "y_pred − y_gt",
        lambda p: {"delta": lambda y_pred, y_gt: y_pred},
        mean=False,
    ),
    _mistake(
        "the gradient of the probabilities",
        "−y_gt/y_pred is the gradient of y_pred; it was not passed through softmax.",
        "y_pred − y_gt, the gradient of the logits",
        lambda p: {"delta": lambda y_pred, y_gt: np.where(y_gt > 0, -y_gt / y_pred, 0)},
        mean=False,
    ),
    _mistake(
        "dout ignored",
        "The gradient is not multiplied by the upstream gradient.",
        "multiply by dout",
        lambda p: {"divided": lambda delta, divisor, dloss: delta / divisor},
        mean=False,
    ),
    _mistake(
        "softmax over tokens",
        "The probabilities of one id sum to 1 over the tokens; softmax was taken along axis −2.",
        "softmax along the last axis, over the vocabulary",
        lambda p: {"y_pred": lambda logits, lse: np.swapaxes(softmax(np.swapaxes(logits, -1, -2)), -1, -2)},
        mean=False,
    ),
    _mistake(
        "softmax twice",
        "Softmax is applied again to the probabilities.",
        "softmax once",
        lambda p: {"y_pred": lambda logits, lse: softmax(softmax(logits))},
        mean=False,
    ),
    _mistake(
        "softmax without subtracting the maximum",
        "exp overflows for logits above 709 (float64) or 88 (float32), and inf/inf is nan.",
        "subtract the largest logit of each row before exp; the result is the same",
        lambda p: {
            "lse": lambda logits: np.zeros(()),
            "y_pred": lambda logits, lse: np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True),
        },
        "E23",
        mean=False,
    ),
)


def _next(name: str, explains: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str = "") -> Mistake:
    return Mistake(name, "next_token_loss", explains, "CE.2", fix, apply, errata)


NEXT_MISTAKES = (
    _next(
        "targets by a cyclic shift",
        "The last token must predict the first.",
        "the last token has no target: its row of the gradient is 0, and the mean does not count it",
        lambda p: {"shift": targets_by_roll},
        "E21",
    ),
    _next(
        "the id plus 1 as the target",
        "t + 1 is the next token, not the next id.",
        "the target of token t is ids[t + 1]",
        lambda p: {
            "shift": lambda ids: ids,
            "y_gt": lambda ids, n_vocab: one_hot(targets_by_next_id(ids, n_vocab), n_vocab),
            "counted": lambda delta, ids: np.concatenate([delta[:, :-1], 0 * delta[:, -1:]], axis=1),
            "divisor": lambda ids, n_vocab: ids[:, 1:].size,
        },
        "E22",
    ),
    _next(
        "no shift",
        "Every token must predict itself.",
        "the target of token t is ids[t + 1]",
        lambda p: {"shift": lambda ids: ids},
    ),
    _next(
        "shifted the wrong way",
        "Every token must predict the one before it.",
        "the target of token t is ids[t + 1]",
        lambda p: {"shift": lambda ids: np.concatenate([np.full_like(ids[:, :1], IGNORE), ids[:, :-1]], axis=1)},
    ),
)
