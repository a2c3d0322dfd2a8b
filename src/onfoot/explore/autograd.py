"""The same gradients by PyTorch's autograd: our forward formulas on its tensors, without our backward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.engine import Engine, get_engine
from onfoot.models.families import network
from onfoot.models.step import features
from onfoot.ops.attention import visible
from onfoot.probe import of_query_heads

if TYPE_CHECKING:
    from onfoot.models.model import Model


class Autograd:
    """One forward and backward pass of a model under autograd; keeps the gradient of every activation."""

    def __init__(self, model: Model, tokens: np.ndarray, targets: np.ndarray, divisor: float) -> None:
        import torch
        from torch.nn.functional import cross_entropy

        self.torch = torch
        self.noted: dict[str, Any] = {}
        self.scores: list[dict[str, Any]] = []  # one per block
        self.config = model.config
        self.params: dict[str, Any] = {
            name: torch.tensor(np.asarray(value), requires_grad=True) for name, value in model.params.items()
        }
        plain = get_engine("torch")
        engine = Engine(
            "torch",
            {**plain.table, "attention_forward": self._attention, "grouped_query_forward": self._attention},
            torch.from_numpy,
        )
        run = model.new_run(on_activation=self._note, engine=engine)
        run.params = self.params
        a11 = features(run, model.config, tokens)
        a12, _ = network(model.config).head_forward(run, model.config, a11)
        rows, labels = a12.reshape(-1, a12.shape[-1]), torch.from_numpy(targets).reshape(-1)
        loss = cross_entropy(rows, labels, reduction="sum") / divisor
        loss.backward(retain_graph=True)
        self.loss = loss.item()
        self._parameter_grads = {name: value.grad for name, value in self.params.items()}
        # copies: a later backward pass through part of the graph would add to .grad
        self._grads = {name: value.grad.clone() for name, value in self.noted.items() if value.grad is not None}

    def activation(self, noted: str) -> np.ndarray:
        """The gradient of an activation, by the name that the forward pass reports it under."""
        return self._grads[noted][0].numpy()

    def parameter(self, name: str) -> np.ndarray:
        return self._parameter_grads[name].numpy()

    def attention(self, block: int, name: str) -> np.ndarray:
        """The gradient of the scores ("raw", "scaled") or of the weights ("ρ") of all heads of a block, (H, T, T)."""
        return self.scores[block][name].grad[0].numpy()

    def through_head(self, block: int, head: int, through: str) -> np.ndarray:
        """The part of a_2's gradient that flows through one head's q, k or v, or several of them."""
        parts = [self.noted[f"{block}.{x}"] for x in through]
        signals = [self.torch.zeros_like(part) for part in parts]
        for signal, x in zip(signals, through, strict=True):
            signal[:, head] = self._grads[f"{block}.{x}"][:, head]
        a2 = self.noted[f"{block}.a_2"]
        (gradient,) = self.torch.autograd.grad(parts, a2, signals, retain_graph=True)
        return gradient[0].numpy()

    def through(self, noted: str, to: str, where: Any) -> np.ndarray:
        """The part of the gradient of the activation `to` that flows through the entries `where` of another one."""
        signal = self.torch.zeros_like(self.noted[noted])
        signal[where] = self._grads[noted][where]
        (gradient,) = self.torch.autograd.grad(self.noted[noted], self.noted[to], signal, retain_graph=True)
        return gradient[0].numpy()

    def _note(self, name: str, value: Any) -> None:
        self.noted[name] = self._retain_grad(value)

    def _retain_grad(self, value: Any) -> Any:
        if value.requires_grad:
            value.retain_grad()
        return value

    def _attention(self, q: Any, k: Any, v: Any, causal: bool, start: Any, keep: Any) -> tuple[Any, Any]:
        k, v = of_query_heads(k, q), of_query_heads(v, q)
        raw = self._retain_grad(q @ k.mT)
        scaled = self._retain_grad(raw / math.sqrt(q.shape[-1]))
        mask = visible(q.shape[-2], k.shape[-2], causal, start, scaled)
        masked = scaled if mask is None else scaled.masked_fill(~mask, -math.inf)
        rho = self._retain_grad(self.torch.softmax(masked, dim=-1))
        self.scores.append({"raw": raw, "scaled": scaled, "ρ": rho})
        return rho @ v, None
