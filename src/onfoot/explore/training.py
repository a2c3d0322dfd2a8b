"""The Training view: how the error signal splits at skip connections, and which loss each gradient comes from."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.attribution import attribute
from onfoot.explore.study_context import StudyContext
from onfoot.explore.swaps import tried_swaps
from onfoot.explore.tensors import TOKEN
from onfoot.ops.cross_entropy import IGNORE
from onfoot.tables import Formula

SWAPS = 8


def share(part: np.ndarray, total: np.ndarray) -> float:
    """The share of a part in `total`: its projection onto it. The shares of all parts add up to 1."""
    square = float((total * total).sum())
    return float((part * total).sum()) / square if square else 0.0


def forks(m: StudyContext) -> list[dict[str, Any]]:
    """Both forks of every block, last block first: the error signal through the skip and through the branch."""
    out = []
    for b in reversed(range(m.config.n_layer)):
        d = {i: value[0] for i, value in m.trace.blocks[b].delta.items()}
        for at, skip, total, branch in ((5, d[10], d[5], "MLP"), (1, d[5], d[1], "attention")):
            through = total - skip
            out.append(
                {
                    "block": b,
                    "at": f"Δ_{at}",
                    "branch": branch,
                    "skip_share": share(skip, total),
                    "branch_share": share(through, total),
                    "skip_norm": float(np.linalg.norm(skip)),
                    "branch_norm": float(np.linalg.norm(through)),
                    "norm": float(np.linalg.norm(total)),
                }
            )
    return out


def tied(m: StudyContext) -> dict[str, Any] | None:
    """The two parts of a tied token table's gradient, as embedding and as logits; None if it is not tied."""
    if not m.config.tie_word_embeddings:
        return None
    parts = {name: m.tensors.value(f"∂w_tok, as {name}") for name in ("embedding", "logits")}
    total = m.tensors.value("∂w_tok")
    norms = {name: float(np.linalg.norm(value)) for name, value in parts.items()}
    dot = float((parts["embedding"] * parts["logits"]).sum())
    return {
        "shares": {name: share(value, total) for name, value in parts.items()},
        "norms": {**norms, "sum": float(np.linalg.norm(total))},
        "cosine": dot / (norms["embedding"] * norms["logits"]) if all(norms.values()) else 0.0,
        "rows_embedding": int((np.abs(parts["embedding"]).sum(axis=1) > 0).sum()),
        "rows_logits": int((np.abs(parts["logits"]).sum(axis=1) > 0).sum()),
    }


def signal_norms(m: StudyContext) -> str:
    """Adds an array of ‖Δ_i‖ of every token at every depth; returns its id."""
    rows = [("Δ_12", m.trace.delta[12][0]), ("Δ_11", m.trace.delta[11][0])]
    for b in reversed(range(m.config.n_layer)):
        block = m.trace.blocks[b].delta
        rows += [(f"block {b + 1} Δ_{i}", block[i][0]) for i in m.signals]
    rows.append(("Δ_1", m.trace.blocks[0].delta[1][0]))
    value = np.stack([np.linalg.norm(x, axis=-1) for _, x in rows])  # (depth, T)
    id = m.add("‖Δ‖", "‖Δ‖", value, ("depth", TOKEN), formula=Formula("‖Δ‖, of each token at each depth"))
    m.tensors[id].row_labels = [_with_subscripts(label) for label, _ in rows]
    return id


def _with_subscripts(label: str) -> str:
    """Δ_10 as Δ₁₀, for plain-text labels."""
    stem, line, digits = label.partition("_")
    if not digits.isdecimal():
        return stem + line + digits
    return stem + digits.translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def parameter_norms(m: StudyContext) -> list[dict[str, Any]]:
    """For every parameter the norms of its gradient and of its weight, and their ratio."""
    out = []
    for name, grad in m.trace.grads.items():
        grad_norm, weight_norm = float(np.linalg.norm(grad)), float(np.linalg.norm(m.params[name]))
        out.append(
            {
                "name": name,
                "gradient": grad_norm,
                "weight": weight_norm,
                "ratio": grad_norm / weight_norm if weight_norm else None,
            }
        )
    order = list(m.params)
    return sorted(out, key=lambda row: order.index(row["name"]))


def drivers(m: StudyContext) -> str:
    """Adds the share that each token's loss has in each parameter's gradient; returns the id of the array.

    The loss is a sum over targets, and so is every gradient: one backward pass per target gives its part.
    """
    names, targets = [row["name"] for row in parameter_norms(m)], m.targets[0]
    shares = np.zeros((len(names), len(targets)))
    for t in np.flatnonzero(targets != IGNORE):
        only = np.full_like(m.targets, IGNORE)
        only[0, t] = targets[t]
        _, grads = m.model.loss_and_grads(m.tokens, only, divisor=m.divisor)
        shares[:, t] = [share(grads[name], m.trace.grads[name]) for name in names]
    id = m.add("drivers", "share", shares, ("parameter", TOKEN), formula=Formula("share = ∂_t · ∂ / ∂ · ∂"))
    m.tensors[id].row_labels = [name.removeprefix("transformer.").removeprefix("model.") for name in names]
    return id


def attribution(m: StudyContext) -> dict[str, Any]:
    """Gradient × input of each token, and the swaps that lower the loss most."""
    result = attribute(m.model, m.tokens[0], m.targets[0], n_swaps=0)
    tried = tried_swaps(m)
    lower = sorted((swap for swap in tried if swap.actual < 0), key=lambda swap: swap.actual)
    return {
        "contributions": result.contributions.tolist(),
        "swaps": [vars(swap) for swap in lower[:SWAPS]],
        "tried": len(tried),
        "lower": len(lower),
    }


def explain_training(m: StudyContext) -> dict[str, Any]:
    """Everything that the Training view shows."""
    for id in ("‖Δ‖", "drivers"):
        if id in m.tensors:
            raise ValueError("explain_training was already called for this study; use Study.training, which caches it")
    return {
        "forks": forks(m),
        "tied": tied(m),
        "signal_norms": signal_norms(m),
        "parameter_norms": parameter_norms(m),
        "drivers": drivers(m),
        "attribution": attribution(m),
    }
