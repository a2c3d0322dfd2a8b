"""Softmax cross-entropy, with given targets and with next-token targets, in steps."""

from __future__ import annotations

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers.attention import OVERFLOW
from onfoot.models.inputs import next_token_targets
from onfoot.ops import cross_entropy_backward, cross_entropy_forward
from onfoot.ops.cross_entropy import IGNORE, log_sum_exp


def one_hot(ids: Array, n: int) -> Array:
    """One-hot rows; a negative id gives a row of zeros."""
    out = np.zeros((*ids.shape, n))
    np.put_along_axis(out, np.maximum(ids, 0)[..., None], (ids >= 0)[..., None], axis=-1)
    return out


PIECES = Pieces(
    lse=lambda logits: log_sum_exp(logits)[..., None],
    y_pred=lambda logits, lse: np.exp(logits - lse),
    y_gt=lambda targets, n: one_hot(targets, n),
    delta=lambda y_pred, y_gt: y_pred - y_gt,
    counted=lambda delta, targets: np.where((targets != IGNORE)[..., None], delta, 0),
    divisor=lambda targets, n_vocab: (targets != IGNORE).sum(),
    divided=lambda delta, divisor, dloss: delta * (dloss / divisor),
)


def steps(p: Pieces, logits: Array, targets: Array, dout: float, reduction: str = "mean") -> Gradients:
    n_vocab = logits.shape[-1]
    delta = p.delta(p.y_pred(logits, p.lse(logits)), p.y_gt(targets, n_vocab))
    divisor = p.divisor(targets, n_vocab) if reduction == "mean" else 1
    return (p.divided(p.counted(delta, targets), divisor, dout),)


def reference(logits: Array, targets: Array, dout: float, reduction: str = "mean") -> Gradients:
    divisor = float((targets != IGNORE).sum()) if reduction == "mean" else 1.0
    return (cross_entropy_backward(dout, cross_entropy_forward(logits, targets, divisor)[1]),)


def _sizes(b: int, n: int, v: int) -> dict[str, float]:
    return {"V": v, "n": n, "B": b, "B·n": b * n, "n − 1": n - 1}


def cases(rng: np.random.Generator, reduction: str = "mean", sizes: Sizes = ANY) -> list[Case]:
    def case(
        name: str, b: int, n: int, v: int, scale: float = 1.0, ignored: int = 0, beyond: str = "", exact: bool = False
    ) -> Case | None:
        fitted = sizes.fit(name, exact, batch=b, tokens=n, width=v)
        if fitted is None:
            return None
        b, n, v = fitted
        targets = rng.integers(0, v, (b, n))
        if ignored:
            targets[:, -1] = IGNORE
            targets[0, :ignored] = IGNORE  # a different number of targets per sequence
        if not (targets != IGNORE).any():
            return None  # with so few tokens, no target would be left
        upstream = float(rng.uniform(0.4, 0.9))
        return Case(name, (scale * rng.standard_normal((b, n, v)), targets, upstream), _sizes(b, n, v), beyond)

    b, n, v = distinct(rng, 3, 2, 8)
    padding = f"targets of {IGNORE} are ignored"
    found = [
        case("odd sizes", b, n + 1, v + 3),
        case("other sizes", *distinct(rng, 3, 3, 12)),
        case("one token", 1, 1, v, exact=True),
        case("as many tokens as ids", 2, v + 2, v + 2, exact=True),
        case("large logits", 2, n, v, scale=800.0, beyond=OVERFLOW),
        case("ignored targets", 3, n + 4, v, ignored=2, beyond=padding),
        case("the last token without a target", 2, n + 3, v, ignored=1, beyond=padding),
    ]
    return kept(found)


SOFTMAX_CROSS_ENTROPY = Layer(
    name="softmax_cross_entropy",
    arguments=("logits", "targets", "dout"),
    gradients=("dlogits",),
    contract=(
        "out = −log softmax(logits)[target], the mean over all targets",
        "logits (batch, tokens, vocabulary); targets (batch, tokens), integers; dout a number, 1 if left out",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"reduction": "mean"},
    choices={"reduction": ("mean", "sum")},
    sizes=("batch", "tokens", "width"),
    upstream_optional=True,
)


NEXT_PIECES = Pieces(**vars(PIECES), shift=next_token_targets)


def next_steps(p: Pieces, logits: Array, ids: Array, dout: float, reduction: str = "mean") -> Gradients:
    return steps(p, logits, p.shift(ids), dout, reduction)


def next_reference(logits: Array, ids: Array, dout: float, reduction: str = "mean") -> Gradients:
    return reference(logits, next_token_targets(ids), dout, reduction)


def next_cases(rng: np.random.Generator, reduction: str = "mean", sizes: Sizes = ANY) -> list[Case]:
    def case(
        name: str, b: int, n: int, v: int, scale: float = 1.0, beyond: str = "", exact: bool = False
    ) -> Case | None:
        fitted = sizes.fit(name, exact, batch=b, tokens=n, width=v)
        if fitted is None:
            return None
        b, n, v = fitted
        logits, ids = scale * rng.standard_normal((b, n, v)), rng.integers(0, v, (b, n))
        return Case(name, (logits, ids, float(rng.uniform(0.4, 0.9))), _sizes(b, n, v), beyond)

    b, n, v = distinct(rng, 3, 2, 8)
    found = [
        case("odd sizes", b, n + 1, v + 3),
        case("other sizes", *distinct(rng, 3, 3, 12)),
        case("two tokens", 1, 2, v, exact=True),
        case("as many tokens as ids", 2, v + 2, v + 2, exact=True),
        case("large logits", 2, n, v, scale=800.0, beyond=OVERFLOW),
    ]
    return kept(found)


NEXT_TOKEN_LOSS = Layer(
    name="next_token_loss",
    arguments=("logits", "ids", "dout"),
    gradients=("dlogits",),
    contract=(
        "out = −log softmax(logits[t])[ids[t + 1]], the mean over all tokens but the last",
        "logits (batch, tokens, vocabulary); ids (batch, tokens); dout a number, 1 if left out",
    ),
    cases=next_cases,
    reference=next_reference,
    steps=next_steps,
    pieces=NEXT_PIECES,
    options={"reduction": "mean"},
    choices={"reduction": ("mean", "sum")},
    sizes=("batch", "tokens", "width"),
    parts=("softmax_cross_entropy",),
    upstream_optional=True,
)
