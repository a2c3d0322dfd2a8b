"""The Mistakes view: applies a known mistake to the network's backward pass and compares its gradients.

The checker writes every layer's backward pass as small named functions ("pieces"); a mistake replaces some of them.
Here the pieces of all layers make up the backward pass of the network, so one replacement acts wherever it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from onfoot.check import CATALOGUE, LAYERS, check_layer
from onfoot.check.equations import EQUATIONS
from onfoot.check.layer import Case, Mistake, Pieces
from onfoot.check.layers import block, cross_entropy, embedding, layer_norm
from onfoot.explore.one_step import FIRST, copy_of
from onfoot.explore.proof import SMALLEST, relative_error
from onfoot.explore.study_context import StudyContext
from onfoot.models.params import HEAD, POSITION_TABLE, TOKEN_TABLE, names_of
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
TOLERANCE = 1e-9  # a larger relative error is not rounding
PARAMETER = 0.1  # the value for a mistake that has a parameter, such as a learning rate
BLOCK_LAYERS = (
    "ln_1",
    "attn.c_attn",
    "attn.c_proj",
    "ln_2",
    "mlp.c_fc",
    "mlp.c_proj",
)  # in the order of the block's arguments
NEXT_LAYER = {  # error signal in a block -> the layer whose parameter gradients are computed from it
    "10": "mlp.c_proj", "7": "mlp.c_fc", "6": "ln_2", "5": "attn.c_proj", "scaled": "attn.c_attn", "2": "ln_1",
}  # fmt: skip


def possible(m: StudyContext) -> list[Mistake]:
    """The catalogued mistakes that apply to this network. Raises ValueError if its blocks differ from GPT-2's."""
    c = m.config
    plain = c.activation_function == "gelu_new" and c.layer_norm_epsilon == 1e-5
    if not plain or not c.key_width == c.value_width == c.n_embd / c.n_head:
        raise ValueError(
            "this view needs GPT-2's blocks: gelu_new, layer_norm_epsilon=1e-5, head width n_embd / n_head"
        )
    given = {"causal": c.causal, "form": "tanh", "reduction": "mean"}
    layers = [name for name in LAYER_NAMES if name != "tied_embedding" or c.tie_word_embeddings]
    found = [x for name in layers for x in CATALOGUE if x.layer == name]
    return [x for x in found if all(given.get(name, value) == value for name, value in x.needs.items())]


def catalogue(m: StudyContext, featured: bool = False) -> dict[str, Any]:
    """The keys and names of the mistakes, grouped by layer."""
    chosen = [x for x in possible(m) if not featured or x.name in FEATURED]
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


def network_pieces(mistake: Mistake | None = None) -> Pieces:
    """Every piece of the network's backward pass, with those of a mistake replaced."""
    tables = (block.PIECES, cross_entropy.NEXT_PIECES, embedding.TIED_PIECES)
    pieces = Pieces(**{name: piece for table in tables for name, piece in vars(table).items()})
    return pieces if mistake is None else pieces.with_changes(_changes(mistake, pieces))


def _changes(mistake: Mistake, pieces: Pieces) -> dict[str, Callable[..., Any]]:
    return mistake.apply(pieces, PARAMETER) if mistake.parameter else mistake.apply(pieces)


