"""How the signal runs through the map: the norm of every row, which row feeds which, and the parts of every sum."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onfoot.explore.tensors import finite_norm

if TYPE_CHECKING:
    from onfoot.explore.step import Step
    from onfoot.explore.tensors import Tensor, Tensors


def motion(steps: list[Step], tensors: Tensors) -> dict[str, Any]:
    """Norms and sums by array id, and edges as pairs of step ids, forward; the backward pass reverses them."""
    shown = [tensors[id] for step in steps for id in (step.forward, step.backward) if id is not None]
    arrays = [one for one in shown if one.id != "a_0" and not getattr(one, "transient", False)]  # ids have no size
    return {
        "norms": {tensor.id: tensor.norm for tensor in arrays},
        "edges": edges(steps, tensors),
        "sums": {tensor.id: parts for tensor in arrays if (parts := sum_parts(tensor, tensors))},
    }


def edges(steps: list[Step], tensors: Tensors) -> list[tuple[str, str]]:
    """(from, to) for every step that reads the activation of another; the last row of a head feeds its attention."""
    out: list[tuple[str, str]] = []
    shown: dict[tuple[int | None, int | None], dict[str, str]] = {}  # block and head -> activation -> its step
    trunk: dict[str, str] = {}  # the same for the rows outside heads
    attention, before = "", ""
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        own = shown.setdefault((step.block, step.head), {})
        out += [(source, step.id) for source in _sources(step, ChainMap(own, trunk), tensors, before)]
        own[step.forward] = before = step.id
        if step.head is None:
            trunk.setdefault(step.forward, step.id)
            attention = step.id
        elif after is None or (after.block, after.head) != (step.block, step.head):
            out.append((step.id, attention))
    return out


def _sources(step: Step, known: Mapping[str, str], tensors: Tensors, before: str) -> list[str]:
    """The steps whose activation the step reads, found by following the terms of its own; else the step before."""
    if step.forward in known:  # a head shows its block's activation again
        return [known[step.forward]]
    found: dict[str, None] = {}
    has_other = not tensors[step.forward].terms  # whether it is made of something unnamed that is not a parameter
    waiting = [step.forward]
    seen = set(waiting)
    while waiting:
        for term in tensors[waiting.pop()].terms:
            for id in (factor.tensor for factor in term.factors):
                if id in known:
                    found[known[id]] = None
                elif id not in seen:
                    seen.add(id)
                    waiting.append(id)
                    has_other = has_other or (not tensors[id].terms and tensors[id].parameter is None)
    if not found and has_other and before:
        return [before]
    return list(found)


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
