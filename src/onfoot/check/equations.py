"""The equations that mistakes violate, one line each, as in docs/equations."""

EQUATIONS = {
    "2": "y = w[ids], row by row",
    "3": "∂w = oheᵗ Δ: the rows of a repeated id are summed",
    "12": "ρ_scaled = q kᵗ/√d_k",
    "13": "ρ_causal = ρ_scaled on and below the diagonal, −∞ above it",
    "15": "ρ = softmax(ρ_causal), row by row",
    "24": "∂b_v = Σ_tokens Δ, where each row of ρ sums to 1",
    "25": "Δ_causal = [dρ − ~(dρ ⊖ ρ)] ∘ ρ with dρ = Δ vᵗ",
    "28": "Δ_raw = Δ_scaled/√d_k",
    "29": "∂b_k = 0, if the keys are not rotated by their positions",
    "23": "∂w_v = (ρ a)ᵗ Δ",
    "31.a": "∂w_q = aᵗ Δ_raw k",
    "31.b": "∂w_k = (Δ_raw a)ᵗ q",
    "32.a": "∂b_q = Σ_tokens Δ_raw k",
    "33": "Δ = Δ_q + Δ_k + Δ_v",
    "34": "a = the heads' outputs, concatenated",
    "36": "ā = (x − μ)/σ with σ = √(variance + eps), the variance over d",
    "40": "∂x = (g − mean(g) − ā mean(g ∘ ā))/σ with g = Δ ∘ w",
    "41": "∂w = Σ_tokens Δ ∘ ā",
    "42": "∂b = Σ_tokens Δ",
    "43": "y = scale · x d u",
    "44": "∂x = scale · Δ uᵗ dᵗ",
    "45": "∂d = scale · xᵗ Δ uᵗ",
    "46": "∂u = scale · (x d)ᵗ Δ",
    "ADAM.1": "p ← p (1 − lr · decay)",
    "ADAM.2": "m ← β₁ m + (1 − β₁) g",
    "ADAM.3": "v ← β₂ v + (1 − β₂) g²",
    "ADAM.4": "m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)",
    "ADAM.5": "p ← p − lr m̂/(√v̂ + eps)",
    "ATT.1": "∂v = ρᵗ Δ",
    "ATT.2": "∂q = Δ_raw k",
    "ATT.3": "∂k = Δ_rawᵗ q",
    "CE.2": "∂logits = (y_pred − y_gt)/divisor, 0 in rows without a target",
    "CLIP.1": "g ← g · min(1, max_norm/‖g‖), ‖g‖ of all gradients together",
    "DO.2": "∂x = Δ ∘ keep",
    "DPO.1": "m = β [(log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r))]",
    "DPO.3": "s = σ(−m)",
    "DPO.4": "∂log π(c) = −β s/n, ∂log π(r) = β s/n",
    "FC.2": "∂x = Δ wᵗ",
    "FC.3": "∂w = xᵗ Δ",
    "FC.4": "∂b = Σ_tokens Δ",
    "G.2": "∂x = Δ where x > 0, else 0",
    "G.4": "∂x = Δ ∘ [(1 + tanh u)/2 + x/2 (1 − tanh² u) u'], u = √(2/π)(x + 0.044715 x³)",
    "G.6": "∂x = Δ ∘ [Φ(x) + x φ(x)]",
    "GLU.2": "∂gate = Δ ∘ up ∘ silu'(gate)",
    "GLU.3": "∂up = Δ ∘ silu(gate)",
    "GQA.1": "y_h = ρ_h v_j: query head h reads the keys and values of head j = h // G",
    "GQA.2": "∂k_j = Σ Δ_rawᵗ q over the query heads of group j",
    "GQA.3": "∂v_j = Σ ρᵗ Δ over the query heads of group j",
    "LORA.2": "∂x = Δ wᵗ + scale · Δ uᵗ dᵗ",
    "NET.1": "Δ_5 = Δ_10 + LN₂ᵇ(Δ_6)",
    "NET.2": "Δ_1 = Δ_5 + LN₁ᵇ(Δ_2)",
    "NET.3": "Δ_h = LN₂ᵇ(Δ) + Δ_7 w_6ᵗ, in a post-norm block",
    "NET.4": "Δ_x = LN₁ᵇ(Δ_h) + Δ_q + Δ_k + Δ_v, in a post-norm block",
    "RMS.1": "x̂ = x/√(mean(x²) + eps)",
    "RMS.3": "∂x = (g − x̂ mean(g ∘ x̂))/rms with g = Δ ∘ w",
    "RMS.4": "∂w = Σ_tokens Δ ∘ x̂",
    "ROPE.1": "frequency i = θ^(−2i/D)",
    "ROPE.4": "features i and i + D/2 of q and k, rotated by position · frequency i",
    "ROPE.5": "∂x = Δ rotated back by the angles of its position",
    "TIE.1": "∂w = oheᵗ Δ_1 + Δ_12ᵗ a_11, the sum of both uses",
}

