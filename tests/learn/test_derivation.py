"""The derivations that `onfoot learn derivation` prints: they have the formulas, as text that a terminal can show."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

from onfoot.learn import EXERCISES, get_exercise
from onfoot.learn.answer import WIDTH
from onfoot.learn.derivation import derivation_text
from onfoot.learn.plain_page import plain_page
from onfoot.learn.tex import plain_formula

PAGES = sorted((Path(__file__).parents[2] / "docs" / "equations").glob("*.md"))
# the answers that the derivation of each exercise must have
ANSWERS = {
    1: ("∂x = Δwᵗ", "∂w = xᵗΔ", "∂b = Σ_tokens Δ"),
    2: ("∂x = Δ ∘ g'(x)", "∂x = Δ  where  x > 0    0  elsewhere", "(1 − tanh² u) ∘ u'"),
    3: ("∂s = ρ ∘ [D − ~(D ⊖ ρ)]", "Δ_12 = (1/n) (y_pred − y_gt)"),
    4: ("∂w_emb = ohe(x)ᵗΔ",),
    5: ("∂x = (1/~σ) [g − mean(g) − ā ∘ mean(ā ∘ g)]", "∂b = Σ_tokens Δ"),
    6: ("∂v = ρᵗΔ", "∂q = Δ_raw k", "∂k = Δ_rawᵗ q"),
    7: ("Δ_scaled = Δ_causal", "∂q = Δ_raw k"),
    8: ("Δ_v = ρᵗΔw_vᵗ", "∂x = Σ_h ∂x^(h)"),
    9: ("Δ_5 = Δ_10 + LNᵇ(Δ_6)", "Δ_1 = Δ_5 + LNᵇ(Δ_2)"),
    10: ("∂w_tok = ohe(a_0)ᵗΔ_1 + Δ_12ᵗ a_11",),
    11: ("Δ_1 = Δ_5 + LNᵇ(Δ_2)", "a_11ᵗ Δ_12"),
    12: ("∂D = αxᵗΔUᵗ", "∂U = α(xD)ᵗΔ"),
    13: ("ρ_new = softmax(q_new[k_cache ⊕ k_new]ᵗ/√d_ρ)",),
    14: ("∂x = (1/~r) [g − ā ∘ mean(ā ∘ g)]", "∂w = Σ_tokens ā ∘ Δ"),
    15: ("∂a = Δ_(a') cos φ + Δ_(b') sin φ",),
    16: ("∂g = Δ ∘ u ∘ [σ(g) + g ∘ σ(g) ∘ (1 − σ(g))]", "∂u = Δ ∘ g ∘ σ(g)"),
    17: ("∂v_j = Σ_(h:j(h)=j) ρ_hᵗ Δ_h",),
    18: ("v ← β_2 v + (1 − β_2)g ∘ g",),
    19: ("ẏ = ẋ w + xẇ + ~ḃ", "ρ̇ = ρ ∘ [ṡ − ~(ρ ⊖ ṡ)]", "ẏ = ā̇ ∘ w + ā ∘ ẇ + ḃ"),
}
LEFT_OVERS = re.compile(r"\\[A-Za-z]|\$|<a |<!--|\]\(|`|\btest_|\*\*|\.py\b|\(\s*\)|[(,] [.)]|\.\. ")


@pytest.mark.parametrize("number", ANSWERS)
def test_a_derivation_has_its_answer_and_reads_as_text(number: int) -> None:
    text = derivation_text(get_exercise(number))
    assert text.startswith(f"The derivation of exercise {number}: ")
    assert [answer for answer in ANSWERS[number] if unicodedata.normalize("NFC", answer) not in text] == []
    assert LEFT_OVERS.findall(text) == []
    prose = [line for line in text.split("\n") if not line.startswith("    ")]
    assert max(map(len, prose)) <= WIDTH


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1, "There dy, dx and dw are small changes, not gradients: the exercises write δ for this d."),
        (4, "There dw_emb is a small change, not a gradient:"),  # in its code, dy is the gradient
        (16, ""),
    ],
)
def test_a_derivation_with_differentials_says_that_they_are_not_the_gradients_of_that_name(
    number: int, said: str
) -> None:
    head = " ".join(derivation_text(get_exercise(number)).split("\n\n")[1].split())
    assert said in head and ("small change" in head) == bool(said)


def test_every_exercise_has_an_answer() -> None:
    assert list(ANSWERS) == [exercise.number for exercise in EXERCISES]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_page_of_equations_can_be_printed(path: Path) -> None:
    assert "\\" not in re.sub(r"\\[nt]", "", plain_page(path.read_text(encoding="utf-8")))


FORMULAS = {
    r"\Delta\cdot dy = (\Delta w^t)\cdot dx": "Δ · dy = (Δwᵗ) · dx",
    r"\frac{1}{n}\sum_t[\mathrm{lse}(a(t)) - a(t,y_t)]": "(1/n) Σ_t[lse(a(t)) − a(t,y_t)]",
    r"x^{-2i/D} = -x^2/\sqrt{2\pi}": "x^(−2i/D) = −x²/√(2π)",
    r"\widetilde{(\rho\ominus ds)} + \widetilde b": "~(ρ ⊖ ds) + ~b",
    r"\dot{\partial w} = \bar a\thinspace\mathrm{mean}(\dot{\bar a})": "(∂w)\u0307 = a\u0304 mean(a\u0304\u0307)",
    r"w_{\mathrm{emb}}^t x_{11}y e^{a_u}": "w_embᵗ x_11 y e^(a_u)",
    r"1-\tanh^2u\cdot\log\rho_k": "1 − tanh² u · log ρ_k",
    r"\begin{cases}s & \beta\le\alpha\cr-\infty & \beta\gt\alpha\end{cases}": "[s  β ≤ α; −∞  β > α]",
}


@pytest.mark.parametrize("tex", FORMULAS)
def test_a_formula_is_text_that_means_the_same(tex: str) -> None:
    assert plain_formula(tex) == unicodedata.normalize("NFC", FORMULAS[tex])


def test_a_command_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match=r"\\oint is not a command"):
        plain_formula(r"\oint x")
