"""The three tables of the paper for any configuration: formulas, shapes and parameter counts, as plain data.

Table 1 is one attention head, Table 2 the network, Table 3 the gradient of every parameter; the parameter counts of
LoRA are added. Where the paper misprints a formula (the mask, the error signal below a LoRA layer) the correct one is
given. In the formulas `~` broadcasts over tokens, `∘` multiplies elementwise, `⊖` takes the dot product of each row,
`ᵗ` transposes, ā is a normalised a, σ its standard deviation, and `mean` runs over the features of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from onfoot.arrays import Shape
from onfoot.config import GPT2Config
from onfoot.models.params import HEAD, POSITION_TABLE, TOKEN_TABLE, block_shapes, count, linear_shapes, shapes


class Formula(NamedTuple):
    """A formula as text, the ids of its equations, and what a symbol in it stands for."""

    text: str
    equations: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Row:
    """One step of Table 1 or 2: forward, shape, backward. `parameters` is the number that the step itself has."""

    layer: str
    forward: Formula
    shape: str
    backward: Formula
    parameters: int = 0
    in_block: bool = False


@dataclass(frozen=True)
class ParameterRow:
    """One parameter of Table 3. `copies` is the number of heads that have one each."""

    layer: str
    symbol: str
    name: str  # the tensor that holds it, within a block where `in_block`
    shape: Shape
    gradient: Formula
    in_block: bool = False
    copies: int = 1

    @property
    def count(self) -> int:
        return self.copies * math.prod(self.shape)


@dataclass(frozen=True)
class LoraRow:
    """The LoRA layer of one linear layer: d (in × r) and u (r × out)."""

    layer: str
    n_in: int
    n_out: int
    r: int
    copies: int  # how many such layers the network has
    frozen: int  # parameters of its base layer

    @property
    def down(self) -> int:
        return self.n_in * self.r

    @property
    def up(self) -> int:
        return self.r * self.n_out

    @property
    def count(self) -> int:
        return self.down + self.up


@dataclass(frozen=True)
class Counts:
    """The number of parameters, for this configuration and for each kind of LM head."""

    total: int
    block: int
    n_blocks: int
    untied_with_bias: int
    untied: int
    tied: int
    logits: int  # FC_logits alone: weight, and bias if any
    dead_per_block: int  # the keys' biases: counted, but without effect

    @property
    def dead(self) -> int:
        return self.n_blocks * self.dead_per_block

    @property
    def saved_by_tying(self) -> float:
        return 1 - self.tied / self.untied_with_bias


ACTIVATION_TEXTS = {
    "gelu_new": ("GELU, tanh form", "G.3", "G.4"),
    "gelu": ("GELU, exact form", "G.5", "G.6"),
    "relu": ("ReLU", "G.1", "G.2"),
}


def formulas(config: GPT2Config) -> dict[str, Formula]:
    """The formula of every a, Δ and ∂ of the network, by symbol; inside a head the index h is omitted."""
    _, g, g_prime = ACTIVATION_TEXTS[config.activation_function]
    tied, masked = config.tie_word_embeddings, "causal" if config.causal else "scaled"
    bias = " + ~b_11" if config.lm_head_bias else ""
    table: dict[str, tuple[str, str]] = {
        "a_0": ("the tokens", ""),
        "a_tok": ("ohe(a_0) w_tok", "2"),
        "a_pos": ("ohe(1 : n_T) w_pos", "2"),
        "a_1": ("a_tok + a_pos", ""),
        **_norm_forward("a_2", 1),
        "q": ("a_2 w_q + ~b_q", "9.a"),
        "k": ("a_2 w_k + ~b_k", "9.b"),
        "v": ("a_2 w_v + ~b_v", "4"),
        "ρ_raw": ("q kᵗ", "10"),
        "ρ_scaled": ("ρ_raw / √d_ρ", "12"),
        **({"ρ_causal": ("ρ_scaled, −∞ above the diagonal", "13")} if config.causal else {}),
        "ρ": (f"softmax ρ_{masked}", "15"),
        "a_3^h": ("ρ v", "16"),
        "a_3": ("the heads, side by side", "34"),
        "a_4": ("a_3 w_3 + ~b_3", "FC.1"),
        "a_5": ("a_1 + a_4", ""),
        **_norm_forward("a_6", 5),
        "a_7": ("a_6 w_6 + ~b_6", "FC.1"),
        "a_8": ("g(a_7)", g),
        "a_9": ("a_8 w_8 + ~b_8", "FC.1"),
        "a_10": ("a_5 + a_9", ""),
        **_norm_forward("a_11", 10),
        "a_12": (("a_11 w_tokᵗ" if tied else "a_11 w_11") + bias, "FC.1"),
        "y_pred": ("softmax a_12", ""),
        "ℓ": ("−y_gt ⊖ log y_pred", "CE.1"),
        "L": ("Σ ℓ / n", "CE.1"),
        "Δ_12": ("(y_pred − y_gt) / n", "CE.2"),
        "Δ_11": ("Δ_12 w_tok" if tied else "Δ_12 w_11ᵗ", "FC.2"),
        "Δ_10": ("LNᵇ_10(Δ_11)", "40"),
        "Δ_9": ("Δ_10", ""),
        "Δ_8": ("Δ_10 w_8ᵗ", "FC.2"),
        "Δ_7": ("Δ_8 ∘ g'(a_7)", g_prime),
        "Δ_6": ("Δ_7 w_6ᵗ", "FC.2"),
        "Δ_5": ("Δ_10 + LNᵇ_5(Δ_6)", "NET.1 40"),
        "Δ_4": ("Δ_5", ""),
        "Δ_3": ("Δ_5 w_3ᵗ", "FC.2"),
        "Δ_3^h": ("the head's columns of Δ_3", "34"),
        "Δ_scaled": ("Δ_causal", "27"),
        f"Δ_{masked}": ("[Δ_3^h vᵗ − ~((Δ_3^h vᵗ) ⊖ ρ)] ∘ ρ", "25 26"),  # without a mask it is Δ_scaled itself
        "Δ_raw": ("Δ_scaled / √d_ρ", "28"),
        "Δ_v": ("ρᵗ Δ_3^h w_vᵗ", "22"),
        "Δ_q": ("Δ_raw k w_qᵗ", "30.a"),
        "Δ_k": ("Δ_rawᵗ q w_kᵗ", "30.b"),
        "Δ_2^h": ("Δ_v + Δ_q + Δ_k", "33"),
        "Δ_2": ("Σ_h Δ_2^h", "35"),
        "Δ_1": ("Δ_5 + LNᵇ_1(Δ_2)", "NET.2 40"),
        "Δ_0": ("Δ_1 w_tokᵗ", "EMB.1"),
        "∂w_tok": ("ohe(a_0)ᵗ Δ_1" + (" + (a_11ᵗ Δ_12)ᵗ" if tied else ""), "3 TIE.1" if tied else "3"),
        "∂w_pos": ("ohe(1 : n_T)ᵗ Δ_1", "3"),
        **_norm_parameters(1, 2),
        "∂w_q": ("a_2ᵗ Δ_raw k", "31.a"),
        "∂b_q": ("Σ_tokens Δ_raw k", "32.a"),
        "∂w_k": ("(Δ_raw a_2)ᵗ q", "31.b"),
        "∂b_k": ("0", "29 32.b"),
        "∂w_v": ("(ρ a_2)ᵗ Δ_3^h", "23"),
        "∂b_v": ("Σ_tokens Δ_3^h", "24"),
        **_linear_parameters(3, 5),
        **_norm_parameters(5, 6),
        **_linear_parameters(6, 7),
        **_linear_parameters(8, 10),
        **_norm_parameters(10, 11),
        **_linear_parameters(11, 12),
        "LoRA a_12": (f"{'a_11 w_tokᵗ' if tied else 'a_11 w_11'}{bias} + α a_11 d_11 u_11", "LORA.1"),
        "LoRA Δ_11": (f"{'Δ_12 w_tok' if tied else 'Δ_12 w_11ᵗ'} + α Δ_12 (d_11 u_11)ᵗ", "LORA.2"),
        "∂d_11": ("α a_11ᵗ Δ_12 u_11ᵗ", "45"),
        "∂u_11": ("α (a_11 d_11)ᵗ Δ_12", "46"),
    }
    where = {"Δ_10": norm_backward("10", "Δ_11"), "Δ_5": norm_backward("5", "Δ_6"), "Δ_1": norm_backward("1", "Δ_2")}
    return {
        symbol: Formula(f"{symbol.removeprefix('LoRA ')} = {text}", tuple(ids.split()), where.get(symbol, ""))
        for symbol, (text, ids) in table.items()
    }


def _norm_forward(out: str, i: int) -> dict[str, tuple[str, str]]:
    return {f"ā_{i}": (f"(a_{i} − mean a_{i}) / σ_{i}", "36"), out: (f"ā_{i} ∘ ~w_{i} + ~b_{i}", "36 37 38")}


def norm_backward(i: str, delta: str) -> str:
    """The formula of LNᵇ_i, the backward pass of layer norm i."""
    return f"LNᵇ_{i}({delta}) = [x − mean x − ā_{i} ∘ mean(ā_{i} ∘ x)] / σ_{i},  x = {delta} ∘ ~w_{i}"


def _norm_parameters(i: int, after: int) -> dict[str, tuple[str, str]]:
    return {f"∂w_{i}": (f"Σ_tokens ā_{i} ∘ Δ_{after}", "41"), f"∂b_{i}": (f"Σ_tokens Δ_{after}", "42")}


def _linear_parameters(i: int, delta: int) -> dict[str, tuple[str, str]]:
    return {f"∂w_{i}": (f"a_{i}ᵗ Δ_{delta}", "FC.3"), f"∂b_{i}": (f"Σ_tokens Δ_{delta}", "FC.4")}


NOTHING = Formula("")


def table_1(config: GPT2Config) -> list[Row]:
    """One head of self-attention: from a_2 to a_3^h, and from Δ_3^h back to its part of Δ_2."""
    f = formulas(config)
    d_rho, d_h, square = f"n_T × {config.key_width}", f"n_T × {config.value_width}", "n_T × n_T"
    owned = {row.symbol: math.prod(row.shape) for row in table_3(config) if row.copies == config.n_head}
    of = {x: owned[f"w_{x}"] + owned[f"b_{x}"] for x in "qkv"}
    mask = [Row("Causal mask", f["ρ_causal"], square, f["Δ_scaled"])] if config.causal else []
    return [
        Row("Input", Formula("a_2"), f"n_T × {config.n_embd}", f["Δ_2^h"]),
        Row("Queries", f["q"], d_rho, f["Δ_q"], of["q"]),
        Row("Keys", f["k"], d_rho, f["Δ_k"], of["k"]),
        Row("Raw weights", f["ρ_raw"], square, Formula("Δ_raw goes to q and to k")),
        Row("Scaling", f["ρ_scaled"], square, f["Δ_raw"]),
        *mask,
        Row("Attention weights", f["ρ"], square, f["Δ_causal" if config.causal else "Δ_scaled"]),
        Row("Values", f["v"], d_h, f["Δ_v"], of["v"]),
        Row("Output", f["a_3^h"], d_h, f["Δ_3^h"]),
    ]


def table_2(config: GPT2Config) -> list[Row]:
    """The network, from the tokens to the probabilities and back; block rows stand for every block."""
    f = formulas(config)
    d, inner = f"n_T × {config.n_embd}", f"n_T × {config.inner_width}"
    heads, vocab = f"n_T × {config.n_head * config.value_width}", f"n_T × {config.vocab_size}"
    owned: dict[str, int] = {}
    for row in table_3(config):
        owned[row.layer] = owned.get(row.layer, 0) + row.count
    steps = [
        ("Input", Formula("a_0"), "n_T", NOTHING, False),
        ("Token embedding", f["a_tok"], d, NOTHING, False),
        ("Position embedding", f["a_pos"], d, NOTHING, False),
        ("Input embedding", f["a_1"], d, f["Δ_1"], False),
        ("LayerNorm 1", f["a_2"], d, f["Δ_2"], True),
        ("Multi-head attention", f["a_3"], heads, f["Δ_3"], True),
        ("FC attProj", f["a_4"], d, f["Δ_4"], True),
        ("Skip 1", f["a_5"], d, f["Δ_5"], True),
        ("LayerNorm 2", f["a_6"], d, f["Δ_6"], True),
        ("FC expand", f["a_7"], inner, f["Δ_7"], True),
        ("Activation g", f["a_8"], inner, f["Δ_8"], True),
        ("FC contract", f["a_9"], d, f["Δ_9"], True),
        ("Skip 2", f["a_10"], d, f["Δ_10"], True),
        ("LayerNorm final", f["a_11"], d, f["Δ_11"], False),
        ("FC logits", f["a_12"], vocab, f["Δ_12"], False),
        ("Softmax", f["y_pred"], vocab, NOTHING, False),
    ]
    return [
        Row(layer, forward, shape, backward, owned.get(layer, 0), in_block)
        for layer, forward, shape, backward, in_block in steps
    ]


def table_3(config: GPT2Config) -> list[ParameterRow]:
    """Every parameter with its gradient, in the order of the forward pass; bottom to top is the backward pass."""
    f = formulas(config)
    network, block = shapes(config), block_shapes(config)
    d, widths = config.n_embd, {"q": config.key_width, "k": config.key_width, "v": config.value_width}

    def of_block(layer: str, i: int, name: str) -> list[ParameterRow]:
        return [
            ParameterRow(layer, f"{x}_{i}", f"{name}.{kind}", block[f"{name}.{kind}"], f[f"∂{x}_{i}"], True)
            for x, kind in (("w", "weight"), ("b", "bias"))
        ]

    rows = [
        ParameterRow("Token embedding", "w_tok", TOKEN_TABLE, network[TOKEN_TABLE], f["∂w_tok"]),
        ParameterRow("Position embedding", "w_pos", POSITION_TABLE, network[POSITION_TABLE], f["∂w_pos"]),
        *of_block("LayerNorm 1", 1, "ln_1"),
    ]
    for x, width in widths.items():
        for symbol, kind, shape in ((f"w_{x}", "weight", (d, width)), (f"b_{x}", "bias", (width,))):
            name = f"attn.c_attn.{kind}"
            rows.append(ParameterRow("Multi-head attention", symbol, name, shape, f[f"∂{symbol}"], True, config.n_head))
    rows += [
        *of_block("FC attProj", 3, "attn.c_proj"),
        *of_block("LayerNorm 2", 5, "ln_2"),
        *of_block("FC expand", 6, "mlp.c_fc"),
        *of_block("FC contract", 8, "mlp.c_proj"),
    ]
    for symbol, kind in (("w_10", "weight"), ("b_10", "bias")):
        name = f"transformer.ln_f.{kind}"
        rows.append(ParameterRow("LayerNorm final", symbol, name, network[name], f[f"∂{symbol}"]))
    for symbol, name in (("w_11", f"{HEAD}.weight"), ("b_11", f"{HEAD}.bias")):
        if name in network:  # stored as (vocabulary, width), in the paper (width, vocabulary)
            rows.append(ParameterRow("FC logits", symbol, name, network[name][::-1], f[f"∂{symbol}"]))
    return rows


def counts(config: GPT2Config) -> Counts:
    """The number of parameters of the network, of a block, and of the network with each of three LM heads."""
    untied = replace(config, tie_word_embeddings=False, lm_head_bias=False)
    with_bias, tied = replace(untied, lm_head_bias=True), replace(untied, tie_word_embeddings=True)
    head = {name: shape for name, shape in shapes(untied).items() if name.startswith(HEAD)}
    bias = config.vocab_size if config.lm_head_bias else 0
    return Counts(
        total=count(shapes(config)),
        block=count(block_shapes(config)),
        n_blocks=config.n_layer,
        untied_with_bias=count(shapes(with_bias)),
        untied=count(shapes(untied)),
        tied=count(shapes(tied)),
        logits=count(head) + bias,
        dead_per_block=next(row.count for row in table_3(config) if row.symbol == "b_k"),
    )


def lora_rows(config: GPT2Config, r: int) -> list[LoraRow]:
    """LoRA layers of rank r on every linear layer; queries, keys and values have one each, as in the paper."""
    if r < 1:
        raise ValueError(f"r must be >= 1, got {r}")
    linear = linear_shapes(config)
    heads, d, n = config.n_head, config.n_embd, config.n_layer
    layers = {
        "queries": (d, heads * config.key_width),
        "keys": (d, heads * config.key_width),
        "values": (d, heads * config.value_width),
        "FC attProj": linear["transformer.h.0.attn.c_proj"],
        "FC expand": linear["transformer.h.0.mlp.c_fc"],
        "FC contract": linear["transformer.h.0.mlp.c_proj"],
    }
    rows = [LoraRow(name, n_in, n_out, r, n, n_in * n_out + n_out) for name, (n_in, n_out) in layers.items()]
    return [*rows, LoraRow("FC logits", *linear[HEAD], r, 1, counts(config).logits)]


def lora_total(rows: list[LoraRow]) -> tuple[int, int]:
    """(one block, the whole network): the logits' LoRA layer is counted once, not once per block."""
    block = sum(row.count for row in rows if row.layer != "FC logits")
    return block, sum(row.copies * row.count for row in rows)
