"""What turns gradients into updates: the accumulator over microbatches and ranks, and the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.models.model import Model
from onfoot.train.buckets import AllReduceGradients, GradientAccumulator, ReduceScatterGradients
from onfoot.train.muon import Muon
from onfoot.train.optimizer import AdamW
from onfoot.train.options import TrainingOptions
from onfoot.train.parallel import World
from onfoot.train.rates import lr_scales
from onfoot.train.shard import ShardedAdamW
from onfoot.train.vector import BucketLayout


def make_update(ranks: World, model: Model, options: TrainingOptions) -> tuple[GradientAccumulator, AdamW]:
    """The gradient accumulator (over microbatches and ranks) and the optimizer."""
    settings: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "weight_decay": options.weight_decay}
    settings["lr_scales"] = lr_scales(model, options.layer_decay, getattr(options, "lora_plus", 1.0))
    kind = Muon if options.optimizer == "muon" else AdamW
    if ranks.size == 1:
        return GradientAccumulator(), kind(model, **settings)
    layout = BucketLayout.of(model, options.bucket_mb, ranks.size)
    if options.shard:
        return ReduceScatterGradients(ranks, layout, model), ShardedAdamW(model, ranks, layout, **settings)
    return AllReduceGradients(ranks, layout, model), kind(model, **settings)


def replicated_state(optimizer: AdamW) -> dict[str, np.ndarray]:
    """The arrays that must be identical on all ranks: the trained weights, and the moments unless they are sharded."""
    model = optimizer.model
    weights = {name: to_numpy(model.params[name]) for name in sorted(model.trainable)}
    return weights if isinstance(optimizer, ShardedAdamW) else weights | optimizer.moments()
