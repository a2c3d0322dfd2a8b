"""The catalogue of known mistakes, one file per topic. Each is a wrong formula that can be run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from onfoot.check.layer import Layer, Mistake
from onfoot.check.layers import LAYERS
from onfoot.check.mistakes import (
    activations,
    adamw,
    adamw_step,
    attention,
    attention_variants,
    block,
    block_variants,
    cross_entropy,
    embedding,
    gelu,
    head,
    heads,
    layer_norm,
    linear,
    lora,
    loss_heads,
    mask,
    rms_norm,
    rope,
    self_attention,
    swiglu,
)

# The known mistakes, each with its name, the layers it occurs in, the equation it violates and the fix.
CATALOGUE: tuple[Mistake, ...] = (
    *attention.MISTAKES,
    *mask.MISTAKES,
    *head.MISTAKES,
    *heads.MISTAKES,
    *layer_norm.MISTAKES,
    *rms_norm.MISTAKES,
    *linear.MISTAKES,
    *lora.MISTAKES,
    *embedding.MISTAKES,
    *cross_entropy.MISTAKES,
    *cross_entropy.NEXT_MISTAKES,
    *gelu.MISTAKES,
    *swiglu.MISTAKES,
    *rope.MISTAKES,
    *block.MISTAKES,
    *adamw.MISTAKES,
    *attention_variants.MISTAKES,
    *self_attention.MISTAKES,
    *block_variants.MISTAKES,
    *activations.MISTAKES,
    *loss_heads.MISTAKES,
    *adamw_step.MISTAKES,
)


@cache
def replaced_pieces(mistake: Mistake) -> frozenset[str]:
    """The names of the pieces that a mistake replaces."""
    if mistake.replaces:
        return mistake.replaces
    pieces = LAYERS[mistake.layer].pieces
    return frozenset(mistake.apply(pieces, 0.0) if mistake.parameter else mistake.apply(pieces))


@cache
def _applicable(name: str) -> tuple[Mistake, ...]:
    """The mistakes of a layer of the checker, by its name."""
    return _of_layer(LAYERS[name])


def _of_layer(layer: Layer) -> tuple[Mistake, ...]:
    """The layer's own mistakes, then those of its parts that replace only its pieces and change its gradients."""
    own = [*layer.mistakes, *(m for m in CATALOGUE if m.layer == layer.name)]
    names = {m.name for m in own}
    parts = [
        m
        for part in layer.parts
        for m in CATALOGUE
        if m.layer == part and replaced_pieces(m) <= layer.pieces.names() and m.name not in names
    ]
    return (*own, *(m for m in parts if has_effect(m, layer, layer.options)))


def has_effect(mistake: Mistake, layer: Layer, options: Mapping[str, Any]) -> bool:
    """Whether the mistake changes a gradient in any case of the layer."""
    changes = mistake.apply(layer.pieces, 0.01) if mistake.parameter else mistake.apply(layer.pieces)
    for case in layer.cases(np.random.default_rng(0), **options):
        right = layer.run(layer.pieces, case, options)
        try:
            wrong = layer.run(layer.pieces.with_changes(changes), case, options)
        except (ValueError, IndexError, TypeError):  # TypeError: a mistake of the mask where there is none
            continue
        if not all(a.shape == b.shape and np.allclose(a, b, 1e-9, 1e-12) for a, b in zip(right, wrong, strict=True)):
            return True
    return False


def mistakes_of(layer: Layer, options: Mapping[str, Any]) -> tuple[Mistake, ...]:
    """Every catalogued mistake that can occur in a layer with these options."""
    given = {**layer.assumes, **options}
    known = (*layer.mistakes, *_applicable(layer.name)) if layer.name in LAYERS else _of_layer(layer)
    return tuple(m for m in known if all(given.get(name) == value for name, value in m.needs.items()))
