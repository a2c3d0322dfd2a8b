"""Checks of backward passes: whether the gradients are correct and, if not, which known mistake explains them.

    import onfoot.check

    print(onfoot.check.attention(my_backward))         # a known layer: (q, k, v, dout) -> dq, dk, dv
    print(onfoot.check.gradients(f, f_backward, [x]))  # anything else: against finite differences

The checked function takes the inputs of the layer's forward pass, then the upstream gradient, and returns the gradients
in the order of the inputs. A torch.autograd.Function, an nn.Module, a class with forward and backward, a JAX function
and a forward/backward pair are taken as they are. `onfoot.check.LAYERS` holds every layer's contract. Each check
returns a report: truthy if all gradients are correct, readable when printed, and a dict for programs with `to_dict()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onfoot.check import session
from onfoot.check.budget import DTYPES
from onfoot.check.case_sizes import sizes
from onfoot.check.engines import installation
from onfoot.check.general import gradients
from onfoot.check.general_report import GradientReport
from onfoot.check.isolated import IsolatedFunction
from onfoot.check.known import check_layer
from onfoot.check.layer import Layer
from onfoot.check.layers import LAYERS, get_layer
from onfoot.check.mistakes import CATALOGUE
from onfoot.check.report import LayerReport

Check = Callable[..., LayerReport]


def _layer_check(layer: Layer) -> Check:
    """Returns the check function of one known layer."""

    def check(
        backward: Any,
        *,
        dtypes: Sequence[str] = DTYPES,
        arrays: str = "auto",
        layout: str = "auto",
        seed: int = 0,
        strict: bool = False,
        **options: Any,
    ) -> LayerReport:
        return check_layer(
            layer, backward, dtypes=dtypes, arrays=arrays, layout=layout, seed=seed, strict=strict, **options
        )

    check.__name__ = check.__qualname__ = layer.name
    options = f"Options: {', '.join(f'{k}={v!r}' for k, v in layer.options.items())}." if layer.options else ""
    chosen = f"Sizes that can be chosen: {', '.join(layer.sizes)}." if layer.sizes else ""
    lines = [*layer.contract, *(line for line in (options, chosen) if line)]
    check.__doc__ = f"Checks a function {layer.signature}.\n\n" + "\n".join(lines)
    return check


attention = _layer_check(LAYERS["attention"])
attention_dropout = _layer_check(LAYERS["attention_dropout"])
rope_attention = _layer_check(LAYERS["rope_attention"])
grouped_query_attention = _layer_check(LAYERS["grouped_query_attention"])
head = _layer_check(LAYERS["head"])
head_dropout = _layer_check(LAYERS["head_dropout"])
multi_head = _layer_check(LAYERS["multi_head"])
self_attention = _layer_check(LAYERS["self_attention"])
self_attention_separate = _layer_check(LAYERS["self_attention_separate"])
cross_attention = _layer_check(LAYERS["cross_attention"])
layer_norm = _layer_check(LAYERS["layer_norm"])
rms_norm = _layer_check(LAYERS["rms_norm"])
linear = _layer_check(LAYERS["linear"])
lora = _layer_check(LAYERS["lora"])
embedding = _layer_check(LAYERS["embedding"])
tied_embedding = _layer_check(LAYERS["tied_embedding"])
tied_head = _layer_check(LAYERS["tied_head"])
loss_head = _layer_check(LAYERS["loss_head"])
softmax_cross_entropy = _layer_check(LAYERS["softmax_cross_entropy"])
next_token_loss = _layer_check(LAYERS["next_token_loss"])
dpo = _layer_check(LAYERS["dpo"])
softmax = _layer_check(LAYERS["softmax"])
gelu = _layer_check(LAYERS["gelu"])
relu = _layer_check(LAYERS["relu"])
silu = _layer_check(LAYERS["silu"])
swiglu = _layer_check(LAYERS["swiglu"])
rope = _layer_check(LAYERS["rope"])
block = _layer_check(LAYERS["block"])
relu_block = _layer_check(LAYERS["relu_block"])
post_norm_block = _layer_check(LAYERS["post_norm_block"])
adamw = _layer_check(LAYERS["adamw"])
adamw_step = _layer_check(LAYERS["adamw_step"])


def assert_gradients(
    function: Any,
    backward: Callable[..., Any] | None = None,
    inputs: Sequence[Any] | None = None,
    *,
    layer: str | None = None,
    **options: Any,
) -> None:
    """For tests: raises an AssertionError with the report if a gradient is wrong; its first line is the verdict.

    `assert_gradients(my_backward, layer="attention")` checks a known layer and
    `assert_gradients(forward, backward, inputs)` anything else. The options are those of the checks.
    """
    if layer is not None:
        report: LayerReport | GradientReport = check_layer(get_layer(layer), function, **options)
    elif backward is None or inputs is None:
        raise ValueError("pass either layer=... or a forward pass, a backward pass and inputs")
    else:
        report = gradients(function, backward, inputs, **options)
    session.record(report)
    if not report.passed:
        raise AssertionError(f"{report.verdict}\n\n{report}")


__all__ = [
    "CATALOGUE",
    "LAYERS",
    "GradientReport",
    "IsolatedFunction",
    "LayerReport",
    "adamw",
    "adamw_step",
    "assert_gradients",
    "attention",
    "attention_dropout",
    "block",
    "cross_attention",
    "dpo",
    "embedding",
    "gelu",
    "gradients",
    "grouped_query_attention",
    "head",
    "head_dropout",
    "installation",
    "layer_norm",
    "linear",
    "lora",
    "loss_head",
    "multi_head",
    "next_token_loss",
    "post_norm_block",
    "relu",
    "relu_block",
    "rms_norm",
    "rope",
    "rope_attention",
    "self_attention",
    "self_attention_separate",
    "silu",
    "sizes",
    "softmax",
    "softmax_cross_entropy",
    "swiglu",
    "tied_embedding",
    "tied_head",
]
