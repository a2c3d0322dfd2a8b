"""A GPT-2 whose whole forward and backward pass is the user's: `gpt2_forward` and `gpt2_backward`.

`loss, saved = gpt2_forward(params, tokens, targets, config)` and `grads = gpt2_backward(saved)`: parameters and
gradients are dicts by Hugging Face's names, and the loss is the mean over the targets that are not −100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onfoot.arrays import Array
from onfoot.config import Config
from onfoot.models.gradients import OnGradient
from onfoot.models.inputs import count_targets
from onfoot.models.model import Model
from onfoot.models.step import checked_batch
from onfoot.own_engine import EngineLike, NotWrittenError, PairError
from onfoot.own_engine.functions import array_of_numbers, called, kind_of

Forward = Callable[..., tuple[Any, Any]]
Backward = Callable[[Any], Mapping[str, Any]]


class OwnNetwork(Model):
    """A model whose gradients are those of the user's two functions; everything else runs on its engine."""

    def __init__(
        self,
        config: Config,
        params: Mapping[str, Any],
        dtype: str,
        engine: EngineLike,
        forward: Forward,
        backward: Backward,
    ) -> None:
        super().__init__(config, params, dtype, engine)
        self._forward, self._backward = forward, backward

    def loss_and_grads(
        self,
        tokens: Any,
        targets: Any = None,
        *,
        divisor: float | None = None,
        segments: Any = None,
        dropout_seed: int | None = None,
        on_gradient: OnGradient | None = None,
        on_loss: Callable[[float], None] | None = None,
    ) -> tuple[float, dict[str, Array]]:
        """The loss and the gradients of all parameters, by the user's functions."""
        if segments is not None or self.active_adapter is not None:
            raise ValueError("gpt2_forward takes neither packed examples nor adapters")
        batch = checked_batch(self, tokens, targets, divisor)
        n = count_targets(batch.targets.ids)
        given = dict(self.params), batch.tokens, batch.targets.ids, self.config
        loss, saved = loss_and_saved(called("gpt2_forward", self._forward, *given))
        scale = n / batch.divisor  # the user's loss is a mean
        value = loss * scale
        if on_loss is not None:
            on_loss(value)
        grads = self.checked(called("gpt2_backward", self._backward, saved), scale)
        if on_gradient is None:
            return value, grads
        for name in list(grads):
            on_gradient(name, grads.pop(name))
        return value, {}

    def checked(self, grads: Any, scale: float = 1.0) -> dict[str, Array]:
        """The gradients of the trainable parameters as arrays of the model's dtype, or a PairError."""
        if not isinstance(grads, Mapping):
            error = NotWrittenError if grads is None else PairError
            raise error(f"your gpt2_backward must return a dict of gradients by name, got {kind_of(grads)}")
        missing = [name for name in sorted(self.trainable) if grads.get(name) is None]
        if missing:
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            error = NotWrittenError if len(missing) == len(self.trainable) else PairError
            raise error(f"your gpt2_backward returns no gradient of {missing[0]}{more}")
        out = {}
        for name in [name for name in self.params if name in self.trainable]:
            grad = array_of_numbers(f"the gradient of {name} from your gpt2_backward", grads[name])
            grad = np.asarray(grad, self.dtype)
            if grad.shape != self.params[name].shape:
                raise PairError(
                    f"your gpt2_backward returns a gradient of {name} of shape {grad.shape}; it has shape "
                    f"{tuple(self.params[name].shape)}"
                )
            out[name] = grad if scale == 1 else grad * np.asarray(scale, self.dtype)
        return out


def loss_and_saved(returned: Any) -> tuple[float, Any]:
    """What gpt2_forward returned, or a PairError."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        got = kind_of(returned)
        raise PairError(f"your gpt2_forward must return the loss and what its backward needs, got {got}")
    loss = array_of_numbers("the loss of your gpt2_forward", returned[0])
    if loss.size != 1:
        raise PairError(f"the loss of your gpt2_forward must be one number, got the shape {loss.shape}")
    return float(loss.item()), returned[1]


def compare_network(model: Model, forward: Forward, backward: Backward, tokens: Any, targets: Any) -> tuple[str, float]:
    """The first gradient in which the user's whole pass differs most from ours, in float64, and its relative error.

    The name is "loss" if the loss differs.
    """
    params = {name: np.array(p, np.float64) for name, p in model.params.items()}
    rng = np.random.default_rng(0)
    for value in params.values():
        value += 0.05 * rng.standard_normal(value.shape)  # away from initial values, at which some mistakes do not show
    ours = Model(model.config, params, "float64", "numpy")
    theirs = OwnNetwork(model.config, params, "float64", "numpy", forward, backward)
    loss, grads = ours.loss_and_grads(tokens, targets)
    their_loss, their_grads = theirs.loss_and_grads(tokens, targets)
    errors = {"loss": abs(their_loss - loss) / abs(loss)}
    errors |= {
        name: float(np.linalg.norm(their_grads[name] - g) / max(np.linalg.norm(g), 1e-12)) for name, g in grads.items()
    }
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return worst, errors[worst]
