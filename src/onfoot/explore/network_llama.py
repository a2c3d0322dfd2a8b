"""The arrays and steps of the LLaMA family: RMS norms, rotated queries and keys, shared key heads and a gated MLP.

The steps have the numbers of GPT-2's map. The MLP has two branches, so instead of a_7 there are a_g and a_u.
"""

from __future__ import annotations

import numpy as np

from onfoot.explore.embedding_logits import add_embedding, add_logits
from onfoot.explore.heads_llama import KeyValueArrays, LlamaHead, add_rotations, fork_terms
from onfoot.explore.rms_arrays import rms_backward_terms, rms_forward_terms, rms_norm
from onfoot.explore.step import Step
from onfoot.explore.study_context import OVER_TOKENS, StudyContext
from onfoot.explore.tensors import FEATURE
from onfoot.explore.terms import Term, dot, product
from onfoot.ops.swiglu import sigmoid
from onfoot.tables import Formula


def build_llama_steps(m: StudyContext) -> list[Step]:
    """Adds every array of the network to the context and returns the rows of the map from top to bottom."""
    _add_residual_stream(m)
    add_rotations(m)
    blocks = [step for b in range(m.config.n_layer) for step in _block(m, b)]
    return [*add_embedding(m), *blocks, *add_logits(m)]


def block_input(b: int) -> str:
    """The id of the input of block b: a_1 for the first block, the a_10 of the block before for all others."""
    return "a_1" if b == 0 else f"{b - 1}.a_10"


def _same(symbol: str, id: str) -> Term:
    return product(symbol, (id, "rc"))


def _add_residual_stream(m: StudyContext) -> None:
    """Adds a_1 and the a_10 of every block with their error signals, each a sum over the uses of the activation."""
    blocks = m.trace.blocks
    m.add("a_1", "a_1", blocks[0].a[1][0], terms=(_same("a_tok", "a_tok"),))
    m.delta("Δ_1", "Δ_1", blocks[0].delta[1][0], "0.a_1", fork(0, "1"))
    for b, block in enumerate(blocks):
        both = _same("a_5", f"{b}.a_5"), _same("a_9", f"{b}.a_9")
        m.add(f"{b}.a_10", "a_10", block.a[10][0], terms=both)
        terms, formula = rms_backward_terms("", "10"), None
        if b < len(blocks) - 1:
            next_ = m.formulas["Δ_1"]
            text = f"Δ_10 = {next_.text.removeprefix('Δ_1 = ')}, of the next block"
            terms, formula = fork(b + 1, "1"), Formula(text, next_.equations, next_.where)
        m.delta(f"{b}.Δ_10", "Δ_10", block.delta[10][0], f"{b}.a_10", terms, formula=formula)


def fork(b: int, i: str) -> tuple[Term, ...]:
    """The terms of Δ_1 or Δ_5 of a block: the error signal through the skip, and two terms of the RMS norm."""
    symbol = "Δ_5" if i == "1" else "Δ_10"
    return (_same(symbol, f"{b}.{symbol}"), *rms_backward_terms(f"{b}.", i))


def linear(m: StudyContext, prefix: str, w: str, layer: str, x: str, delta: str) -> list[tuple[str, str]]:
    """Adds the weight of a linear layer, and its bias if it has one, with their gradients."""
    symbol, signal = m.tensors[x].symbol, m.tensors[delta].symbol
    of_weight = dot(f"{symbol}ᵗ {signal}", OVER_TOKENS, (x, "jr"), (delta, "jc"))
    axes = (FEATURE, FEATURE)
    pairs = [m.parameter(prefix, f"w_{w}", f"{layer}.weight", axes, (of_weight,), transposed=True)]
    if f"{layer}.bias" in m.params:
        of_bias = dot(f"Σ_tokens {signal}", OVER_TOKENS, (delta, "jc"))
        pairs.append(m.parameter(prefix, f"b_{w}", f"{layer}.bias", (FEATURE,), (of_bias,)))
    return pairs


def linear_terms(m: StudyContext, prefix: str, w: str, layer: str, x: str, symbol: str) -> tuple[Term, ...]:
    """x w, and the bias if there is one."""
    bias = (product(f"~b_{w}", (f"{prefix}b_{w}", "c")),) if f"{layer}.bias" in m.params else ()
    return (dot(f"{symbol} w_{w}", "features", (x, "rj"), (f"{prefix}w_{w}", "jc")), *bias)