_PAGES = {  # the page of an id: of its letters, or of the paper's number
    "ADAM": "optimizer", "ATT": "attention", "CE": "cross_entropy", "CLIP": "optimizer", "DO": "dropout",
    "DPO": "dpo", "FC": "linear", "G": "activation", "GLU": "swiglu", "GQA": "grouped_query", "LORA": "lora",
    "NET": "network", "RMS": "rms_norm", "ROPE": "rope", "TIE": "network", "2": "embedding", "3": "embedding",
    "12": "attention", "13": "attention", "15": "attention", "23": "attention_head", "24": "attention_head",
    "25": "attention", "28": "attention", "29": "attention_head", "31": "attention_head", "32": "attention_head",
    "33": "attention_head", "34": "attention_head", "36": "layer_norm", "40": "layer_norm", "41": "layer_norm",
    "42": "layer_norm", "43": "lora", "44": "lora", "45": "lora", "46": "lora",
}  # fmt: skip


_ATTENTION = {"dq": "ATT.2", "dk": "ATT.3", "dv": "ATT.1"}
_HEAD = {
    "da": "33", "dx": "33", "dw_q": "31.a", "dw_k": "31.b", "dw_v": "23", "db_q": "32.a", "db_k": "29", "db_v": "24",
    "dw_o": "FC.3", "db_o": "FC.4", "dw_qkv": "FC.3", "db_qkv": "FC.4",
    "dquery": "FC.2", "dkey": "FC.2", "dvalue": "FC.2",
}  # fmt: skip
_UPDATE = {"param": "ADAM.5", "weight": "ADAM.5", "bias": "ADAM.5", "m": "ADAM.2", "v": "ADAM.3"}
_OF_GRADIENT: dict[str, dict[str, str]] = {
    "attention": _ATTENTION,
    "attention_dropout": _ATTENTION,
    "rope_attention": _ATTENTION,
    "grouped_query_attention": {"dq": "ATT.2", "dk": "GQA.2", "dv": "GQA.3"},
    "head": _HEAD,
    "head_dropout": {**_HEAD, "db_v": "FC.4"},
    "multi_head": _HEAD,
    "self_attention": _HEAD,
    "learn_self_attention": _HEAD,
    "self_attention_separate": _HEAD,
    "cross_attention": _HEAD,
    "layer_norm": {"dx": "40", "dweight": "41", "dbias": "42"},
    "rms_norm": {"dx": "RMS.3", "dweight": "RMS.4"},
    "lora": {"dx": "LORA.2", "ddown": "45", "dup": "46"},
    "embedding": {"dweight": "3"},
    "tied_embedding": {"dweight": "TIE.1"},
    "tied_head": {"dweight": "TIE.1"},
    "softmax_cross_entropy": {"dlogits": "CE.2"},
    "next_token_loss": {"dlogits": "CE.2"},
    "dpo": {"dchosen": "DPO.4", "drejected": "DPO.4"},
    "softmax": {"dx": "25"},
    "gelu": {"dx": "G.4"},
    "relu": {"dx": "G.2"},
    "learn_softmax": {"dscores": "25"},
    "learn_loss": {"dlogits": "CE.2"},
    "silu": {"dx": "GLU.2"},
    "swiglu": {"dgate": "GLU.2", "dup": "GLU.3"},
    "rope": {"dx": "ROPE.5"},
    "block": {"dx": "NET.2"},
    "relu_block": {"dx": "NET.2"},
    "post_norm_block": {"dx": "NET.4"},
    "adamw": _UPDATE,
}


def equation_of(layer: str, gradient: str, form: str = "") -> str:
    """The id of the equation of a gradient: of its layer, else of a norm's parameter or of a linear map."""
    found = _OF_GRADIENT.get(layer, {}).get(gradient, "")
    if found:
        return "G.6" if form == "erf" else found
    if layer == "adamw_step":
        return _UPDATE[gradient.split("_")[0]]
    if gradient.startswith("dln_"):
        return "41" if gradient.endswith("weight") else "42"
    if gradient == "dx":
        return "FC.2"
    return "FC.3" if gradient.endswith("weight") else "FC.4" if gradient.endswith("bias") else ""


def page_of(equation: str) -> str:
    """The page of docs/equations that derives the equation, with its anchor."""
    page = _PAGES.get(equation.split(".")[0])
    if page is None:
        return "docs/equations/README.md"
    return f"docs/equations/{page}.md#eq-{equation.lower().replace('.', '-')}"
