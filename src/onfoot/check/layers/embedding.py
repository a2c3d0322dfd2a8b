"""The embedding, and an embedding tied to the output projection, in steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onfoot.arrays import rows, scatter_add
from onfoot.check.case_sizes import ANY, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import embedding_backward, embedding_forward, linear_backward, linear_forward

PIECES = Pieces(table_ids=lambda ids: ids, scatter=lambda ids, dy, n_rows: scatter_add(n_rows, ids, dy))


def steps(p: Pieces, ids: Array, weight: Array, dout: Array) -> Gradients:
    return (p.scatter(p.table_ids(ids), dout, weight.shape[0]),)


def reference(ids: Array, weight: Array, dout: Array) -> Gradients:
    return (embedding_backward(dout, embedding_forward(ids, weight)[1]),)


def ids_of(rng: np.random.Generator, sizes: Sizes) -> Iterator[tuple[str, Array, int, int]]:
    """(name, ids, vocabulary size, width) of inputs with and without repeated ids."""
    b, n, d = distinct(rng, 3, 2, 7)
    v = int(rng.integers(8, 12))
    drawn = {
        "odd sizes": (b, n, d, v),
        "repeated ids": (b, n + 3, d + 1, v),
        "no repeated ids": (2, v // 2, d, v),
        "a single id, repeated": (2, n + 1, d, v),
        "one token": (1, 1, d, v),
        "as many ids as features": (3, 4, v, v),
    }
    for name, (batch, tokens, width, vocabulary) in drawn.items():
        exact = name in ("one token", "no repeated ids", "as many ids as features")
        fitted = sizes.fit(name, exact, batch=batch, tokens=tokens, width=width, vocabulary=vocabulary)
        if fitted is None:
            continue
        batch, tokens, width, vocabulary = fitted
        ids = rng.integers(0, vocabulary, (batch, tokens))
        if name == "repeated ids":
            ids[:, :2] = ids[0, 0]  # within a sequence and across the batch
        if name == "no repeated ids":
            ids = rng.permutation(vocabulary)[: ids.size].reshape(ids.shape)
        if name == "a single id, repeated":
            ids[:] = rng.integers(min(1, vocabulary - 1), vocabulary)
        yield name, ids, vocabulary, width


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    draw = rng.standard_normal
    return [
        Case(
            name,
            (ids, draw((v, d)), draw((*ids.shape, d))),
            {"n": ids.shape[1], "B": len(ids), "B·n": ids.size, "V": v, "d": d},
        )
        for name, ids, v, d in ids_of(rng, sizes)
    ]


EMBEDDING = Layer(
    name="embedding",
    arguments=("ids", "weight", "dout"),
    gradients=("dweight",),
    contract=(
        "out = weight[ids]",
        "ids (batch, tokens), integers from 0; weight (vocabulary, features); dout (batch, tokens, features)",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    sizes=("batch", "tokens", "width", "vocabulary"),
)


TIED_PIECES = Pieces(
    **vars(PIECES),
    through_logits=lambda dy, weight: dy @ weight,
    logits_path=lambda dy, features: rows(dy).T @ rows(features),
    both_paths=lambda embedding, logits: embedding + logits,
)


def tied_steps(p: Pieces, ids: Array, weight: Array, dout: Array) -> Gradients:
    through_embedding = p.scatter(p.table_ids(ids), p.through_logits(dout, weight), weight.shape[0])
    return (p.both_paths(through_embedding, p.logits_path(dout, weight[ids])),)


def tied_reference(ids: Array, weight: Array, dout: Array) -> Gradients:
    features, embedding = embedding_forward(ids, weight)
    dfeatures, dhead, _ = linear_backward(dout, linear_forward(features, weight.T)[1])
    return (embedding_backward(dfeatures, embedding) + dhead.T,)


def tied_cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    draw = rng.standard_normal
    return [
        Case(
            name,
            (ids, draw((v, d)), draw((*ids.shape, v))),
            {"n": ids.shape[1], "B": len(ids), "B·n": ids.size, "V": v, "d": d},
        )
        for name, ids, v, d in ids_of(rng, sizes)
    ]


TIED_EMBEDDING = Layer(
    name="tied_embedding",
    arguments=("ids", "weight", "dout"),
    gradients=("dweight",),
    contract=(
        "out = weight[ids] weightᵗ: one table for the embedding and the logits",
        "ids (batch, tokens); weight (vocabulary, features); dout (batch, tokens, vocabulary)",
    ),
    cases=tied_cases,
    reference=tied_reference,
    steps=tied_steps,
    pieces=TIED_PIECES,
    sizes=("batch", "tokens", "width", "vocabulary"),
    parts=("embedding",),
)
