"""GPT-2 with two blocks and one table for tokens and logits: the gradients of its mean loss, in steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.arrays import rows, scatter_add
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import block, cross_entropy, layer_norm
from onfoot.config import GPT2Config
from onfoot.learn.layers.own import mistake
from onfoot.models.gpt2_params import POSITION_TABLE, TOKEN_TABLE, block_shapes, shapes
from onfoot.models.load import create
from onfoot.models.model import Model
from onfoot.ops import attention_forward, gelu_tanh_forward, layer_norm_forward, linear_forward
from onfoot.ops.multi_head import merge_heads, split_heads

BLOCKS, HEADS, EPS = 2, 2, 1e-5
FINAL = ("transformer.ln_f.weight", "transformer.ln_f.bias")


def config_of(table: Array, positions: Array) -> GPT2Config:
    """The configuration of a network with these tables."""
    (vocabulary, width), n_positions = table.shape, positions.shape[0]
    return GPT2Config(n_layer=BLOCKS, n_head=HEADS, n_embd=width, n_positions=n_positions, vocab_size=vocabulary)


NAMES = tuple(
    shapes(config_of(np.empty((3, 4)), np.empty((5, 4))))
)  # every parameter, in the order of the forward pass
OF_BLOCK = tuple(block_shapes(config_of(np.empty((3, 4)), np.empty((5, 4)))))


def block_output(x: Array, *values: Array) -> Array:
    """The output of a block."""
    pairs: Any = (values[i : i + 2] for i in range(0, 12, 2))
    ln_1, attn, proj, ln_2, fc, out = pairs
    qkv = linear_forward(layer_norm_forward(x, *ln_1)[0], *attn)[0]
    q, k, v = (split_heads(part, HEADS) for part in np.split(qkv, 3, axis=-1))
    x = x + linear_forward(merge_heads(attention_forward(q, k, v)[0]), *proj)[0]
    hidden = gelu_tanh_forward(linear_forward(layer_norm_forward(x, *ln_2)[0], *fc)[0])[0]
    return x + linear_forward(hidden, *out)[0]


PIECES = Pieces(
    **vars(block.PIECES),
    **vars(cross_entropy.PIECES),
    block_output=block_output,
    head_logits=lambda features, table: features @ table.T,
    through_head=lambda dy, table: dy @ table,
    head_use=lambda dy, features: rows(dy).T @ rows(features),
    below_final_norm=lambda through_norm, d11: through_norm,
    order=lambda n: tuple(reversed(range(n))),
    below_block=lambda dx, dout: dx,
    over_batch=lambda dx: dx.sum(axis=0),
    position_rows=lambda dx, n_rows: scatter_add(n_rows, np.arange(len(dx)), dx),
    embedding_use=lambda ids, dx, n_rows: scatter_add(n_rows, ids, dx),
    both_uses=lambda head, embedding: head + embedding,
)


def steps(p: Pieces, *inputs: Array) -> Gradients:
    *values, tokens, targets = inputs
    w = dict(zip(NAMES, values, strict=True))
    table, positions = w[TOKEN_TABLE], w[POSITION_TABLE]
    of_block = [[w[f"transformer.h.{b}.{name}"] for name in OF_BLOCK] for b in range(BLOCKS)]
    xs = [table[tokens] + positions[: tokens.shape[1]]]
    for b in range(BLOCKS):
        xs.append(p.block_output(xs[-1], *of_block[b]))
    centred = p.centred(xs[-1], p.mean(xs[-1]))
    a11 = p.scaled(p.normed(centred, p.rstd(p.variance(centred), EPS)), *(w[name] for name in FINAL))
    (d12,) = cross_entropy.steps(p, p.head_logits(a11, table), targets, 1.0)

    grads: dict[str, Array] = {}
    d11 = p.through_head(d12, table)
    scale, shift = (w[name] for name in FINAL)
    dx, *final = layer_norm.steps(p, xs[-1], scale, shift, d11, EPS)
    grads |= dict(zip(FINAL, final, strict=True))
    d = p.below_final_norm(dx, d11)
    for b in p.order(BLOCKS):
        dx, *found = block.steps(p, xs[b], *of_block[b], d, n_head=HEADS)
        grads |= {f"transformer.h.{b}.{name}": grad for name, grad in zip(OF_BLOCK, found, strict=True)}
        d = p.below_block(dx, d)
    grads[POSITION_TABLE] = p.position_rows(p.over_batch(d), positions.shape[0])
    grads[TOKEN_TABLE] = p.both_uses(p.head_use(d12, a11), p.embedding_use(tokens, d, table.shape[0]))
    return tuple(grads[name] for name in NAMES)


def model_of(*values: Array) -> Model:
    """A model with these parameters, in the order of NAMES."""
    w = dict(zip(NAMES, values, strict=True))
    model = create(config_of(w[TOKEN_TABLE], w[POSITION_TABLE]), dtype="float64", engine="numpy")
    for name, value in w.items():
        model.params[name][...] = value
    return model


def loss(*inputs: Array) -> float:
    """The mean loss."""
    *values, tokens, targets = inputs
    return model_of(*values).loss(tokens, targets)


def reference(*inputs: Array) -> Gradients:
    *values, tokens, targets = inputs
    grads = model_of(*values).loss_and_grads(tokens, targets)[1]
    return tuple(grads[name] for name in NAMES)


def cases(rng: np.random.Generator) -> list[Case]:
    def case(name: str, b: int, n: int, d_k: int, v: int, spare: int = 2, ignored: int = 0) -> Case:
        width = HEADS * d_k
        config = config_of(np.empty((v, width)), np.empty((n + spare, width)))
        values = []
        for one, shape in shapes(config).items():
            norm = ".ln_" in one and one.endswith("weight")
            values.append((1.0 if norm else 0.0) + 0.4 * rng.standard_normal(shape))
        tokens, targets = rng.integers(0, v - 1, (b, n)), rng.integers(0, v, (b, n))  # the last token never occurs
        if ignored:
            targets[:, -ignored:] = -100
        found = {"n": n, "B": b, "B·n": b * n, "d": width, "V": v, "d_k": d_k}
        return Case(name, (*values, tokens, targets), found)

    b, n, d_k = distinct(rng, 3, 2, 6)
    return [
        case("odd sizes", b, n + 1, d_k, 11),
        case("one sequence", 1, n + 2, d_k, 7, spare=0),
        case("tokens without a target", 3, n + 2, 2, 9, ignored=1),
    ]


MISTAKES = (
    mistake(
        "gpt2",
        "TIE.1",
        "the token table's use in the embedding missing",
        "The token table gets the gradient of the logits alone; it is also the embedding at the bottom.",
        "add the gradient of the embedding to that of the head",
        both_uses=lambda head, embedding: head,
    ),
    mistake(
        "gpt2",
        "TIE.1",
        "the token table's use in the head missing",
        "The token table gets the gradient of the embedding alone; it also makes the logits.",
        "add the gradient of the head, transposed, to that of the embedding",
        both_uses=lambda head, embedding: embedding,
    ),
    mistake(
        "gpt2",
        "3",
        "the positions of one sequence only",
        "The position table gets the gradient of the first sequence alone; every sequence of the batch uses it.",
        "sum the gradient over the batch",
        over_batch=lambda dx: dx[0],
    ),
    mistake(
        "gpt2",
        "3",
        "the positions averaged over the batch",
        "The gradient of the positions is the mean over the sequences; an array that is used B times gets the sum.",
        "sum the gradient over the batch",
        over_batch=lambda dx: dx.mean(axis=0),
    ),
    mistake(
        "gpt2",
        "NET.2",
        "the blocks in the order of the forward pass",
        "The gradient goes through the first block first; it comes from the last one.",
        "go through the blocks from the last to the first",
        order=lambda n: tuple(range(n)),
    ),
    mistake(
        "gpt2",
        "NET.2",
        "the gradient not passed from block to block",
        "Every block gets the gradient that comes out of the final norm, not that of the block above it.",
        "give each block the dx of the block above",
        below_block=lambda dx, dout: dout,
    ),
    mistake(
        "gpt2",
        "CE.2",
        "the sum of the losses in place of their mean",
        "The gradient of the logits is not divided by the number of targets; the loss is the mean.",
        "start from cross_entropy_backward(1.0, …), which divides",
        divided=lambda delta, divisor, dloss: delta * dloss,
    ),
    mistake(
        "gpt2",
        "40",
        "the final norm left out",
        "The gradient of the logits' features goes to the last block without passing through ln_f.",
        "give the last block the dx of layer_norm_backward",
        below_final_norm=lambda through_norm, d11: d11,
    ),
)

GPT2 = Layer(
    name="gpt2",
    arguments=(*NAMES, "tokens", "targets"),
    gradients=NAMES,
    contract=(
        "the mean cross-entropy of GPT-2 with two blocks, two heads and one table for tokens and logits",
        "tokens, targets (batch, tokens); a target of −100 does not count",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    assumes={"causal": True, "form": "tanh", "n_head": HEADS, "reduction": "mean"},
    mistakes=MISTAKES,
    probed=False,
)
