"""The layers that the checker knows, one file per topic."""

from __future__ import annotations

import difflib

from onfoot.check.layer import Layer
from onfoot.check.layers.activations import RELU, SILU
from onfoot.check.layers.adamw import ADAMW
from onfoot.check.layers.adamw_step import ADAMW_STEP
from onfoot.check.layers.attention import ATTENTION
from onfoot.check.layers.attention_variants import ATTENTION_DROPOUT, GROUPED_QUERY_ATTENTION, ROPE_ATTENTION
from onfoot.check.layers.block import BLOCK
from onfoot.check.layers.block_variants import POST_NORM_BLOCK, RELU_BLOCK
from onfoot.check.layers.cross_entropy import NEXT_TOKEN_LOSS, SOFTMAX_CROSS_ENTROPY
from onfoot.check.layers.dpo import DPO
from onfoot.check.layers.embedding import EMBEDDING, TIED_EMBEDDING
from onfoot.check.layers.gelu import GELU
from onfoot.check.layers.head import HEAD, HEAD_DROPOUT
from onfoot.check.layers.layer_norm import LAYER_NORM
from onfoot.check.layers.linear import LINEAR
from onfoot.check.layers.lora import LORA
from onfoot.check.layers.loss_heads import LOSS_HEAD, TIED_HEAD
from onfoot.check.layers.multi_head import MULTI_HEAD
from onfoot.check.layers.rms_norm import RMS_NORM
from onfoot.check.layers.rope import ROPE
from onfoot.check.layers.self_attention import CROSS_ATTENTION, SELF_ATTENTION, SELF_ATTENTION_SEPARATE
from onfoot.check.layers.softmax import SOFTMAX
from onfoot.check.layers.swiglu import SWIGLU

# The layers that can be checked, by name, each with its contract: arguments, gradients, options and sizes.
LAYERS: dict[str, Layer] = {
    layer.name: layer
    for layer in (
        ATTENTION,
        ATTENTION_DROPOUT,
        ROPE_ATTENTION,
        GROUPED_QUERY_ATTENTION,
        HEAD,
        HEAD_DROPOUT,
        MULTI_HEAD,
        SELF_ATTENTION,
        SELF_ATTENTION_SEPARATE,
        CROSS_ATTENTION,
        LAYER_NORM,
        RMS_NORM,
        LINEAR,
        LORA,
        EMBEDDING,
        TIED_EMBEDDING,
        TIED_HEAD,
        LOSS_HEAD,
        SOFTMAX_CROSS_ENTROPY,
        NEXT_TOKEN_LOSS,
        DPO,
        SOFTMAX,
        GELU,
        RELU,
        SILU,
        SWIGLU,
        ROPE,
        BLOCK,
        RELU_BLOCK,
        POST_NORM_BLOCK,
        ADAMW,
        ADAMW_STEP,
    )
}


def get_layer(name: str) -> Layer:
    """Returns the layer with that name; raises a ValueError that lists all names."""
    if name not in LAYERS:
        near = difflib.get_close_matches(name, LAYERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"unknown layer {name!r}{hint}; choose from {', '.join(LAYERS)}")
    return LAYERS[name]
