"""Cross-entropy with a divisor that is given, in steps: the loss of exercise 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, Mistake, Piece, Pieces
from onfoot.check.layers import LAYERS
from onfoot.check.layers.cross_entropy import PIECES, one_hot
from onfoot.check.mistakes.cross_entropy import divisor_of_the_mean_of_means
from onfoot.learn.layers.own import mistake
from onfoot.ops import cross_entropy_backward, cross_entropy_forward
from onfoot.ops.cross_entropy import IGNORE

NAME = "learn_loss"
MEAN = LAYERS["softmax_cross_entropy"]  # the same with the number of targets as the divisor
LOSS_PIECES = Pieces(**{**vars(PIECES), "divisor": lambda targets, n_vocab, given: given})


def steps(p: Pieces, logits: Array, targets: Array, divisor: float, dout: float) -> Gradients:
    n_vocab = logits.shape[-1]
    delta = p.delta(p.y_pred(logits, p.lse(logits)), p.y_gt(targets, n_vocab))
    return (p.divided(p.counted(delta, targets), p.divisor(targets, n_vocab, divisor), dout),)


def reference(logits: Array, targets: Array, divisor: float, dout: float) -> Gradients:
    return (cross_entropy_backward(dout, cross_entropy_forward(logits, targets, divisor)[1]),)


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    """Those of the mean loss, with a divisor that is not the number of targets."""

    def divided(case: Case) -> Case:
        logits, targets, dout = case.inputs
        divisor = float((targets != IGNORE).sum() * rng.uniform(1.2, 1.9))
        return replace(case, inputs=(logits, targets, divisor, dout))

    return [divided(case) for case in MEAN.cases(rng, sizes=sizes)]


def _ignored(name: str, explains: str, **pieces: Any) -> Mistake:
    fix = "set the whole row to 0 where the target is −100"
    return mistake(NAME, "CE.2", name, explains, fix, **pieces)


def _divided(name: str, explains: str, divisor: Piece) -> Mistake:
    return mistake(NAME, "CE.2", name, explains, "divide by the divisor that was saved", divisor=divisor)


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
    _divided(
        "not divided by divisor",
        "The loss is divided by divisor, so that its gradient is as well.",
        lambda targets, n_vocab, given: 1,
    ),
    _divided(
        "divided by the number of targets in place of divisor",
        "divisor is given; it need not be the number of targets, which it is not where a batch is cut into several.",
        lambda targets, n_vocab, given: (targets != IGNORE).sum(),
    ),
    _divided(
        "divided by the number of tokens in place of divisor",
        "divisor is given; it is not the number of tokens, some of which may have no target.",
        lambda targets, n_vocab, given: targets.size,
    ),
    _divided(
        "divided by the number of sequences in place of divisor",
        "divisor is given; the loss is not the mean over the sequences.",
        lambda targets, n_vocab, given: len(targets),
    ),
    _divided(
        "the mean of the sequences' means",
        "Each sequence is divided by its own number of targets; the loss is divided by divisor.",
        lambda targets, n_vocab, given: divisor_of_the_mean_of_means(targets, n_vocab),
    ),
    _divided(
        "divided by the number of logits in place of divisor",
        "divisor is given; the mean over all entries of the logits is another loss.",
        lambda targets, n_vocab, given: targets.size * n_vocab,
    ),
    _divided(
        "divided by the number of targets as well as by divisor",
        "The loss is divided by divisor and by nothing else.",
        lambda targets, n_vocab, given: given * (targets != IGNORE).sum(),
    ),
    _divided(
        "multiplied by divisor in place of divided",
        "The loss is divided by divisor, so that its gradient is as well.",
        lambda targets, n_vocab, given: 1 / given,
    ),
)

LOSS = Layer(
    name=NAME,
    arguments=("logits", "targets", "divisor", "dout"),
    gradients=("dlogits",),
    contract=(
        "out = the sum of −log softmax(logits)[target] over the tokens that have a target, over divisor",
        "logits (batch, tokens, vocabulary); targets (batch, tokens), integers or −100; divisor, dout numbers",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=LOSS_PIECES,
    sizes=MEAN.sizes,
    parts=(MEAN.name,),
    mistakes=MISTAKES,
)
