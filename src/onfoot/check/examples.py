"""Small example inputs with odd sizes for every op of an engine's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onfoot.ops import Head
from onfoot.ops.dropout import dropout_pattern
from onfoot.ops.rope import angles, frequencies


class Example(NamedTuple):
    """Inputs of an op's forward pass, and the indices and names of those with gradients."""

    inputs: list[Any]
    wrt: list[int]
    names: list[str]
    pack: Callable[..., list[Any]] | None = None  # flat inputs -> the op's arguments, if those are nested


def _example(names: str, inputs: list[Any], wrt: list[int] | None = None) -> Example:
    gradients = names.split()
    return Example(inputs, list(range(len(gradients))) if wrt is None else wrt, gradients)


def examples(seed: int = 0) -> dict[str, Example]:
    """One example per op, by name."""
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal
    x, gamma = draw((2, 5, 6)), 1 + 0.5 * draw(6)
    q, k, v = draw((2, 4, 5, 3)), draw((2, 4, 5, 3)), draw((2, 4, 5, 7))
    away_from_0 = np.where(np.abs(x) < 0.1, x + 0.3, x)  # ReLU has no derivative at 0
    targets = rng.integers(0, 7, (2, 5))
    targets[0, 2:] = -100
    ids = np.array([[3, 1, 3, 0, 3], [1, 6, 6, 2, 1]])
    cos, sin = angles(np.arange(5) + 3, frequencies(10000.0, 6))
    head = [draw((6, 3)), draw(3), draw((6, 3)), draw(3), draw((6, 4)), draw(4)]
    other = [draw((6, 5)), draw(5), draw((6, 5)), draw(5), draw((6, 2)), draw(2)]
    inputs = [draw((2, 4, 6)), draw((2, 5, 3)), draw((2, 5, 7))]  # query, key, value
    projections = [draw((6, 8)), draw(8), draw((3, 8)), draw(8), draw((7, 6)), draw(6)]
    lora = [x, draw((6, 2)), draw((2, 7)), 0.75]
    parameters = "dw_q db_q dw_k db_k dw_v db_v"
    return {
        "linear": _example("dx dweight dbias", [x, draw((6, 7)), draw(7)]),
        "frozen_linear": _example("dx", [x, draw((6, 7)), draw(7)]),
        "embedding": _example("dweight", [ids, draw((7, 4))], [1]),
        "layer_norm": _example("dx dweight dbias", [x, gamma, draw(6)]),
        "rms_norm": _example("dx dweight", [x, gamma]),
        "relu": _example("dx", [away_from_0]),
        "gelu_tanh": _example("dx", [3 * x]),
        "gelu_erf": _example("dx", [3 * x]),
        "swiglu": _example("dgate dup", [2 * x, draw((2, 5, 6))]),
        "rope": _example("dx", [draw((2, 3, 5, 6)), cos, sin]),
        "attention": _example("dq dk dv", [q, k, v]),
        "grouped_query": _example("dq dk dv", [q, k[:, :2], v[:, :2]]),
        "head": _example(f"da {parameters}", [x, *head])._replace(pack=lambda a, *p: [a, Head(*p)]),
        "heads": _example(f"da {parameters} {parameters}", [x, *head, *other])._replace(
            pack=lambda a, *p: [a, [Head(*p[:6]), Head(*p[6:])]]
        ),
        "multi_head": _example(f"dquery dkey dvalue {parameters}", [*inputs, *projections, 2, False]),
        "batch_norm": _example("dx dweight dbias", [x, gamma, draw(6)]),
        "cross_entropy": _example("dlogits", [draw((2, 5, 7)), targets, 7.0]),
        "lora": _example("dx ddown dup", lora),
        "lora_linear": _example("dx ddown dup", [x, draw((6, 7)), draw(7), *lora[1:]], [0, 3, 4]),
        "dropout": _example("dx", [x, dropout_pattern(x.shape, 0.4, 1, "float64")]),
    }


def flattened(grads: Any) -> Any:
    """Nested gradients (a Head, a list of Heads) as one flat tuple."""
    if isinstance(grads, (tuple, list)):
        return tuple(g for part in grads for g in (flattened(part) if isinstance(part, (tuple, list)) else (part,)))
    return grads
