"""The arrays and steps of a LLaMA head: rotated queries, and keys and values that several query heads may share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onfoot.explore.heads import HeadArrays, Row
from onfoot.explore.rms_arrays import add_rms, rms_backward_terms, rms_forward_terms
from onfoot.explore.step import Step
from onfoot.explore.study_context import OVER_TOKENS, StudyContext
from onfoot.explore.tensors import FEATURE, TOKEN
from onfoot.explore.terms import Term, dot, product
from onfoot.models.llama import rotations
from onfoot.ops.rope import turn
from onfoot.tables import Formula

COS, SIN, TURN = "cos φ", "sin φ", "J"
ANGLE = "φ = t ω_i, of token t and pair i"
Move = Callable[[np.ndarray], np.ndarray]


def rotation(m: StudyContext) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of the angles of all tokens, (T, D/2)."""
    c = m.config
    return rotations(c.rope_theta, c.key_width, c.rope_scaling, m.n_tokens, "float64")


def rotated(m: StudyContext, x: np.ndarray, back: bool = False) -> np.ndarray:
    """x (..., T, D) rotated by the positions of its tokens, or rotated back."""
    cos, sin = rotation(m)
    return turn(x, cos, -sin if back else sin, False)


def add_rotations(m: StudyContext) -> None:
    """Adds cos φ and sin φ (T, D), the same for all heads, and J (D, D), which turns each pair (a, b) to (−b, a)."""
    cos, sin = rotation(m)
    for id, value in ((COS, cos), (SIN, sin)):
        m.add(id, id, np.concatenate([value, value], axis=1), formula=Formula(ANGLE, ("ROPE.1",)))
    half = m.config.key_width // 2
    turned = np.zeros((2 * half, 2 * half))
    turned[:half, half:], turned[half:, :half] = np.eye(half), -np.eye(half)
    formula = Formula("x J = (−b, a) of each pair (a, b) of features", ("ROPE.4",))
    m.add(TURN, TURN, turned, (FEATURE, FEATURE), formula=formula)


def turned_terms(id: str, symbol: str, back: bool = False) -> tuple[Term, ...]:
    """x ∘ cos φ ± (x J) ∘ sin φ."""
    return (
        product(f"{symbol} ∘ cos φ", (id, "rc"), (COS, "rc")),
        dot(f"({symbol} J) ∘ sin φ", "features", (id, "rj"), (TURN, "jc"), (SIN, "rc"), sign=-1 if back else 1),
    )


def fork_terms(m: StudyContext, b: int) -> tuple[Term, ...]:
    """The terms of Δ_2: one through the queries of every head, and one each through the keys and values they share."""
    queries = [product(f"Δ_q^{{{h + 1}}}", (f"{b}.{h}.Δ_q", "rc")) for h in range(m.config.n_head)]
    shared = [
        product(f"Δ_{x}^{{{j + 1}}}", (f"{b}.kv{j}.Δ_{x}", "rc")) for j in range(m.config.n_kv_head) for x in "kv"
    ]
    return (*queries, *shared)


