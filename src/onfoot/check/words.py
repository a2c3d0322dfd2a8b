"""Plain words for the pieces of the backward passes and for their arguments, as a finding names them.

A piece without an entry is called by its own name, with spaces.
"""

from __future__ import annotations

import inspect

from onfoot.check.layer import Piece
from onfoot.check.routes import WORDS

# piece: (what it is, its right formula)
PIECES: dict[str, tuple[str, str]] = {
    # attention
    "mask": ("the mask", "token t attends to itself and earlier tokens"),
    "scores": ("the scores", "q kᵗ/√d_k"),
    "weights": ("the weights ρ", "softmax of the masked scores, over the keys"),
    "drho": ("dρ", "dout vᵗ"),
    "row_dots": ("the row sum Σ dρ ρ", "(dρ ∘ ρ).sum(axis=-1, keepdims=True)"),
    "dscores": ("the gradient of the scores", "(dρ − Σ dρ ρ) ∘ ρ"),
    "draw": ("dS, the gradient of q kᵗ", "the gradient of the scores, divided by √d_k"),
    "dq": ("dq", "dS k"),
    "dk": ("dk", "dSᵗ q"),
    "dv": ("dv", "ρᵗ dout"),
    # heads and projections
    "split": ("the split into heads", "reshape to (batch, tokens, heads, width), then swap tokens and heads"),
    "split_dout": ("the split of dout into heads", "the same split as of q, k and v"),
    "merge": ("the merge of the heads", "swap heads and tokens, then reshape"),
    "project": ("the projection", "x weight"),
    "projected": ("the projection", "a weight + bias"),
    "rotated": ("the rotation of q and k", "by the angles of their positions"),
    "rotated_back": ("the rotation of dq and dk", "by the angles of their positions, backwards"),
    "at_projection": ("the gradient of the projection's output", "dq, dk or dv"),
    "db_k": ("db_k", "0"),
    "db_v": ("db_v", "Σ_tokens dv"),
    "three_paths": ("da", "dq w_qᵗ + dk w_kᵗ + dv w_vᵗ"),
    "dropped": ("the weights after dropout", "ρ ∘ keep"),
    "through_dropout": ("dρ", "(dout vᵗ) ∘ keep"),
    "rho_for_softmax": ("ρ in the softmax gradient", "the weights before dropout"),
    # norms
    "mean": ("the mean of x", "over the last axis"),
    "centred": ("x − mean", "x minus its mean over the last axis"),
    "variance": ("the variance", "the mean of (x − mean)² over the last axis"),
    "rstd": ("1/σ", "1/√(variance + eps)"),
    "normed": ("ā", "(x − mean)/σ"),
    "dnormed": ("g", "dout ∘ weight"),
    "mean_term": ("mean(g)", "the mean of g over the last axis"),
    "along_term": ("mean(g ∘ ā)", "the mean of g ∘ ā over the last axis"),
    "bracket": ("g − mean(g) − ā · mean(g ∘ ā)", "with g = dout ∘ weight"),
    "norm_dx": ("dx", "(g − mean(g) − ā · mean(g ∘ ā))/σ"),
    "norm_dweight": ("dweight", "Σ_tokens dout ∘ ā"),
    "norm_dbias": ("dbias", "Σ_tokens dout"),
    "rms_centred": ("x", "x itself, not centred"),
    "mean_square": ("the mean of x²", "over the last axis"),
    "rms_rstd": ("1/rms", "1/√(mean(x²) + eps)"),
    "rms_normed": ("x̂", "x/rms"),
    "rms_dnormed": ("g", "dout ∘ weight"),
    "rms_along": ("mean(g ∘ x̂)", "the mean of g ∘ x̂ over the last axis"),
    "rms_along_term": ("the term x̂ · mean(g ∘ x̂)", "x̂ times the mean of g ∘ x̂"),
    "rms_mean_term": ("mean(g)", "0: RMS norm subtracts no mean"),
    "rms_bracket": ("g − x̂ · mean(g ∘ x̂)", "with g = dout ∘ weight"),
    "rms_dx": ("dx", "(g − x̂ · mean(g ∘ x̂))/rms"),
    "rms_dweight": ("dweight", "Σ_tokens dout ∘ x̂"),
    # linear layers
    "through": ("dx", "dout weightᵗ"),
    "dweight": ("dweight", "xᵗ dout, summed over all tokens"),
    "dbias": ("dbias", "Σ_tokens dout"),
    "scale": ("the scale", "α/r"),
    "low": ("x down", "x times the first adapter matrix"),
    "dlow": ("dout upᵗ", "α/r · dout upᵗ"),
    "frozen_path": ("the frozen path of dx", "dout weightᵗ"),
    "adapter_path": ("the adapter's path of dx", "α/r · dout upᵗ downᵗ"),
    "both_dx": ("dx", "dout weightᵗ + α/r dout upᵗ downᵗ"),
    "ddown": ("ddown", "α/r · xᵗ dout upᵗ"),
    # tables
    "table_ids": ("the ids", "the given ids"),
    "scatter": ("the rows added to the table", "row id of dweight = Σ of the rows of dout with that id"),
    "through_logits": ("the gradient of the features", "dout weight"),
    "logits_path": ("the gradient through the logits", "doutᵗ features"),
    "both_paths": ("dweight", "the gradient through the embedding + the gradient through the logits"),
    # losses
    "lse": ("log Σ exp(logits)", "over the vocabulary"),
    "y_pred": ("y_pred", "softmax(logits) over the vocabulary"),
    "y_gt": ("the one-hot targets y_gt", "1 at the target, 0 elsewhere"),
    "delta": ("y_pred − y_gt", "softmax(logits) minus the one-hot targets"),
    "counted": ("y_pred − y_gt", "0 in rows without a target"),
    "divisor": ("the divisor", "the number of targets"),
    "divided": ("dlogits", "dout (y_pred − y_gt)/number of targets"),
    "shift": ("the next-token targets", "the target of token t is ids[t + 1]"),
    # activations
    "cumulative": ("Φ(x)", "½ (1 + tanh u), or the normal distribution function for form='erf'"),
    "density": ("φ(x), the derivative of Φ", "½ (1 − tanh² u) u' with u' = √(2/π)(1 + 3 · 0.044715 x²)"),
    "slope": ("gelu'(x)", "Φ(x) + x φ(x)"),
    "gelu_dx": ("dx", "dout ∘ gelu'(x)"),
    "sigmoid": ("σ(gate)", "1/(1 + exp(−gate))"),
    "silu": ("silu(gate)", "gate σ(gate)"),
    "silu_slope": ("silu'(gate)", "σ(gate) + gate σ(gate)(1 − σ(gate))"),
    "dgate": ("dgate", "dout ∘ up ∘ silu'(gate)"),
    # positions
    "frequencies": ("the frequencies", "θ^(−2i/D), i = 0 … D/2 − 1"),
    "angles": ("the angles", "position · frequency"),
    "rotate_back": ("dx", "first · cos + second · sin, second · cos − first · sin"),
    # the block
    "affine": ("the output of a linear layer", "x weight + bias"),
    "scaled": ("the output of a norm", "ā ∘ weight + bias"),
    "activated": ("gelu(x)", "of the MLP's hidden layer"),
    "skip_forward": ("the skip connection", "x + branch"),
    "side_by_side": ("dq | dk | dv", "concatenated in the order of the forward pass"),
    "skip_mlp": ("the gradient below the MLP", "dout + the gradient from ln_2"),
    "skip_attention": ("dx", "the gradient below the MLP + the gradient from ln_1"),
    # AdamW
    "decayed": ("the decayed weight", "param (1 − lr · weight_decay)"),
    "effective_gradient": ("the gradient", "grad, unchanged"),
    "first": ("the first moment m", "β₁ m + (1 − β₁) g"),
    "second": ("the second moment v", "β₂ v + (1 − β₂) g²"),
    "first_corrected": ("m̂", "m/(1 − β₁ᵗ)"),
    "second_corrected": ("v̂", "v/(1 − β₂ᵗ)"),
    "denominator": ("the denominator", "√v̂ + eps"),
    "updated": ("the updated weight", "param − lr m̂/(√v̂ + eps)"),
    # attention with dropout, positions or groups
    "dscores_kept": ("the gradient of the scores", "without keep, which belongs to dρ"),
    "rotated_v": ("v", "not rotated"),
    "for_products": ("the rotated q and k of the products", "q̃ and k̃, as in the scores"),
    "dq_below": ("dq", "dS k̃, rotated back"),
    "dk_below": ("dk", "dSᵗ q̃, rotated back"),
    "dv_below": ("dv", "ρᵗ dout, not rotated"),
    "repeated": ("the repeated keys and values", "query head h reads head h // G"),
    "dk_of_group": ("dk", "the sum over the query heads of a group"),
    "dv_of_group": ("dv", "the sum over the query heads of a group"),
    # the output projection
    "mixed": ("the heads' outputs", "ρ v"),
    "to_projection": ("the input of the output projection", "the heads' outputs, concatenated"),
    "to_heads": ("the gradient of the heads' outputs", "dout w_oᵗ"),
    "thirds": ("q | k | v", "the first, second and last third of the columns"),
    "to_projections": ("dq, dk and dv", "each to its own projection"),
    "dkey": ("dkey", "dk w_kᵗ"),
    "dvalue": ("dvalue", "dv w_vᵗ"),
    # ReLU and SiLU
    "relu": ("relu(x)", "max(x, 0)"),
    "relu_slope": ("relu'(x)", "1 where x > 0, else 0"),
    "relu_dx": ("dx", "dout where x > 0, else 0"),
    "silu_dx": ("dx", "dout ∘ silu'(x)"),
    # heads with a loss
    "dlogits": ("dlogits", "dout (y_pred − y_gt)/number of targets"),
    "for_dx": ("dlogits in dx", "divided by the number of targets"),
    "for_parameters": ("dlogits in dweight and dbias", "divided by the number of targets"),
    "logits": ("the logits", "features weightᵗ"),
    "head_input": ("the input of the logits", "the layer norm's output"),
    "below_norm": ("the gradient of the embedding", "the layer norm's dx"),
    "rows_of": ("the rows of the embedding", "the ids"),
    # DPO
    "gain_chosen": ("the gain of the chosen answer", "chosen − ref_chosen"),
    "gain_rejected": ("the gain of the rejected answer", "rejected − ref_rejected"),
    "margin": ("the margin", "beta [(chosen − ref_chosen) − (rejected − ref_rejected)]"),
    "push": ("σ(−m)", "1/(1 + exp(m))"),
    "pairs": ("the number of pairs", "the length of chosen"),
    "weight": ("the weight of a pair", "beta σ(−m) dout/number of pairs"),
    "dchosen": ("dchosen", "− the weight of a pair"),
    "drejected": ("drejected", "+ the weight of a pair"),
    # clipping
    "total_norm": ("the norm of the gradients", "√(Σ dweight² + Σ dbias²)"),
    "clip": ("the factor of clipping", "min(1, max_norm/norm)"),
    "clipped_weight": ("dweight after clipping", "dweight times the factor"),
    "clipped_bias": ("dbias after clipping", "dbias times the factor"),
    "decay_of_bias": ("the weight decay of the bias", "0"),
}

