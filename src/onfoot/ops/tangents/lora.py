"""The tangents of LoRA, alone and with its frozen layer."""

from __future__ import annotations

from onfoot.arrays import Array, rows
from onfoot.ops.linear import FrozenLinearSaved
from onfoot.ops.lora import LoRALinearSaved, LoRASaved
from onfoot.ops.tangents.linear import frozen_linear_backward_tangent, frozen_linear_tangent


def lora_tangent(x_dot: Array, down_dot: Array, up_dot: Array, saved: LoRASaved) -> tuple[Array, LoRASaved]:
    """ẏ = α [(ẋ d + x ḋ) u + x d u̇]."""
    x, down, up, scale, low = saved
    low_dot = x_dot @ down + x @ down_dot  # eq LORA.3  (..., r)
    y_dot = scale * (low_dot @ up + low @ up_dot)  # eq LORA.4
    return y_dot, LoRASaved(x_dot, down_dot, up_dot, scale, low_dot)


def lora_backward_tangent(
    dy: Array, dy_dot: Array, saved: LoRASaved, saved_dot: LoRASaved
) -> tuple[Array, Array, Array]:
    """Tangents of the gradients of x, down and up."""
    x, down, up, scale, low = saved
    x_dot, down_dot, up_dot, _, low_dot = saved_dot
    dlow = scale * (dy @ up.T)  # (..., r)
    dlow_dot = scale * (dy_dot @ up.T + dy @ up_dot.T)
    dx_dot = dlow_dot @ down.T + dlow @ down_dot.T  # eq LORA.5  (..., in)
    ddown_dot = rows(x_dot).T @ rows(dlow) + rows(x).T @ rows(dlow_dot)  # eq LORA.6  (in, r)
    dup_dot = scale * (rows(low_dot).T @ rows(dy) + rows(low).T @ rows(dy_dot))  # eq LORA.7  (r, out)
    return dx_dot, ddown_dot, dup_dot


def lora_linear_tangent(
    x_dot: Array, weight_dot: None, bias_dot: None, down_dot: Array, up_dot: Array, saved: LoRALinearSaved
) -> tuple[Array, LoRALinearSaved]:
    """ẏ of a frozen layer and its LoRA layer: both paths."""
    frozen, keep, lora = saved
    y_dot, _ = frozen_linear_tangent(x_dot, None, None, frozen)
    low_rank_dot, lora_dot = lora_tangent(x_dot if keep is None else x_dot * keep, down_dot, up_dot, lora)
    return y_dot + low_rank_dot, LoRALinearSaved(FrozenLinearSaved(None), None, lora_dot)


def lora_linear_backward_tangent(
    dy: Array, dy_dot: Array, saved: LoRALinearSaved, saved_dot: LoRALinearSaved
) -> tuple[Array, Array, Array]:
    """Tangents of the gradients of x, down and up."""
    frozen, keep, lora = saved
    dx_dot, ddown_dot, dup_dot = lora_backward_tangent(dy, dy_dot, lora, saved_dot.lora)
    if keep is not None:
        dx_dot = dx_dot * keep
    return frozen_linear_backward_tangent(dy, dy_dot, frozen, saved_dot.frozen) + dx_dot, ddown_dot, dup_dot
