"""How the signal runs through the map: the norm of every row, which row feeds which, and the parts of every sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onfoot.explore.step import Step
    from onfoot.explore.tensors import Tensor, Tensors


def motion(steps: list[Step], tensors: Tensors) -> dict[str, Any]:
    """Norms and sums by array id, and edges as pairs of step ids, forward; the backward pass reverses them."""
    arrays = [tensors[id] for step in steps for id in (step.forward, step.backward) if id is not None]
    return {
        "norms": {tensor.id: finite_norm(tensor.value) for tensor in arrays if tensor.id != "a_0"},  # ids have no size
        "edges": edges(steps, tensors),
        "sums": {tensor.id: parts for tensor in arrays if (parts := sum_parts(tensor, tensors))},
    }


def finite_norm(value: np.ndarray) -> float:
    """The Frobenius norm without the −∞ of a mask."""
    return float(np.linalg.norm(value[np.isfinite(value)]))


def edges(steps: list[Step], tensors: Tensors) -> list[tuple[str, str]]:
    """(from, to) for every step that reads the activation of another; the last row of a head feeds its attention."""
    out = [(source, step.id) for i, step in enumerate(steps) for source in _sources(i, steps, tensors)]
    attention = ""
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.head is None:
            attention = step.id
        elif after is None or after.head != step.head or after.block != step.block:
            out.append((step.id, attention))
    return out


def _sources(i: int, steps: list[Step], tensors: Tensors) -> list[str]:
    """The steps whose activation the step reads, found by following the terms of its own."""
    step = steps[i]
    before = {other.forward: other.id for other in reversed(steps[:i]) if other.head is None}
    before |= {other.forward: other.id for other in steps[:i] if (other.block, other.head) == (step.block, step.head)}
    if step.forward in before:  # a head shows its block's activation again
        return [before[step.forward]]
    found: dict[str, None] = {}
    is_open = not tensors[step.forward].terms  # whether something that is not a parameter has no terms
    waiting = [step.forward]
    seen = set(waiting)
    while waiting:
        for term in tensors[waiting.pop()].terms:
            for id in (factor.tensor for factor in term.factors):
                if id in before:
                    found[before[id]] = None
                elif id not in seen:
                    seen.add(id)
                    waiting.append(id)
                    is_open = is_open or (not tensors[id].terms and tensors[id].parameter is None)
    order = [other.id for other in steps]
    if not found and is_open and i:
        found[steps[i - 1].id] = None
    return sorted(found, key=order.index)


def sum_parts(tensor: Tensor, tensors: Tensors) -> list[dict[str, Any]]:
    """The parts of an array that is a sum of others, as {"label", "norm"}; the rest, through a branch, has no label."""
    alone = [term for term in tensor.terms if len(term.factors) == 1 and not term.over]
    alone = [term for term in alone if tensors[term.factors[0].tensor].parameter is None]
    if not alone or len(tensor.terms) < 2 or any(term.sign < 0 for term in alone):
        return []
    values = [tensors.value(term.factors[0].tensor) for term in alone]
    parts: list[dict[str, Any]] = [
        {"label": term.label, "norm": finite_norm(value)} for term, value in zip(alone, values, strict=True)
    ]
    if len(alone) < len(tensor.terms):
        parts.append({"label": "", "norm": finite_norm(tensor.value - sum(values))})
    return parts
