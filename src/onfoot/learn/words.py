"""What the checker says, in the words of an exercise: its dout is the learner's dy, its ā is `normed`.

The checker's words are those of the documents. A learner has only the exercises, so that every name and explanation
is translated before it is shown; a factor is also explained.
"""

from __future__ import annotations

import re

BEFORE, AFTER = r"(?<![A-Za-z_.])", r"(?![A-Za-z_])"  # Python's \b takes ᵗ for a letter

# the gradient that a function gets, if it is not dy
UPSTREAM = {
    "softmax_gradient": "drho",
    "cross_entropy_backward": "dloss",
    "block_backward": "d10",
    "tied_backward": "dlogits",
}
# in every exercise: (pattern, words)
COMMON = (
    (r"dρ", "drho"),
    (r"ρ", "rho"),
    (r"x φ\(x\)", "x times the derivative of (1 + tanh u)/2"),
    (r"φ\(x\), the derivative of Φ", "the derivative of (1 + tanh u)/2"),
    (r"φ\(x\)", "the derivative of (1 + tanh u)/2"),
    (r"Φ\(x\)", "(1 + tanh u)/2"),
    (r"γ", "weight"),
    (r"ā|x̂", "normed"),
    (r"−y_gt/y_pred is the gradient of y_pred", "−1/softmax(logits) at the target is the gradient of softmax(logits)"),
    (r"y_pred − y_gt", "softmax(logits), minus 1 at the target,"),
    (r"has a zero row in y_gt", "has nothing to subtract"),
    (r"the one-hot targets y_gt|y_gt", "the 1 at the target"),
    (r"y_pred", "softmax(logits)"),
    (r"(?<=by )d_k", "D"),
    (r"√d_k", "√D"),
    (r"√d_v", "√Dv"),
    (BEFORE + r"d_k" + AFTER, "D"),
    (BEFORE + r"d_v" + AFTER, "Dv"),
    (BEFORE + r"H_kv" + AFTER, "Hkv"),
    (r"n = D" + AFTER, "T = D"),
    (r" ?\(eq \d+\)", ""),
    (r"The bracket of eq \d+", "The bracket"),
    (r"\bdiag\(rho\) − rhoᵗrho", "the matrix of derivatives"),
    (r": rho_k \(δ_jk − rho_k\)", ""),
    (r" \(ddof=1, PyTorch's default\)", ""),
    (r"dS, the gradient of q kᵗ", "draw, the gradient of q kᵗ"),
    (r"dS" + AFTER, "draw"),
    (r" ∘ ", " * "),
    (r"∘", "*"),
    (r"α/r", "scale"),
    (r"r/α", "1/scale"),
    (r"α/√r", "alpha/√r"),
    (r"α", "alpha"),
    (r"θ", "theta"),
    (r"β₁", "beta1"),
    (r"β₂", "beta2"),
    (r"β", "beta"),
    (r"weight_decay", "decay"),
    (r"param\b", "p"),
    (r"grad\b", "g"),
    (r"oheᵗ Δ_1", "the gradient through the embedding"),
    (r"Δ_5", "the gradient of a5"),
    (r"the sum h \+ …", "the sum a5 + a9"),
    (r"the sum x \+ …", "the sum x + a4"),
)
NORM = ((r"(?<![\w.])d(?!\w)", "C"),)  # the number of features
OF_FUNCTION: dict[str, tuple[tuple[str, str], ...]] = {
    "layer_norm_backward": NORM,
    "rms_norm_backward": (*NORM, (r"\brms\b", "r")),
    "gelu_tanh_backward": ((r"x σ\(1.702 x\)", "x sigmoid(1.702 x)"),),
    "layer_norm_tangent": ((r"1/σ", "rstd"), (r"σ", "1/rstd"), (r"μ", "the mean")),
    "softmax_tangent": ((r"dρ", "scores_dot"),),
    "swiglu_backward": ((r"\bout is a product", "y is a product"),),
    "block_backward": NORM,
    "gpt2_backward": ((r"used B times", "used by every sequence"),),
}
# the name of a factor: (what it is, as if ... if the gradient is too small, as if ... if it is too large)
TOKENS = "the number of tokens in the batch"
FACTORS: dict[str, tuple[str, str, str]] = {
    "B·n": (TOKENS, "averaged over the tokens, where a sum belongs", "it lacks a division, or is added once per token"),
    "n": (
        "the number of tokens of a sequence",
        "averaged over the tokens of a sequence, where a sum belongs",
        "it lacks a division, or is added once per token of a sequence",
    ),
    "B": (
        "the number of sequences",
        "averaged over the sequences, where a sum belongs",
        "it lacks a division, or is added once per sequence",
    ),
    "H": (
        "the number of heads",
        "averaged over the heads, where a sum belongs",
        "it lacks a division, or is added once per head",
    ),
    "G": (
        "the number of query heads in a group",
        "averaged over the group, where a sum belongs",
        "it lacks a division, or is added once per head of the group",
    ),
    "H_kv": (
        "the number of key/value heads",
        "averaged over the key/value heads, where a sum belongs",
        "it lacks a division, or is added once per key/value head",
    ),
    "d": ("the number of features", "averaged over the features, where a sum belongs", "a sum where a mean belongs"),
    "d_k": ("D, the width of q and k", "divided by D once too often", "a division by D is missing"),
    "√d_k": ("√D", "divided by √D once too often", "the division by √D is missing"),
    "V": (
        "the size of the vocabulary",
        "averaged over the vocabulary, where a sum belongs",
        "a sum where a mean belongs",
    ),
    "in": ("the number of features in", "averaged over them, where a sum belongs", "a sum where a mean belongs"),
    "out": ("the number of features out", "averaged over them, where a sum belongs", "a sum where a mean belongs"),
    "α/r": ("the scale", "divided by scale, or not multiplied by it", "multiplied by scale once too often"),
    "r": ("the rank", "divided by the rank once too often", "a division by the rank is missing"),
    "α": ("alpha", "not multiplied by alpha", "multiplied by alpha once too often"),
}
FACTOR = re.compile(r"(?P<is>is|are) (?P<name>[^\s,]+)(?: = (?P<value>[\d.,e+]+))? times too (?P<how>small|large)")


