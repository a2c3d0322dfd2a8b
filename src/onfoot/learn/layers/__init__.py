"""Layers that only the exercises need, in the checker's form: exact gradients, steps, and mistakes known by name."""

from __future__ import annotations

from dataclasses import replace

from onfoot.check.layer import Layer
from onfoot.check.layers import LAYERS
from onfoot.learn.layers.gpt2 import GPT2, OF_BLOCK
from onfoot.learn.layers.relu import RELU
from onfoot.learn.layers.self_attention import SELF_ATTENTION
from onfoot.learn.layers.softmax import SOFTMAX

BLOCK = replace(LAYERS["block"], gradients=("dx", *OF_BLOCK))  # its gradients by GPT-2's names

OWN_LAYERS: dict[str, Layer] = {
    "relu": RELU,
    "softmax": SOFTMAX,
    "self_attention": SELF_ATTENTION,
    "gpt2_block": BLOCK,
    "gpt2": GPT2,
}
