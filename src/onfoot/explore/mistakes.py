"""The Mistakes view: applies a known mistake to the network's backward pass and compares its gradients.

The checker writes every layer's backward pass as small named functions ("pieces"); a mistake replaces some of them.
Here the pieces of all layers make up the backward pass of the network, so one replacement acts wherever it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from onfoot.check import CATALOGUE, LAYERS, check_layer
from onfoot.check.layer import Case, Mistake
from onfoot.check.mistakes import replaced_pieces
from onfoot.explore.copies import copy_of
from onfoot.explore.jobs import progress
from onfoot.explore.mistake_formulas import violated
from onfoot.explore.proof import SMALLEST, relative_error
from onfoot.explore.stepped import settings, stepped
from onfoot.explore.study_context import StudyContext
from onfoot.explore.wrong_backward import backward_of, changes_of, network_pieces
from onfoot.models.params import HEAD, names_of
from onfoot.train.optimizer import AdamW

LAYER_NAMES = {
    "next_token_loss": "Targets",
    "softmax_cross_entropy": "Loss",
    "attention": "Attention",
    "multi_head": "Heads",
    "layer_norm": "Layer norm",
    "gelu": "GELU",
    "linear": "Linear layers",
    "block": "Skips and branches",
    "rms_norm": "RMS norm",
    "rope": "RoPE",
    "rope_attention": "Attention with RoPE",
    "grouped_query_attention": "Grouped queries",
    "swiglu": "SwiGLU",
    "embedding": "Embedding",
    "tied_embedding": "Tied embedding",
}
FEATURED = (  # those in an exported page: running the diagnosis for all mistakes takes half a minute
    "targets by a cyclic shift", "a mean loss whose gradient is not divided", "divided by all tokens",
    "1/√d_k missing from the backward pass", "row sums broadcast along the wrong axis",
    "the mean in place of the weighted sum", "the sum missing from the gradient of softmax",
    "the mask multiplied into the scores", "dv without the transpose of ρ",
    "dout split into heads without a transpose", "γ outside the means", "the variance held constant",
    "unbiased variance", "tanh-GELU with erf's derivative", "update before propagation",
    "the skip connection around attention missing", "repeated ids lost", "only the gradient through the logits",
)  # fmt: skip
FEATURED_LLAMA = (
    "targets by a cyclic shift", "a mean loss whose gradient is not divided", "the mean in place of the weighted sum",
    "γ outside the mean", "the root mean square held constant", "layer norm's mean subtracted", "rotated forward again",
    "the rotation left out", "adjacent features as pairs", "dk not rotated back", "v rotated as well",
    "σ in place of silu's derivative", "up missing from dgate", "gate in place of silu(gate) in dup",
    "dk and dv of the last query head of a group", "key head h mod H_kv in place of h // G",
    "the skip connection around attention missing", "only the gradient through the logits",
)  # fmt: skip
TOLERANCE = 1e-9  # a larger relative error is not rounding
NEXT_LAYER = {  # per family: error signal in a block -> the layer whose parameter gradients are computed from it
    "gpt2": {
        "10": "mlp.c_proj", "7": "mlp.c_fc", "6": "ln_2", "5": "attn.c_proj", "scaled": "attn.c_attn", "2": "ln_1",
    },
    "llama": {
        "10": "mlp.down_proj", "g": "mlp.gate_proj", "u": "mlp.up_proj", "6": "post_attention_layernorm",
        "5": "self_attn.o_proj", "scaled": "self_attn.", "2": "input_layernorm",
    },
}  # fmt: skip


def possible(m: StudyContext) -> list[Mistake]:
    """The catalogued mistakes that apply to this network. Raises ValueError if its blocks cannot be put together."""
    c = m.config
    if m.family == "llama":
        windows = [c.window(b) for b in range(c.n_layer)]
        if any(window is not None and window < m.n_tokens for window in windows):
            raise ValueError(
                f"this view needs attention to all earlier tokens, and a window of this model is shorter than the "
                f"{m.n_tokens} tokens of the text; run a shorter text"
            )
        skipped = {"layer_norm", "gelu"} | ({"grouped_query_attention"} if c.n_kv_head == c.n_head else set())
    else:
        plain = c.activation_function == "gelu_new" and c.layer_norm_epsilon == 1e-5
        if not plain or not c.key_width == c.value_width == c.n_embd / c.n_head:
            raise ValueError(
                "this view needs GPT-2's blocks: gelu_new, layer_norm_epsilon=1e-5, head width n_embd / n_head"
            )
        skipped = {"rms_norm", "rope", "rope_attention", "grouped_query_attention", "swiglu"}
    given = {"causal": c.causal, "form": "tanh", "reduction": "mean"}
    layers = [name for name in LAYER_NAMES if name not in skipped]
    if not c.tie_word_embeddings:
        layers.remove("tied_embedding")
    pieces = network_pieces(m).names()
    if not any(name.endswith(".bias") for name in m.params):
        pieces.remove("dbias")
    found = [x for name in layers for x in CATALOGUE if x.layer == name and replaced_pieces(x) <= pieces]
    return [x for x in found if all(given.get(name, value) == value for name, value in x.needs.items())]


def catalogue(m: StudyContext, featured: bool = False) -> dict[str, Any]:
    """The keys and names of the mistakes, grouped by layer."""
    names = FEATURED_LLAMA if m.family == "llama" else FEATURED
    chosen = [x for x in possible(m) if not featured or x.name in names]
    groups = {layer: [x for x in chosen if x.layer == layer] for layer in LAYER_NAMES}
    return {
        "groups": [
            {"name": LAYER_NAMES[layer], "mistakes": [{"key": key_of(x), "name": x.name} for x in mistakes]}
            for layer, mistakes in groups.items()
            if mistakes
        ]
    }


def key_of(mistake: Mistake) -> str:
    return f"{mistake.layer}: {mistake.name}"


def right_signal(m: StudyContext, id: str) -> np.ndarray:
    """The correct array for an id of `Backward.signals`, with the batch axis."""
    if id == "Δ_12":
        return m.trace.delta[12]  # of the whole vocabulary
    if id.endswith(".Δ_scaled"):
        return m.trace.blocks[int(id.partition(".")[0])].delta_causal
    return m.tensors.value(id)[None]


def rows_of(
    m: StudyContext, backward: Any, next_in_block: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """Every gradient in backward order, each signal and then the parameters computed from it: with its error, the array
    and the right one. `backward` has `signals` and `grads`."""
    signals, left = iter(backward.signals.items()), list(backward.grads)
    next_layer = {"Δ_12": f"{HEAD}.", "Δ_11": "model.norm." if m.family == "llama" else "transformer.ln_f."}
    blocks = names_of(m.config).BLOCKS
    for b in range(m.config.n_layer):
        next_layer |= {f"{b}.Δ_{i}": f"{blocks}{b}.{short}" for i, short in next_in_block.items()}

    def row(name: str, prefix: str, is_parameter: bool, value: np.ndarray, right: np.ndarray) -> Any:
        return _row(name, int(prefix) if prefix else None, is_parameter, value, right), value, right

    for id, value in signals:
        prefix, _, symbol = id.rpartition(".")
        yield row(symbol, prefix, False, value, right_signal(m, id))
        if id in next_layer:
            for name in [name for name in left if name.startswith(next_layer[id])]:
                left.remove(name)
                yield row(name, prefix, True, backward.grads[name], m.grads[name])
    for name in left:
        yield row(name, "", True, backward.grads[name], m.grads[name])


def _row(name: str, block: int | None, is_parameter: bool, value: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    out: dict[str, Any] = {"name": name, "block": block, "parameter": is_parameter, "problem": "", "error": None}
    if value.shape != right.shape:
        out["problem"] = f"shape {value.shape} instead of {right.shape}"
    elif not np.isfinite(value).all():
        out["problem"] = f"{int((~np.isfinite(value)).sum())} of {value.size} entries are not finite"
    else:
        out["error"] = relative_error(value, right, SMALLEST)
    out["wrong"] = bool(out["problem"]) or out["error"] > TOLERANCE
    return out


def apply_mistake(m: StudyContext, key: str) -> dict[str, Any]:
    """The effect of a mistake on this network and text, and the checker's diagnosis."""
    found = [x for x in possible(m) if key_of(x) == key]
    if not found:
        raise KeyError(f"unknown mistake {key!r}")
    mistake = found[0]
    out = {
        "key": key,
        "name": mistake.name,
        "layer": LAYER_NAMES[mistake.layer],
        "explains": mistake.explains,
        **violated(mistake.equation),
        "fix": mistake.fix,
        "errata": mistake.errata,
        "diagnosis": diagnosis(mistake),
    }
    angle, rows = Angle(), []
    try:
        backward = backward_of(m, mistake)
        for row, wrong, right in rows_of(m, backward, NEXT_LAYER[m.family]):
            rows.append(row)
            progress("comparing the gradients", len(rows), len(backward.signals) + len(backward.grads))
            if row["parameter"] and not row["problem"]:
                angle.add(wrong, right)
    except (ValueError, IndexError) as error:
        return {**out, "runs": False, "message": str(error), "rows": []}
    return {**out, "runs": True, "rows": rows, **consequences(m, backward.grads, rows, angle)}


