"""The steps of `onfoot walk`: every activation of the forward pass, then every gradient with its check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onfoot.models.model import Model
from onfoot.models.params import HEAD, POSITION_TABLE, TOKEN_TABLE
from onfoot.models.trace import Trace
from onfoot.ops.cross_entropy import IGNORE
from onfoot.ops.embedding import embedding_backward, embedding_forward
from onfoot.ops.layer_norm import layer_norm_forward
from onfoot.probe import Check, Move, Probe, itself
from onfoot.tables import Formula, formulas


@dataclass
class Step:
    """One array of the walk: its symbol, formula and value, and the check of a gradient."""

    symbol: str
    formula: Formula
    value: np.ndarray
    check: Check | None = None
    parameter: str | None = None  # name of the tensor whose gradient this is
    margin: tuple[str, np.ndarray] | None = None  # a label and one number per row: its sum Σ or its σ


@dataclass
class Section:
    """The steps of one part of the network in one direction."""

    title: str
    direction: str  # "forward" or "backward"
    block: int | None
    head: int | None
    steps: list[Step]


def row_sums(value: np.ndarray) -> tuple[str, np.ndarray]:
    """The sum of each row, as a margin."""
    return "Σ", value.sum(axis=-1)


class Walk:
    """Builds the sections from a trace; `probe` checks each gradient with finite differences."""

    def __init__(self, model: Model, trace: Trace, probe: Probe) -> None:
        self.model, self.config = model, model.config
        self.trace, self.probe = trace, probe
        self.formulas = formulas(model.config)

    def step(self, symbol: str, value: Any, text: str | None = None, **more: Any) -> Step:
        formula = self.formulas[symbol] if text is None else Formula(f"{symbol} = {text}")
        return Step(symbol, formula, np.asarray(value), **more)

    def sections(self) -> Iterator[Section]:
        """The sections of the forward pass, then those of the backward pass."""
        blocks, heads = range(self.config.n_layer), range(self.config.n_head)

        def block_section(b: int, direction: str, part: str, steps: list[Step]) -> Section:
            return Section(f"block {b + 1} of {len(blocks)}, {part}", direction, b, None, steps)

        def head_section(b: int, h: int, direction: str, steps: list[Step]) -> Section:
            title = f"block {b + 1} of {len(blocks)}, head {h + 1} of {len(heads)}"
            return Section(title, direction, b, h, steps)

        yield Section("embedding", "forward", None, None, self.embedding_forward())
        for b in blocks:
            yield block_section(b, "forward", "first layer norm", self.first_norm_forward(b))
            for h in heads:
                yield head_section(b, h, "forward", self.head_forward(b, h))
            yield block_section(b, "forward", "after attention", self.after_attention_forward(b))
        yield Section("logits and loss", "forward", None, None, self.logits_forward())
        yield Section("loss and logits", "backward", None, None, self.logits_backward())
        for b in reversed(blocks):
            yield block_section(b, "backward", "after attention", self.after_attention_backward(b))
            for h in heads:
                yield head_section(b, h, "backward", self.head_backward(b, h))
            yield block_section(b, "backward", "first layer norm", self.first_norm_backward(b))
        yield Section("embedding", "backward", None, None, self.embedding_backward())

    # --- forward ---

    def embedding_forward(self) -> list[Step]:
        a = self.trace.a
        return [
            self.step("a_0", a[0][0]),
            self.step("y_gt", self.probe.targets[0], f"the next token, {IGNORE} for none"),
            self.step("a_tok", a["tok"][0]),
            self.step("a_pos", a["pos"]),
        ]

    def first_norm_forward(self, b: int) -> list[Step]:
        a = self.trace.blocks[b].a
        text = None if b == 0 else "a_10 of the previous block"
        return [self.step("a_1", a[1][0], text), self.normalized(1, a[1][0]), self.step("a_2", a[2][0])]

    def normalized(self, i: int, a: np.ndarray) -> Step:
        """ā_i, with σ_i of each row as its margin."""
        eps = self.config.layer_norm_epsilon
        y, _ = layer_norm_forward(a, np.ones(a.shape[-1]), np.zeros(a.shape[-1]), eps)
        return self.step(f"ā_{i}", y, margin=("σ", np.sqrt(a.var(axis=-1) + eps)))

    def head_forward(self, b: int, h: int) -> list[Step]:
        block = self.trace.blocks[b]
        q, k, v, rho = (x[0, h] for x in (block.q, block.k, block.v, block.rho))
        raw = q @ k.T
        scaled = raw / math.sqrt(q.shape[-1])
        steps = [self.step("q", q), self.step("k", k), self.step("v", v)]
        steps += [self.step("ρ_raw", raw), self.step("ρ_scaled", scaled)]
        if self.config.causal:
            steps.append(self.step("ρ_causal", np.where(np.tri(len(scaled)) > 0, scaled, -math.inf)))
        width = self.config.value_width
        out = block.a[3][0][:, h * width : (h + 1) * width]
        return [*steps, self.step("ρ", rho, margin=row_sums(rho)), self.step("a_3^h", out)]

    def after_attention_forward(self, b: int) -> list[Step]:
        a = {i: value[0] for i, value in self.trace.blocks[b].a.items()}
        steps = {i: self.step(f"a_{i}", a[i]) for i in range(3, 11)}
        return [*(steps[i] for i in (3, 4, 5)), self.normalized(5, a[5]), *(steps[i] for i in range(6, 11))]

    def logits_forward(self) -> list[Step]:
        a, targets = self.trace.a, self.probe.targets[0]
        pred = a["pred"][0]
        has_target = targets != IGNORE
        token_loss = np.where(has_target, -np.log(pred[np.arange(len(targets)), np.where(has_target, targets, 0)]), 0)
        return [
            self.normalized(10, self.trace.blocks[-1].a[10][0]),
            self.step("a_11", a[11][0]),
            self.step("a_12", a[12][0]),
            self.step("y_pred", pred, margin=row_sums(pred)),
            self.step("ℓ", token_loss),
            self.step("L", self.trace.loss),
        ]

    # --- backward ---

    def delta(self, symbol: str, value: np.ndarray, activation: str, text: str | None = None, **more: Any) -> Step:
        """The gradient of an activation, checked by perturbing the activation."""
        return self.step(symbol, value, text, check=self.probe.activation(value, {activation: itself}), **more)

    def gradient(self, symbol: str, name: str, transposed: bool = False) -> Step:
        """The gradient of a parameter, checked by perturbing the parameter."""
        value = self.trace.grads[name]
        check = self.probe.parameter(value, name)
        return self.step(symbol, value.T if transposed else value, check=check, parameter=name)

    def weight_and_bias(self, i: int, name: str) -> list[Step]:
        """The gradients of a layer's weight and bias."""
        return [self.gradient(f"∂w_{i}", f"{name}.weight"), self.gradient(f"∂b_{i}", f"{name}.bias")]

    def logits_backward(self) -> list[Step]:
        d12, d11 = self.trace.delta[12][0], self.trace.delta[11][0]
        steps = [self.delta("Δ_12", d12, "a_12", margin=row_sums(d12))]
        for symbol, name in (("∂w_11", f"{HEAD}.weight"), ("∂b_11", f"{HEAD}.bias")):
            if name in self.trace.grads:
                steps.append(self.gradient(symbol, name, transposed=True))
        return [*steps, self.delta("Δ_11", d11, "a_11"), *self.weight_and_bias(10, "transformer.ln_f")]

    def after_attention_backward(self, b: int) -> list[Step]:
        d, name = {i: x[0] for i, x in self.trace.blocks[b].delta.items()}, f"transformer.h.{b}"
        last = b == self.config.n_layer - 1

        def delta(i: int, text: str | None = None, **more: Any) -> Step:
            return self.delta(f"Δ_{i}", d[i], f"{b}.a_{i}", text, **more)

        return [
            delta(10, None if last else "Δ_1 of the next block"),
            delta(9),
            *self.weight_and_bias(8, f"{name}.mlp.c_proj"),
            delta(8),
            delta(7),
            *self.weight_and_bias(6, f"{name}.mlp.c_fc"),
            delta(6),
            *self.weight_and_bias(5, f"{name}.ln_2"),
            delta(5),
            delta(4),
            *self.weight_and_bias(3, f"{name}.attn.c_proj"),
            delta(3),
        ]

    def head_backward(self, b: int, h: int) -> list[Step]:
        """One head, from its columns of Δ_3 to its part of Δ_2; each branch is checked by perturbing its q, k or v."""
        block, probe = self.trace.blocks[b], self.probe
        q, k, rho, d_causal = (x[0, h] for x in (block.q, block.k, block.rho, block.delta_causal))
        root = math.sqrt(q.shape[-1])
        width = self.config.value_width
        columns = slice(h * width, (h + 1) * width)
        d3 = block.delta[3][0][:, columns]
        d_raw = d_causal / root
        w = {x: self.weight_of(b, h, x) for x in "qkv"}
        branches = {"v": rho.T @ d3 @ w["v"].T, "q": d_raw @ k @ w["q"].T, "k": d_raw.T @ q @ w["k"].T}

        def output_move(direction: np.ndarray) -> np.ndarray:
            out = np.zeros_like(block.a[3])
            out[0][:, columns] = direction
            return out

        def input_move(x: str) -> Move:
            """How q, k or v of this head changes when a_2 changes."""

            def move(direction: np.ndarray) -> np.ndarray:
                out = np.zeros_like(getattr(block, x))
                out[0, h] = direction @ w[x]
                return out

            return move

        def input_gradient(symbol: str, gradient: np.ndarray, inputs: str) -> Step:
            moves = {f"{b}.{x}": input_move(x) for x in inputs}
            return self.step(symbol, gradient, check=probe.activation(gradient, moves))

        def scores(symbol: str, gradient: np.ndarray, scale: float = 1) -> Step:
            check = probe.scores(gradient, b, h, lambda x: x / scale)
            return self.step(symbol, gradient, check=check, margin=row_sums(gradient))

        return [
            self.step("Δ_3^h", d3, check=probe.activation(d3, {f"{b}.a_3": output_move})),
            *self.head_parameters(b, h, "v"),
            input_gradient("Δ_v", branches["v"], "v"),
            *([scores("Δ_causal", d_causal)] if self.config.causal else []),
            scores("Δ_scaled", d_causal),
            scores("Δ_raw", d_raw, root),
            *self.head_parameters(b, h, "q"),
            input_gradient("Δ_q", branches["q"], "q"),
            *self.head_parameters(b, h, "k"),
            input_gradient("Δ_k", branches["k"], "k"),
            input_gradient("Δ_2^h", branches["v"] + branches["q"] + branches["k"], "qkv"),
        ]

    def columns_of(self, h: int, x: str) -> slice:
        """The columns of head h's q, k or v in c_attn, whose columns are q | k | v."""
        c = self.config
        width = c.value_width if x == "v" else c.key_width
        start = {"q": 0, "k": c.n_head * c.key_width, "v": 2 * c.n_head * c.key_width}[x] + h * width
        return slice(start, start + width)

    def weight_of(self, b: int, h: int, x: str) -> np.ndarray:
        return self.model.params[f"transformer.h.{b}.attn.c_attn.weight"][:, self.columns_of(h, x)]

    def head_parameters(self, b: int, h: int, x: str) -> list[Step]:
        """The gradients of one head's w_x and b_x, which are columns of c_attn's."""
        columns, steps = self.columns_of(h, x), []
        for symbol, kind in ((f"∂w_{x}", "weight"), (f"∂b_{x}", "bias")):
            name = f"transformer.h.{b}.attn.c_attn.{kind}"
            value = self.trace.grads[name][..., columns]
            check = self.probe.parameter(value, name, (..., columns))
            part = f"{name}[..., {columns.start}:{columns.stop}]"
            steps.append(self.step(symbol, value, check=check, parameter=part))
        return steps

    def first_norm_backward(self, b: int) -> list[Step]:
        d = self.trace.blocks[b].delta
        return [
            self.delta("Δ_2", d[2][0], f"{b}.a_2"),
            *self.weight_and_bias(1, f"transformer.h.{b}.ln_1"),
            self.delta("Δ_1", d[1][0], f"{b}.a_1"),
        ]

    def embedding_backward(self) -> list[Step]:
        table, d0 = self.model.params[TOKEN_TABLE], self.trace.delta[0][0]
        steps = []
        if self.config.tie_word_embeddings:
            steps = self.tied_paths()
        return [
            *steps,
            self.gradient("∂w_tok", TOKEN_TABLE),
            self.gradient("∂w_pos", POSITION_TABLE),
            self.step("Δ_0", d0, check=self.probe.activation(d0, {"a_tok": lambda x: x @ table})),
        ]

    def tied_paths(self) -> list[Step]:
        """The gradients from both uses of a tied embedding, each checked by perturbing the output of that use alone."""
        trace, tokens = self.trace, self.probe.tokens[0]
        d1, d12, a11 = trace.blocks[0].delta[1][0], trace.delta[12][0], trace.a[11][0]
        _, saved = embedding_forward(tokens, self.model.params[TOKEN_TABLE])
        lookup, logits = embedding_backward(d1, saved), d12.T @ a11  # (V, d) both
        lookup_formula = Formula("∂w_tok, as embedding = ohe(a_0)ᵗ Δ_1", ("3",))
        logits_formula = Formula("∂w_tok, as logits = (a_11ᵗ Δ_12)ᵗ", ("TIE.1",))
        return [
            Step("∂w_tok", lookup_formula, lookup, self.probe.activation(lookup, {"a_tok": lambda x: x[tokens]})),
            Step("∂w_tok", logits_formula, logits, self.probe.activation(logits, {"a_12": lambda x: a11 @ x.T})),
        ]
