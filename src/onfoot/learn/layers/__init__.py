"""Layers that only the exercises need, in the checker's form: exact gradients, steps, and mistakes known by name."""

from __future__ import annotations

from onfoot.check.layer import Layer
from onfoot.learn.layers.relu import RELU
from onfoot.learn.layers.softmax import SOFTMAX

OWN_LAYERS: dict[str, Layer] = {layer.name: layer for layer in (RELU, SOFTMAX)}
