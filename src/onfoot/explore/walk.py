"""`onfoot walk`: the arrays of the network in the order of the computation, with every gradient checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onfoot.config import GPT2Config
from onfoot.explore.heads import columns_of
from onfoot.explore.network import block_input, build_steps
from onfoot.explore.study_context import StudyContext
from onfoot.models.inputs import check_tokens, count_targets, next_token_targets
from onfoot.models.model import Model
from onfoot.models.params import POSITION_TABLE, shapes
from onfoot.ops.cross_entropy import IGNORE
from onfoot.probe import Check, Probe
from onfoot.tables import Formula


@dataclass
class Line:
    """One array of the walk: its symbol, formula and value, and the check of a gradient."""

    symbol: str
    formula: Formula
    value: np.ndarray
    check: Check | None = None
    parameter: str | None = None  # name of the tensor whose gradient this is
    margin: tuple[str, np.ndarray] | None = None  # a label and one number per row: its sum Σ or its σ


@dataclass
class Section:
    """The arrays of one part of the network in one direction."""

    title: str
    direction: str  # "forward" or "backward"
    block: int | None
    head: int | None
    lines: list[Line]


def small_model(config: GPT2Config, seed: int) -> Model:
    """A float64 model with random parameters far from their initialization: biases are not 0, norm weights not 1."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in shapes(config).items():
        value = rng.normal(0, 0.5 if len(shape) == 2 else 0.2, shape)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        params[name] = value + 1 if is_norm else value
    return Model(config, params, "float64", "numpy")


