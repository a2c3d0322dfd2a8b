"""The One step view: AdamW steps on this text, and the first steps of LoRA training; see `one_step_large`."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.explore.copies import active, copy_of
from onfoot.explore.jobs import progress
from onfoot.explore.study_context import FIRST_LR, StudyContext
from onfoot.explore.tensors import FEATURE
from onfoot.tables import Formula
from onfoot.train.optimizer import AdamW, global_norm

FIRST = (FIRST_LR, 1)  # the learning rate and the number of steps that the page starts with
MAX_STEPS = 20
MAX_LR = 1.0
LORA_RANK = 2
LORA_STEPS = 3
SYMBOLS = {"new": "new w", "update": "new w − w"}  # of the arrays of a step; the others have their names


def check_choice(lr: float, n: int, most: int) -> None:
    """Raises ValueError for a learning rate or a number of steps that cannot be chosen."""
    if not 0 < lr <= MAX_LR:
        raise ValueError(f"lr must be > 0 and <= {MAX_LR}, got {lr}")
    if not 1 <= n <= most:
        raise ValueError(f"steps must be between 1 and {most}, got {n}")


def array_id(n: int, lr: float, key: str, name: str) -> str:
    return f"step {n}, lr {lr:g}: {key} of {name}"


def optimizer_steps(m: StudyContext, lr: float, n: int) -> dict[str, Any]:
    """Takes n AdamW steps on the text. Adds the arrays of the last one to the study as `step n, lr: m of <name>`."""
    check_choice(lr, n, MAX_STEPS)
    model = copy_of(m.model)
    optimizer = AdamW(model, lr=lr)
    losses = []
    for _ in range(n):
        before = {name: value.copy() for name, value in model.params.items()}
        loss, grads = model.loss_and_grads(m.tokens, m.targets, divisor=m.divisor)
        losses.append(loss)
        optimizer.step(grads)
    losses.append(model.loss(m.tokens, m.targets, divisor=m.divisor))
    predicted = sum(float((grads[name] * (model.params[name] - before[name])).sum()) for name in grads)
    rows = []
    for name in m.params:
        if name not in grads:
            continue
        w, new = before[name], model.params[name]
        arrays = {"w": w, "∂w": grads[name], "m": optimizer.m[name], "v": optimizer.v[name]}
        arrays |= {"new": new, "update": new - w}
        ids = {key: _add(m, array_id(n, lr, key, name), SYMBOLS.get(key, key), x) for key, x in arrays.items()}
        rows.append({"name": name, "arrays": ids})
    return {
        "lr": lr,
        "steps": n,
        "most_steps": MAX_STEPS,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "losses": losses,
        "gradient_norm": global_norm(grads),
        "predicted": predicted,
        "actual": losses[-1] - losses[-2],
        "parameters": rows,
    }


def lora_steps(m: StudyContext) -> dict[str, Any]:
    """LoRA of rank 2 on every linear layer of the blocks: its matrices and gradients before each training step."""
    model = copy_of(m.model)
    rank = min(LORA_RANK, m.config.n_embd)
    model.add_lora(r=rank, alpha=rank)
    optimizer = AdamW(model, lr=1e-2, weight_decay=0.0)
    adapter = active(model)
    shown = list(adapter.layers)[:1] if m.frozen else list(adapter.layers)  # those whose arrays are kept
    layers: dict[str, list[dict[str, Any]]] = {layer: [] for layer in adapter.layers}
    losses = []
    for step in range(LORA_STEPS):
        progress("the first steps of LoRA", step, LORA_STEPS + 1)
        loss, grads = model.loss_and_grads(m.tokens, m.targets, divisor=m.divisor)
        losses.append(loss)
        for layer, states in layers.items():
            names = {"d": adapter.down(layer), "u": adapter.up(layer)}  # stored transposed
            arrays = {x: model.params[name].T.copy() for x, name in names.items()}
            arrays |= {f"∂{x}": grads[name].T.copy() for x, name in names.items()}
            ids = {}
            if layer in shown:
                ids = {key: _add(m, f"LoRA {step}: {key} of {layer}", key, value) for key, value in arrays.items()}
            states.append({"norms": {key: float(np.linalg.norm(x)) for key, x in arrays.items()}, "arrays": ids})
        optimizer.step(grads)
    losses.append(model.loss(m.tokens, m.targets, divisor=m.divisor))
    return {
        "rank": rank,
        "scale": 1.0,
        "trainable": model.n_trainable,
        "frozen": m.model.n_params,
        "losses": losses,
        "layers": [{"name": layer, "states": states} for layer, states in layers.items()],
    }


def _add(m: StudyContext, id: str, symbol: str, value: np.ndarray) -> str:
    if id not in m.tensors:
        m.add(id, symbol, value.copy(), (FEATURE,) * value.ndim, formula=Formula(""))
    return id
