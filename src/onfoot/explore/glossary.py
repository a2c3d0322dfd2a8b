"""What every symbol and operator in the page's formulas means, in a sentence, with its shape.

The meanings are those of docs/equations and of `onfoot.tables`. A symbol is looked up first as it is (`w_tok`), then
with i in place of its number (`a_5` as `a_i`).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from onfoot.explore.mathml import TOKENS, tree

PAPER = "L. Boué, “Deep learning for pedestrians: backpropagation in Transformers”, arXiv:2512.23329"


class Entry(NamedTuple):
    """A symbol as text, what it is called, a plain sentence, and its shape (T tokens, d features, V tokens known)."""

    symbol: str
    name: str
    meaning: str
    shape: str = ""


ENTRIES = [
    Entry("a_i", "activation", "The output of step i of the forward pass: one row per token, one column per feature.", "T × d"),
    Entry("a_0", "tokens", "The text as numbers: the id of each token.", "T"),
    Entry("a_tok", "token embedding", "The row of the token table that belongs to each token.", "T × d"),
    Entry("a_pos", "position embedding", "The row of the position table that belongs to each position.", "T × d"),
    Entry("a_12", "scores (logits)", "One score per token of the vocabulary: the higher, the more probable as the next token.", "T × V"),
    Entry("a_i^h", "output of a head", "The columns of the attention’s output that one head computes.", "T × d_h"),
    Entry("a", "activation", "The input of the layer that is meant.", "T × d"),
    Entry("ā_i", "normalised activation", "Each token’s row with its mean subtracted and divided by its standard deviation σ.", "T × d"),
    Entry("Δ_i", "error signal", "How the loss changes with each number of the activation of the same index: ∂L/∂a. Negative: raising that number lowers the loss.", "the shape of a_i"),
    Entry("Δ", "error signal", "How the loss changes with each number of the layer’s output.", "the shape of the output"),
    Entry("Δ_i^h", "error signal of a head", "The part of the error signal that belongs to one head.", "T × d_h"),
    Entry("Δ_v", "error signal through the values", "What reaches the head’s input through its values.", "T × d"),
    Entry("Δ_q", "error signal through the queries", "What reaches the head’s input through its queries.", "T × d"),
    Entry("Δ_k", "error signal through the keys", "What reaches the head’s input through its keys.", "T × d"),
    Entry("Δ_causal", "gradient of the masked scores", "How the loss changes with each score after the mask; exactly 0 above the diagonal.", "T × T"),
    Entry("Δ_scaled", "gradient of the scaled scores", "How the loss changes with each score after the division by √d_ρ.", "T × T"),
    Entry("Δ_raw", "gradient of the raw scores", "How the loss changes with each product of a query and a key.", "T × T"),
    Entry("∂", "gradient of", "How the loss changes with each number of what follows. A training step moves a parameter against it.", "the shape of what follows"),
    Entry("∂_t", "part of a gradient", "The part that the loss at token t has in the gradient."),
    Entry("w_i", "weight", "A matrix of parameters that the step multiplies its input a_i by; of a layer norm, one factor γ per feature.", "in × out, or d"),
    Entry("w", "weight", "The factors γ of the layer norm that is meant, one per feature. Of AdamW: the parameter.", "d"),
    Entry("b_i", "bias", "One number per output feature, added to every token; of a layer norm, its β.", "out"),
    Entry("w_tok", "token table", "One row of features per token of the vocabulary. A tied table is also the weight of the scores.", "V × d"),
    Entry("w_pos", "position table", "One row of features per position.", "positions × d"),
    Entry("w_q", "weight of the queries", "Makes the head’s queries of its input.", "d × d_ρ"),
    Entry("w_k", "weight of the keys", "Makes the head’s keys of its input.", "d × d_ρ"),
    Entry("w_v", "weight of the values", "Makes the head’s values of its input.", "d × d_h"),
    Entry("b_q", "bias of the queries", "Added to every query.", "d_ρ"),
    Entry("b_k", "bias of the keys", "Added to every key. It changes no attention weight, so its gradient is 0.", "d_ρ"),
    Entry("b_v", "bias of the values", "Added to every value.", "d_h"),
    Entry("q", "queries", "What each token looks for.", "T × d_ρ"),
    Entry("k", "keys", "What each token offers to be found by.", "T × d_ρ"),
    Entry("v", "values", "What each token hands on when it is attended to. Of AdamW: the running mean of the squared gradient.", "T × d_h"),
    Entry("m", "momentum", "Of AdamW: the running mean of the gradient.", "the shape of w"),
    Entry("ρ", "attention weights", "How much each token (row) takes from each token (column); every row sums to 1.", "T × T"),
    Entry("ρ_raw", "raw scores", "The dot product of each query with each key.", "T × T"),
    Entry("ρ_scaled", "scaled scores", "The raw scores divided by √d_ρ.", "T × T"),
    Entry("ρ_causal", "masked scores", "The scaled scores with −∞ where a token would look at a later one.", "T × T"),
    Entry("d_ρ", "width of queries and keys", "The number of features of a query; scores are divided by its root.", "a number"),
    Entry("d_h", "width of a head", "The number of features that a head puts out.", "a number"),
    Entry("n_T", "number of tokens", "The length of the text, T.", "a number"),
    Entry("n", "number of targets", "The loss is the mean over them, so its gradient is divided by them.", "a number"),
    Entry("σ_i", "standard deviation", "Of each token’s features: √(variance + ε).", "T"),
    Entry("ε", "epsilon", "A small number that keeps the division by σ finite.", "a number"),
    Entry("γ", "gain of a layer norm", "One factor per feature; this page writes it as the layer norm’s w.", "d"),
    Entry("β", "shift of a layer norm", "One number per feature; this page writes it as the layer norm’s b.", "d"),
    Entry("x_i", "weighted error signal", "The error signal at the layer norm’s output, times its factors w.", "T × d"),
    Entry("x", "weighted error signal", "The error signal at the layer norm’s output, times its factors w.", "T × d"),
    Entry("LNᵇ_i", "backward pass of a layer norm", "Turns the error signal at its output into that at its input: x without its mean and without its part along ā, divided by σ.", "T × d"),
    Entry("g", "activation function", "Applied to each number: GELU or ReLU.", "same shape"),
    Entry("g′", "derivative of the activation function", "The slope of g at each number.", "same shape"),
    Entry("gate", "gate", "The factor between 0 and about 1 by which g multiplies each number.", "T × inner width"),
    Entry("Φ", "normal distribution function", "The probability that a normal random number is smaller."),
    Entry("u", "argument of tanh", "Of tanh-GELU: √(2/π) (a + 0.044715 a³). In LoRA: the second factor of the low-rank matrix, 0 at the start."),
    Entry("d", "LoRA’s first factor", "It maps the input to a few features (the rank).", "in × rank"),
    Entry("u_i", "LoRA’s second factor", "It maps the few features to the output; 0 at the start.", "rank × out"),
    Entry("d_i", "LoRA’s first factor", "It maps the input to a few features (the rank).", "in × rank"),
    Entry("α", "LoRA’s scale", "The factor of the low-rank addition.", "a number"),
    Entry("π", "pi", "3.14159…"),
    Entry("y_pred", "prediction", "The probability of each token of the vocabulary to be the next.", "T × V"),
    Entry("y_gt", "truth", "1 at the token that really follows, 0 elsewhere (ground truth).", "T × V"),
    Entry("ℓ", "loss per token", "−log of the probability that the model gave to the token that follows.", "T"),
    Entry("L", "loss", "The mean of ℓ over all targets: the one number that training lowers.", "a number"),
    Entry("h", "head", "The index of a head; a sum over h adds all heads."),
    Entry("Σ", "sum", "Adds up what follows, over the index below it."),
    Entry("Σ_tokens", "sum over tokens", "Adds the rows: one number per feature.", "T × d to d"),
    Entry("Σ_h", "sum over heads", "Adds what every head returns."),
    Entry("ᵗ", "transpose", "Rows become columns. A step that multiplies by w forward multiplies by wᵗ backward.", "n × m to m × n"),
    Entry("∘", "elementwise product", "Each number times the number at the same place (Hadamard product).", "equal shapes"),
    Entry("⊖", "row-wise dot product", "Multiplies two rows elementwise and adds up: one number per row.", "two of n × m, to n"),
    Entry("~", "broadcast", "One row repeated for every token, or one number per row repeated along it.", "to the shape of its neighbour"),
    Entry("√", "square root", "Of what stands under it."),
    Entry("²", "square", "Times itself."),
    Entry("³", "cube", "To the third power."),
    Entry("−∞", "minus infinity", "Its exponential is exactly 0, so softmax gives it no weight."),
    Entry("·", "product", "Of two numbers; of two arrays, the sum of all elementwise products."),
    Entry("/", "divided by", "Each number on the left by that on the right."),
    Entry("ohe", "one-hot rows", "A row of zeros with a 1 at the token’s id: times a table, it picks that row.", "T × V"),
    Entry("softmax", "softmax", "Makes weights of scores: positive, and every row sums to 1.", "same shape"),
    Entry("log", "natural logarithm", "Of each number."),
    Entry("exp", "exponential", "e to the power of each number."),
    Entry("tanh", "hyperbolic tangent", "Between −1 and 1."),
    Entry("max", "largest number", "Of the row; subtracted before exp so that nothing overflows."),
    Entry("mean", "mean", "Over the features of a token: one number per token.", "T × d to T"),
    Entry("var", "variance", "Over the features of a token: one number per token.", "T × d to T"),
    Entry("‖", "norm", "The root of the sum of all squares: one number for the size of an array.", "to a number"),
]  # fmt: skip
PLAIN_SIGNS = set("()[]{},.:=<>+−-|")  # they need no explanation
_BY_SYMBOL = {entry.symbol: entry for entry in ENTRIES}


def symbols_of(formula: str) -> list[str]:
    """The symbols and operators of a formula, in the glossary's spelling; words, numbers and brackets are left out."""
    tokens = [(match.lastgroup or "", match[0]) for match in TOKENS.finditer(formula)]
    out: list[str] = []
    for at, (kind, text) in enumerate(tokens):
        if kind in ("space", "script", "raised", "prime") or text in PLAIN_SIGNS or text.isdecimal():
            continue
        if kind == "number" and text != "−∞":
            continue
        raised = []
        for follows, script in tokens[at + 1 :]:
            if follows == "raised" and script in "ᵗ²³":
                raised.append(script)
            elif follows == "script":
                text += re.sub(r"[{}]", "", script)
            elif follows in ("raised", "prime"):
                text += "′" if follows == "prime" else script
            else:
                break
        if kind != "word" or find(text):
            out += [text, *raised]
    return out


def find(symbol: str) -> Entry | None:
    """The entry of a symbol: its own, or that of its kind (in the page: `glossaryEntry`)."""
    general = re.sub(r"\^\w+", "^h", re.sub(r"_\d+", "_i", symbol))
    for one in (symbol, general, re.sub(r"\^\w+", "", symbol)):
        if one in _BY_SYMBOL:
            return _BY_SYMBOL[one]
    return None


def glossary() -> dict[str, Any]:
    """The table for the page, with every symbol as MathML, and the paper's name."""
    letters = {entry.symbol: any(character.isalpha() for character in entry.symbol) for entry in ENTRIES}
    letters["ᵗ"] = False  # it stands above a letter, like the powers
    signs = {symbol: ["math", ["mo", symbol]] for symbol, is_letter in letters.items() if not is_letter}
    shown = [{**entry._asdict(), "tree": signs.get(entry.symbol) or tree(entry.symbol)} for entry in ENTRIES]
    return {"paper": PAPER, "entries": shown}