# argument of a piece: what it is
ARGUMENTS: dict[str, str] = {
    "dy": "dout",
    "drho": "dρ",
    "rho": "ρ",
    "dots": "the row sum Σ dρ ρ",
    "dscores": "the gradient of the scores",
    "draw": "dS",
    "rstd": "1/σ",
    "normed": "ā",
    "centred": "x − mean",
    "dnormed": "g",
    "along": "the term along ā",
    "lse": "log Σ exp(logits)",
    "dloss": "dout",
    "n_vocab": "the vocabulary size",
    "cumulative": "Φ(x)",
    "density": "φ(x)",
    "slope": "the derivative",
    "s": "σ(gate)",
    "silu": "silu(gate)",
    "up": "up",
    "frozen": "the frozen path",
    "adapter": "the adapter's path",
    "low": "x down",
    "dlow": "dout upᵗ",
    "d_q": "the path through the queries",
    "d_k": "the path through the keys",
    "d_v": "the path through the values",
    "embedding": "the path through the embedding",
    "logits": "the logits",
    "mean_square": "the mean of x²",
    "branch": "the branch's gradient",
    "d10": "dout",
    "d5": "the gradient below the MLP",
    "dsum": "the norm's gradient",
    "dmixed": "dout w_oᵗ",
    "qkv": "q | k | v",
    "rotated_back": "the gradient rotated back",
    "gain_chosen": "the gain of the chosen answer",
    "gain_rejected": "the gain of the rejected answer",
    "push": "σ(−m)",
    "ref_chosen": "ref_chosen",
    "ref_rejected": "ref_rejected",
    "beta1": "β₁",
    "beta2": "β₂",
    "decay": "weight_decay",
    "t": "the step",
    "denominator": "the denominator",
    "theta": "θ",
    "keep": "keep",
    "delta": "y_pred − y_gt",
    "n_rows": "the number of rows",
    "angle": "the angle",
    "x_dot": "x_dot",
    "weight_dot": "weight_dot",
    "bias_dot": "bias_dot",
    "scores_dot": "scores_dot",
    "normed_dot": "normed_dot",
}
# the same argument name in another layer
OF_PIECE: dict[tuple[str, str], str] = {
    ("both_paths", "logits"): "the path through the logits",
    ("rms_dx", "rstd"): "1/rms",
    ("rms_normed", "rstd"): "1/rms",
    ("rms_dweight", "normed"): "x̂",
    ("rms_along", "normed"): "x̂",
    ("rms_along_term", "normed"): "x̂",
    ("rms_along_term", "along"): "mean(g ∘ x̂)",
    ("rms_bracket", "along"): "the term x̂ · mean(g ∘ x̂)",
    ("rms_bracket", "mean"): "mean(g)",
    ("bracket", "mean"): "mean(g)",
    ("bracket", "along"): "mean(g ∘ ā)",
    ("updated", "m"): "m̂",
    ("denominator", "v"): "v̂",
    ("first", "g"): "the gradient",
    ("second", "g"): "the gradient",
}


