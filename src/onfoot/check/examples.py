"""Inputs for every op of an engine's table, small and awkward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onfoot.ops import Head
from onfoot.ops.dropout import dropout_pattern
from onfoot.ops.rope import angles, frequencies


class Example(NamedTuple):
    """Inputs of an op's forward pass, and the places and names of those that have gradients."""

    inputs: list[Any]
    wrt: list[int]
    names: list[str]
    pack: Callable[..., list[Any]] | None = None  # flat inputs -> what the op takes, where it takes something nested


def _of(names: str, inputs: list[Any], wrt: list[int] | None = None) -> Example:
    gradients = names.split()
    return Example(inputs, list(range(len(gradients))) if wrt is None else wrt, gradients)


def examples(seed: int = 0) -> dict[str, Example]:
    """One example for each op, by the op's name."""
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
    lora = [x, draw((6, 2)), draw((2, 7)), 0.75]
    parameters = "dw_q db_q dw_k db_k dw_v db_v"
    return {
        "linear": _of("dx dweight dbias", [x, draw((6, 7)), draw(7)]),
        "frozen_linear": _of("dx", [x, draw((6, 7)), draw(7)]),
        "embedding": _of("dweight", [ids, draw((7, 4))], [1]),
        "layer_norm": _of("dx dweight dbias", [x, gamma, draw(6)]),
        "rms_norm": _of("dx dweight", [x, gamma]),
        "relu": _of("dx", [away_from_0]),
        "gelu_tanh": _of("dx", [3 * x]),
        "gelu_erf": _of("dx", [3 * x]),
        "swiglu": _of("dgate dup", [2 * x, draw((2, 5, 6))]),
        "rope": _of("dx", [draw((2, 3, 5, 6)), cos, sin]),
        "attention": _of("dq dk dv", [q, k, v]),
        "grouped_query": _of("dq dk dv", [q, k[:, :2], v[:, :2]]),
        "head": _of(f"da {parameters}", [x, *head])._replace(pack=lambda a, *p: [a, Head(*p)]),
        "multi_head": _of(f"da {parameters} {parameters}", [x, *head, *other])._replace(
            pack=lambda a, *p: [a, [Head(*p[:6]), Head(*p[6:])]]
        ),
        "cross_entropy": _of("dlogits", [draw((2, 5, 7)), targets, 7.0]),
        "lora": _of("dx ddown dup", lora),
        "lora_linear": _of("dx ddown dup", [x, draw((6, 7)), draw(7), *lora[1:]], [0, 3, 4]),
        "dropout": _of("dx", [x, dropout_pattern(x.shape, 0.4, 1, "float64")]),
    }


def flattened(grads: Any) -> Any:
    """Gradients that are nested (a Head, a list of Heads) as one row."""
    if isinstance(grads, (tuple, list)):
        return tuple(g for part in grads for g in (flattened(part) if isinstance(part, (tuple, list)) else (part,)))
    return grads
