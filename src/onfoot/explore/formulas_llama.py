"""The formulas of the LLaMA family by symbol, with the ids of their equations in docs/equations."""

from __future__ import annotations

from onfoot.config import Config, LlamaConfig
from onfoot.tables import Formula, formulas

SIGMOID = "σ(x) = 1 / (1 + exp(−x))"
PAIRS = "φ = t ω_i, of token t and pair i,  x J = (−b, a) of each pair (a, b)"


def all_formulas(config: Config) -> dict[str, Formula]:
    """The formula of every a, Δ and ∂ of the network, by symbol; inside a head the index h is omitted."""
    return llama_formulas(config) if isinstance(config, LlamaConfig) else formulas(config)


def rms_backward(i: str, delta: str) -> str:
    """The formula of RMSᵇ_i, the backward pass of RMS norm i."""
    return f"RMSᵇ_{i}({delta}) = [x − ā_{i} ∘ mean(ā_{i} ∘ x)] / r_{i},  x = {delta} ∘ ~w_{i}"


def llama_formulas(config: LlamaConfig) -> dict[str, Formula]:
    """The formulas of a LLaMA, with the biases and head norms that this configuration has."""
    tied, normed = config.tie_word_embeddings, config.qk_norm
    qkv = config.attention_bias or config.model_type == "qwen2"
    before, out = ("norm" if normed else "lin"), config.attention_bias
    table: dict[str, tuple[str, str]] = {
        "a_0": ("the tokens", ""),
        "a_tok": ("ohe(a_0) w_tok", "2"),
        "a_1": ("a_tok", ""),
        **_norm("1", "a_1", "a_2", "Δ_2"),
        **_linear("q_lin", "a_2", "q", qkv),
        **_linear("k_lin", "a_2", "k", qkv),
        **_linear("v", "a_2", "v", qkv),
        **{key: value for x in "qk" if normed for key, value in _head_norm(x).items()},
        **{x: (f"{x}_{before} ∘ cos φ + ({x}_{before} J) ∘ sin φ", "ROPE.4") for x in "qk"},
        "ρ_raw": ("q kᵗ", "10 GQA.1"),
        "ρ_scaled": ("ρ_raw / √d_ρ", "12"),
        "ρ_causal": ("ρ_scaled, −∞ where the mask hides tokens", "13"),
        "ρ": ("softmax ρ_causal", "15"),
        "a_3^h": ("ρ v", "16 GQA.1"),
        "a_3": ("the heads, side by side", ""),
        **_linear("a_4", "a_3", "o", out),
        "a_5": ("a_1 + a_4", ""),
        **_norm("5", "a_5", "a_6", "Δ_6"),
        **_linear("a_g", "a_6", "g", config.mlp_bias),
        **_linear("a_u", "a_6", "u", config.mlp_bias),
        "a_8": ("a_g ∘ σ(a_g) ∘ a_u", "GLU.1"),
        **_linear("a_9", "a_8", "d", config.mlp_bias),
        "a_10": ("a_5 + a_9", ""),
        **_norm("10", "a_10", "a_11", "Δ_11"),
        "a_12": ("a_11 w_tokᵗ" if tied else "a_11 w_11", "FC.1"),
        "y_pred": ("softmax a_12", ""),
        "ℓ": ("−y_gt ⊖ log y_pred", "CE.1"),
        "L": ("Σ ℓ / n", "CE.1"),
        "Δ_12": ("(y_pred − y_gt) / n", "CE.2"),
        "Δ_11": ("Δ_12 w_tok" if tied else "Δ_12 w_11ᵗ", "FC.2"),
        "Δ_10": ("RMSᵇ_10(Δ_11)", "RMS.3"),
        "Δ_9": ("Δ_10", ""),
        "Δ_8": ("Δ_9 w_dᵗ", "FC.2"),
        "Δ_g": ("Δ_8 ∘ a_u ∘ SiLU'(a_g)", "GLU.2"),
        "Δ_u": ("Δ_8 ∘ a_g ∘ σ(a_g)", "GLU.3"),
        "Δ_6": ("Δ_u w_uᵗ + Δ_g w_gᵗ", "LLAMA.1"),
        "Δ_5": ("Δ_10 + RMSᵇ_5(Δ_6)", "LLAMA.2 RMS.3"),
        "Δ_4": ("Δ_5", ""),
        "Δ_3": ("Δ_4 w_oᵗ", "FC.2"),
        "Δ_3^h": ("the head's columns of Δ_3", ""),
        "∂ρ": ("Δ_3^h vᵗ", ""),
        "Δ_causal": ("[∂ρ − ~(∂ρ ⊖ ρ)] ∘ ρ", "25 26"),
        "Δ_scaled": ("Δ_causal", "27"),
        "Δ_raw": ("Δ_scaled / √d_ρ", "28"),
        "∂q": ("Δ_raw k", "ATT.2"),
        "∂k": ("Σ_h Δ_rawᵗ q", "GQA.2 ATT.3"),
        "∂v": ("Σ_h ρᵗ Δ_3^h", "GQA.3 ATT.1"),
        **{f"∂{x}_{before}": (f"∂{x} ∘ cos φ − (∂{x} J) ∘ sin φ", "ROPE.5") for x in "qk"},
        **{f"∂{x}_lin": (f"RMSᵇ_{x}(∂{x}_norm)", "LLAMA.5 RMS.3") for x in "qk" if normed},
        "Δ_q": ("∂q_lin w_qᵗ", "LLAMA.3"),
        "Δ_k": ("∂k_lin w_kᵗ", "LLAMA.3"),
        "Δ_v": ("∂v w_vᵗ", "LLAMA.3"),
        "Δ_2": ("Σ_h Δ_q + Σ_j (Δ_k + Δ_v)", "LLAMA.3"),
        "Δ_1": ("Δ_5 + RMSᵇ_1(Δ_2)", "LLAMA.4 RMS.3"),
        "Δ_0": ("Δ_1 w_tokᵗ", "EMB.1"),
        "∂w_tok": ("ohe(a_0)ᵗ Δ_1" + (" + (a_11ᵗ Δ_12)ᵗ" if tied else ""), "3 TIE.1" if tied else "3"),
        **_linear_gradients("q", "a_2", "∂q_lin"),
        **_linear_gradients("k", "a_2", "∂k_lin"),
        **_linear_gradients("v", "a_2", "∂v"),
        **_linear_gradients("o", "a_3", "Δ_4"),
        **_linear_gradients("g", "a_6", "Δ_g"),
        **_linear_gradients("u", "a_6", "Δ_u"),
        **_linear_gradients("d", "a_8", "Δ_9"),
        "∂w_11": ("a_11ᵗ Δ_12", "FC.3"),
    }
    where = {
        "Δ_10": rms_backward("10", "Δ_11"),
        "Δ_5": rms_backward("5", "Δ_6"),
        "Δ_1": rms_backward("1", "Δ_2"),
        "a_8": SIGMOID,
        "Δ_g": f"SiLU'(x) = σ(x) + x ∘ σ(x) ∘ (1 − σ(x)),  {SIGMOID}",
        "Δ_u": SIGMOID,
        "∂k": "h = the heads that read this key",
        "∂v": "h = the heads that read this value",
        "Δ_2": "h = the heads,  j = the heads of keys and values",
        **{name: PAIRS for x in "qk" for name in (x, f"∂{x}_{before}")},
        **{f"∂{x}_lin": rms_backward(x, f"∂{x}_norm") for x in "qk" if normed},
    }
    return {
        symbol: Formula(f"{symbol} = {text}", tuple(ids.split()), where.get(symbol, ""))
        for symbol, (text, ids) in table.items()
    }


