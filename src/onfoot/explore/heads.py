"""The arrays and steps of one attention head: Table 1 with numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from onfoot.explore.step import Step
from onfoot.explore.study_context import OVER_TOKENS, StudyContext
from onfoot.explore.tensors import FEATURE, TOKEN, Tensor
from onfoot.explore.terms import Factor, Term, dot, product
from onfoot.ops.attention import visible
from onfoot.tables import Formula

KINDS = {"q": "Queries", "k": "Keys", "v": "Values"}
# gradients at q, k and v, before the backward pass of c_attn; the tables have the resulting gradients at a_2
INNER = {
    "∂v": Formula("∂v = ρᵗ Δ_3^h", ("ATT.1",)),
    "∂q": Formula("∂q = Δ_raw k", ("ATT.2",)),
    "∂k": Formula("∂k = Δ_rawᵗ q", ("ATT.3",)),
    "∂ρ": Formula("∂ρ = Δ_3^h vᵗ"),
}
SQUARE = (TOKEN, TOKEN)
# of a row of the map: the end of its id, its title, the ids of its activation and error signal, of its parameters and
# of the intermediate values in its formulas
Row = tuple[str, str, str, str, list[tuple[str, str]], list[str]]


def columns_of(m: StudyContext, h: int, x: str) -> slice:
    """The columns of c_attn (q | k | v) that hold head h's q, k or v."""
    c = m.config
    width = c.value_width if x == "v" else c.key_width
    start = {"q": 0, "k": c.n_head * c.key_width, "v": 2 * c.n_head * c.key_width}[x] + h * width
    return slice(start, start + width)


def fork_terms(m: StudyContext, b: int) -> tuple[Term, ...]:
    """The terms of Δ_2: one each through the values, queries and keys of every head."""
    return tuple(
        product(f"Δ_{x}^{{{h + 1}}}", (f"{b}.{h}.Δ_{x}", "rc")) for h in range(m.config.n_head) for x in ("v", "q", "k")
    )