# pieces that a larger layer has from a smaller one, and the arguments that mean something else there
PARTS: dict[str, tuple[str, str]] = {
    "through": ("a linear layer's input gradient", "the gradient of its output times weightᵗ"),
    "dweight": ("a weight's gradient", "inputᵗ times the gradient of the output, summed over all tokens"),
    "dbias": ("a bias's gradient", "the sum of the output's gradient over all tokens"),
    "norm_dx": ("a norm's input gradient", "(g − mean(g) − ā · mean(g ∘ ā))/σ"),
    "norm_dweight": ("a norm's weight gradient", "Σ_tokens (the gradient of its output) ∘ ā"),
    "norm_dbias": ("a norm's bias gradient", "Σ_tokens of the gradient of its output"),
    "gelu_dx": ("the gradient of GELU's input", "the gradient of its output ∘ gelu'(x)"),
}
PART_ARGUMENTS = {"dy": "the gradient of the output", "x": "the input"}
SINGLE = ("linear", "layer_norm", "gelu")
CALLED = {
    ("lora", "dup"): ("dup", "α/r · (x down)ᵗ dout"),
    ("swiglu", "dup"): ("dup", "dout ∘ silu(gate)"),
    ("softmax", "weights"): ("y", "softmax(x), over the last axis"),
    ("softmax", "row_dots"): ("the row sum Σ dout y", "(dout ∘ y).sum(axis=-1, keepdims=True)"),
    ("softmax", "dscores"): ("dx", "(dout − Σ dout y) ∘ y"),
    ("learn_loss", "divisor"): ("the divisor", "divisor, as it was given"),
    ("learn_loss", "divided"): ("dlogits", "dout (y_pred − y_gt)/divisor"),
    ("linear_tangent", "moved_input"): ("x_dot weight", "x_dot weight"),
    ("linear_tangent", "moved_weight"): ("x weight_dot", "x weight_dot"),
    ("linear_tangent", "moved"): ("y_dot", "x_dot weight + x weight_dot + bias_dot"),
    ("softmax_tangent", "rho_dot"): ("rho_dot", "(scores_dot − Σ scores_dot ρ) ∘ ρ"),
    ("layer_norm_tangent", "along"): ("mean(normed ∘ x_dot)", "the mean of normed ∘ x_dot over the last axis"),
    ("layer_norm_tangent", "mean_moves"): ("mean(x_dot)", "the mean of x_dot over the last axis"),
    ("layer_norm_tangent", "normed_dot"): (
        "normed_dot",
        "(x_dot − mean(x_dot) − normed ∘ mean(normed ∘ x_dot))/σ",
    ),
    ("layer_norm_tangent", "scaled_dot"): ("y_dot", "normed_dot ∘ weight + normed ∘ weight_dot + bias_dot"),
    ("silu", "sigmoid"): ("σ(x)", "1/(1 + exp(−x))"),
    ("silu", "silu"): ("silu(x)", "x σ(x)"),
    ("silu", "silu_slope"): ("silu'(x)", "σ(x) + x σ(x)(1 − σ(x))"),
    ("self_attention", "side_by_side"): ("dq | dk | dv", "concatenated in the order of the columns of w_qkv"),
    ("self_attention_separate", "three_paths"): ("dx", "dq w_qᵗ + dk w_kᵗ + dv w_vᵗ"),
    ("rope_attention", "rotate_back"): (
        "the gradient rotated back",
        "first · cos + second · sin, second · cos − first · sin",
    ),
    ("post_norm_block", "skip_mlp"): ("dh", "the gradient from ln_2 + the gradient from the MLP"),
    ("post_norm_block", "skip_attention"): ("dx", "the gradient from ln_1 + the gradient from attention"),
    ("relu_block", "relu_dx"): ("the gradient of ReLU's input", "the gradient of its output where x > 0, else 0"),
    ("post_norm_block", "relu_dx"): ("the gradient of ReLU's input", "the gradient of its output where x > 0, else 0"),
}
CALLED_ARGUMENTS = {
    ("softmax", "drho"): "dout",
    ("softmax", "rho"): "y",
    ("softmax", "scores"): "x",
    ("softmax", "dots"): "the row sum Σ dout y",
    ("linear_tangent", "by_input"): "x_dot weight",
    ("linear_tangent", "by_weight"): "x weight_dot",
    ("layer_norm_tangent", "mean"): "mean(x_dot)",
    ("layer_norm_tangent", "along"): "mean(normed ∘ x_dot)",
    ("silu", "gate"): "x",
    ("silu", "s"): "σ(x)",
    ("silu", "silu"): "silu(x)",
    ("rope_attention", "dq"): "the gradient of the rotated queries",
    ("rope_attention", "dk"): "the gradient of the rotated keys",
}