def _block(m: StudyContext, b: int) -> list[Step]:
    """The rows of a block, with the rows of its heads after that of attention."""
    p, name, block = f"{b}.", f"model.layers.{b}", m.trace.blocks[b]
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"

    def a(i: int | str, *terms: Term, note: str = "") -> None:
        m.add(f"{p}a_{i}", f"a_{i}", block.a[i][0], terms=terms, note=note)

    def d(i: int | str, *terms: Term) -> None:
        m.delta(f"{p}Δ_{i}", f"Δ_{i}", block.delta[i][0], f"{b}.a_{i}", terms)

    def back(w: str, delta: str) -> Term:
        return dot(f"Δ_{delta} w_{w}ᵗ", "features", (f"{p}Δ_{delta}", "rj"), (f"{p}w_{w}", "cj"))

    sigma, slope = _silu(m, b)
    a(2, *rms_forward_terms(p, "1"))
    d(2, *fork_terms(m, b))
    a(3, note=_heads_note(m))
    d(3, back("o", "4"))
    a(4, *linear_terms(m, p, "o", f"{attn}.o_proj", f"{p}a_3", "a_3"))
    d(4, _same("Δ_5", f"{p}Δ_5"))
    a(5, _same("a_1", block_input(b)), _same("a_4", f"{p}a_4"))
    d(5, *fork(b, "5"))
    a(6, *rms_forward_terms(p, "5"))
    d(6, back("u", "u"), back("g", "g"))
    for x, layer in (("g", "gate_proj"), ("u", "up_proj")):
        a(x, *linear_terms(m, p, x, f"{mlp}.{layer}", f"{p}a_6", "a_6"))
    signal, gate = (f"{p}Δ_8", "rc"), (f"{p}a_g", "rc")
    d("g", product("Δ_8 ∘ a_u ∘ SiLU'(a_g)", signal, (f"{p}a_u", "rc"), (slope, "rc")))
    d("u", product("Δ_8 ∘ a_g ∘ σ(a_g)", signal, gate, (sigma, "rc")))
    a(8, product("a_g ∘ σ(a_g) ∘ a_u", gate, (sigma, "rc"), (f"{p}a_u", "rc")))
    d(8, back("d", "9"))
    a(9, *linear_terms(m, p, "d", f"{mlp}.down_proj", f"{p}a_8", "a_8"))
    d(9, _same("Δ_10", f"{p}Δ_10"))
    norm_1, inside_1 = rms_norm(m, p, "1", f"{name}.input_layernorm", block_input(b), f"{p}Δ_2")
    norm_5, inside_5 = rms_norm(m, p, "5", f"{name}.post_attention_layernorm", f"{p}a_5", f"{p}Δ_6")

    def step(i: int | str, title: str, parameters: list[tuple[str, str]], inside: list[str] | None = None) -> Step:
        return Step(f"{p}{i}", title, f"{p}a_{i}", f"{p}Δ_{i}", parameters, inside or [], b)

    shared = [KeyValueArrays(m, b, j) for j in range(m.config.n_kv_head)]
    group = m.config.n_head // m.config.n_kv_head
    heads = [LlamaHead(m, b, h, shared[h // group]) for h in range(m.config.n_head)]
    for head in heads:
        head.add_arrays()
    for one in shared:
        one.add_gradients()
    return [
        step(2, "RMS norm 1", norm_1, inside_1),
        step(3, "Grouped-query attention" if group > 1 else "Multi-head attention", []),
        *(one for head in heads for one in head.steps()),
        step(4, "FC attProj", linear(m, p, "o", f"{attn}.o_proj", f"{p}a_3", f"{p}Δ_4")),
        step(5, "Skip 1", []),
        step(6, "RMS norm 2", norm_5, inside_5),
        step("g", "FC gate", linear(m, p, "g", f"{mlp}.gate_proj", f"{p}a_6", f"{p}Δ_g")),
        step("u", "FC up", linear(m, p, "u", f"{mlp}.up_proj", f"{p}a_6", f"{p}Δ_u")),
        step(8, "SwiGLU", [], [sigma, slope]),
        step(9, "FC down", linear(m, p, "d", f"{mlp}.down_proj", f"{p}a_8", f"{p}Δ_9")),
        step(10, "Skip 2", []),
    ]


def _heads_note(m: StudyContext) -> str:
    width, n = m.config.value_width, m.config.n_head
    return f"columns 0 to {width - 1} are head 1, the next {width} are head 2, and so on" if n > 1 else ""


def _silu(m: StudyContext, b: int) -> tuple[str, str]:
    """Adds σ(a_g) and SiLU'(a_g); returns both ids."""
    gate = m.trace.blocks[b].a["g"][0]
    sigma, slope = f"{b}.σ(a_g)", f"{b}.SiLU'(a_g)"

    def derivative() -> np.ndarray:
        s = sigmoid(gate)
        return s + gate * s * (1 - s)

    of_sigma = Formula("σ(a_g) = 1 / (1 + exp(−a_g))", ("GLU.1",))
    m.add(sigma, "σ(a_g)", lambda: sigmoid(gate), formula=of_sigma, known_shape=gate.shape)
    s, g = (sigma, "rc"), (f"{b}.a_g", "rc")
    terms = (
        product("σ(a_g)", s),
        product("a_g ∘ σ(a_g)", g, s),
        product("a_g ∘ σ(a_g) ∘ σ(a_g)", g, s, s, sign=-1),
    )
    of_slope = Formula("SiLU'(a_g) = σ(a_g) + a_g ∘ σ(a_g) ∘ (1 − σ(a_g))", ("GLU.2",))
    m.add(slope, "SiLU'(a_g)", derivative, terms=terms, formula=of_slope, known_shape=gate.shape)
    return sigma, slope
