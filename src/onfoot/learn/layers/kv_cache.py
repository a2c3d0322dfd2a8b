"""Causal self-attention of tokens that come in chunks, with a KV cache: a forward pass, in steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention
from onfoot.learn.layers.own import mistake
from onfoot.learn.layers.self_attention import forward
from onfoot.ops.multi_head import merge_heads, split_heads

HEADS = 2

PIECES = Pieces(
    mask=attention.PIECES.mask,
    scores=attention.PIECES.scores,
    weights=attention.PIECES.weights,
    affine=lambda x, weight, bias: x @ weight + bias,
    split=split_heads,
    merge=merge_heads,
    cached=lambda keys, values: (keys, values),
    keys_so_far=lambda past, new: np.concatenate([past, new], axis=2),
    values_so_far=lambda past, new: np.concatenate([past, new], axis=2),
    kept=lambda joined, new: joined,
    averaged=lambda rho, v: rho @ v,
)


def steps(p: Pieces, x: Array, weight: Array, bias: Array, cuts: Array) -> Gradients:
    found, begin = [], 0
    past = [np.zeros((len(x), HEADS, 0, x.shape[-1] // HEADS)) for _ in range(2)]
    for length in cuts:
        part = x[:, begin : begin + length]
        q, *new = (p.split(one, HEADS) for one in np.split(p.affine(part, weight, bias), 3, axis=-1))
        past_k, past_v = p.cached(*past)
        k, v = p.keys_so_far(past_k, new[0]), p.values_so_far(past_v, new[1])
        rho = p.weights(p.scores(q, k), p.mask(q.shape[-2], k.shape[-2], True))
        found.append(p.merge(p.averaged(rho, v)))
        past = [p.kept(joined, one) for joined, one in zip((k, v), new, strict=True)]
        begin += length
    return (np.concatenate(found, axis=1),)


def reference(x: Array, weight: Array, bias: Array, cuts: Array) -> Gradients:
    return (forward(x, weight, bias, HEADS),)


def cases(rng: np.random.Generator) -> list[Case]:
    def case(name: str, b: int, d_k: int, cuts: Sequence[int]) -> Case:
        n, width = sum(cuts), HEADS * d_k
        draw = rng.standard_normal
        x, weight, bias = draw((b, n, width)), draw((width, 3 * width)) / np.sqrt(width), draw(3 * width)
        return Case(name, (x, weight, bias, np.array(cuts)), {"n": n, "B": b, "d": width, "d_k": d_k, "H": HEADS})

    b, d_k, first, second = distinct(rng, 4, 2, 7)
    return [
        case("a prompt, then single tokens", b, d_k, (first, 1, 1, 1)),
        case("chunks of several tokens", d_k, b, (first, second, 3)),
        case("one token after the other", 1, 3, (1, 1, 1, 1, 1)),
        case("everything at once", 2, d_k, (first + 3,)),
    ]


MISTAKES = (
    mistake(
        "kv_cache",
        "ATT.1",
        "the cache not used",
        "The new tokens attend only to themselves; the keys and values of earlier tokens are not put before them.",
        "join the old keys and values with the new ones",
        keys_so_far=lambda past, new: new,
        values_so_far=lambda past, new: new,
    ),
    mistake(
        "kv_cache",
        "ATT.1",
        "only the newest chunk kept",
        "What is returned as the cache has the new keys and values alone, so all but the last chunk is forgotten.",
        "return the joined keys and values",
        kept=lambda joined, new: new,
    ),
    mistake(
        "kv_cache",
        "ATT.1",
        "the old cache returned",
        "The cache that is returned is the one that was given, without the new keys and values: they are forgotten.",
        "return the joined keys and values",
        kept=lambda joined, new: joined[:, :, : joined.shape[2] - new.shape[2]] if joined.shape != new.shape else new,
    ),
    mistake(
        "kv_cache",
        "13",
        "the new keys before the old ones",
        "The new keys and values are put before the cached ones, but the mask takes the last keys for the newest.",
        "put the old ones first",
        keys_so_far=lambda past, new: np.concatenate([new, past], axis=2),
        values_so_far=lambda past, new: np.concatenate([new, past], axis=2),
    ),
    mistake(
        "kv_cache",
        "13",
        "keys and values in different orders",
        "The new keys are put before the cached ones, but the new values behind them: a weight meets another's value.",
        "put the old ones first in both",
        keys_so_far=lambda past, new: np.concatenate([new, past], axis=2),
    ),
    mistake(
        "kv_cache",
        "13",
        "values and keys in different orders",
        "The new values are put before the cached ones, but the new keys behind them: a weight meets another's value.",
        "put the old ones first in both",
        values_so_far=lambda past, new: np.concatenate([new, past], axis=2),
    ),
    mistake(
        "kv_cache",
        "13",
        "the mask aligned with the first key",
        "New token i attends to keys up to i, as if it stood at the beginning; it stands behind the cached tokens.",
        "align the last query with the last key",
        mask=lambda n_q, n_k, causal: np.arange(n_k) <= np.arange(n_q)[:, None],
    ),
    mistake(
        "kv_cache",
        "13",
        "no mask among the new tokens",
        "The new tokens of a chunk attend to all keys, also to those of later tokens of the same chunk.",
        "use the causal mask for every chunk",
        mask=lambda n_q, n_k, causal: np.ones((n_q, n_k), dtype=bool),
    ),
    mistake(
        "kv_cache",
        "13",
        "no mask as soon as there is a cache",
        "With cached keys the mask is left out, so a token of a later chunk attends to those after it in the chunk.",
        "use the causal mask for every chunk",
        mask=lambda n_q, n_k, causal: np.arange(n_k) <= np.arange(n_q)[:, None] + (n_k if n_k > n_q else 0),
    ),
    mistake(
        "kv_cache",
        "ATT.1",
        "keys and values exchanged in the cache",
        "What is taken out of the cache as keys was put in as values, and the other way round.",
        "take them out in the order in which they were put in",
        cached=lambda keys, values: (values, keys),
    ),
    mistake(
        "kv_cache",
        "34",
        "heads merged without a transpose",
        "The heads (batch, heads, tokens, d) are reshaped to (batch, tokens, features): tokens and features are mixed.",
        "swap the axes of heads and tokens before the reshape",
        merge=lambda x: x.reshape(x.shape[0], x.shape[2], -1),
    ),
)

KV_CACHE = Layer(
    name="kv_cache",
    arguments=("x", "weight", "bias", "cuts"),
    gradients=("y",),
    contract=(
        "y = causal self-attention of all tokens, computed chunk by chunk; q | k | v = x weight + bias",
        "x (batch, tokens, features); weight (features, 3 features); cuts: the lengths of the chunks; n_head = 2",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    mistakes=MISTAKES,
)
