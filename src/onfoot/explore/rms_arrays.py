"""The arrays of an RMS norm: its parameters with their gradients, and the values in its formulas, both ways."""

from __future__ import annotations

from functools import cache

import numpy as np

from onfoot.explore.study_context import OVER_TOKENS, StudyContext
from onfoot.explore.tensors import FEATURE, TOKEN
from onfoot.explore.terms import Factor, Term, dot, product
from onfoot.tables import Formula


def add_rms(m: StudyContext, prefix: str, i: str, x: str, delta: str, name: str, weight: str) -> list[str]:
    """Adds r, ā, x and mean(ā ∘ x) of the norm `i`; returns their ids.

    `x` is the id of its input and `delta` that of the error signal at its output; `name` is its weight's parameter and
    `weight` that parameter's id.
    """

    @cache
    def inside() -> dict[str, np.ndarray]:
        a, d = m.tensors.value(x), m.tensors.value(delta)  # (T, d) both
        r = np.sqrt((a * a).mean(axis=-1) + m.config.rms_norm_eps)  # (T,)
        normed, signal = a / r[:, None], d * m.weight(name)
        return {"r": r, "ā": normed, "x": signal, "mean āx": (normed * signal).mean(axis=-1)}

    shape = m.tensors[x].shape
    of_root, of_normed, of_signal, of_along = (f"{prefix}{symbol}_{i}" for symbol in ("r", "ā", "x", "mean āx"))
    symbol = m.tensors[x].symbol
    m.add(of_root, f"r_{i}", lambda: inside()["r"], (TOKEN,), known_shape=shape[:1])
    divided = product(f"{symbol} / r_{i}", (x, "rc"), Factor(of_root, "r", -1))
    m.add(of_normed, f"ā_{i}", lambda: inside()["ā"], terms=(divided,), known_shape=shape)
    scaled = product(f"Δ ∘ ~{m.tensors[weight].symbol}", (delta, "rc"), (weight, "c"))
    formula = Formula(f"x_{i} = {m.tensors[delta].symbol} ∘ ~{m.tensors[weight].symbol}")
    m.add(of_signal, f"x_{i}", lambda: inside()["x"], terms=(scaled,), formula=formula, known_shape=shape)
    m.add(of_along, f"mean(ā_{i} ∘ x_{i})", lambda: inside()["mean āx"], (TOKEN,), known_shape=shape[:1])
    return [of_root, of_normed, of_signal, of_along]


def rms_norm(
    m: StudyContext, prefix: str, i: str, layer: str, x: str, delta: str
) -> tuple[list[tuple[str, str]], list[str]]:
    """Adds the RMS norm i of a block: its weight with its gradient, and the values in its formulas."""
    of_weight = dot(f"Σ_tokens ā_{i} ∘ Δ", OVER_TOKENS, (f"{prefix}ā_{i}", "jc"), (delta, "jc"))
    name = f"{layer}.weight"
    pair = m.parameter(prefix, f"w_{i}", name, (FEATURE,), (of_weight,))
    return [pair], add_rms(m, prefix, i, x, delta, name, pair[0])


def rms_forward_terms(prefix: str, i: str, weight: str = "") -> tuple[Term, ...]:
    """ā ∘ w."""
    weight = weight or f"w_{i}"
    shown = weight.rpartition(".")[2]
    return (
        product(f"ā_{i} ∘ ~{shown}", (f"{prefix}ā_{i}", "rc"), (weight if "." in weight else prefix + weight, "c")),
    )


def rms_backward_terms(prefix: str, i: str) -> tuple[Term, ...]:
    """The two terms of an RMS norm's error signal: x, minus its component along ā, both over r."""
    over_root = Factor(f"{prefix}r_{i}", "r", -1)
    along = (f"{prefix}ā_{i}", "rc"), (f"{prefix}mean āx_{i}", "r")
    return (
        product(f"x_{i} / r_{i}", (f"{prefix}x_{i}", "rc"), over_root),
        product(f"ā_{i} ∘ mean(ā_{i} ∘ x_{i}) / r_{i}", *along, over_root, sign=-1),
    )