class Angle:
    """The cosine between two gradients of all parameters, which are given one parameter at a time."""

    def __init__(self) -> None:
        self.dot = self.wrong = self.right = 0.0

    def add(self, wrong: np.ndarray, right: np.ndarray) -> None:
        for name, x, y in (("dot", wrong, right), ("wrong", wrong, wrong), ("right", right, right)):
            axes = "ab"[: x.ndim]
            setattr(self, name, getattr(self, name) + float(np.einsum(f"{axes},{axes}->", x, y)))  # without a copy

    @property
    def cosine(self) -> float | None:
        size = math.sqrt(self.wrong) * math.sqrt(self.right)
        return self.dot / size if size else None


def consequences(
    m: StudyContext, grads: Mapping[str, np.ndarray], rows: list[dict[str, Any]], angle: Angle
) -> dict[str, Any]:
    """The cosine between the wrong and the correct gradient, and the loss after one step with each."""
    if any(row["problem"] for row in rows if row["parameter"]):
        return {"cosine": None, "loss_wrong": None, "loss_right": None}
    progress("the loss after a step with each gradient", 0, 2)
    if m.loss_after_step is None:
        m.loss_after_step = (_loss_after(m, m.grads),)
    progress("the loss after a step with each gradient", 1, 2)
    return {"cosine": angle.cosine, "loss_wrong": _loss_after(m, grads), "loss_right": m.loss_after_step[0]}