def _words(name: str, layer: str) -> tuple[str, str]:
    if (layer, name) in CALLED:
        return CALLED[layer, name]
    if (layer, name) in WORDS:
        return WORDS[layer, name]
    if name in PARTS and layer not in SINGLE:
        return PARTS[name]
    return PIECES.get(name, (name.replace("_", " "), ""))


def piece_words(name: str, layer: str) -> str:
    """What a piece of a layer is called."""
    return _words(name, layer)[0]


def formula(name: str, layer: str) -> str:
    """“piece: its right formula”, or "" if none is known."""
    what, right = _words(name, layer)
    return f"{what.removeprefix('the ').split(',')[0]}: {right}" if right else ""


def argument_words(piece: str, argument: str, layer: str) -> str:
    """What an argument of a piece is called."""
    if (layer, argument) in CALLED_ARGUMENTS:
        return CALLED_ARGUMENTS[layer, argument]
    if piece in PARTS and layer not in SINGLE and argument in PART_ARGUMENTS:
        return PART_ARGUMENTS[argument]
    return OF_PIECE.get((piece, argument), ARGUMENTS.get(argument, argument.replace("_", " ")))


def parameters_of(piece: Piece, n: int) -> list[str]:
    """The names of a piece's n parameters, as far as it tells them."""
    try:
        names = list(inspect.signature(piece).parameters)
    except (TypeError, ValueError):
        names = []
    return [*names, *(f"argument {i + 1}" for i in range(len(names), n))][:n]


PLURAL = ("the frequencies", "the angles", "the ids", "the scores", "the weights ρ", "the one-hot targets y_gt")


def sentence(says: str, what: str) -> str:
    """“{} is missing” of an array, with the verb in the plural if it needs one."""
    if what in PLURAL or what.startswith("the rows"):
        says = says.replace("{} is ", "{} are ").replace("{} has ", "{} have ").replace("{0} is ", "{0} are ")
    return says.format(what)