def _norm(i: str, x: str, out: str, delta: str) -> dict[str, tuple[str, str]]:
    return {
        f"r_{i}": (f"√(mean({x} ∘ {x}) + ε)", "RMS.1"),
        f"ā_{i}": (f"{x} / ~r_{i}", "RMS.2"),
        out: (f"ā_{i} ∘ ~w_{i}", "RMS.2"),
        f"∂w_{i}": (f"Σ_tokens ā_{i} ∘ {delta}", "RMS.4"),
    }


def _head_norm(x: str) -> dict[str, tuple[str, str]]:
    made = _norm(x, f"{x}_lin", f"{x}_norm", f"∂{x}_norm")
    weight = f"w_{x}^norm"
    made[f"{x}_norm"] = (f"ā_{x} ∘ ~{weight}", "LLAMA.5 RMS.2")
    del made[f"∂w_{x}"]  # the name of the linear layer's weight
    return {**made, f"∂{weight}": (f"Σ_tokens Σ_h ā_{x} ∘ ∂{x}_norm", "LLAMA.5 RMS.4")}


def _linear(out: str, x: str, w: str, bias: bool) -> dict[str, tuple[str, str]]:
    return {out: (f"{x} w_{w}" + (f" + ~b_{w}" if bias else ""), "FC.1")}


def _linear_gradients(w: str, x: str, delta: str) -> dict[str, tuple[str, str]]:
    return {f"∂w_{w}": (f"{x}ᵗ {delta}", "FC.3"), f"∂b_{w}": (f"Σ_tokens {delta}", "FC.4")}
