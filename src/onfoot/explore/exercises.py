"""Exercises: predict the sign of a change of the loss, and find a mistake that is hidden in the backward pass.

Exercise n is a function of the text and of n, so that a link reopens it and an exported page can have the first ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from onfoot.check.layer import Mistake
from onfoot.explore.jobs import progress
from onfoot.explore.mistake_formulas import violated
from onfoot.explore.mistakes import LAYER_NAMES, NEXT_LAYER, backward_of, possible, rows_of
from onfoot.explore.study_context import StudyContext
from onfoot.explore.tensors import Tensor
from onfoot.explore.whatif import change_of
from onfoot.models.params import names_of

KINDS = ("sign", "mistake")
MAX_NUMBER = 999
EXPORTED = 6  # exercises of each kind in an exported page
TRIES = 200
CLEAR = 1e-6  # a smaller change of the loss is not asked for
HINTS = 3
CHANGES = {"logit": 0.5, "weight": 0.05, "score": 0.2}
IN_BLOCKS = (  # planted in one block
    "attention", "multi_head", "layer_norm", "gelu", "linear", "block",
    "rms_norm", "rope", "rope_attention", "grouped_query_attention", "swiglu",
)  # fmt: skip


def exercise(m: StudyContext, kind: str, number: int) -> dict[str, Any]:
    if kind not in KINDS:
        raise ValueError(f"kind must be sign or mistake, got {kind!r}")
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"number must be between 0 and {MAX_NUMBER}, got {number}")
    text = int.from_bytes(hashlib.sha256(m.tokens.tobytes()).digest()[:4], "big")
    rng = np.random.default_rng((text, KINDS.index(kind), number))
    found = _sign(m, rng, number) if kind == "sign" else _mistake(m, rng)
    return {"kind": kind, "number": number, **found}


def _sign(m: StudyContext, rng: np.random.Generator, number: int) -> dict[str, Any]:
    """Does the loss rise or fall if this value grows? Only where the promise and the truth agree, and are not 0."""
    what = list(CHANGES)[number % len(CHANGES)]
    for _ in range(TRIES):
        kind, name, row, column, hints = {"logit": _logit, "weight": _weight, "score": _score}[what](m, rng)
        value, gradient, loss_after = change_of(m, kind, name, row, column)
        change = CHANGES[what]
        if abs(gradient * change) < CLEAR:
            continue
        true = loss_after(change) - m.trace.loss
        if abs(true) < CLEAR or (true > 0) != (gradient > 0):
            continue
        return {
            "what": what,
            "target": {"kind": kind, "name": name, "row": row, "column": column},
            "value": value,
            "change": change,
            "hints": hints,
            "answer": {"gradient": gradient, "promised": gradient * change, "true": true},
        }
    raise ValueError("no value was found whose change has a clear sign; run another text")


Question = tuple[str, str, int, int, list[dict[str, Any]]]


def _logit(m: StudyContext, rng: np.random.Generator) -> Question:
    """A logit of a token with a target: the target's, or that of a likely other token."""
    t = int(rng.choice(np.flatnonzero(m.targets[0] >= 0)))
    target, row = int(m.targets[0, t]), np.asarray(m.trace.a["pred"])[0, t]
    likely = [int(v) for v in np.argsort(-row)[:4] if v != target]
    v = target if rng.random() < 0.4 else int(rng.choice(likely))
    hint = {"token": t, "target": target, "chosen": v, "probability": float(row[v])}
    shown = m.tensors["a_12"].columns  # of a large vocabulary, only some
    return "activation", "a_12", t, v if shown is None else int(np.searchsorted(shown, v)), [hint]


def _weight(m: StudyContext, rng: np.random.Generator) -> Question:
    """A weight of a linear layer, with the largest terms a ∘ Δ of its gradient."""
    tensors = _linear_gradients(m)
    tensor = tensors[int(rng.integers(len(tensors)))]
    row, column = (int(rng.integers(n)) for n in tensor.shape)
    # aᵗ Δ, or Δᵗ a where a weight is stored transposed
    factors = sorted(tensor.terms[0].factors, key=lambda factor: m.tensors[factor.tensor].is_gradient)
    a, delta = (m.tensors.value(f.tensor)[:, row if f.at == "jr" else column] for f in factors)  # (T,) both
    largest = np.argsort(-abs(a * delta))[:HINTS]
    hints = [{"token": int(t), "a": float(a[t]), "delta": float(delta[t])} for t in largest]
    assert tensor.parameter is not None
    at = (column, row) if names_of(m.config).OUT_IN else (row, column)  # in the file's order
    return "weight", tensor.parameter, *at, hints


def _linear_gradients(m: StudyContext) -> list[Tensor]:
    """The gradients of whole weight matrices that are one product aᵗ Δ."""
    turned = names_of(m.config).OUT_IN  # the file has (out, in), the formulas (in, out)
    return [
        tensor
        for tensor in m.tensors
        if tensor.is_gradient
        and tensor.parameter is not None
        and tensor.shape == m.params[tensor.parameter].shape[:: -1 if turned else 1]
        and [[factor.at for factor in term.factors] for term in tensor.terms] == [["jr", "jc"]]
    ]


def _score(m: StudyContext, rng: np.random.Generator) -> Question:
    """A score, with the gradient of its weight and the mean of these over the row, whose difference has its sign."""
    b, h = int(rng.integers(m.config.n_layer)), int(rng.integers(m.config.n_head))
    row = int(rng.integers(1, m.tokens.shape[1])) if m.tokens.shape[1] > 1 else 0
    column = int(rng.integers(row + 1 if m.config.causal else m.tokens.shape[1]))
    rho, drho = m.trace.blocks[b].rho[0, h], m.tensors.value(f"{b}.{h}.∂ρ")
    mean = float((rho[row] * drho[row]).sum())
    hint = {"rho": float(rho[row, column]), "drho": float(drho[row, column]), "mean": mean}
    return "score", f"{b}.{h}", row, column, [hint]


def _mistake(m: StudyContext, rng: np.random.Generator) -> dict[str, Any]:
    """A mistake from the catalogue, planted in one place: the rows in backward order, of which the first wrong one."""
    catalogue = possible(m)
    for index in rng.permutation(len(catalogue)):
        mistake = catalogue[int(index)]
        block = int(rng.integers(m.config.n_layer)) if mistake.layer in IN_BLOCKS else None
        rows = _planted_rows(m, mistake, block)
        if any(row["wrong"] for row in rows):
            return {
                "rows": rows,
                "answer": next(i for i, row in enumerate(rows) if row["wrong"]),
                "block": block,
                "name": mistake.name,
                "layer": LAYER_NAMES[mistake.layer],
                "explains": mistake.explains,
                "fix": mistake.fix,
                **violated(mistake.equation),
            }
    raise ValueError("no mistake shows in the gradients of this text; run a longer one")


def _planted_rows(m: StudyContext, mistake: Mistake, block: int | None) -> list[dict[str, Any]]:
    """Every gradient with its norm and its error; empty if the mistake raises an error or its shapes do not fit."""
    rows: list[dict[str, Any]] = []
    try:
        backward = backward_of(m, mistake, block)
        for row, value, _ in rows_of(m, backward, NEXT_LAYER[m.family]):
            progress("comparing the gradients", len(rows), len(backward.signals) + len(backward.grads))
            if row["problem"]:
                return []
            rows.append({**row, "norm": float(np.linalg.norm(value))})
    except (ValueError, IndexError):
        return []
    return rows
