"""The head of a language model with its loss, in steps: a linear layer, or the embedding's own table."""

from __future__ import annotations

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import cross_entropy, embedding, layer_norm, linear
from onfoot.check.layers.attention import OVERFLOW
from onfoot.ops import (
    cross_entropy_backward,
    cross_entropy_forward,
    embedding_backward,
    embedding_forward,
    layer_norm_backward,
    layer_norm_forward,
    linear_backward,
    linear_forward,
)

EPS = 1e-5
LOSS = Pieces(**vars(cross_entropy.PIECES), dlogits=lambda divided, y_pred: divided)


def _dlogits(p: Pieces, logits: Array, targets: Array, dout: float) -> tuple[Array, Array]:
    """The gradient of the logits (B, T, V), and the same before the division by the number of targets."""
    n_vocab = logits.shape[-1]
    y_pred = p.y_pred(logits, p.lse(logits))
    delta = p.counted(p.delta(y_pred, p.y_gt(targets, n_vocab)), targets)
    return p.dlogits(p.divided(delta, p.divisor(targets, n_vocab), dout), y_pred), delta * dout


# a linear layer

HEAD_PIECES = Pieces(
    **vars(LOSS),
    **vars(linear.PIECES),
    affine=lambda x, weight, bias: x @ weight + bias,
    for_dx=lambda dlogits, undivided: dlogits,
    for_parameters=lambda dlogits, undivided: dlogits,
)


def head_steps(p: Pieces, x: Array, weight: Array, bias: Array, targets: Array, dout: float) -> Gradients:
    both = _dlogits(p, p.affine(x, weight, bias), targets, dout)
    at_parameters = p.for_parameters(*both)
    return p.through(p.for_dx(*both), weight, x), p.dweight(x, at_parameters), p.dbias(at_parameters)


def head_reference(x: Array, weight: Array, bias: Array, targets: Array, dout: float) -> Gradients:
    logits, saved = linear_forward(x, weight, bias)
    dlogits = cross_entropy_backward(dout, cross_entropy_forward(logits, targets, float(targets.size))[1])
    dx, dweight, dbias = linear_backward(dlogits, saved)
    assert dbias is not None
    return dx, dweight, dbias


def head_cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    def case(
        name: str, b: int, n: int, d: int, v: int, scale: float = 1.0, beyond: str = "", exact: bool = False
    ) -> Case | None:
        fitted = sizes.fit(name, exact, batch=b, tokens=n, width=d, vocabulary=v)
        if fitted is None:
            return None
        b, n, d, v = fitted
        x, weight = rng.standard_normal((b, n, d)), scale * rng.standard_normal((d, v)) / np.sqrt(d)
        inputs = (x, weight, rng.standard_normal(v), rng.integers(0, v, (b, n)), float(rng.uniform(0.4, 0.9)))
        return Case(name, inputs, {"V": v, "d": d, "n": n, "B": b, "B·n": b * n, "n − 1": n - 1}, beyond)

    b, n, d, v = distinct(rng, 4, 2, 8)
    square = int(rng.integers(4, 8))
    found = [
        case("odd sizes", b, n + 1, d, v + 3),
        case("other sizes", *distinct(rng, 4, 3, 12)),
        case("one token", 1, 1, d, v, exact=True),
        case("as many ids as features", 2, n, square, square),
        case("large logits", 2, n, d, v, scale=300.0, beyond=OVERFLOW),
    ]
    return kept(found)


LOSS_HEAD = Layer(
    name="loss_head",
    arguments=("x", "weight", "bias", "targets", "dout"),
    gradients=("dx", "dweight", "dbias"),
    contract=(
        "out = −log softmax(x weight + bias)[target], the mean over all targets",
        "x (batch, tokens, d); weight (d, vocabulary); bias (vocabulary); targets (batch, tokens), integers; dout a "
        "number, 1 if left out",
    ),
    cases=head_cases,
    reference=head_reference,
    steps=head_steps,
    pieces=HEAD_PIECES,
    sizes=("batch", "tokens", "width", "vocabulary"),
    assumes={"reduction": "mean"},
    parts=("linear", "softmax_cross_entropy"),
    upstream_optional=True,
)


