"""What explains training: where the error signal goes, and whose loss a gradient comes from."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.attribution import attribute
from onfoot.explore.study_context import StudyContext
from onfoot.explore.tensors import TOKEN
from onfoot.ops.cross_entropy import IGNORE
from onfoot.tables import Formula

SWAPS = 8


def share(part: np.ndarray, whole: np.ndarray) -> float:
    """How much of `whole` a part makes up: its projection on it. The shares of all parts add up to 1."""
    square = float((whole * whole).sum())
    return float((part * whole).sum()) / square if square else 0.0


def forks(m: StudyContext) -> list[dict[str, Any]]:
    """Both forks of every block, from the top down: the signal through the skip and through the branch."""
    out = []
    for b in reversed(range(m.config.n_layer)):
        d = {i: value[0] for i, value in m.trace.blocks[b].delta.items()}
        for at, skip, whole, branch in ((5, d[10], d[5], "expand and contract"), (1, d[5], d[1], "attention")):
            through = whole - skip
            out.append(
                {
                    "block": b,
                    "at": f"Δ_{at}",
                    "branch": branch,
                    "skip_share": share(skip, whole),
                    "branch_share": share(through, whole),
                    "skip_norm": float(np.linalg.norm(skip)),
                    "branch_norm": float(np.linalg.norm(through)),
                    "norm": float(np.linalg.norm(whole)),
                }
            )
    return out


def tied(m: StudyContext) -> dict[str, Any] | None:
    """The two uses of a tied token table, and what each adds to its gradient."""
    if not m.config.tie_word_embeddings:
        return None
    parts = {name: m.tensors.value(f"∂w_tok, as {name}") for name in ("embedding", "logits")}
    whole = m.tensors.value("∂w_tok")
    norms = {name: float(np.linalg.norm(value)) for name, value in parts.items()}
    dot = float((parts["embedding"] * parts["logits"]).sum())
    return {
        "shares": {name: share(value, whole) for name, value in parts.items()},
        "norms": {**norms, "sum": float(np.linalg.norm(whole))},
        "cosine": dot / (norms["embedding"] * norms["logits"]) if all(norms.values()) else 0.0,
        "rows_embedding": int((np.abs(parts["embedding"]).sum(axis=1) > 0).sum()),
        "rows_logits": int((np.abs(parts["logits"]).sum(axis=1) > 0).sum()),
    }


def signal_norms(m: StudyContext) -> str:
    """Adds ‖Δ_i‖ of every token at every depth as an array; returns its id."""
    rows = [("Δ_12", m.trace.delta[12][0]), ("Δ_11", m.trace.delta[11][0])]
    for b in reversed(range(m.config.n_layer)):
        block = m.trace.blocks[b].delta
        rows += [(f"block {b + 1} Δ_{i}", block[i][0]) for i in (10, 8, 7, 6, 5, 3, 2)]
    rows.append(("Δ_1", m.trace.blocks[0].delta[1][0]))
    value = np.stack([np.linalg.norm(x, axis=-1) for _, x in rows])  # (depth, T)
    id = m.add("‖Δ‖", "‖Δ‖", value, ("depth", TOKEN), formula=Formula("‖Δ‖, of each token at each depth"))
    m.tensors[id].row_labels = [_lowered(label) for label, _ in rows]
    return id


def _lowered(label: str) -> str:
    """Δ_10 as Δ₁₀, for labels that are plain text."""
    stem, _, digits = label.partition("_")
    return stem + digits.translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def parameter_norms(m: StudyContext) -> list[dict[str, Any]]:
    """Every tensor of the model: the norm of its gradient, and what it is against the tensor's own."""
    out = []
    for name, grad in m.trace.grads.items():
        size, own = float(np.linalg.norm(grad)), float(np.linalg.norm(m.params[name]))
        out.append({"name": name, "gradient": size, "weight": own, "ratio": size / own if own else None})
    order = list(m.params)
    return sorted(out, key=lambda row: order.index(row["name"]))


def drivers(m: StudyContext) -> str:
    """Adds, for every tensor of the model, the share of its gradient that each token's loss is behind.

    The loss is a sum over targets, and so is every gradient: one backward pass a target takes it apart.
    """
    names, targets = [row["name"] for row in parameter_norms(m)], m.targets[0]
    shares = np.zeros((len(names), len(targets)))
    for t in np.flatnonzero(targets != IGNORE):
        only = np.full_like(m.targets, IGNORE)
        only[0, t] = targets[t]
        _, grads = m.model.loss_and_grads(m.tokens, only, divisor=m.divisor)
        shares[:, t] = [share(grads[name], m.trace.grads[name]) for name in names]
    id = m.add("drivers", "share", shares, ("parameter", TOKEN), formula=Formula("share = ∂_t · ∂ / ∂ · ∂"))
    m.tensors[id].row_labels = [name.removeprefix("transformer.") for name in names]
    return id


def attribution(m: StudyContext) -> dict[str, Any]:
    """Gradient × input of each token, and the swaps that promise the lowest loss, with what they truly do."""
    result = attribute(m.model, m.tokens[0], m.targets[0], n_swaps=SWAPS)
    return {"contributions": result.contributions.tolist(), "swaps": [vars(swap) for swap in result.swaps]}


def explain_training(m: StudyContext) -> dict[str, Any]:
    """All of the above for the page."""
    for id in ("‖Δ‖", "drivers"):
        if id in m.tensors:
            raise ValueError("training was explained already: ask the study, which keeps it")
    return {
        "forks": forks(m),
        "tied": tied(m),
        "signal_norms": signal_norms(m),
        "parameter_norms": parameter_norms(m),
        "drivers": drivers(m),
        "attribution": attribution(m),
    }
