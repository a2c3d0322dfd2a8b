"""The input of a study (a model, a text and its trace), and helpers that add arrays to the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.config import LlamaConfig
from onfoot.explore.formulas_llama import all_formulas
from onfoot.explore.tensors import FEATURE, TOKEN, Tensor, Tensors
from onfoot.explore.terms import Factor, Term, dot, evaluate, product
from onfoot.ops import sum_of_squares
from onfoot.quantized import FrozenWeight, Quantized, Transposed, frozen_weight
from onfoot.tables import Formula

if TYPE_CHECKING:
    from onfoot.explore.embedding_logits import Vocabulary
    from onfoot.models.model import Model
    from onfoot.models.trace import Trace

OVER_TOKENS = "tokens"
FIRST_LR, LARGE_LR = 1e-3, 1e-5  # of AdamW, for a small model and for one whose weights are frozen
LARGE_ARRAY = 100_000  # cells; of a model with frozen weights, larger parameters and gradients are computed at each use


class StudyContext:
    """A model, a text, its trace, and the arrays collected from them."""

    def __init__(self, model: Model, trace: Trace, tokens: np.ndarray, targets: np.ndarray, divisor: float) -> None:
        self.model, self.config, self.params = model, model.config, model.params
        self.trace, self.tokens, self.targets, self.divisor = trace, tokens, targets, divisor  # tokens: (1, T)
        self.formulas = all_formulas(model.config)
        self.family = "llama" if isinstance(model.config, LlamaConfig) else "gpt2"
        self.vocabulary: Vocabulary
        # the error signals of a block that views list, in the order of the backward pass
        mlp: tuple[int | str, ...] = ("g", "u") if self.family == "llama" else (7,)
        self.signals: tuple[int | str, ...] = (10, 8, *mlp, 6, 5, 3, 2)
        self.tensors = Tensors()
        self.n_tokens = tokens.shape[1]
        self.loss_after_step: tuple[float | None] | None = None  # after one step with the right gradients, once known
        self._weight_norms: dict[str, float] = {}

    @property
    def frozen(self) -> bool:
        """Whether weights stay as the file has them, and no gradient of a weight is kept."""
        return bool(self.model.quantized)

    @property
    def first_lr(self) -> float:
        """The learning rate of a first step of AdamW on all weights: a large model needs a smaller one."""
        return LARGE_LR if self.frozen else FIRST_LR

    @cached_property
    def grads(self) -> Mapping[str, np.ndarray]:
        """The gradient of every parameter; of a frozen model, as factors that are multiplied when it is read."""
        if not self.frozen:
            return self.trace.grads
        from onfoot.explore.factors import lazy_gradients

        return lazy_gradients(self.model, self.tokens, self.targets, self.divisor)

    def weight_norm(self, name: str) -> float:
        """The norm of a parameter, computed once."""
        if name not in self._weight_norms:
            base = frozen_weight(self.params[name])
            if base is None:
                norm = float(np.linalg.norm(self.params[name]))
            else:
                norm = math.sqrt(sum(sum_of_squares(base.floats(rows, np.float64)) for rows in base._chunks()))
            self._weight_norms[name] = norm
        return self._weight_norms[name]

    def weight(self, name: str, where: Any = ...) -> np.ndarray:
        """A parameter, or the part `where` of it, in float64."""
        value = self.params[name]
        if not isinstance(value, Quantized):
            return value[where]
        if isinstance(value, FrozenWeight) and isinstance(where, slice | np.ndarray):
            return value.floats(where, np.float64)
        if isinstance(value, Transposed) and isinstance(where, tuple) and where[0] is ...:
            return value.T.floats(where[1], np.float64).T  # only these columns: a part would keep the whole alive
        return np.asarray(value, dtype=np.float64)[where]

    def entry(self, name: str, at: tuple[int, ...]) -> float:
        """One entry of a parameter."""
        value = self.params[name]
        base = frozen_weight(value)
        if base is None:
            return float(value[at])
        row, column = at[::-1] if isinstance(value, Transposed) else at
        return float(base.floats(np.array([row]), np.float64)[0, column])

    def add(
        self,
        id: str,
        symbol: str,
        make: Callable[[], Any] | np.ndarray,
        axes: tuple[str, ...] = (TOKEN, FEATURE),
        terms: tuple[Term, ...] = (),
        formula: Formula | None = None,
        **more: Any,
    ) -> str:
        """Adds an array and returns its id. Its formula defaults to that of its symbol."""
        found = self.formulas.get(symbol, Formula("")) if formula is None else formula
        maker = make if callable(make) else lambda: make
        if not callable(make):
            more.setdefault("known_shape", np.shape(make))
        return self.tensors.add(Tensor(id, symbol, maker, axes, found, terms, family=self.family, **more))

    def delta(
        self,
        id: str,
        symbol: str,
        value: np.ndarray,
        noted: str,
        terms: tuple[Term, ...],
        axes: tuple[str, ...] = (TOKEN, FEATURE),
        formula: Formula | None = None,
        note: str = "",
    ) -> str:
        """Adds the gradient of an activation; it is checked by perturbing that activation."""
        from onfoot.probe import itself

        return self.add(
            id,
            symbol,
            value,
            axes,
            terms,
            formula,
            note=note,
            measure=lambda probe: probe.activation(value, {noted: itself}),
            differentiate=lambda autograd: autograd.activation(noted),
        )

    def parameter(
        self,
        prefix: str,
        symbol: str,
        name: str,
        axes: tuple[str, ...],
        terms: tuple[Term, ...],
        where: Any = ...,
        transposed: bool = False,
        part: str = "",
    ) -> tuple[str, str]:
        """Adds a parameter, or the part `where` of it, and its gradient; returns both ids.

        With `transposed`, the file's (out, in) is shown as the formulas have it, (in, out).
        """

        def turned(x: np.ndarray) -> np.ndarray:
            return x.T if transposed else x

        shape = turned(np.broadcast_to(np.int8(0), self.params[name].shape)[where]).shape
        about: dict[str, Any] = {"parameter": name, "part": part, "known_shape": shape}
        about["transient"] = isinstance(self.params[name], Quantized) and np.prod(shape) > LARGE_ARRAY
        id = f"{prefix}∂{symbol}"
        weight = self.add(
            f"{prefix}{symbol}", symbol, lambda: turned(self.weight(name, where)), axes, formula=Formula(""), **about
        )
        gradient = self.add(
            id,
            f"∂{symbol}",
            lambda: turned(self.trace.grads[name][where]) if name in self.trace.grads else self.sum_of_terms(id),
            axes,
            terms,
            measure=lambda probe: probe.parameter(turned(self.tensors.value(id)), name, where),
            differentiate=lambda autograd: turned(autograd.parameter(name)[where]),
            **about,
        )
        return weight, gradient

    def sum_of_terms(self, id: str) -> np.ndarray:
        """A gradient by its formula, for a frozen weight: the backward pass computed only its factors."""
        tensor = self.tensors[id]
        assert tensor.known_shape is not None
        total = np.zeros(tensor.known_shape)
        if tensor.formula.text.endswith("= 0"):
            return total
        for term in tensor.terms:
            total += evaluate(term, tensor.known_shape, self.tensors.value)
        return total

    def linear(self, prefix: str, i: int, layer: str, x: str, delta: str) -> list[tuple[str, str]]:
        """Adds the weight and the bias of a linear layer a_i → a_{i+1}, with their gradients."""
        of_weight = dot(f"a_{i}ᵗ Δ", OVER_TOKENS, (x, "jr"), (delta, "jc"))
        of_bias = dot("Σ_tokens Δ", OVER_TOKENS, (delta, "jc"))
        return [
            self.parameter(prefix, f"w_{i}", f"{layer}.weight", (FEATURE, FEATURE), (of_weight,)),
            self.parameter(prefix, f"b_{i}", f"{layer}.bias", (FEATURE,), (of_bias,)),
        ]

    def norm(self, prefix: str, i: int, layer: str, x: str, delta: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Adds layer norm i: its parameters with their gradients, and its intermediate values, forward and backward.

        `x` is the id of its input, `delta` the id of the error signal at its output.
        """

        @cache
        def inside() -> dict[str, np.ndarray]:
            a, d = self.tensors.value(x), self.tensors.value(delta)  # (T, d) both
            sigma = np.sqrt(a.var(axis=-1) + self.config.layer_norm_epsilon)  # (T,)
            normed = (a - a.mean(axis=-1, keepdims=True)) / sigma[:, None]
            signal = d * self.weight(f"{layer}.weight")  # the x of the backward formula
            return {
                "mean a": a.mean(axis=-1),
                "σ": sigma,
                "ā": normed,
                "x": signal,
                "mean x": signal.mean(axis=-1),
                "mean āx": (normed * signal).mean(axis=-1),
            }

        ids = [f"{prefix}{name}_{i}" for name in ("mean a", "σ", "ā", "x", "mean x", "mean āx")]
        of_mean, of_sigma, of_normed, of_signal, of_signal_mean, of_along = ids
        per_token, all_cells = (self.n_tokens,), (self.n_tokens, self.config.n_embd)
        self.add(of_mean, f"mean a_{i}", lambda: inside()["mean a"], (TOKEN,), known_shape=per_token)
        of_variance = Formula(f"σ_{i} = √(var a_{i} + ε)")
        self.add(of_sigma, f"σ_{i}", lambda: inside()["σ"], (TOKEN,), formula=of_variance, known_shape=per_token)
        over_sigma = Factor(of_sigma, "r", -1)
        centred = (
            product(f"a_{i} / σ_{i}", (x, "rc"), over_sigma),
            product(f"mean a_{i} / σ_{i}", (of_mean, "r"), over_sigma, sign=-1),
        )
        self.add(of_normed, f"ā_{i}", lambda: inside()["ā"], terms=centred, known_shape=all_cells)
        inner = product("Δ ∘ ~w", (delta, "rc"), (f"{prefix}w_{i}", "c"))
        of_x = Formula(f"x_{i} = Δ ∘ ~w_{i}")
        self.add(of_signal, f"x_{i}", lambda: inside()["x"], terms=(inner,), formula=of_x, known_shape=all_cells)
        self.add(of_signal_mean, f"mean x_{i}", lambda: inside()["mean x"], (TOKEN,), known_shape=per_token)
        self.add(of_along, f"mean(ā_{i} ∘ x_{i})", lambda: inside()["mean āx"], (TOKEN,), known_shape=per_token)
        parameters = [
            self.parameter(
                prefix,
                f"w_{i}",
                f"{layer}.weight",
                (FEATURE,),
                (dot(f"Σ_tokens ā_{i} ∘ Δ", OVER_TOKENS, (of_normed, "jc"), (delta, "jc")),),
            ),
            self.parameter(
                prefix, f"b_{i}", f"{layer}.bias", (FEATURE,), (dot("Σ_tokens Δ", OVER_TOKENS, (delta, "jc")),)
            ),
        ]
        return parameters, ids


