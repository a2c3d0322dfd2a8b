"""What the documents contain, item by item, compiled by reading them: the list that docs/paper/ must cover.

Displays without a number are counted within their section, in the order of the text; a derivation that goes on in the
next display counts once. The comments say what each is, so that the list can be compared with the documents.
"""

from __future__ import annotations

PARTS = {5: "abcd", 9: "ab", 30: "ab", 31: "ab", 32: "ab", 55: "ab"}
NUMBERED = [f"({n}{'.' + part if part else ''})" for n in range(1, 56) for part in PARTS.get(n, [""])]

DISPLAYS = {
    "§1": 4,  # y_pred = N(a_0); three columns; the losses; shiftByOne
    "§2": 5,  # one-hot row; its product; one-hot matrix; its product; Δ·da
    "§3.1": 15,  # input; output; → values; att⟨,⟩; = ?; attempt 2; attempt 3; ρ_raw drawn; kᵗ and q; (13) drawn; row;
    #              softmax of it; Att(Att); a_{i+1}(t*); a_i(t_α)
    "§3.2": 9,  # split; values; (25)'s lines; Δ_causal's rows; (26)'s lines; d(q kᵗ); queries; keys; Δ_raw transposed
    "§3, properties": 3,  # Att(Pa); cached row of ρ; cached row of a
    "§4": 3,  # list of heads; applied; Δ sliced
    "§5": 3,  # μ and σ; ā(t*); a(t*)
    "§6": 3,  # r(f + f′); d and u; Δ·da
    "§7": 8,  # sizes; a_5 and a_10; y_pred; n_block; n; LoRA's a_12; its Δ_11, ∂d, ∂u; n_lora
    "A": 8,  # ρa; rows mixed; A·(BCD); its cycles; (A∘B)J; (51)'s lines; Σ(AB)_ij; a↑
    "B": 3,  # b broadcast; G + Hbᵗ; one row
}
UNNUMBERED = [f"{section}, {i}" for section, n in DISPLAYS.items() for i in range(1, n + 1)]

SECTIONS = [
    "Abstract",
    *["§1", "§1, data", "§1, next-token prediction"],
    *["§2", "§2, positions", "§2, forward", "§2, backward"],
    *["§3", "§3.1", "§3.1, starting from the end", "§3.1, attention weights"],
    *["§3.1, attempt 1", "§3.1, attempt 2", "§3.1, attempt 3", "§3.1, observations"],
    *["§3.1, final enhancements", "§3.1, summary", "§3.1, complexity", "§3.1, biases", "§3.1, composition"],
    *["§3.2", "§3, equivariance", "§3, KV cache"],
    *["§4", "§4, forward", "§4, backward", "§5", "§5, forward", "§5, backward", "§6", "§6, forward", "§6, backward"],
    *["§7", "§7, architecture", "§7, how many parameters", "§7, with LoRA", "§7, sampling"],
    *["Appendix A", "Appendix A, linear mixing", "Appendix A, Frobenius products", "Appendix A, broadcasting"],
    *["Appendix A, sums over rows", "Appendix B", "Appendix B, shift invariance", "Appendix B, permutations"],
]
TABLES_AND_NOTES = [
    *["Table 1", "Table of §4", "Table 2", "Table 3", "Figure of §7"],
    *["Footnote 1", "Footnote 2", "Footnote 3", "Footnote 4"],
]

EARLIER_PAPER = ["(11)", "(13)", "(39)", "(41)", "(42)", "(43)", "(48)", "(52)", "(53)", "§5", "§9"]

BLOG_POST = [
    *["division by d_ρ", "A·B = Σ_rows A ⊖ B = Σ A ∘ B", "ρ_raw = q·k as a sum", "the mean of a score is 0"],
    *["its variance is d_ρ", "why dot products get large", "⟨∂L/∂W, dW⟩_F"],
]
NOTE_WITH_LISTINGS = [
    *["Attention(Q, K, V), S, A, O", "∂L/∂O", "∂L/∂A", "∂A_i/∂S_i", "∂L/∂S by matrix products", "∂L/∂Q", "∂L/∂K"],
    *["∂L/∂V", "summary of the gradients", "listing: forward", "listing: split_heads", "listing: backward"],
    *["listing: optimised backward", "techniques 1 to 4", "technique 5: mixed precision"],
    *["technique 6: gradient clipping", "technique 7: sparse updates", "technique 8: kernel fusion", "A_ij"],
    *["∂A_ij/∂S_ij, ∂A_ij/∂S_ik", "J_i", "∂L/∂S = ∂L/∂A · J", "two lines of code for dS"],
    *["why W^Q, W^K, W^V are matrices", "why a dot product, why √d_k", "table of components", "table of shapes"],
    *["gradients (1) to (6)", "table of gradients", "suggestion: a numerical example"],
]
NOTE_ON_QK = [
    *["A = softmax(QKᵗ/√d_k)", "Z = QKᵗ and shapes", "∂Z/∂Q = K, ∂Z/∂K = Qᵗ", "∂L/∂Q = ∂L/∂A · K"],
    "∂L/∂K = (∂L/∂A)ᵗ · Q",
]

ITEMS = {  # page and heading -> what its table must have
    ("sections.md", "Sections"): SECTIONS,
    ("sections.md", "Tables, figure, footnotes"): TABLES_AND_NOTES,
    ("equations.md", "With a number"): NUMBERED,
    ("equations.md", "Without a number"): UNNUMBERED,
    ("others.md", "The earlier paper"): EARLIER_PAPER,
    ("others.md", "The blog post on attention's variance"): BLOG_POST,
    ("others.md", "The note with NumPy listings"): NOTE_WITH_LISTINGS,
    ("others.md", "The note on the gradients of QKᵗ"): NOTE_ON_QK,
}
