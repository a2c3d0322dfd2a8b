"""The Yours view: the gradients of a user's own pairs beside the right ones, on the same network and text."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.explore.mistakes import Angle, consequences, rows_of
from onfoot.explore.study_context import StudyContext
from onfoot.explore.tensors import FEATURE, TOKEN, VOCABULARY
from onfoot.models.compare_pairs import Comparison, compare_pairs
from onfoot.models.model import Model
from onfoot.own_engine import OwnEngine, PairError
from onfoot.tables import Formula

NEXT_LAYER: dict[str, dict[str, str]] = {  # per family: error signal -> the layer whose gradients are computed next
    "gpt2": {
        "10": "mlp.c_proj", "7": "mlp.c_fc", "6": "ln_2", "5": "attn.c_proj", "3": "attn.c_attn", "2": "ln_1",
    },
    "llama": {
        "10": "mlp.down_proj", "g": "mlp.gate_proj", "u": "mlp.up_proj", "6": "post_attention_layernorm",
        "5": "self_attn.o_proj", "3": "self_attn.", "2": "input_layernorm",
    },
}  # fmt: skip


class OwnBackward:
    """The error signals and gradients of a network that runs on a user's pairs."""

    def __init__(self, m: StudyContext, engine: OwnEngine) -> None:
        model = Model(m.config, m.params, m.model.dtype, engine)
        with np.errstate(all="ignore"):
            trace = model.trace(m.tokens, m.targets, divisor=m.divisor)
        self.loss = trace.loss
        self.grads = dict(trace.grads)
        self.signals = {"Δ_12": trace.delta[12], "Δ_11": trace.delta[11]}
        for b in reversed(range(m.config.n_layer)):
            self.signals |= {f"{b}.Δ_{i}": trace.blocks[b].delta[i] for i in m.signals}
        self.signals["Δ_1"] = trace.blocks[0].delta[1]


def show_own(m: StudyContext, engine: OwnEngine) -> dict[str, Any]:
    """What the page shows of a user's pairs: each pair, each gradient with its error, and both arrays of each."""
    model = Model(m.config, m.params, m.model.dtype, engine)
    found = compare_pairs(model, m.tokens, m.targets)
    out: dict[str, Any] = {"name": engine.name, "counted": found.counted, "pairs": _pairs(found)}
    out["first"] = None if found.first is None else str(found.first)
    try:
        backward = OwnBackward(m, engine)
    except PairError as error:
        return {**out, "runs": False, "message": str(error), "rows": []}
    rows, angle = [], Angle()
    for row, yours, right in rows_of(m, backward, NEXT_LAYER[m.family]):
        rows.append({**row, "arrays": _arrays(m, row, yours, right)})
        if row["parameter"] and not row["problem"]:
            angle.add(yours, right)
    more = consequences(m, backward.grads, rows, angle)
    return {**out, "runs": True, "loss": backward.loss, "rows": rows, **more}


def _pairs(found: Comparison) -> list[dict[str, Any]]:
    """Each pair of the network: whose it is, and its first wrong result."""
    out = []
    for pair, is_theirs in found.used.items():
        wrong = [one for one in found.of(pair) if one.wrong]
        out.append({"pair": pair, "yours": is_theirs, "wrong": bool(wrong), "words": str(wrong[0]) if wrong else ""})
    return out


def _arrays(m: StudyContext, row: dict[str, Any], yours: np.ndarray, right: np.ndarray) -> dict[str, str]:
    """Adds both arrays of a row and their difference to the study; their ids."""
    if row["problem"]:
        return {}
    if not row["parameter"]:
        yours, right = yours[0], right[0]  # without the batch axis
    axes = (FEATURE,) * right.ndim if row["parameter"] else (TOKEN, VOCABULARY if row["name"] == "Δ_12" else FEATURE)
    where = row["name"] if row["block"] is None or row["parameter"] else f"{row['block']}.{row['name']}"
    made = {"right": right, "yours": yours, "yours − right": yours - right}
    for symbol, value in made.items():
        m.add(f"{symbol}: {where}", symbol, value, axes, formula=Formula(""))
    return {symbol: f"{symbol}: {where}" for symbol in made}
