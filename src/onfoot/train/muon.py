"""Muon for the matrices of the blocks, AdamW for all other parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onfoot.arrays import Array, namespace
from onfoot.models.params import hidden_matrices
from onfoot.ops.muon import muon_update
from onfoot.train.optimizer import AdamW

if TYPE_CHECKING:
    from onfoot.models.model import Model

MOMENTUM = 0.95


class Muon(AdamW):
    """AdamW whose matrices of the blocks get orthogonalized updates instead, of about the same size.

    They have one running mean, of the gradient. Embeddings, the head, biases and norms have AdamW's update.
    """

    def __init__(self, model: Model, *args: Any, momentum: float = MOMENTUM, **kwargs: Any) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        self.momentum, self.matrices = momentum, hidden_matrices(model.config)
        super().__init__(model, *args, **kwargs)

    def make_moments(self) -> None:
        """Initializes the moments to 0; matrices of the blocks have no second one."""
        for name in sorted(self.model.trainable):
            p = self.model.params[name]
            self.m[name] = namespace(p).zeros_like(p)
            if name not in self.matrices:
                self.v[name] = namespace(p).zeros_like(p)

    def update(self, name: str, g: Array) -> None:
        """Updates one parameter, at the latest when the step ends."""
        if name not in self.matrices:
            super().update(name, g)
            return
        self._partial = True
        lr = self._lr * self.lr_scales.get(name, 1.0)
        p, m = self.model.params[name], self.m[name]
        settings = lr, self.momentum, self.weight_decay, self._scale, self.model.engine.weight_gradient
        for columns in self.matrices[name]:  # views, which are updated in place
            muon_update(p[:, columns], m[:, columns], g[:, columns], *settings)
