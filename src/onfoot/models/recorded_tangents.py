"""A pass with tangents (`second_order`), recorded the first time and replayed from then on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.arrays import Array
from onfoot.models.dual import Dual, DualEngine
from onfoot.models.recorded import LOSS, Entry, fill, given, recorded_params
from onfoot.models.step import Batch, forward_backward
from onfoot.recording import pool
from onfoot.recording.recorded_array import CannotRecord, RecordedArray
from onfoot.recording.recorder import Event, Recorder
from onfoot.recording.replay import Replay, if_free

if TYPE_CHECKING:
    from onfoot.models.model import Model

DOTS = "tokens"


class Results(NamedTuple):
    """What a replay computes, as `TangentPass` has it; `dots` has one number per row of the loss."""

    loss: float
    dots: np.ndarray
    grads: dict[str, Array]
    hvp: dict[str, Array]


def recorded_tangents(
    model: Model, batch: Batch, moves: Mapping[str, Array], kind: str, backward: bool, gradients: bool
) -> Results | None:
    """The pass with tangents; None if it cannot be recorded."""
    if model._steps is None:
        return None
    names, threads = tuple(sorted(moves)), pool.threads()
    policy = backward, gradients, frozenset(model.trainable), model.active_adapter, model.recompute, threads
    key = "tangents", kind, names, batch.shape, policy
    entry = model._steps.kept(key, model, lambda: _record(model, batch, names, kind, backward, gradients))
    if entry is None:
        return None
    (replay,) = entry.replays
    with if_free(model._steps.direction_lock) as free:
        return _run(model, replay, batch, moves) if free else None


def _record(model: Model, batch: Batch, names: tuple[str, ...], kind: str, backward: bool, gradients: bool) -> Entry:
    recorder, engine = Recorder(pool.threads()), DualEngine(model.engine, kind, gradients)

    def on_gradient(name: str, grad: Any) -> None:
        if isinstance(grad, Dual) and gradients:
            recorder.event(f"value {name}", grad.value)
        grad = grad.tangent if isinstance(grad, Dual) else grad
        recorder.event(f"tangent {name}", grad)

    try:
        with recorder.recording():
            run = model.new_run(keep_saved=backward, dropout_seed=batch.dropout_seed, engine=engine)
            moving = {name: _direction(model, name).view(RecordedArray) for name in names}
            run.params = {name: Dual(p, moving.get(name)) for name, p in recorded_params(model.params).items()}
            run.gradients.on_gradient = on_gradient
            run.on_loss = lambda loss: recorder.event(LOSS, loss)
            forward_backward(run, model.config, *given(recorder, batch), backward)
            (dots,) = engine.token_dots
            recorder.event(DOTS, dots)
            replay = Replay(recorder.finish())
    except CannotRecord:
        return Entry.of(model, None, [])
    return Entry.of(model, [replay], [(0, len(batch.tokens))])


def _direction(model: Model, name: str) -> np.ndarray:
    assert model._steps is not None
    return model._steps.direction(name, model.params[name].shape)


def _run(model: Model, replay: Any, batch: Batch, moves: Mapping[str, Array]) -> Results:
    for name, u in moves.items():
        _direction(model, name)[...] = u
    fill(replay, model, batch, batch, 0)
    made: dict[str, np.ndarray] = {}

    def on_result(event: Event, array: np.ndarray) -> None:
        made[event.name] = array

    replay.run(on_result, as_final=False)
    parts: dict[str, dict[str, Array]] = {"value": {}, "tangent": {}}
    for event, array in made.items():
        part, _, name = event.partition(" ")
        if name:
            parts[part][name] = array
    return Results(float(np.float32(made[LOSS][0])), made[DOTS], parts["value"], parts["tangent"])