def _loss_after(m: StudyContext, grads: Mapping[str, np.ndarray]) -> float | None:
    """The loss after one AdamW step with these gradients."""
    with np.errstate(all="ignore"):
        if m.frozen:
            model = stepped(m.model, [grads], settings(m.model, m.first_lr))
        else:
            model = copy_of(m.model)
            AdamW(model, lr=m.first_lr).step(dict(grads))
        loss = model.loss(m.tokens, m.targets, divisor=m.divisor)
    return loss if math.isfinite(loss) else None


@cache
def diagnosis(mistake: Mistake) -> dict[str, Any]:
    """The checker's diagnosis of a function with this mistake, on the checker's own cases."""
    layer = LAYERS[mistake.layer]
    pieces = layer.pieces.with_changes(changes_of(mistake, layer.pieces))
    options = layer.with_options({name: value for name, value in mistake.needs.items() if name in layer.options})

    def backward(*inputs: Any) -> Any:
        return layer.run(pieces, Case("", inputs, {}), options)

    report = check_layer(layer, backward, dtypes=("float64",), name="your function")
    found = report.diagnosis
    findings = [] if found is None else found.findings
    return {
        "signature": layer.signature,
        "cases": len(report.outcomes),
        "wrong": report.wrong,
        "findings": [{"name": f.name, "fix": f.fix, "gradients": f.gradients, "value": f.value} for f in findings],
        "found": any(f.name == mistake.name for f in findings),
        "candidates": [
            {"names": names, "residual": residual if math.isfinite(residual) else None}
            for names, residual in ([] if found is None else found.candidates)
        ],
        "report": str(report),
    }