class Backward:
    """The backward pass of the network in pieces; the results are in `signals` and `grads`."""

    def __init__(self, m: StudyContext, pieces: Pieces) -> None:
        self.m = m
        self.outputs: dict[str, list[np.ndarray]] = {}
        self.signals: dict[str, np.ndarray] = {}  # by array id
        self.grads: dict[str, np.ndarray] = {}  # by parameter name
        self.p = Pieces(**{name: self._recorded(name, piece) for name, piece in vars(pieces).items()})
        with np.errstate(all="ignore"):
            self._run()

    def _recorded(self, name: str, piece: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            out = piece(*arguments)
            self.outputs.setdefault(name, []).append(out)
            return out

        return recorded

    def _run(self) -> None:
        m, p, trace, config = self.m, self.p, self.m.trace, self.m.config
        table = TOKEN_TABLE if config.tie_word_embeddings else f"{HEAD}.weight"
        (d12,) = cross_entropy.next_steps(p, trace.a[12], m.tokens, 1.0)
        a11 = trace.a[11]
        d11 = p.through(d12, m.params[table].T, a11)
        head = np.swapaxes(p.dweight(a11, d12), -1, -2)
        if config.lm_head_bias:
            self.grads[f"{HEAD}.bias"] = p.dbias(d12)
        d, *norm = layer_norm.steps(p, trace.blocks[-1].a[10], *self._pair("transformer.ln_f"), d11)
        self._store("transformer.ln_f", norm)
        self.signals |= {"Δ_12": d12, "Δ_11": d11}
        for b in reversed(range(config.n_layer)):
            self.signals[f"{b}.Δ_10"] = d
            d = self._block(b, d)
        self.signals["Δ_1"] = d
        looked_up = p.scatter(p.table_ids(m.tokens), d, config.vocab_size)
        if config.tie_word_embeddings:
            self.grads[TOKEN_TABLE] = p.both_paths(looked_up, head)
        else:
            self.grads |= {TOKEN_TABLE: looked_up, f"{HEAD}.weight": head}
        positions = np.arange(m.tokens.shape[1])[None]
        self.grads[POSITION_TABLE] = p.scatter(positions, d, config.n_positions)

    def _pair(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        return self.m.params[f"{layer}.weight"], self.m.params[f"{layer}.bias"]

    def _store(self, layer: str, pair: list[np.ndarray]) -> None:
        self.grads[f"{layer}.weight"], self.grads[f"{layer}.bias"] = pair

    def _block(self, b: int, d10: np.ndarray) -> np.ndarray:
        config, name = self.m.config, f"transformer.h.{b}"
        parameters = [value for short in BLOCK_LAYERS for value in self._pair(f"{name}.{short}")]
        self.outputs.clear()
        a1 = self.m.trace.blocks[b].a[1]
        d1, *grads = block.steps(self.p, a1, *parameters, d10, n_head=config.n_head, causal=config.causal)
        for i, short in enumerate(BLOCK_LAYERS):
            self._store(f"{name}.{short}", grads[2 * i : 2 * i + 2])
        through = dict(zip((8, 6, 3, 2), self.outputs["through"], strict=True))  # contract, expand, attProj, c_attn
        through |= {7: self.outputs["gelu_dx"][0], 5: self.outputs["skip_mlp"][0]}
        self.signals |= {f"{b}.Δ_{i}": through[i] for i in (8, 7, 6, 5, 3)}
        self.signals[f"{b}.Δ_scaled"] = self.outputs["dscores"][0]
        self.signals[f"{b}.Δ_2"] = through[2]
        return d1


def right_signal(m: StudyContext, id: str) -> np.ndarray:
    """The correct array for an id of `Backward.signals`, with the batch axis."""
    if id.endswith(".Δ_scaled"):
        return m.trace.blocks[int(id.partition(".")[0])].delta_causal
    return m.tensors.value(id)[None]


def _rows(m: StudyContext, backward: Backward) -> Iterator[dict[str, Any]]:
    """Every gradient in backward order with its error: each signal, then the parameters computed from it."""
    return (row for row, _, _ in rows_of(m, backward, NEXT_LAYER))


def rows_of(
    m: StudyContext, backward: Any, next_in_block: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
    """The same with the array and the right one. `backward` has `signals` and `grads`."""
    signals, grads = iter(backward.signals.items()), dict(backward.grads)
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
            for name in [name for name in grads if name.startswith(next_layer[id])]:
                yield row(name, prefix, True, grads.pop(name), m.trace.grads[name])
    for name, value in grads.items():
        yield row(name, "", True, value, m.trace.grads[name])


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
        "equation": mistake.equation,
        "equation_text": EQUATIONS.get(mistake.equation, ""),
        "fix": mistake.fix,
        "errata": mistake.errata,
        "diagnosis": diagnosis(mistake),
    }
    try:
        backward = Backward(m, network_pieces(mistake))
    except (ValueError, IndexError) as error:
        return {**out, "runs": False, "message": str(error), "rows": []}
    rows = list(_rows(m, backward))
    return {**out, "runs": True, "rows": rows, **consequences(m, backward, rows)}


def consequences(m: StudyContext, backward: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The cosine between the wrong and the correct gradient, and the loss after one step with each."""
    if any(row["problem"] for row in rows if row["parameter"]):
        return {"cosine": None, "loss_wrong": None, "loss_right": None}
    right = np.concatenate([m.trace.grads[name].ravel() for name in m.trace.grads])
    wrong = np.concatenate([backward.grads[name].ravel() for name in m.trace.grads])
    size = float(np.linalg.norm(right) * np.linalg.norm(wrong))
    return {
        "cosine": float(right @ wrong) / size if size else None,
        "loss_wrong": _loss_after(m, backward.grads),
        "loss_right": _loss_after(m, m.trace.grads),
    }


def _loss_after(m: StudyContext, grads: dict[str, np.ndarray]) -> float | None:
    model = copy_of(m.model)
    AdamW(model, lr=FIRST[0]).step(grads)
    loss = model.loss(m.tokens, m.targets, divisor=m.divisor)
    return loss if math.isfinite(loss) else None


@cache
def diagnosis(mistake: Mistake) -> dict[str, Any]:
    """The checker's diagnosis of a function with this mistake, on the checker's own cases."""
    layer = LAYERS[mistake.layer]
    pieces = layer.pieces.with_changes(_changes(mistake, layer.pieces))
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