def norm_forward_terms(prefix: str, i: int) -> tuple[Term, ...]:
    """ā ∘ w + b."""
    return (
        product(f"ā_{i} ∘ ~w_{i}", (f"{prefix}ā_{i}", "rc"), (f"{prefix}w_{i}", "c")),
        product(f"~b_{i}", (f"{prefix}b_{i}", "c")),
    )


def norm_backward_terms(prefix: str, i: int) -> tuple[Term, ...]:
    """The three terms of a layer norm's error signal: x, minus its mean, minus its component along ā, all over σ."""
    over_sigma = Factor(f"{prefix}σ_{i}", "r", -1)
    return (
        product(f"x_{i} / σ_{i}", (f"{prefix}x_{i}", "rc"), over_sigma),
        product(f"mean x_{i} / σ_{i}", (f"{prefix}mean x_{i}", "r"), over_sigma, sign=-1),
        product(
            f"ā_{i} ∘ mean(ā_{i} ∘ x_{i}) / σ_{i}",
            (f"{prefix}ā_{i}", "rc"),
            (f"{prefix}mean āx_{i}", "r"),
            over_sigma,
            sign=-1,
        ),
    )


def affine_terms(x: str, weight: str, bias: str, i: int) -> tuple[Term, ...]:
    """x w + b: a sum over the features of x, and the bias."""
    return dot(f"a_{i} w_{i}", "features", (x, "rj"), (weight, "jc")), product(f"~b_{i}", (bias, "c"))
