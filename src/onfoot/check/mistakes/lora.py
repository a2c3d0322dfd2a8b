"""Known mistakes in a LoRA adapter of a frozen linear layer."""

from __future__ import annotations

from collections.abc import Callable

from onfoot.arrays import rows
from onfoot.check.layer import Mistake, Piece


def _mistake(
    name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str = ""
) -> Mistake:
    return Mistake(name, "lora", explains, equation, fix, apply, errata)


MISTAKES = (
    _mistake(
        "the frozen path missing from dx",
        "dx = α/r dout (down up)ᵗ: the frozen weight is not trained, but the gradient passes through it.",
        "LORA.2",
        "dx = dout weightᵗ + α/r dout upᵗ downᵗ",
        lambda p: {"both_dx": lambda frozen, adapter: adapter},
        "E29",
    ),
    _mistake(
        "the adapter's path missing from dx",
        "dx = dout weightᵗ: x is also the input of the adapter.",
        "LORA.2",
        "dx = dout weightᵗ + α/r dout upᵗ downᵗ",
        lambda p: {"both_dx": lambda frozen, adapter: frozen},
    ),
    _mistake(
        "α in place of α/r",
        "The adapter is scaled by α; adapter files use α/r.",
        "43",
        "scale = alpha / r, with r = down.shape[1]",
        lambda p: {"scale": lambda alpha, rank: alpha},
        "E30",
    ),
    _mistake(
        "α/√r in place of α/r",
        "This is the scale of rank-stabilized LoRA (rsLoRA).",
        "43",
        "scale = alpha / r, with r = down.shape[1]",
        lambda p: {"scale": lambda alpha, rank: alpha / rank**0.5},
    ),
    _mistake(
        "α/r missing everywhere",
        "The adapter is not scaled at all.",
        "43",
        "scale = alpha / r, in dx, ddown and dup",
        lambda p: {"scale": lambda alpha, rank: 1.0},
    ),
    _mistake(
        "r/α in place of α/r",
        "The scale is inverted.",
        "43",
        "scale = alpha / r",
        lambda p: {"scale": lambda alpha, rank: rank / alpha},
    ),
    _mistake(
        "α/r missing from dx",
        "The adapter's path of dx, dout upᵗ downᵗ, is not scaled.",
        "LORA.2",
        "dx = dout weightᵗ + α/r dout upᵗ downᵗ",
        lambda p: {"adapter_path": lambda dlow, down, scale: (dlow / scale) @ down.T},
    ),
    _mistake(
        "α/r missing from ddown",
        "xᵗ dout upᵗ is not scaled.",
        "45",
        "ddown = α/r xᵗ dout upᵗ",
        lambda p: {"ddown": lambda x, dlow, scale: rows(x).T @ rows(dlow / scale)},
    ),
    _mistake(
        "α/r missing from dx and ddown",
        "dout upᵗ is not scaled.",
        "44",
        "multiply dout upᵗ by alpha / r",
        lambda p: {"dlow": lambda dy, up, scale: dy @ up.T},
    ),
    _mistake(
        "α/r missing from dup",
        "(x down)ᵗ dout is not scaled.",
        "46",
        "multiply (x down)ᵗ dout by alpha / r",
        lambda p: {"dup": lambda low, dy, scale: rows(low).T @ rows(dy)},
    ),
    _mistake(
        "α/r twice in dup",
        "x down is saved with its scale, and dup is scaled again.",
        "46",
        "dup = α/r (x down)ᵗ dout, scaled once",
        lambda p: {"dup": lambda low, dy, scale: scale**2 * (rows(low).T @ rows(dy))},
    ),
    _mistake(
        "ddown transposed",
        "ddown = (dout upᵗ)ᵗ x has shape (r, in).",
        "45",
        "ddown = α/r xᵗ dout upᵗ, (in, r)",
        lambda p: {"ddown": lambda x, dlow, scale: rows(dlow).T @ rows(x)},
    ),
)
