"""Which parameters train, and each one's learning rate relative to the step's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from onfoot.models.params import layer_order

if TYPE_CHECKING:
    from onfoot.models.model import Model

BLOCK = re.compile(r"\.(\d+)\.")  # the number of a block, as in transformer.h.3.ln_1.weight
UP = ".lora_B."


def freeze(model: Model, patterns: Sequence[str]) -> None:
    """Stops training the parameters that match: by name, by the start of a name up to a dot, or by a glob."""
    for pattern in patterns:
        found = {n for n in model.params if n.startswith(f"{pattern}.") or fnmatchcase(n, pattern)}
        if not found:
            names = sorted(model.params)
            raise ValueError(
                f"freeze: no parameter matches {pattern!r}; names are such as {names[0]} and {names[-1]}, "
                f"and patterns such as {names[0].rpartition('.')[0]} or *.bias"
            )
        model.trainable = model.trainable - found
    if not model.trainable:
        raise ValueError(f"freeze: {','.join(patterns)} leaves no parameter to train")


def lr_scales(model: Model, layer_decay: float = 1.0, lora_plus: float = 1.0) -> dict[str, float]:
    """The factor of the learning rate of each trainable parameter, where it is not 1."""
    scales = {}
    for name in model.trainable:
        scale = layer_decay ** (model.config.n_layer - depth(model, name))  # eq RATE.1
        scale *= lora_plus if UP in name else 1.0  # eq RATE.2
        scales[name] = scale
    return {name: scale for name, scale in scales.items() if scale != 1.0}


def depth(model: Model, name: str) -> int:
    """0 for embeddings, 1 ... L for the blocks, L for what comes after them."""
    layer = name.partition(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0]
    block = BLOCK.search(f"{layer}.")
    if block:
        return int(block[1]) + 1
    order = layer_order(model.config)
    first = min(i for other, i in order.items() if BLOCK.search(f"{other}."))
    return 0 if order[layer] < first else model.config.n_layer
