"""LoRA: a low-rank layer x d u, added to a frozen one.

d (in, r) is the down-projection, u (r, out) the up-projection. `scale` is the paper's α; PEFT's scale is alpha/r. The
products are computed in the cheap order: (dy uᵗ) dᵗ costs r (in + out) per token, dy (d u)ᵗ costs in × out.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, rows
from onfoot.ops.linear import FrozenLinearSaved, frozen_linear_backward, frozen_linear_forward


class LoRASaved(NamedTuple):
    x: Array
    down: Array
    up: Array
    scale: float
    low: Array  # x d, (..., r)


def lora_forward(x: Array, down: Array, up: Array, scale: float) -> tuple[Array, LoRASaved]:
    """y = α x d u."""
    low = x @ down  # (..., r)
    return scale * (low @ up), LoRASaved(x, down, up, scale, low)  # eq 43


def lora_backward(dy: Array, saved: LoRASaved) -> tuple[Array, Array, Array]:
    """Gradients of x, down and up."""
    x, down, up, scale, low = saved
    dlow = scale * (dy @ up.T)  # (..., r)
    dx = dlow @ down.T  # eq 44  α Δ (d u)ᵗ, (..., in)
    ddown = rows(x).T @ rows(dlow)  # eq 45  α xᵗ Δ uᵗ, (in, r)
    dup = scale * (rows(low).T @ rows(dy))  # eq 46  α (x d)ᵗ Δ, (r, out)
    return dx, ddown, dup


class LoRALinearSaved(NamedTuple):
    frozen: FrozenLinearSaved
    keep: Array | None
    lora: LoRASaved


def lora_linear_forward(
    x: Array, weight: Array, bias: Array | None, down: Array, up: Array, scale: float, keep: Array | None = None
) -> tuple[Array, LoRALinearSaved]:
    """y = x w + b + α (x ∘ keep) d u: a frozen layer and its LoRA layer; `keep` is a dropout pattern."""
    y, frozen = frozen_linear_forward(x, weight, bias)
    low_rank, saved = lora_forward(x if keep is None else x * keep, down, up, scale)
    return y + low_rank, LoRALinearSaved(frozen, keep, saved)  # eq LORA.1


def lora_linear_backward(dy: Array, saved: LoRALinearSaved) -> tuple[Array, Array, Array]:
    """Gradients of x, down and up. That of x is the sum of BOTH paths, including the frozen one."""
    dx_lora, ddown, dup = lora_backward(dy, saved.lora)
    if saved.keep is not None:
        dx_lora = dx_lora * saved.keep
    dx = frozen_linear_backward(dy, saved.frozen) + dx_lora  # eq LORA.2  Δ wᵗ + α Δ (d u)ᵗ
    return dx, ddown, dup