class HeadArrays:
    """Adds the arrays of head h of block b and builds its steps."""

    def __init__(self, m: StudyContext, b: int, h: int) -> None:
        self.m, self.b, self.h = m, b, h
        self.prefix = f"{b}.{h}."
        self.block = m.trace.blocks[b]
        self.root = math.sqrt(m.config.key_width)
        self.layer = f"transformer.h.{b}.attn.c_attn"
        width = m.config.value_width
        self.output = slice(h * width, (h + 1) * width)
        self.square = (m.n_tokens, m.n_tokens)

    def steps(self) -> list[Step]:
        self.forward()
        self.scores_backward()
        self.qkv_backward()
        parameters = {x: self.parameters(x) for x in KINDS}
        p = self.prefix
        rows: list[Row] = [
            ("a_2", "Input of the head", f"{self.b}.a_2", f"{p}Δ_2^h", [], [f"{p}Δ_{x}" for x in "vqk"]),
            *((x, name, f"{p}{x}", f"{p}∂{x}", parameters[x], []) for x, name in KINDS.items()),
        ]
        return self.rows([*rows, *self.score_rows()])

    def score_rows(self) -> list[Row]:
        """The rows of the map from the raw scores to the output of the head."""
        p, masked = self.prefix, self.m.config.causal
        return [
            ("raw", "Raw weights", f"{p}ρ_raw", f"{p}Δ_raw", [], []),
            ("scaled", "Scaling", f"{p}ρ_scaled", f"{p}Δ_scaled", [], []),
            *([("causal", "Causal mask", f"{p}ρ_causal", f"{p}Δ_causal", [], [])] if masked else []),
            ("rho", "Attention weights", f"{p}ρ", f"{p}∂ρ", [], [f"{p}∂ρ⊖ρ"]),
            ("out", "Output of the head", f"{p}a_3^h", f"{p}Δ_3^h", [], []),
        ]

    def rows(self, rows: list[Row]) -> list[Step]:
        return [
            Step(f"{self.prefix}{name}", title, forward, backward, params, inside, self.b, self.h)
            for name, title, forward, backward, params, inside in rows
        ]

    def add(self, symbol: str, value: Any, axes: tuple[str, str], *terms: Term, **more: Any) -> None:
        formula = INNER.get(symbol)
        self.m.add(f"{self.prefix}{symbol}", symbol, value, axes, terms, formula, **more)

    def id(self, symbol: str) -> str:
        """The id of an array of this head; keys and values may be shared by several heads."""
        return f"{self.prefix}{symbol}"

    def value(self, symbol: str) -> np.ndarray:
        return self.m.tensors.value(self.id(symbol))

    def forward(self) -> None:
        p = self.prefix
        for x in KINDS:
            self.add(
                x,
                getattr(self.block, x)[0, self.h],
                (TOKEN, FEATURE),
                dot(f"a_2 w_{x}", "features", (f"{self.b}.a_2", "rj"), (f"{p}w_{x}", "jc")),
                product(f"~b_{x}", (f"{p}b_{x}", "c")),
            )
        self.scores_forward()

    def scores_forward(self) -> None:
        """From queries, keys and values to the output of the head."""
        m, p, h = self.m, self.prefix, self.h
        causal, square = m.config.causal, {"known_shape": self.square}
        m.tensors.add(Tensor(f"{p}√d_ρ", "√d_ρ", lambda: self.root, (), known_shape=()))
        self.add(
            "ρ_raw",
            lambda: self.value("q") @ self.value("k").T,
            SQUARE,
            dot("q kᵗ", "features", (self.id("q"), "rj"), (self.id("k"), "cj")),
            **square,
        )
        scaled = product("ρ_raw / √d_ρ", (f"{p}ρ_raw", "rc"), Factor(f"{p}√d_ρ", "", -1))
        self.add("ρ_scaled", lambda: self.value("ρ_raw") / self.root, SQUARE, scaled, **square)
        scores = "ρ_scaled"
        if causal:
            scores = "ρ_causal"
            self.add("ρ_causal", self._masked, SQUARE, product("ρ_scaled", (f"{p}ρ_scaled", "rc")), **square)

        @cache
        def exponentials() -> np.ndarray:
            s = self.value(scores)
            return np.exp(s - s.max(axis=-1, keepdims=True))

        m.tensors.add(Tensor(f"{p}e", f"exp({scores} − max)", exponentials, SQUARE, known_shape=self.square))
        of_sum = f"Σ exp({scores} − max)"
        m.tensors.add(
            Tensor(f"{p}Σe", of_sum, lambda: exponentials().sum(axis=-1), (TOKEN,), known_shape=self.square[:1])
        )
        weight = product(f"exp({scores} − max) / Σ", (f"{p}e", "rc"), Factor(f"{p}Σe", "r", -1))
        self.add("ρ", self.block.rho[0, h], SQUARE, weight)
        mixed = dot("ρ v", OVER_TOKENS, (f"{p}ρ", "rj"), (self.id("v"), "jc"))
        self.add("a_3^h", self.block.a[3][0][:, self.output], (TOKEN, FEATURE), mixed)

    def _masked(self) -> np.ndarray:
        scaled, start = self.value("ρ_scaled"), self.m.trace.starts[self.b]
        n = len(scaled)
        mask = visible(n, n, True, None if start is None else start[0, 0], scaled)
        assert mask is not None
        return np.where(mask, scaled, -math.inf)

    def scores_backward(self) -> None:
        """From the head's columns of Δ_3 to the raw scores."""
        m, p, b, h = self.m, self.prefix, self.b, self.h
        d3 = self.block.delta[3][0][:, self.output]
        d_causal = self.block.delta_causal[0, h]
        width = d3.shape[1]

        def perturb(direction: np.ndarray) -> np.ndarray:
            out = np.zeros_like(self.block.a[3])
            out[0][:, self.output] = direction
            return out

        self.add(
            "Δ_3^h",
            d3,
            (TOKEN, FEATURE),
            product("Δ_3", Factor(f"{b}.Δ_3", "rc", shift=h * width)),
            measure=lambda probe: probe.activation(d3, {f"{b}.a_3": perturb}),
            differentiate=lambda autograd: autograd.activation(f"{b}.a_3")[:, self.output],
        )
        self.add(
            "∂ρ",
            lambda: d3 @ self.value("v").T,
            SQUARE,
            dot("Δ_3^h vᵗ", "features", (f"{p}Δ_3^h", "rj"), (self.id("v"), "cj")),
            known_shape=self.square,
            measure=lambda probe: probe.weights(self.value("∂ρ"), b, h),
            differentiate=lambda autograd: autograd.attention(b, "ρ")[h],
        )
        m.tensors.add(
            Tensor(
                f"{p}∂ρ⊖ρ",
                "(∂ρ ⊖ ρ)",
                lambda: (self.value("∂ρ") * self.value("ρ")).sum(axis=-1),
                (TOKEN,),
                known_shape=self.square[:1],
            )
        )
        top = "Δ_causal" if m.config.causal else "Δ_scaled"
        self.add(
            top,
            d_causal,
            SQUARE,
            product("∂ρ ∘ ρ", (f"{p}∂ρ", "rc"), (f"{p}ρ", "rc")),
            product("~(∂ρ ⊖ ρ) ∘ ρ", (f"{p}∂ρ⊖ρ", "r"), (f"{p}ρ", "rc"), sign=-1),
            **self._scores_proof(d_causal, 1.0, "scaled"),
        )
        if m.config.causal:
            same = product("Δ_causal", (f"{p}Δ_causal", "rc"))
            self.add("Δ_scaled", d_causal, SQUARE, same, **self._scores_proof(d_causal, 1.0, "scaled"))
        d_raw = d_causal / self.root
        scaled = product("Δ_scaled / √d_ρ", (f"{p}Δ_scaled", "rc"), Factor(f"{p}√d_ρ", "", -1))
        self.add("Δ_raw", d_raw, SQUARE, scaled, **self._scores_proof(d_raw, self.root, "raw"))

    def _scores_proof(self, gradient: np.ndarray, scale: float, name: str) -> dict[str, Any]:
        b, h = self.b, self.h
        return {
            "measure": lambda probe: probe.scores(gradient, b, h, lambda direction: direction / scale),
            "differentiate": lambda autograd: autograd.attention(b, name)[h],
        }

    def qkv_backward(self) -> None:
        """The gradients of q, k and v, and of a_2 through each of them."""
        p = self.prefix
        raw, d3, features = f"{p}Δ_raw", f"{p}Δ_3^h", (TOKEN, FEATURE)
        like_a2 = {"known_shape": self.block.a[2].shape[1:]}
        made = {
            "v": dot("ρᵗ Δ_3^h", OVER_TOKENS, (f"{p}ρ", "jr"), (d3, "jc")),
            "q": dot("Δ_raw k", OVER_TOKENS, (raw, "rj"), (f"{p}k", "jc")),
            "k": dot("Δ_rawᵗ q", OVER_TOKENS, (raw, "jr"), (f"{p}q", "jc")),
        }
        for x, term in made.items():
            like_x = {"known_shape": getattr(self.block, x).shape[2:]}
            self.add(f"∂{x}", self._qkv_gradient(x), features, term, **self._qkv_proof(x), **like_x)
            through = dot(f"∂{x} w_{x}ᵗ", "features", (f"{p}∂{x}", "rj"), (f"{p}w_{x}", "cj"))
            self.add(f"Δ_{x}", self._input_gradient(x), features, through, **self._input_proof(f"Δ_{x}", x), **like_a2)
        parts = [product(f"Δ_{x}", (f"{p}Δ_{x}", "rc")) for x in ("v", "q", "k")]
        self.add(
            "Δ_2^h",
            lambda: self.value("Δ_v") + self.value("Δ_q") + self.value("Δ_k"),
            features,
            *parts,
            **self._input_proof("Δ_2^h", "qkv"),
            **like_a2,
        )

    def _qkv_gradient(self, x: str) -> Callable[[], np.ndarray]:
        """The gradient of q, k or v."""
        return {
            "v": lambda: self.value("ρ").T @ self.value("Δ_3^h"),
            "q": lambda: self.value("Δ_raw") @ self.value("k"),
            "k": lambda: self.value("Δ_raw").T @ self.value("q"),
        }[x]

    def _input_gradient(self, x: str) -> Callable[[], np.ndarray]:
        return lambda: self.value(f"∂{x}") @ self.value(f"w_{x}").T

    def _qkv_proof(self, x: str) -> dict[str, Any]:
        """∂q is checked by perturbing only this head's q."""
        b, h, all_heads = self.b, self.h, getattr(self.block, x)

        def perturb(direction: np.ndarray) -> np.ndarray:
            out = np.zeros_like(all_heads)
            out[0, h] = direction
            return out

        return {
            "measure": lambda probe: probe.activation(self.value(f"∂{x}"), {f"{b}.{x}": perturb}),
            "differentiate": lambda autograd: autograd.activation(f"{b}.{x}")[h],
        }

    def _input_proof(self, symbol: str, through: str) -> dict[str, Any]:
        """Δ_q is checked by perturbing a_2 only where this head's q reads it; Δ_2^h likewise with q, k and v."""
        b, h = self.b, self.h

        def perturbation(x: str) -> Callable[[np.ndarray], np.ndarray]:
            def perturb(direction: np.ndarray) -> np.ndarray:
                out = np.zeros_like(getattr(self.block, x))
                out[0, h] = direction @ self.value(f"w_{x}")
                return out

            return perturb

        return {
            "measure": lambda probe: probe.activation(
                self.value(symbol), {f"{b}.{x}": perturbation(x) for x in through}
            ),
            "differentiate": lambda autograd: autograd.through_head(b, h, through),
        }

    def parameters(self, x: str) -> list[tuple[str, str]]:
        """The head's w_x and b_x, columns of c_attn, with their gradients."""
        m, p = self.m, self.prefix
        columns = columns_of(m, self.h, x)
        a2, part = f"{self.b}.a_2", f"columns of head {self.h + 1}"
        if x == "q":
            of_weight = dot("a_2ᵗ Δ_raw k", OVER_TOKENS, (a2, "jr"), (f"{p}∂q", "jc"))
            of_bias = dot("Σ_tokens Δ_raw k", OVER_TOKENS, (f"{p}∂q", "jc"))
        else:
            mixing, signal, name = ("ρ", "Δ_3^h", "ρ a_2") if x == "v" else ("Δ_raw", "q", "Δ_raw a_2")
            like_a2 = self.block.a[2].shape[1:]
            mixed = f"{p}{name}"
            m.add(
                mixed, name, lambda: self.value(mixing) @ m.tensors.value(a2), formula=Formula(""), known_shape=like_a2
            )
            of_weight = dot(f"({name})ᵗ {signal}", OVER_TOKENS, (f"{p}{name}", "jr"), (f"{p}{signal}", "jc"))
            of_bias = dot(
                "Σ_tokens Δ_3^h" if x == "v" else "Σ_tokens Δ_rawᵗ q",
                OVER_TOKENS,
                (f"{p}{'Δ_3^h' if x == 'v' else '∂k'}", "jc"),
            )
        pairs = [
            m.parameter(
                p, f"w_{x}", f"{self.layer}.weight", (FEATURE, FEATURE), (of_weight,), (..., columns), part=part
            ),
            m.parameter(p, f"b_{x}", f"{self.layer}.bias", (FEATURE,), (of_bias,), (..., columns), part=part),
        ]
        if x == "k":
            m.tensors[f"{p}∂b_k"].note = "set to exactly 0: the rows of Δ_raw sum to 0, so the sum is only rounding"
        return pairs
