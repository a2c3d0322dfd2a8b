"""The study of a model after some training steps, so that every view can show it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onfoot.explore.jobs import held
from onfoot.explore.live import whole
from onfoot.explore.study import Study

if TYPE_CHECKING:
    from onfoot.explore.server import Explorer

RUN = "run"  # in place of learning rates: the checkpoints of the run


def live_answer(study: Study, query: Mapping[str, str]) -> dict[str, Any]:
    """A part of the training, for `rates` such as 0:0.001,50:0.01, or "run" for the checkpoints of a run."""
    step, known = whole(query, "step"), max(whole(query, "known"), 0)
    if query["rates"] == RUN:
        return study.checkpoints.answer(step, known)
    return {**study.live.answer(query["rates"], step, known), "run": study.run_steps}


def trained_study(study: Study, rates: str, step: int) -> Study:
    """The study of the same text on the model after `step` training steps; `document["trained"]` says which."""
    if rates == RUN:
        model = study.checkpoints.model_at(step)
        label = study.checkpoints.steps()[step]
    else:
        model, label = study.live.model_at(rates, step), step
    trained = Study(model, study.tokens, study.own_engine)
    trained.key = f"{study.key}-{hashlib.sha256(f'{rates} {step}'.encode()).hexdigest()[:12]}"
    trained.document["trained"] = {"base": study.key, "rates": rates, "step": step, "label": label}
    return trained


def trained_answer(explorer: Explorer, body: dict[str, Any]) -> dict[str, Any]:
    """The response to {"text": …, "trained": "80@0:0.001"}: the text's study after 80 steps at that learning rate."""
    trained = body["trained"]
    found = re.fullmatch(r"(\d{1,6})@(.{1,2000})", trained if isinstance(trained, str) else "")
    if found is None:
        raise ValueError('trained must be like "80@0:0.001": a step, and the learning rates up to it')
    study = explorer.study({key: value for key, value in body.items() if key != "trained"})
    with held(explorer.live_lock):
        shown = trained_study(study, found[2], int(found[1]))
    with held(explorer.study_lock):
        explorer.keep(shown)
        return {"document": shown.document, "arrays": shown.first_arrays()}


def what_if_answer(study: Study, query: Mapping[str, str]) -> dict[str, Any]:
    """The choices of the What if view, or with a `kind` the effect of one change."""
    if "block" in query:
        return study.knockouts(whole(query, "block"))
    if "kind" not in query:
        return study.what_if_choices
    try:
        change = float(query["change"])
    except ValueError:
        raise ValueError(f"the change must be a number, got {query['change'][:40]!r}") from None
    return study.what_if(query["kind"], query["name"], whole(query, "row"), whole(query, "column"), change)


def exercise_answer(study: Study, query: Mapping[str, str]) -> dict[str, Any]:
    return study.exercise(query["kind"], whole(query, "number"))
