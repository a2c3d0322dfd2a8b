"""Checks of backward passes: whether a gradient is right, and if not, which mistake it is.

    import onfoot.check

    print(onfoot.check.attention(my_backward))         # a known layer: (q, k, v, dout) -> dq, dk, dv
    print(onfoot.check.gradients(f, f_backward, [x]))  # anything else: against finite differences

A user's function takes what the layer's forward takes and the upstream gradient last, and returns the gradients in the
same order. `onfoot.check.LAYERS` has every layer's contract. What comes back is a report: true where all is right, text
where it is printed, `to_dict()` for programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onfoot.check.engines import installation
from onfoot.check.general import gradients
from onfoot.check.general_report import GradientReport
from onfoot.check.known import DTYPES, check_layer
from onfoot.check.layer import Layer
from onfoot.check.layers import LAYERS, get_layer
from onfoot.check.mistakes import CATALOGUE
from onfoot.check.report import LayerReport

Check = Callable[..., LayerReport]


def _known(layer: Layer) -> Check:
    """The check of one known layer."""

    def check(
        backward: Callable[..., Any],
        *,
        dtypes: Sequence[str] = DTYPES,
        arrays: str = "auto",
        seed: int = 0,
        strict: bool = False,
        **options: Any,
    ) -> LayerReport:
        return check_layer(layer, backward, dtypes=dtypes, arrays=arrays, seed=seed, strict=strict, **options)

    check.__name__ = check.__qualname__ = layer.name
    options = f"Options: {', '.join(f'{k}={v!r}' for k, v in layer.options.items())}." if layer.options else ""
    check.__doc__ = f"Checks a function {layer.signature}.\n\n" + "\n".join([*layer.contract, options]).strip()
    return check


attention = _known(LAYERS["attention"])
head = _known(LAYERS["head"])
head_dropout = _known(LAYERS["head_dropout"])
multi_head = _known(LAYERS["multi_head"])
layer_norm = _known(LAYERS["layer_norm"])
rms_norm = _known(LAYERS["rms_norm"])
linear = _known(LAYERS["linear"])
lora = _known(LAYERS["lora"])
embedding = _known(LAYERS["embedding"])
tied_embedding = _known(LAYERS["tied_embedding"])
softmax_cross_entropy = _known(LAYERS["softmax_cross_entropy"])
next_token_loss = _known(LAYERS["next_token_loss"])
gelu = _known(LAYERS["gelu"])
swiglu = _known(LAYERS["swiglu"])
rope = _known(LAYERS["rope"])
block = _known(LAYERS["block"])
adamw = _known(LAYERS["adamw"])


def assert_gradients(
    function: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    inputs: Sequence[Any] | None = None,
    *,
    layer: str | None = None,
    **options: Any,
) -> None:
    """For tests: an AssertionError with the report, where a gradient is wrong.

    `assert_gradients(my_backward, layer="attention")` for a known layer, `assert_gradients(forward, backward, inputs)`
    for anything else; options are those of the checks.
    """
    if layer is not None:
        report: LayerReport | GradientReport = check_layer(get_layer(layer), function, **options)
    elif backward is None or inputs is None:
        raise ValueError("give either layer=... or a forward pass, a backward pass and inputs")
    else:
        report = gradients(function, backward, inputs, **options)
    if not report.passed:
        raise AssertionError(f"\n{report}")


__all__ = [
    "CATALOGUE",
    "LAYERS",
    "GradientReport",
    "LayerReport",
    "adamw",
    "assert_gradients",
    "attention",
    "block",
    "embedding",
    "gelu",
    "gradients",
    "head",
    "head_dropout",
    "installation",
    "layer_norm",
    "linear",
    "lora",
    "multi_head",
    "next_token_loss",
    "rms_norm",
    "rope",
    "softmax_cross_entropy",
    "swiglu",
    "tied_embedding",
]
