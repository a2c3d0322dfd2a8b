"""The Training view: how the error signal splits at skip connections, and which loss each gradient comes from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onfoot.explore.factors import dots, lazy_gradients, norm_of, target_parts
from onfoot.explore.jobs import progress, tracked
from onfoot.explore.study_context import StudyContext
from onfoot.explore.swaps import input_delta, tried_swaps
from onfoot.explore.tensors import TOKEN
from onfoot.ops.cross_entropy import IGNORE
from onfoot.tables import Formula

SWAPS = 8
ROWS = 128  # tokens of the copies of the text that are computed together


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
    ids, d1 = m.tokens[0], m.trace.blocks[0].delta[1][0]  # (T,), (T, d)
    d12, a11 = m.trace.delta[12][0], m.trace.a[11][0]  # (T, V), (T, d)
    rows, where = np.unique(ids, return_inverse=True)
    embedding = np.zeros((len(rows), d1.shape[1]))  # its nonzero rows
    np.add.at(embedding, where, d1)
    dot = float((embedding * (d12.T[rows] @ a11)).sum())
    squares = {"embedding": float((embedding**2).sum())}
    squares["logits"] = max(float(((a11 @ a11.T) * (d12 @ d12.T)).sum()), 0.0)  # ‖Δ_12ᵗ a_11‖², without that product
    total = squares["embedding"] + squares["logits"] + 2 * dot
    norms = {name: math.sqrt(square) for name, square in squares.items()}
    return {
        "shares": {name: (square + dot) / total if total else 0.0 for name, square in squares.items()},
        "norms": {**norms, "sum": math.sqrt(max(total, 0.0))},
        "cosine": dot / (norms["embedding"] * norms["logits"]) if all(norms.values()) else 0.0,
        "rows_embedding": int((np.abs(embedding).sum(axis=1) > 0).sum()),
        "rows_logits": int((np.abs(d12).sum(axis=0) > 0).sum()),
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
    for name in tracked([name for name in m.params if name in m.grads], "norms of the weights"):
        grad_norm, weight_norm = norm_of(m.grads, name), m.weight_norm(name)
        ratio = grad_norm / weight_norm if weight_norm else None
        out.append({"name": name, "gradient": grad_norm, "weight": weight_norm, "ratio": ratio})
    return out


def driver_shares(m: StudyContext) -> tuple[list[str], np.ndarray]:
    """The share that each token's loss has in each parameter's gradient, (parameters, T), and their names.

    The loss is a sum over targets, and so is every gradient. A batch has the text once per target, each copy with that
    target alone, and the parts are compared with the whole without forming a gradient.
    """
    names, targets = [name for name in m.params if name in m.grads], np.flatnonzero(m.targets[0] != IGNORE)
    whole = lazy_gradients(m.model, m.tokens, m.targets, m.divisor)
    squares = {name: whole.norm(name) ** 2 for name in names}
    shares = np.zeros((len(names), m.n_tokens))
    together = max(ROWS // m.n_tokens, 1)
    for i in range(0, len(targets), together):
        progress("which token’s loss drives each gradient", i, len(targets))
        chosen = targets[i : i + together]
        parts = target_parts(m.model, m.tokens, m.targets, m.divisor, chosen)
        for row, name in enumerate(names):
            if squares[name] and name in parts:
                shares[row, chosen] = dots(parts[name], whole.factors[name]) / squares[name]
    return names, shares


def drivers(m: StudyContext, names: list[str], shares: np.ndarray) -> str:
    """Adds the shares to the study; returns the id of the array."""
    id = m.add("drivers", "share", shares, ("parameter", TOKEN), formula=Formula("share = ∂_t · ∂ / ∂ · ∂"))
    m.tensors[id].row_labels = [name.removeprefix("transformer.").removeprefix("model.") for name in names]
    return id


def attribution(m: StudyContext) -> dict[str, Any]:
    """Gradient × input of each token, and the swaps that lower the loss most."""
    contributions = np.take_along_axis(input_delta(m), m.tokens[0][:, None], axis=1)[:, 0]  # (T,)
    tried = tried_swaps(m)
    lower = sorted((swap for swap in tried if swap.actual < 0), key=lambda swap: swap.actual)
    return {
        "contributions": contributions.tolist(),
        "swaps": [vars(swap) for swap in lower[:SWAPS]],
        "tried": len(tried),
        "lower": len(lower),
    }


def explain_training(m: StudyContext) -> dict[str, Any]:
    """Everything that the Training view shows. What takes a while comes first: if it is stopped, nothing was added."""
    if "drivers" in m.tensors:
        raise ValueError("explain_training was already called for this study; use Study.training, which caches it")
    norms = parameter_norms(m)
    attributed = attribution(m)
    shares = driver_shares(m)
    return {
        "forks": forks(m),
        "tied": tied(m),
        "signal_norms": signal_norms(m),
        "parameter_norms": norms,
        "drivers": drivers(m, *shares),
        "attribution": attributed,
    }
