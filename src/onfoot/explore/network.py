"""The arrays and steps of the network: Table 2 with numbers, forward and backward."""

from __future__ import annotations

import numpy as np

from onfoot.explore.embedding_logits import add_embedding, add_logits
from onfoot.explore.heads import HeadArrays, fork_terms
from onfoot.explore.step import Step
from onfoot.explore.study_context import StudyContext, affine_terms, norm_backward_terms, norm_forward_terms
from onfoot.explore.terms import Term, dot, product
from onfoot.ops import activation
from onfoot.tables import Formula


def build_steps(m: StudyContext) -> list[Step]:
    """Adds every array of the network to the context and returns the rows of the map from top to bottom."""
    if m.family == "llama":
        from onfoot.explore.network_llama import build_llama_steps

        return build_llama_steps(m)
    _add_residual_stream(m)
    blocks = [step for b in range(m.config.n_layer) for step in _block(m, b)]
    return [*add_embedding(m), *blocks, *add_logits(m)]


def block_input(b: int) -> str:
    """The id of the input of block b: a_1 for the first block, the a_10 of the block before for all others."""
    return "a_1" if b == 0 else f"{b - 1}.a_10"


def _add_residual_stream(m: StudyContext) -> None:
    """Adds a_1 and the a_10 of every block with their error signals, each a sum over the uses of the activation."""
    blocks = m.trace.blocks
    m.add("a_1", "a_1", blocks[0].a[1][0], terms=_sum(("a_tok", "a_tok"), ("a_pos", "a_pos")))
    m.delta("Δ_1", "Δ_1", blocks[0].delta[1][0], "0.a_1", fork(0, 1))
    for b, block in enumerate(blocks):
        m.add(f"{b}.a_10", "a_10", block.a[10][0], terms=_sum(("a_5", f"{b}.a_5"), ("a_9", f"{b}.a_9")))
        terms, formula = norm_backward_terms("", 10), None
        if b < len(blocks) - 1:
            next_ = m.formulas["Δ_1"]
            text = f"Δ_10 = {next_.text.removeprefix('Δ_1 = ')}, of the next block"
            terms, formula = fork(b + 1, 1), Formula(text, next_.equations, next_.where)
        m.delta(f"{b}.Δ_10", "Δ_10", block.delta[10][0], f"{b}.a_10", terms, formula=formula)


def fork(b: int, i: int) -> tuple[Term, ...]:
    """The terms of Δ_1 or Δ_5 of a block: the error signal through the skip, and three terms of the layer norm."""
    symbol = "Δ_5" if i == 1 else "Δ_10"
    return (product(symbol, (f"{b}.{symbol}", "rc")), *norm_backward_terms(f"{b}.", i))


def _sum(*parts: tuple[str, str]) -> tuple[Term, ...]:
    return tuple(product(symbol, (id, "rc")) for symbol, id in parts)


