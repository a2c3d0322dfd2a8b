"""The equations that the catalogued mistakes of these networks violate, in the notation of the page's formulas.

Every symbol is one of the glossary, so that the page explains it; `onfoot.check.equations` has them for the terminal.
"""

from __future__ import annotations

from typing import Any

from onfoot.check.equations import EQUATIONS
from onfoot.explore.mathml import tree

FORMULAS = {
    "2": "a_tok = ohe(a_0) w_tok",
    "3": "∂w_tok = ohe(a_0)ᵗ Δ_1, the rows of a repeated token summed",
    "12": "ρ_scaled = q kᵗ / √d_ρ",
    "13": "ρ_causal = ρ_scaled on and below the diagonal, −∞ above it",
    "15": "ρ = softmax(ρ_causal), row by row",
    "25": "Δ_causal = [Δ_3^h vᵗ − ~((Δ_3^h vᵗ) ⊖ ρ)] ∘ ρ",
    "28": "Δ_raw = Δ_scaled / √d_ρ",
    "33": "Δ_2^h = Δ_v + Δ_q + Δ_k",
    "34": "a_3 = the heads, side by side",
    "36": "ā_i = (a_i − mean a_i) / σ_i",
    "40": "LNᵇ_i(Δ) = [x − mean x − ā_i ∘ mean(ā_i ∘ x)] / σ_i, x = Δ ∘ ~w_i",
    "41": "∂w_i = Σ_tokens ā_i ∘ Δ",
    "ATT.1": "∂v = ρᵗ Δ_3^h",
    "ATT.2": "∂q = Δ_raw k",
    "ATT.3": "∂k = Δ_rawᵗ q",
    "CE.2": "Δ_12 = (y_pred − y_gt) / n, 0 in rows without a target",
    "FC.2": "Δ_i = Δ w_iᵗ",
    "FC.3": "∂w_i = a_iᵗ Δ",
    "FC.4": "∂b_i = Σ_tokens Δ",
    "G.4": "Δ_7 = Δ_8 ∘ g'(a_7)",
    "NET.1": "Δ_5 = Δ_10 + LNᵇ_5(Δ_6)",
    "NET.2": "Δ_1 = Δ_5 + LNᵇ_1(Δ_2)",
    "TIE.1": "∂w_tok = ohe(a_0)ᵗ Δ_1 + (a_11ᵗ Δ_12)ᵗ",
    "GLU.2": "Δ_g = Δ_8 ∘ a_u ∘ SiLU'(a_g)",
    "GLU.3": "Δ_u = Δ_8 ∘ a_g ∘ σ(a_g)",
    "GQA.1": "a_3^h = ρ v, with the values of the group of head h",
    "GQA.2": "∂k = Σ_h Δ_rawᵗ q, over the heads of the group",
    "GQA.3": "∂v = Σ_h ρᵗ Δ_3^h, over the heads of the group",
    "RMS.1": "ā_i = a_i / r_i",
    "RMS.3": "RMSᵇ_i(Δ) = [x − ā_i ∘ mean(ā_i ∘ x)] / r_i, x = Δ ∘ ~w_i",
    "RMS.4": "∂w_i = Σ_tokens ā_i ∘ Δ",
    "ROPE.1": "φ = t ω_i, of token t and pair i",
    "ROPE.4": "q = q_lin ∘ cos φ + (q_lin J) ∘ sin φ",
    "ROPE.5": "∂q_lin = ∂q ∘ cos φ − (∂q J) ∘ sin φ",
}


def violated(equation: str) -> dict[str, Any]:
    """An equation's number, its words, and its formula with the MathML, if there is one."""
    formula = FORMULAS.get(equation, "")
    return {
        "equation": equation,
        "equation_text": EQUATIONS.get(equation, ""),
        "formula": formula,
        "math": {formula: tree(formula)} if formula else {},
    }