class Projection:
    """Queries, keys or values of one head: x = a_2 w, normed and rotated where the family does it.

    `adds` are the terms of the gradient at the end, ∂q, ∂k or ∂v, and `gradient` its value.
    """

    def __init__(self, m: StudyContext, b: int, index: int, x: str, prefix: str) -> None:
        self.m, self.b, self.index, self.x, self.prefix = m, b, index, x, prefix
        self.layer = f"model.layers.{b}.self_attn.{x}_proj"
        width = m.config.value_width if x == "v" else m.config.key_width
        self.rows = slice(index * width, (index + 1) * width)
        self.all_heads = getattr(m.trace.blocks[b], x)  # (1, heads, T, D)
        self.rotates, self.normed = x != "v", x != "v" and m.config.qk_norm
        self.first = f"{x}_lin" if self.rotates else x  # the symbol of the linear layer's output
        self.before = f"{x}_norm" if self.normed else self.first  # that of RoPE's input
        self.norm_weight = f"{b}.w_{x}^norm"

    def id(self, symbol: str) -> str:
        return f"{self.prefix}{symbol}"

    def value(self, symbol: str) -> np.ndarray:
        return self.m.tensors.value(self.id(symbol))

    def add(self, symbol: str, value: Any, *terms: Term, **more: Any) -> None:
        self.m.add(self.id(symbol), symbol, value, (TOKEN, FEATURE), terms, **more)

    def forward(self) -> None:
        """Adds the linear layer's output, the normed one and the rotated one."""
        m, x, a2 = self.m, self.x, f"{self.b}.a_2"
        like = {"known_shape": self.all_heads.shape[2:]}
        bias = (product(f"~b_{x}", (self.id(f"b_{x}"), "c")),) if f"{self.layer}.bias" in m.params else ()
        product_ = dot(f"a_2 w_{x}", "features", (a2, "rj"), (self.id(f"w_{x}"), "jc"))
        if not self.rotates:
            self.add(x, self.all_heads[0, self.index], product_, *bias)
            return
        self.add(self.first, self._linear_output, product_, *bias, **like)
        if self.normed:
            self.add(self.before, self._unrotated, *rms_forward_terms(self.prefix, x, self.norm_weight), **like)
        self.add(x, self.all_heads[0, self.index], *turned_terms(self.id(self.before), self.before))

    def _unrotated(self) -> np.ndarray:
        return rotated(self.m, self.all_heads[0, self.index], back=True)

    def _linear_output(self) -> np.ndarray:
        if not self.normed:
            return self._unrotated()
        y = self.m.tensors.value(f"{self.b}.a_2") @ self.value(f"w_{self.x}")
        name = f"{self.layer}.bias"
        return y + self.m.weight(name, self.rows) if name in self.m.params else y

    def backward(self, gradient: Callable[[], np.ndarray], *terms: Term) -> None:
        """Adds the gradients from ∂q, which the terms make, back to the one through a_2."""
        m, x, b = self.m, self.x, self.b
        like = {"known_shape": self.all_heads.shape[2:]}
        self.add(f"∂{x}", gradient, *terms, **like, **self._proof(f"∂{x}", f"{b}.{x}", self._in_heads))
        if self.rotates:
            back = turned_terms(self.id(f"∂{x}"), f"∂{x}", back=True)
            name = f"∂{self.before}"
            self.add(name, lambda: rotated(m, self.value(f"∂{x}"), back=True), *back, **like, **self._before_rope(name))
        if self.normed:
            inside = f"∂{self.before}"
            add_rms(m, self.prefix, x, self.id(self.first), self.id(inside), self.norm_name, self.norm_weight)
            terms = rms_backward_terms(self.prefix, x)
            proof = self._proof(f"∂{self.first}", f"{b}.{self.first}", self._in_columns)
            self.add(f"∂{self.first}", self._norm_gradient, *terms, **like, **proof)
        last = f"∂{self.first}"
        through = dot(f"{last} w_{x}ᵗ", "features", (self.id(last), "rj"), (self.id(f"w_{x}"), "cj"))
        shape = {"known_shape": m.trace.blocks[b].a[2].shape[1:]}
        self.add(f"Δ_{x}", lambda: self.value(last) @ self.value(f"w_{x}").T, through, **shape, **self._input_proof())

    @property
    def norm_name(self) -> str:
        return f"model.layers.{self.b}.self_attn.{self.x}_norm.weight"

    def _norm_gradient(self) -> np.ndarray:
        normed, signal, along, root = (self.value(f"{n}_{self.x}") for n in ("ā", "x", "mean āx", "r"))
        return (signal - normed * along[:, None]) / root[:, None]

    def _in_heads(self, direction: np.ndarray) -> np.ndarray:
        out = np.zeros_like(self.all_heads)
        out[0, self.index] = direction
        return out

    def _in_columns(self, direction: np.ndarray) -> np.ndarray:
        """A direction of this head's output of the linear layer, which has the heads side by side."""
        out = np.zeros((1, len(direction), self.all_heads.shape[1] * direction.shape[1]))
        out[0, :, self.rows] = direction
        return out

    def _proof(self, symbol: str, noted: str, move: Move) -> dict[str, Any]:
        def differentiate(autograd: Any) -> np.ndarray:
            found = autograd.activation(noted)
            return found[:, self.rows] if noted.endswith("_lin") else found[self.index]

        return {
            "measure": lambda probe: probe.activation(self.value(symbol), {noted: move}),
            "differentiate": differentiate,
        }

    def _before_rope(self, symbol: str) -> dict[str, Any]:
        """Perturbing RoPE's input perturbs its output by the rotated direction."""
        if not self.normed:
            return self._proof(symbol, f"{self.b}.{self.before}", self._in_columns)
        noted = f"{self.b}.{self.before}"  # (1, T, heads, D)

        def move(direction: np.ndarray) -> np.ndarray:
            return np.moveaxis(self._in_heads(direction), 1, 2)

        return {
            "measure": lambda probe: probe.activation(self.value(symbol), {noted: move}),
            "differentiate": lambda autograd: autograd.activation(noted)[:, self.index],
        }

    def _input_proof(self) -> dict[str, Any]:
        """Δ_q is checked by perturbing a_2 only where this head's q reads it."""
        noted = f"{self.b}.{self.first}"
        place = self._in_columns if self.rotates else self._in_heads

        def move(direction: np.ndarray) -> np.ndarray:
            return place(direction @ self.value(f"w_{self.x}"))

        return {
            "measure": lambda probe: probe.activation(self.value(f"Δ_{self.x}"), {noted: move}),
            "differentiate": lambda autograd: autograd.through(
                noted, f"{self.b}.a_2", (..., self.rows) if self.rotates else (slice(None), self.index)
            ),
        }

    def parameters(self) -> list[tuple[str, str]]:
        """This head's rows of the projection's weight and bias, with their gradients."""
        m, x, signal = self.m, self.x, self.id(f"∂{self.first}")
        part = f"rows of {'head' if x == 'q' else 'key head'} {self.index + 1}, transposed"
        of_weight = dot(f"a_2ᵗ ∂{self.first}", OVER_TOKENS, (f"{self.b}.a_2", "jr"), (signal, "jc"))
        weight, axes = f"{self.layer}.weight", (FEATURE, FEATURE)
        pairs = [m.parameter(self.prefix, f"w_{x}", weight, axes, (of_weight,), self.rows, transposed=True, part=part)]
        if f"{self.layer}.bias" in m.params:
            of_bias = dot(f"Σ_tokens ∂{self.first}", OVER_TOKENS, (signal, "jc"))
            name = f"{self.layer}.bias"
            part = part.removesuffix(", transposed")
            pairs.append(m.parameter(self.prefix, f"b_{x}", name, (FEATURE,), (of_bias,), self.rows, part=part))
        return pairs

    def norm_parameter(self, n_heads: int, prefix: str) -> list[tuple[str, str]]:
        """The weight of Qwen3's norm, one for all heads of a block; `prefix` is that of head 0 without its number."""
        if not self.normed:
            return []
        ids = f"{self.b}.w_{self.x}^norm", f"{self.b}.∂w_{self.x}^norm"
        if ids[0] not in self.m.tensors:
            terms = tuple(
                dot(
                    f"Σ_tokens ā_{self.x} ∘ ∂{self.before}, of head {h + 1}",
                    OVER_TOKENS,
                    (f"{prefix}{h}.ā_{self.x}", "jc"),
                    (f"{prefix}{h}.∂{self.before}", "jc"),
                )
                for h in range(n_heads)
            )
            self.m.parameter(f"{self.b}.", f"w_{self.x}^norm", self.norm_name, (FEATURE,), terms)
        return [ids]

    def rows_of_map(self, names: tuple[str, str, str], n_heads: int, prefix: str, shared: str) -> list[Row]:
        """The rows of the map: the linear layer, and where they exist the norm and the rotation."""
        linear, norm, rope = names
        inside_norm = [self.id(f"{symbol}_{self.x}") for symbol in ("r", "ā", "x", "mean āx")] if self.normed else []
        weights = [
            (self.id(w), self.id(f"∂{w}")) for w in (f"w_{self.x}", f"b_{self.x}") if self.id(w) in self.m.tensors
        ]
        rows: list[Row] = [(self.first, linear + shared, self.id(self.first), self.id(f"∂{self.first}"), weights, [])]
        if self.normed:
            signal, pair = self.id(f"∂{self.before}"), self.norm_parameter(n_heads, prefix)
            rows.append((self.before, norm + shared, self.id(self.before), signal, pair, inside_norm))
        if self.rotates:
            rows.append((self.x, rope + shared, self.id(self.x), self.id(f"∂{self.x}"), [], [COS, SIN]))
        return rows