class Walk:
    """A walk through a small model: `loss` is set at once, `errors` and `failed` fill up while `sections` is iterated.

    The arrays, their formulas and their checks are those of the page (`network.build_steps`).
    """

    def __init__(self, config: GPT2Config, tokens: np.ndarray, seed: int, summed: bool) -> None:
        self.config, self.seed = config, seed
        self.tokens = check_tokens(tokens, config.vocab_size, config.n_positions)
        if self.tokens.shape[1] < 2:
            raise ValueError('1 token has no target; give at least 2, as in --tokens "3 1 4 1 5"')
        targets = next_token_targets(self.tokens)
        self.divisor = 1 if summed else count_targets(targets)
        model = small_model(config, seed)
        trace = model.trace(self.tokens, targets, divisor=self.divisor, input_gradient=True)
        self.loss = trace.loss
        self.context = StudyContext(model, trace, self.tokens, targets, self.divisor)
        build_steps(self.context)
        self.probe = Probe(model, self.tokens, targets, self.divisor, seed + 1)
        self.errors: list[float] = []
        self.failed: list[str] = []

    def sections(self) -> Iterator[Section]:
        """The sections of the forward pass, then those of the backward pass."""
        for section in self._sections():
            for line in section.lines:
                if line.check is not None:
                    self.errors.append(line.check.error)
                    if not line.check.passed:
                        self.failed.append(f"{line.symbol} ({section.title})")
            yield section

    def _sections(self) -> Iterator[Section]:
        blocks, heads = range(self.config.n_layer), range(self.config.n_head)

        def block(b: int, direction: str, part: str, lines: list[Line]) -> Section:
            return Section(f"block {b + 1} of {len(blocks)}, {part}", direction, b, None, lines)

        def head(b: int, h: int, direction: str, lines: list[Line]) -> Section:
            title = f"block {b + 1} of {len(blocks)}, head {h + 1} of {len(heads)}"
            return Section(title, direction, b, h, lines)

        yield Section("embedding", "forward", None, None, self.embedding_forward())
        for b in blocks:
            yield block(b, "forward", "first layer norm", self.first_norm_forward(b))
            for h in heads:
                yield head(b, h, "forward", self.head_forward(b, h))
            yield block(b, "forward", "after attention", self.after_attention_forward(b))
        yield Section("logits and loss", "forward", None, None, self.logits_forward())
        yield Section("loss and logits", "backward", None, None, self.logits_backward())
        for b in reversed(blocks):
            yield block(b, "backward", "after attention", self.after_attention_backward(b))
            for h in heads:
                yield head(b, h, "backward", self.head_backward(b, h))
            yield block(b, "backward", "first layer norm", self.first_norm_backward(b))
        yield Section("embedding", "backward", None, None, self.embedding_backward())

    def line(self, id: str, margin: str = "", **changes: Any) -> Line:
        """An array of the page; a gradient is checked. A margin of "Σ" sums each row, "σ" is that of a layer norm."""
        tensor = self.context.tensors[id]
        check = tensor.measure(self.probe) if tensor.measure is not None else None
        parameter = tensor.parameter if check is not None else None
        made = Line(tensor.symbol, tensor.formula, tensor.value, check, parameter)
        if margin == "Σ":
            made.margin = margin, tensor.value.sum(axis=-1)
        elif margin == "σ":
            made.margin = margin, self.context.tensors.value(id.replace("ā", "σ"))
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    def lines(self, prefix: str, *symbols: str) -> list[Line]:
        return [self.line(f"{prefix}{symbol}") for symbol in symbols]

    def embedding_forward(self) -> list[Line]:
        targets = Line("y_gt", Formula(f"y_gt = the next token, {IGNORE} for none"), self.context.targets[0])
        return [self.line("a_0", value=self.tokens[0]), targets, *self.lines("", "a_tok", "a_pos")]

    def first_norm_forward(self, b: int) -> list[Line]:
        entering = self.line(block_input(b))
        if b:
            entering.symbol, entering.formula = "a_1", Formula("a_1 = a_10 of the previous block")
        return [entering, self.line(f"{b}.ā_1", "σ"), self.line(f"{b}.a_2")]

    def head_forward(self, b: int, h: int) -> list[Line]:
        masked = ["ρ_causal"] if self.config.causal else []
        scores = self.lines(f"{b}.{h}.", "q", "k", "v", "ρ_raw", "ρ_scaled", *masked)
        return [*scores, self.line(f"{b}.{h}.ρ", "Σ"), self.line(f"{b}.{h}.a_3^h")]

    def after_attention_forward(self, b: int) -> list[Line]:
        before, after = (3, 4, 5), (6, 7, 8, 9, 10)
        first, second = (self.lines(f"{b}.", *(f"a_{i}" for i in part)) for part in (before, after))
        return [*first, self.line(f"{b}.ā_5", "σ"), *second]

    def logits_forward(self) -> list[Line]:
        loss = Line("L", self.context.formulas["L"], np.asarray(self.loss))
        logits = [self.line("ā_10", "σ"), *self.lines("", "a_11", "a_12")]
        return [*logits, self.line("y_pred", "Σ"), self.line("ℓ"), loss]

    def logits_backward(self) -> list[Line]:
        lines = [self.line("Δ_12", "Σ")]
        for id in ("∂w_11", "∂b_11"):
            if id in self.context.tensors:  # in the file, the weight is (vocabulary, width)
                lines.append(self.line(id, value=self.context.tensors.value(id).T))
        return [*lines, *self.lines("", "Δ_11", "∂w_10", "∂b_10")]

    def after_attention_backward(self, b: int) -> list[Line]:
        linear = ("Δ_9", "∂w_8", "∂b_8", "Δ_8", "Δ_7", "∂w_6", "∂b_6", "Δ_6", "∂w_5", "∂b_5", "Δ_5", "Δ_4")
        entering = self.line(f"{b}.Δ_10")
        if b < self.config.n_layer - 1:
            entering.formula = Formula("Δ_10 = Δ_1 of the next block")
        return [entering, *self.lines(f"{b}.", *linear, "∂w_3", "∂b_3", "Δ_3")]

    def head_backward(self, b: int, h: int) -> list[Line]:
        """One head, from its columns of Δ_3 to its part of Δ_2."""
        p = f"{b}.{h}."
        scores = ["Δ_causal"] if self.config.causal else []
        return [
            self.line(f"{p}Δ_3^h"),
            *self.head_parameters(b, h, "v"),
            self.line(f"{p}Δ_v"),
            *(self.line(f"{p}{symbol}", "Σ") for symbol in (*scores, "Δ_scaled", "Δ_raw")),
            *self.head_parameters(b, h, "q"),
            self.line(f"{p}Δ_q"),
            *self.head_parameters(b, h, "k"),
            *self.lines(p, "Δ_k", "Δ_2^h"),
        ]

    def head_parameters(self, b: int, h: int, x: str) -> list[Line]:
        """The gradients of one head's w_x and b_x, which are columns of c_attn's."""
        columns = columns_of(self.context, h, x)
        lines = self.lines(f"{b}.{h}.", f"∂w_{x}", f"∂b_{x}")
        for line in lines:
            line.parameter = f"{line.parameter}[..., {columns.start}:{columns.stop}]"
        return lines

    def first_norm_backward(self, b: int) -> list[Line]:
        lines = self.lines(f"{b}.", "Δ_2", "∂w_1", "∂b_1")
        leaving = self.line("Δ_1" if b == 0 else f"{b - 1}.Δ_10", symbol="Δ_1", formula=self.context.formulas["Δ_1"])
        return [*lines, leaving]

    def embedding_backward(self) -> list[Line]:
        tied = self.tied_parts() if self.config.tie_word_embeddings else []
        table = self.line("∂w_tok")
        positions = self.context.trace.grads[POSITION_TABLE]
        check = self.probe.parameter(positions, POSITION_TABLE)
        of_positions = Line("∂w_pos", self.context.formulas["∂w_pos"], positions, check, POSITION_TABLE)
        return [*tied, table, of_positions, self.line("Δ_0")]

    def tied_parts(self) -> list[Line]:
        """The gradients from both uses of a tied embedding, each checked by perturbing the output of that use alone."""
        tokens, a11 = self.tokens[0], self.context.tensors.value("a_11")
        lookup, logits = (self.line(f"∂w_tok, as {use}", symbol="∂w_tok") for use in ("embedding", "logits"))
        lookup.check = self.probe.activation(lookup.value, {"a_tok": lambda x: x[tokens]})
        logits.check = self.probe.activation(logits.value, {"a_12": lambda x: a11 @ x.T})
        return [lookup, logits]
