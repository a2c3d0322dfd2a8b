"""Cross-entropy through exp, sum, division and log, each with its own derivative, and through log-softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Gradients, Pieces
from onfoot.check.routes.route import Route

Steps = Callable[..., Gradients]


def _chain(p: Pieces, logits: Array, targets: Array, dout: float, reduction: str = "mean") -> Gradients:
    n_vocab = logits.shape[-1]
    divisor = p.divisor(targets, n_vocab) if reduction == "mean" else 1
    e = p.exponentials(logits)
    total = p.total(e)
    inverse = p.inverse(total)
    dlog = p.dlogprobs(p.y_gt(targets, n_vocab), divisor, dout)
    dprobs = p.dprobs(dlog, p.probs(e, inverse))
    dtotal = p.dtotal(p.dinverse(dprobs, e), p.inverse_square(inverse))
    return (p.through_exp(p.de(p.de_direct(dprobs, inverse), dtotal), e),)


def _log_softmax(p: Pieces, logits: Array, targets: Array, dout: float, reduction: str = "mean") -> Gradients:
    n_vocab = logits.shape[-1]
    divisor = p.divisor(targets, n_vocab) if reduction == "mean" else 1
    dlog = p.dlogprobs(p.y_gt(targets, n_vocab), divisor, dout)
    probs = p.y_pred(logits, p.lse(logits))
    return (p.log_softmax_backward(dlog, p.shares(probs, p.row_total(dlog))),)


CHAIN = Pieces(
    exponentials=lambda logits: np.exp(logits - logits.max(axis=-1, keepdims=True)),
    total=lambda e: e.sum(axis=-1, keepdims=True),
    inverse=lambda total: 1 / total,
    inverse_square=lambda inverse: inverse * inverse,
    probs=lambda e, inverse: e * inverse,
    dlogprobs=lambda y_gt, divisor, dloss: -y_gt * (dloss / divisor),
    dprobs=lambda dlog, probs: np.where(dlog == 0, 0, dlog / probs),
    de_direct=lambda dprobs, inverse: dprobs * inverse,
    dinverse=lambda dprobs, e: (dprobs * e).sum(axis=-1, keepdims=True),
    dtotal=lambda dinverse, inverse_square: -dinverse * inverse_square,
    de=lambda direct, dtotal: direct + dtotal,
    through_exp=lambda de, e: de * e,
)
CHAIN_WORDS = {
    "exponentials": ("exp(logits)", "exp(logits − the largest of the row)"),
    "total": ("Σ exp(logits)", "over the vocabulary"),
    "inverse": ("1/Σ exp(logits)", "the reciprocal of the sum"),
    "inverse_square": ("1/(Σ exp(logits))²", "the derivative of 1/s is −1/s²"),
    "probs": ("y_pred", "exp(logits)/Σ exp(logits)"),
    "dlogprobs": ("the gradient of log y_pred", "−dout/number of targets at the target, 0 elsewhere"),
    "dprobs": ("the gradient of y_pred", "(the gradient of log y_pred)/y_pred"),
    "de_direct": ("the direct gradient of exp(logits)", "(the gradient of y_pred)/Σ exp(logits)"),
    "dinverse": ("the gradient of 1/Σ exp(logits)", "Σ over the vocabulary of (the gradient of y_pred) ∘ exp(logits)"),
    "dtotal": ("the gradient of Σ exp(logits)", "−(the gradient of 1/Σ exp(logits))/(Σ exp(logits))²"),
    "de": ("the gradient of exp(logits)", "the direct one + that of Σ exp(logits)"),
    "through_exp": ("dlogits", "(the gradient of exp(logits)) ∘ exp(logits)"),
}
LOG_SOFTMAX = Pieces(
    dlogprobs=CHAIN.dlogprobs,
    row_total=lambda dlog: dlog.sum(axis=-1, keepdims=True),
    shares=lambda probs, row_total: probs * row_total,
    log_softmax_backward=lambda dlog, shares: dlog - shares,
)
LOG_SOFTMAX_WORDS = {
    "dlogprobs": CHAIN_WORDS["dlogprobs"],
    "row_total": ("the sum of the gradient of log y_pred", "over the vocabulary"),
    "shares": ("y_pred · Σ (the gradient of log y_pred)", "the sum over the vocabulary, times y_pred"),
    "log_softmax_backward": ("dlogits", "the gradient of log y_pred − y_pred · its sum over the vocabulary"),
}


def _next(steps: Steps) -> Steps:
    def run(p: Pieces, logits: Array, ids: Array, dout: float, reduction: str = "mean") -> Gradients:
        return steps(p, logits, p.shift(ids), dout, reduction)

    return run


ROUTES = tuple(
    Route(layer, pieces, steps if layer == "softmax_cross_entropy" else _next(steps), words)
    for layer in ("softmax_cross_entropy", "next_token_loss")
    for pieces, steps, words in ((CHAIN, _chain, CHAIN_WORDS), (LOG_SOFTMAX, _log_softmax, LOG_SOFTMAX_WORDS))
)
