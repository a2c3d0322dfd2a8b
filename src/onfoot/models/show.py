"""Models and traces as short texts and, in notebooks, as small tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.config import Config, GPT2Config
from onfoot.models.params import count, shapes
from onfoot.models.trace_names import ASCII
from onfoot.terminal import html_table

if TYPE_CHECKING:
    from onfoot.models.model import Model
    from onfoot.models.trace import Trace


def model_facts(model: Model) -> dict[str, str]:
    """What a model is, by name."""
    config = model.config
    facts = {
        "family": "GPT-2"
        if isinstance(config, GPT2Config)
        else config.to_dict().get("model_type", type(config).__name__),
        "parameters": f"{count(shapes(config)):,}",
        "blocks": f"{config.n_layer} of width {config.n_embd}, {heads_text(config)}",
        "vocabulary": f"{config.vocab_size:,}, up to {config.n_positions:,} positions",
        "numbers": f"{model.dtype}, engine {model.engine.name}",
    }
    if model.quantized:
        facts["quantized or 16-bit"] = f"{len(model.quantized)} of {len(model.params)} tensors"
    if model.active_adapter is not None:
        facts["adapter"] = model.active_adapter
    if model.source is not None:
        facts["loaded from"] = model.source
    return facts


def heads_text(config: Config) -> str:
    """The number of heads, and of a LLaMA's key/value heads, which several query heads may share."""
    shared = (
        "" if isinstance(config, GPT2Config) else f", {getattr(config, 'n_kv_head', config.n_head)} key/value heads"
    )
    return f"{config.n_head} heads{shared}"


def model_text(model: Model) -> str:
    facts, config = model_facts(model), model.config
    rest = ", ".join(f"{name} {value}" for name, value in list(facts.items())[5:])
    return (
        f"Model({facts['family']}, {facts['parameters']} parameters, {config.n_layer} blocks of width {config.n_embd}, "
        f"{heads_text(config)}, vocabulary {config.vocab_size:,}, {facts['numbers']}{', ' + rest if rest else ''})"
    )


def model_html(model: Model) -> str:
    return html_table([[name, value] for name, value in model_facts(model).items()])


def trace_text(trace: Trace) -> str:
    """What a trace has, and how to ask for it."""
    network, in_block, in_head = trace.names()
    batch, tokens = trace.a[0].shape
    return "\n".join(
        [
            f"Trace of {batch} × {tokens} tokens through {len(trace.blocks)} blocks: loss {trace.loss:.6g}",
            f"  network  {' '.join(network)}",
            f"  block    {' '.join(in_block)}",
            f"  head     {' '.join(in_head)}",
            '  trace["Δ_12"], trace["Δ_5", 0] of the first block, trace["ρ", 0, 1] of its second head; trace.grads',
            f"  in ASCII: {ASCII}",
        ]
    )


def trace_html(trace: Trace) -> str:
    """The activations of the network with the norms of their gradients."""
    heading = f"Loss {trace.loss:.6g}; the norm of each activation and of its gradient"
    cells = [["", "activation", "shape", "norm", "gradient", "norm"]]
    deltas = {(name.removeprefix("Δ_"), b): value for name, b, value in trace.items() if name.startswith("Δ_")}
    for name, b, value in trace.items():
        if not name.startswith("a_") or name == "a_0":
            continue
        index = name.removeprefix("a_")
        delta = deltas.get((index, b))
        cells.append(
            [
                "" if b is None else f"block {b}",
                name,
                " × ".join(map(str, value.shape)),
                _norm(value),
                "" if delta is None else f"Δ_{index}",
                "" if delta is None else _norm(delta),
            ]
        )
    return f"<p>{escape(heading)}</p>{html_table(cells)}"


def _norm(x: object) -> str:
    return f"{float(np.linalg.norm(to_numpy(x))):.3g}"