class KeyValueArrays:
    """The keys and values of one key head, which one or more query heads read."""

    def __init__(self, m: StudyContext, b: int, j: int) -> None:
        self.m, self.b, self.j, self.prefix = m, b, j, f"{b}.kv{j}."
        group = m.config.n_head // m.config.n_kv_head
        self.readers = range(j * group, (j + 1) * group)
        self.keys, self.values = (Projection(m, b, j, x, self.prefix) for x in "kv")
        for one in (self.keys, self.values):
            if one.normed:
                one.norm_parameter(m.config.n_kv_head, f"{b}.kv")
            one.forward()
            one.parameters()

    @property
    def shared(self) -> str:
        """What a row's title says of keys and values that several heads read."""
        if len(self.readers) == 1:
            return ""
        return f", shared by heads {self.readers[0] + 1} to {self.readers[-1] + 1}"

    def add_gradients(self) -> None:
        """Adds ∂k and ∂v, the sums over the query heads that read them, and what follows from them."""
        value, b = self.m.tensors.value, self.b
        ids = [f"{b}.{h}." for h in self.readers]
        several = len(ids) > 1

        def label(text: str, h: int) -> str:
            return f"{text}, of head {h + 1}" if several else text

        of_keys = [
            dot(label("Δ_rawᵗ q", h), OVER_TOKENS, (f"{p}Δ_raw", "jr"), (f"{p}q", "jc"))
            for p, h in zip(ids, self.readers, strict=True)
        ]
        of_values = [
            dot(label("ρᵗ Δ_3^h", h), OVER_TOKENS, (f"{p}ρ", "jr"), (f"{p}Δ_3^h", "jc"))
            for p, h in zip(ids, self.readers, strict=True)
        ]

        def keys() -> np.ndarray:
            return np.sum([value(f"{p}Δ_raw").T @ value(f"{p}q") for p in ids], axis=0)  # eq GQA.2

        def values() -> np.ndarray:
            return np.sum([value(f"{p}ρ").T @ value(f"{p}Δ_3^h") for p in ids], axis=0)  # eq GQA.3

        self.keys.backward(keys, *of_keys)
        self.values.backward(values, *of_values)


