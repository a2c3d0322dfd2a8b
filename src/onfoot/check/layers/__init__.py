"""The layers that the checker knows, one file per topic."""

from __future__ import annotations

import difflib

from onfoot.check.layer import Layer
from onfoot.check.layers.adamw import ADAMW
from onfoot.check.layers.attention import ATTENTION
from onfoot.check.layers.block import BLOCK
from onfoot.check.layers.cross_entropy import NEXT_TOKEN_LOSS, SOFTMAX_CROSS_ENTROPY
from onfoot.check.layers.embedding import EMBEDDING, TIED_EMBEDDING
from onfoot.check.layers.gelu import GELU
from onfoot.check.layers.head import HEAD, HEAD_DROPOUT
from onfoot.check.layers.layer_norm import LAYER_NORM
from onfoot.check.layers.linear import LINEAR
from onfoot.check.layers.lora import LORA
from onfoot.check.layers.multi_head import MULTI_HEAD
from onfoot.check.layers.rms_norm import RMS_NORM
from onfoot.check.layers.rope import ROPE
from onfoot.check.layers.swiglu import SWIGLU

LAYERS: dict[str, Layer] = {
    layer.name: layer
    for layer in (
        ATTENTION,
        HEAD,
        HEAD_DROPOUT,
        MULTI_HEAD,
        LAYER_NORM,
        RMS_NORM,
        LINEAR,
        LORA,
        EMBEDDING,
        TIED_EMBEDDING,
        SOFTMAX_CROSS_ENTROPY,
        NEXT_TOKEN_LOSS,
        GELU,
        SWIGLU,
        ROPE,
        BLOCK,
        ADAMW,
    )
}


def get_layer(name: str) -> Layer:
    """Returns the layer with that name; raises a ValueError that lists all names."""
    if name not in LAYERS:
        near = difflib.get_close_matches(name, LAYERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"unknown layer {name!r}{hint}; choose from {', '.join(LAYERS)}")
    return LAYERS[name]