def own_words(text: str, function: str) -> str:
    """A text of the checker in the words of the exercise that has this function."""
    found = FACTOR.search(text)
    if found is not None and found["name"] in FACTORS:
        size = found["value"] or f"{FACTORS[found['name']][0]} "
        text = text.replace(found[0], f"{found['is']} {size.strip()} times too {found['how']}")
    upstream = UPSTREAM.get(function, "dy")
    if function == "block_backward" and re.search(r"dx = dout|dweight = dout|dout ∘|dout is summed|xᵗ dout", text):
        upstream = "dy"  # of a layer inside the block
    rules = ((BEFORE + r"dout" + AFTER, upstream), *OF_FUNCTION.get(function, ()), *COMMON)
    for pattern, words in rules:
        text = re.sub(pattern, words, text)
    return text


def factor_words(name: str) -> str:
    """A sentence that explains the factor in the name of a mistake, or ""."""
    found = FACTOR.search(name)
    if found is None or found["name"] not in FACTORS:
        return ""
    what, small, large = FACTORS[found["name"]]
    begin = f"{found['value']} is {what}" if found["value"] else ""
    as_if = small if found["how"] == "small" else large
    said = f"as if {as_if}" if as_if.startswith(("averaged", "divided", "multiplied", "not")) else as_if
    return f"{begin}: {said}." if begin else f"{said[:1].upper()}{said[1:]}."


def legend(function: str) -> str:
    """What the words of the checker's whole report mean in an exercise."""
    upstream = UPSTREAM.get(function, "dy")
    return f"In the report dout is your {upstream}, B is the number of sequences and n that of tokens in one."


def report_text(report: str, derivation: str) -> str:
    """The checker's whole report; where it names a page of the repository, the command that prints the derivation."""
    return re.sub(r"docs/equations/\S+", derivation, report)