def _block(m: StudyContext, b: int) -> list[Step]:
    """The nine rows of a block, with the rows of its heads after that of attention."""
    p, name, block = f"{b}.", f"transformer.h.{b}", m.trace.blocks[b]
    gate_id, derivative_id = _activation(m, b)

    def a(i: int, *terms: Term, note: str = "") -> None:
        m.add(f"{p}a_{i}", f"a_{i}", block.a[i][0], terms=terms, note=note)

    def d(i: int, *terms: Term) -> None:
        m.delta(f"{p}Δ_{i}", f"Δ_{i}", block.delta[i][0], f"{b}.a_{i}", terms)

    def affine(i: int) -> tuple[Term, ...]:
        return affine_terms(f"{p}a_{i}", f"{p}w_{i}", f"{p}b_{i}", i)

    def back(i: int, delta: int) -> Term:
        return dot(f"Δ_{delta} w_{i}ᵗ", "features", (f"{p}Δ_{delta}", "rj"), (f"{p}w_{i}", "cj"))

    norm_1, inside_1 = m.norm(p, 1, f"{name}.ln_1", block_input(b), f"{p}Δ_2")
    norm_5, inside_5 = m.norm(p, 5, f"{name}.ln_2", f"{p}a_5", f"{p}Δ_6")
    a(2, *norm_forward_terms(p, 1))
    d(2, *fork_terms(m, b))
    a(3, note=_heads_note(m))
    d(3, back(3, 4))
    a(4, *affine(3))
    d(4, product("Δ_5", (f"{p}Δ_5", "rc")))
    a(5, *_sum(("a_1", block_input(b)), ("a_4", f"{p}a_4")))
    d(5, *fork(b, 5))
    a(6, *norm_forward_terms(p, 5))
    d(6, back(6, 7))
    a(7, *affine(6))
    d(7, product("Δ_8 ∘ g'(a_7)", (f"{p}Δ_8", "rc"), (derivative_id, "rc")))
    a(8, product("a_7 ∘ gate", (f"{p}a_7", "rc"), (gate_id, "rc")))
    d(8, back(8, 9))
    a(9, *affine(8))
    d(9, product("Δ_10", (f"{p}Δ_10", "rc")))

    def step(i: int, title: str, parameters: list[tuple[str, str]], inside: list[str] | None = None) -> Step:
        return Step(f"{p}{i}", title, f"{p}a_{i}", f"{p}Δ_{i}", parameters, inside or [], b)

    heads = [one for h in range(m.config.n_head) for one in HeadArrays(m, b, h).steps()]
    return [
        step(2, "LayerNorm 1", norm_1, inside_1),
        step(3, "Multi-head attention", []),
        *heads,
        step(4, "FC attProj", m.linear(p, 3, f"{name}.attn.c_proj", f"{p}a_3", f"{p}Δ_4")),
        step(5, "Skip 1", []),
        step(6, "LayerNorm 2", norm_5, inside_5),
        step(7, "FC expand", m.linear(p, 6, f"{name}.mlp.c_fc", f"{p}a_6", f"{p}Δ_7")),
        step(8, "Activation g", [], [gate_id, derivative_id]),
        step(9, "FC contract", m.linear(p, 8, f"{name}.mlp.c_proj", f"{p}a_8", f"{p}Δ_9")),
        step(10, "Skip 2", []),
    ]


def _heads_note(m: StudyContext) -> str:
    width, n = m.config.value_width, m.config.n_head
    return f"columns 0 to {width - 1} are head 1, the next {width} are head 2, and so on" if n > 1 else ""


def _activation(m: StudyContext, b: int) -> tuple[str, str]:
    """Adds the activation as a gate, g(x) = x ∘ gate(x), and its derivative g'(x). Returns both ids."""
    pair = activation.ACTIVATIONS[m.config.activation_function]
    forward, backward = (getattr(activation, f"{pair}_{way}") for way in ("forward", "backward"))
    a7 = m.trace.blocks[b].a[7][0]
    _, forward_id, backward_id = m.formulas["a_8"].equations[0], f"{b}.gate", f"{b}.g'"

    def gate() -> np.ndarray:
        y, _ = forward(a7)
        return np.divide(y, a7, out=np.full_like(a7, 0.5), where=a7 != 0)

    def derivative() -> np.ndarray:
        _, saved = forward(a7)
        return backward(np.ones_like(a7), saved)

    texts = {
        "relu": "gate = 1 where a_7 > 0, else 0",
        "gelu_tanh": "gate = (1 + tanh u) / 2,  u = √(2/π) (a_7 + 0.044715 a_7³)",
        "gelu_erf": "gate = Φ(a_7)",
    }
    of_gate = Formula(texts[pair], m.formulas["a_8"].equations)
    m.add(forward_id, "gate", gate, formula=of_gate, known_shape=a7.shape)
    of_derivative = Formula("", m.formulas["Δ_7"].equations)
    m.add(backward_id, "g'(a_7)", derivative, formula=of_derivative, known_shape=a7.shape)
    return forward_id, backward_id