class LlamaHead(HeadArrays):
    """Adds the arrays of query head h of block b and builds its steps; its keys and values are those of `shared`."""

    def __init__(self, m: StudyContext, b: int, h: int, shared: KeyValueArrays) -> None:
        super().__init__(m, b, h)
        self.shared = shared
        self.queries = Projection(m, b, h, "q", self.prefix)

    def id(self, symbol: str) -> str:
        return f"{self.shared.prefix}{symbol}" if symbol in ("k", "v") else f"{self.prefix}{symbol}"

    def add(self, symbol: str, value: Any, axes: tuple[str, str], *terms: Term, **more: Any) -> None:
        self.m.add(f"{self.prefix}{symbol}", symbol, value, axes, terms, **more)

    def add_arrays(self) -> None:
        """Adds the head's arrays, except the gradients of the keys and values, which may have other readers."""
        if self.queries.normed:
            self.queries.norm_parameter(self.m.config.n_head, f"{self.b}.")
        self.queries.forward()
        self.queries.parameters()
        self.scores_forward()
        self.scores_backward()
        made = dot("Δ_raw k", OVER_TOKENS, (f"{self.prefix}Δ_raw", "rj"), (self.id("k"), "jc"))
        self.queries.backward(lambda: self.value("Δ_raw") @ self.value("k"), made)

    def steps(self) -> list[Step]:
        p, shared, kv = self.prefix, self.shared, self.shared.prefix
        n, n_kv, b = self.m.config.n_head, self.m.config.n_kv_head, self.b
        through = [f"{kv}Δ_k", f"{kv}Δ_v"]
        keys, values = shared.keys, shared.values
        rows: list[Row] = [
            ("a_2", "Input of the head", f"{b}.a_2", f"{p}Δ_q", [], through),
            *self.queries.rows_of_map(("Queries", "RMS norm of queries", "Queries, RoPE"), n, f"{b}.", ""),
            *keys.rows_of_map(("Keys", "RMS norm of keys", "Keys, RoPE"), n_kv, f"{b}.kv", shared.shared),
            *values.rows_of_map(("Values", "", ""), n_kv, f"{b}.kv", shared.shared),
        ]
        return self.rows([*rows, *self.score_rows()])