# the embedding's table

TIED_PIECES = Pieces(
    **vars(LOSS),
    **vars(embedding.TIED_PIECES),
    **vars(layer_norm.PIECES),
    scaled=lambda normed, weight, bias: normed * weight + bias,
    logits=lambda features, weight: features @ weight.T,
    head_input=lambda features, embedded: features,
    below_norm=lambda dx, dfeatures: dx,
    rows_of=lambda ids, targets: ids,
)


def tied_steps(
    p: Pieces, ids: Array, weight: Array, ln_weight: Array, ln_bias: Array, targets: Array, dout: float
) -> Gradients:
    embedded = weight[ids]  # (B, T, C)
    centred = p.centred(embedded, p.mean(embedded))
    features = p.scaled(p.normed(centred, p.rstd(p.variance(centred), EPS)), ln_weight, ln_bias)
    dlogits, _ = _dlogits(p, p.logits(features, weight), targets, dout)
    dfeatures = p.through_logits(dlogits, weight)
    through_head = p.logits_path(dlogits, p.head_input(features, embedded))
    dx, dln_weight, dln_bias = layer_norm.steps(p, embedded, ln_weight, ln_bias, dfeatures, EPS)
    at_table = p.below_norm(dx, dfeatures)
    through_embedding = p.scatter(p.table_ids(p.rows_of(ids, targets)), at_table, weight.shape[0])
    return p.both_paths(through_embedding, through_head), dln_weight, dln_bias


def tied_reference(
    ids: Array, weight: Array, ln_weight: Array, ln_bias: Array, targets: Array, dout: float
) -> Gradients:
    embedded, of_table = embedding_forward(ids, weight)
    features, of_norm = layer_norm_forward(embedded, ln_weight, ln_bias, EPS)
    logits, of_head = linear_forward(features, weight.T)
    dlogits = cross_entropy_backward(dout, cross_entropy_forward(logits, targets, float(targets.size))[1])
    dfeatures, dhead, _ = linear_backward(dlogits, of_head)
    dembedded, dln_weight, dln_bias = layer_norm_backward(dfeatures, of_norm)
    return embedding_backward(dembedded, of_table) + dhead.T, dln_weight, dln_bias


def tied_cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    found = []
    for name, ids, v, d in embedding.ids_of(rng, sizes):
        ln_weight, ln_bias = 1 + 0.5 * rng.standard_normal(d), 0.5 * rng.standard_normal(d)
        targets, upstream = rng.integers(0, v, ids.shape), float(rng.uniform(0.4, 0.9))
        b, n = ids.shape
        inputs = (ids, rng.standard_normal((v, d)), ln_weight, ln_bias, targets, upstream)
        found.append(Case(name, inputs, {"n": n, "B": b, "B·n": b * n, "V": v, "d": d, "n − 1": n - 1}))
    return found


TIED_HEAD = Layer(
    name="tied_head",
    arguments=("ids", "weight", "ln_weight", "ln_bias", "targets", "dout"),
    gradients=("dweight", "dln_weight", "dln_bias"),
    contract=(
        "out = −log softmax(ln(weight[ids]) weightᵗ)[target], the mean over all targets: one table embeds the ids and "
        "computes the logits, with a layer norm in between",
        "ids, targets (batch, tokens), integers; weight (vocabulary, d); ln_weight, ln_bias (d); eps 1e-5; dout a "
        "number, 1 if left out",
    ),
    cases=tied_cases,
    reference=tied_reference,
    steps=tied_steps,
    pieces=TIED_PIECES,
    sizes=("batch", "tokens", "width", "vocabulary"),
    assumes={"reduction": "mean"},
    parts=("tied_embedding", "embedding", "layer_norm", "softmax_cross_entropy"),
    upstream_optional=True,
)
