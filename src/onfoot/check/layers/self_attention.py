"""Multi-head attention with its output projection, in steps: packed or separate, self- or cross-attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept, width_of
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention, linear, multi_head
from onfoot.check.layers.head import CAUSAL
from onfoot.ops import linear_backward, linear_forward, multi_head_backward, multi_head_forward

COMMON = Pieces(
    **vars(attention.PIECES),
    **vars(multi_head.HEAD_PIECES),
    **vars(linear.PIECES),
    affine=lambda x, weight, bias: x @ weight + bias,
    mixed=lambda rho, v: rho @ v,
    to_projection=lambda mixed, x: mixed,
    to_heads=lambda dmixed, dout: dmixed,
)
PACKED_PIECES = Pieces(
    **vars(COMMON),
    thirds=lambda qkv, n_head: tuple(np.split(qkv, 3, axis=-1)),
    side_by_side=lambda dq, dk, dv, n_head: np.concatenate([dq, dk, dv], axis=-1),
)
SEPARATE_PIECES = Pieces(
    **vars(COMMON),
    at_projection=lambda dy, weight: dy,
    to_projections=lambda dq, dk, dv: (dq, dk, dv),
    three_paths=lambda d_q, d_k, d_v: d_q + d_k + d_v,
)
CROSS_PIECES = Pieces(
    **vars(COMMON),
    at_projection=lambda dy, weight: dy,
    to_projections=lambda dq, dk, dv: (dq, dk, dv),
    dkey=lambda dkey, dvalue: dkey,
    dvalue=lambda dkey, dvalue: dvalue,
)

# which of several linear layers a call belongs to, in the order of the backward pass
PACKED_PLACES = ("the output projection", "the q, k, v projection")
SEPARATE_PLACES = ("the output projection", "the queries", "the keys", "the values")
MERGES = ("forward pass", "queries", "keys", "values")


def _places(linears: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    twice = ("forward pass", "backward pass")
    return {
        **dict.fromkeys(("through", "dweight", "dbias"), linears),
        **dict.fromkeys(("mask", "scores", "weights"), twice),
        "affine": (*linears[1:], linears[0]),
        "merge": MERGES,
        "split": MERGES[1:],
    }


def _core(
    p: Pieces, qkv: Sequence[Array], x: Array, w_o: Array, dout: Array, causal: bool, n_head: int
) -> tuple[list[Array], Gradients]:
    """The gradients of the projected queries, keys and values (B, T, C), then dw_o and db_o."""
    q, k, v = (p.split(one, n_head) for one in qkv)
    mask = p.mask(q.shape[-2], k.shape[-2], causal)
    mixed = p.merge(p.mixed(p.weights(p.scores(q, k), mask), v))  # (B, T, C)
    dmixed = p.to_heads(p.through(dout, w_o, mixed), dout)
    of_output = p.dweight(p.to_projection(mixed, x), dout), p.dbias(dout)
    grads = attention.steps(p, q, k, v, p.split_dout(dmixed, n_head), causal)
    return [p.merge(d) for d in grads], of_output


def packed_steps(
    p: Pieces,
    x: Array,
    w_qkv: Array,
    b_qkv: Array,
    w_o: Array,
    b_o: Array,
    dout: Array,
    causal: bool = True,
    n_head: int = 2,
) -> Gradients:
    qkv = p.thirds(p.affine(x, w_qkv, b_qkv), n_head)
    grads, of_output = _core(p, qkv, x, w_o, dout, causal, n_head)
    dqkv = p.side_by_side(*grads, n_head)  # (B, T, 3 C)
    return p.through(dqkv, w_qkv, x), p.dweight(x, dqkv), p.dbias(dqkv), *of_output


def separate_steps(p: Pieces, x: Array, *rest: Array, causal: bool = True, n_head: int = 2) -> Gradients:
    *given, w_o, _, dout = rest
    pairs = [given[:2], given[2:4], given[4:]]
    qkv = [p.affine(x, w, b) for w, b in pairs]
    grads, of_output = _core(p, qkv, x, w_o, dout, causal, n_head)
    grads = p.to_projections(*grads)
    paths = [p.through(d, w, x) for d, (w, _) in zip(grads, pairs, strict=True)]
    at_parameters = [p.at_projection(d, w) for d, (w, _) in zip(grads, pairs, strict=True)]
    return p.three_paths(*paths), *(g for d in at_parameters for g in (p.dweight(x, d), p.dbias(d))), *of_output


def cross_steps(p: Pieces, query: Array, key: Array, value: Array, *rest: Array, n_head: int = 2) -> Gradients:
    *given, w_o, _, dout = rest
    inputs, pairs = (query, key, value), [given[:2], given[2:4], given[4:]]
    qkv = [p.affine(x, w, b) for x, (w, b) in zip(inputs, pairs, strict=True)]
    grads, of_output = _core(p, qkv, query, w_o, dout, False, n_head)
    grads = p.to_projections(*grads)
    dquery, dkey, dvalue = (p.through(d, w, x) for d, (w, _), x in zip(grads, pairs, inputs, strict=True))
    at_parameters = [p.at_projection(d, w) for d, (w, _) in zip(grads, pairs, strict=True)]
    of_pairs = (g for d, x in zip(at_parameters, inputs, strict=True) for g in (p.dweight(x, d), p.dbias(d)))
    return dquery, p.dkey(dkey, dvalue), p.dvalue(dkey, dvalue), *of_pairs, *of_output


def _reference(inputs: Sequence[Array], given: Sequence[Array], dout: Array, causal: bool, n_head: int) -> Gradients:
    """The gradients of the three inputs, of the three projections and of the output projection."""
    w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o = given
    query, key, value = inputs
    mixed, saved = multi_head_forward(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v, n_head, causal)
    dmixed, *of_output = linear_backward(dout, linear_forward(mixed, w_o, b_o)[1])
    return *multi_head_backward(dmixed, saved), *of_output


def separate_reference(x: Array, *rest: Array, causal: bool = True, n_head: int = 2) -> Gradients:
    *given, dout = rest
    dquery, dkey, dvalue, *others = _reference((x, x, x), given, dout, causal, n_head)
    return dquery + dkey + dvalue, *others


def packed_reference(
    x: Array,
    w_qkv: Array,
    b_qkv: Array,
    w_o: Array,
    b_o: Array,
    dout: Array,
    causal: bool = True,
    n_head: int = 2,
) -> Gradients:
    pairs = zip(np.split(w_qkv, 3, axis=1), np.split(b_qkv, 3), strict=True)
    given = [g for pair in pairs for g in pair]
    dx, *of_pairs, dw_o, db_o = separate_reference(x, *given, w_o, b_o, dout, causal=causal, n_head=n_head)
    return dx, np.concatenate(of_pairs[0::2], axis=1), np.concatenate(of_pairs[1::2]), dw_o, db_o


def cross_reference(query: Array, key: Array, value: Array, *rest: Array, n_head: int = 2) -> Gradients:
    *given, dout = rest
    return _reference((query, key, value), given, dout, False, n_head)


Build = Callable[[np.random.Generator, int, int, int, int], tuple[Array, ...]]  # (rng, B, n, m, width) -> inputs


def _pair(rng: np.random.Generator, n_in: int, n_out: int) -> list[Array]:
    return [rng.standard_normal((n_in, n_out)) / np.sqrt(n_in), rng.standard_normal(n_out)]


def _packed(rng: np.random.Generator, b: int, n: int, m: int, width: int) -> tuple[Array, ...]:
    x, dout = rng.standard_normal((b, n, width)), rng.standard_normal((b, n, width))
    return x, *_pair(rng, width, 3 * width), *_pair(rng, width, width), dout


def _separate(rng: np.random.Generator, b: int, n: int, m: int, width: int) -> tuple[Array, ...]:
    x, dout = rng.standard_normal((b, n, width)), rng.standard_normal((b, n, width))
    return x, *(g for _ in range(4) for g in _pair(rng, width, width)), dout


def _cross(rng: np.random.Generator, b: int, n: int, m: int, width: int) -> tuple[Array, ...]:
    key, value = rng.standard_normal((b, m, width)), rng.standard_normal((b, m, width))
    query, *given, dout = _separate(rng, b, n, m, width)
    return query, key, value, *given, dout


def _cases(rng: np.random.Generator, build: Build, n_head: int, sizes: Sizes, cross: bool = False) -> list[Case]:
    def case(name: str, b: int, n: int, d_k: int, m: int = 0, exact: bool = False) -> Case | None:
        width = width_of(sizes, n_head, d_k)
        fitted = sizes.fit(name, exact, batch=b, tokens=n)
        if fitted is None or (exact and width != n_head * d_k):
            return None
        b, n = fitted
        inputs = build(rng, b, n, m or n + 1, width)
        found = {"n": n, "d_k": width // n_head, "d_model": width, "B": b, "B·n": b * n, "H": n_head}
        return Case(name, inputs, {**found, "m": m or n + 1} if cross else found)

    b, n = distinct(rng, 2, 3, 8)
    found = [
        case("odd sizes", b, n, 3),
        case("other sizes", n, b + 4, 5),
        case("one token", b, 1, 4, exact=True),
        case("as many tokens as features per head", 2, 4, 4, exact=True),
        case("one sequence", 1, n + 2, 3, exact=True),
    ]
    if cross:
        found += [
            case("more keys than queries", b, n, 3, m=n + 6),
            case("more queries than keys", b, n + 2, 3, m=2),
            case("as many keys as queries", 2, n + 1, 4, m=sizes.nearest("tokens", n + 1)),
        ]
    return kept(found)


def packed_cases(rng: np.random.Generator, causal: bool = True, n_head: int = 2, sizes: Sizes = ANY) -> list[Case]:
    return _cases(rng, _packed, n_head, sizes)


def separate_cases(rng: np.random.Generator, causal: bool = True, n_head: int = 2, sizes: Sizes = ANY) -> list[Case]:
    return _cases(rng, _separate, n_head, sizes)


def cross_cases(rng: np.random.Generator, n_head: int = 2, sizes: Sizes = ANY) -> list[Case]:
    return _cases(rng, _cross, n_head, sizes, cross=True)


SIZES = ("batch", "tokens", "width", "heads", "head_dim")
PROJECTIONS = ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v", "w_o", "b_o")
PARTS = ("attention", "multi_head", "linear")
FORMULA = "softmax(mask(q kᵗ/√d_k)) v of all heads, concatenated, times w_o, plus b_o"

SELF_ATTENTION = Layer(
    name="self_attention",
    arguments=("x", "w_qkv", "b_qkv", "w_o", "b_o", "dout"),
    gradients=("dx", "dw_qkv", "db_qkv", "dw_o", "db_o"),
    contract=(
        f"out = {FORMULA}; q | k | v = x w_qkv + b_qkv",
        "x, dout (batch, tokens, d); w_qkv (d, 3 d), columns q | k | v; b_qkv (3 d); w_o (d, d); b_o (d); n_head = 2",
        CAUSAL,
    ),
    cases=packed_cases,
    reference=packed_reference,
    steps=packed_steps,
    pieces=PACKED_PIECES,
    options={"causal": True, "n_head": 2},
    sizes=SIZES,
    parts=PARTS,
    places=_places(PACKED_PLACES),
)

SELF_ATTENTION_SEPARATE = Layer(
    name="self_attention_separate",
    arguments=("x", *PROJECTIONS, "dout"),
    gradients=("dx", *(f"d{name}" for name in PROJECTIONS)),
    contract=(
        f"out = {FORMULA}; q = x w_q + b_q, k = x w_k + b_k, v = x w_v + b_v",
        "x, dout (batch, tokens, d); w_q, w_k, w_v, w_o (d, d); b_q, b_k, b_v, b_o (d); n_head = 2",
        CAUSAL,
    ),
    cases=separate_cases,
    reference=separate_reference,
    steps=separate_steps,
    pieces=SEPARATE_PIECES,
    options={"causal": True, "n_head": 2},
    sizes=SIZES,
    parts=PARTS,
    places=_places(SEPARATE_PLACES),
)

CROSS_ATTENTION = Layer(
    name="cross_attention",
    arguments=("query", "key", "value", *PROJECTIONS, "dout"),
    gradients=("dquery", "dkey", "dvalue", *(f"d{name}" for name in PROJECTIONS)),
    contract=(
        "out = softmax(q kᵗ/√d_k) v of all heads, concatenated, times w_o, plus b_o, without a mask; "
        "q = query w_q + b_q, k = key w_k + b_k, v = value w_v + b_v",
        "query, dout (batch, n, d); key, value (batch, m, d), in general m ≠ n; w_q, w_k, w_v, w_o (d, d); "
        "b_q, b_k, b_v, b_o (d); n_head = 2",
    ),
    cases=cross_cases,
    reference=cross_reference,
    steps=cross_steps,
    pieces=CROSS_PIECES,
    options={"n_head": 2},
    sizes=SIZES,
    assumes={"causal": False},
    parts=PARTS,
    places=_places(SEPARATE_PLACES),
)
