"""Arrays as JSON for the page: shapes, formulas, terms, source lines, and numbers as base64."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.explore.mathml import tree
from onfoot.explore.sources import lines_of

if TYPE_CHECKING:
    from onfoot.explore.tensors import Tensor

# formulas in the page's prose
PAGE_FORMULAS = [
    "ρ", "Δ_causal", "Δ_scaled", "Δ_0", "∂b_k",
    "∂d = α aᵗ Δ uᵗ",
    "∂w_tok = ohe(a_0)ᵗ Δ_1 + (a_11ᵗ Δ_12)ᵗ",
    "Δ_5 = Δ_10 + LNᵇ_5(Δ_6)",
    "Δ_1 = Δ_5 + LNᵇ_1(Δ_2)",
    "Δ_5 = Δ_10 + RMSᵇ_5(Δ_6)",
    "Δ_1 = Δ_5 + RMSᵇ_1(Δ_2)",
    "w (1 − lr λ)",  # AdamW, ADAM.1 to ADAM.5
    "m = β_1 m + (1 − β_1) ∂w",
    "v = β_2 v + (1 − β_2) (∂w)²",
    "√v / √(1 − β_2^{step}) + ε",
    "lr / (1 − β_1^{step}) · m / (√v / √(1 − β_2^{step}) + ε)",
    "Σ ∂w ∘ (new w − w)", "α a d u", "u = 0", "u", "d", "‖u‖", "‖∂d‖", "‖∂u‖",
]  # fmt: skip


def encoded(value: np.ndarray) -> str:
    """An array as base64 of its float64 numbers, little-endian and row by row."""
    return base64.b64encode(value.astype("<f8").tobytes()).decode()


def describe(tensor: Tensor) -> dict[str, Any]:
    """Everything about an array except its numbers."""
    formula = tensor.formula
    out: dict[str, Any] = {"symbol": tensor.symbol, "shape": list(tensor.shape), "axes": list(tensor.axes)}
    optional = {
        "formula": formula.text,
        "where": where_parts(formula.where),
        "equations": list(formula.equations),
        "terms": [term.to_json() for term in tensor.terms],
        "note": tensor.note,
        "parameter": tensor.parameter,
        "part": tensor.part,
        "gradient": tensor.is_gradient,
        "rows": None if tensor.rows is None else tensor.rows.tolist(),
        "columns": None if tensor.columns is None else tensor.columns.tolist(),
        "row_labels": tensor.row_labels,
        "source": lines_of(tensor.symbol, formula.equations, tensor.family) if formula.text else [],
    }
    return {**out, **{key: value for key, value in optional.items() if value}}


def where_parts(where: str) -> list[str]:
    """The definitions of a formula's symbols, one string per definition."""
    return where.split(",  ") if where else []


def strings_in(value: Any) -> list[str]:
    """All strings in a nested structure."""
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for child in children for text in strings_in(child)]


def formulas_of(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Every formula, symbol and label of the arrays: text -> MathML."""
    found: dict[str, Any] = {}
    for tensor in tensors:
        labels = [term.label for term in tensor.terms]
        for text in (tensor.symbol, tensor.formula.text, *where_parts(tensor.formula.where), *labels):
            if text and text not in found:
                found[text] = tree(text)
    return found
