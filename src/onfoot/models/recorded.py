"""Steps of a model that are recorded the first time and replayed from then on (`onfoot.recording`).

A recording is for one shape (sequences × tokens, rows with a target) and one policy: what trains, the adapter,
recomputation, dropout, packing, the number of threads. It holds the addresses of the parameters, so new arrays in
`model.params` need a new recording. A step that cannot be recorded runs without one.

For a small model, each thread replays a step on its own sequences without waiting for others, and the gradients are
summed at the end. For a large one, all threads share every call.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.arrays import Array
from onfoot.kernels import LOGITS
from onfoot.models.families import network
from onfoot.models.inputs import check_tokens
from onfoot.models.layout import Layout, Targets, in_window
from onfoot.models.run import Dropped, Run
from onfoot.models.step import Batch, checked_batch, forward_backward
from onfoot.recording import pool
from onfoot.recording.recorded_array import CannotRecord, RecordedArray
from onfoot.recording.recorder import INPUT, RESULT, Event, Recorder, Recording
from onfoot.recording.replay import Replay, if_free, result_layout, results_at_peak, run_per_thread

if TYPE_CHECKING:
    from onfoot.models.model import Model

KEPT = 16  # recordings kept per model
SMALL = 1 << 20  # elements of the largest parameter: up to this, each thread replays its own step
PARTS = 1 << 24  # elements of all threads' gradients together: up to this, each thread replays its own step
LOSS = "loss"


class Entry(NamedTuple):
    """A recording, and the state of the model that it was made from."""

    replays: list[Replay] | None  # one, or one per thread; None: cannot be recorded
    shares: list[tuple[int, int]]  # the sequences of each: (begin, end)
    engine: Any
    config: Any
    adapter: Any
    params: list[Any]
    shapes: list[Any]  # of the parameters: NumPy allows changing the shape of an array in place
    sizes: list[int]  # of the parameters, in bytes
    lock: Any

    @classmethod
    def of(cls, model: Model, replays: list[Replay] | None, shares: list[tuple[int, int]]) -> Entry:
        """An entry for the current state of the model."""
        params = list(model.params.values())
        shapes = [p.shape for p in params]
        what = model.engine, model.config, _adapter(model)
        return cls(replays, shares, *what, params, shapes, [p.nbytes for p in params], threading.Lock())

    def is_current(self, model: Model) -> bool:
        """Whether the model has not changed since the recording."""
        same = self.engine is model.engine and self.config is model.config and self.adapter == _adapter(model)
        return same and self.holds_arrays_of(model)

    def holds_arrays_of(self, model: Model) -> bool:
        """Whether the model's parameters are still the recorded arrays."""
        params = model.params
        same = len(params) == len(self.params) and all(map(operator.is_, params.values(), self.params))
        return same and [p.nbytes for p in self.params] == self.sizes

    def keeps_shapes(self) -> bool:
        """Whether the parameters still have the recorded shapes; if not, recording again raises the error."""
        return [p.shape for p in self.params] == self.shapes


def _adapter(model: Model) -> Any:
    if model.active_adapter is None:
        return None
    return model.active_adapter, tuple(model.adapters[model.active_adapter].layers.items())


class Steps:
    """The recordings of one model. A copy of the model starts with none: its parameters have other addresses."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Entry] = OrderedDict()
        self._directions: dict[Any, np.ndarray] = {}
        self.direction_lock = threading.Lock()  # held while a pass with tangents is replayed

    def __deepcopy__(self, memo: Any) -> Steps:
        return Steps()

    def __reduce__(self) -> Any:
        return Steps, ()

    def clear(self) -> None:
        """Forgets all recordings: they keep the arrays that they read."""
        self._kept.clear()
        self._directions.clear()

    def direction(self, name: str, shape: Any) -> np.ndarray:
        """Where the direction of a parameter lies, the same array for all recordings of passes with tangents."""
        return self._directions.setdefault((name, tuple(shape)), np.empty(shape, np.float32))

    def __len__(self) -> int:
        return sum(entry.replays is not None for entry in self._kept.values())

    def gradients(
        self,
        model: Model,
        batch: Batch,
        on_gradient: Callable[[str, Array], None] | None,
        on_loss: Callable[[float], None] | None,
    ) -> tuple[float, dict[str, Array]] | None:
        """The loss and the gradients; None if the step cannot be recorded."""
        entry = self._entry(model, batch, backward=True)
        return None if entry is None else _gradients(model, entry, batch, on_gradient, on_loss)

    def loss(self, model: Model, batch: Batch) -> float | None:
        """The loss; None if the step cannot be recorded."""
        entry = self._entry(model, batch, backward=False)
        return None if entry is None else _gradients(model, entry, batch, None, None)[0]

    def _entry(self, model: Model, batch: Batch, backward: bool) -> Entry | None:
        threads = pool.threads()
        shares = _shares(model, batch, threads, backward)
        trains = frozenset(model.trainable) if backward else None
        key: Any = (batch.shape, backward, trains, model.active_adapter, model.recompute, threads)
        if len(shares) > 1:
            key = (*key, *(part.shape for part in parts_of(batch, shares)))
        return self.kept(key, model, lambda: self._record(model, batch, shares, threads, backward))

    def kept(self, key: Any, model: Model, make: Callable[[], Entry]) -> Entry | None:
        """The entry of a key, which is made first if there is none or the model has changed; None: not recorded."""
        entry = self._kept.get(key)
        if entry is None or not (entry.is_current(model) and entry.keeps_shapes()):
            for old in [k for k, e in list(self._kept.items()) if not (e.holds_arrays_of(model) and e.keeps_shapes())]:
                self._kept.pop(old, None)  # it would keep arrays alive that are no longer the model's
            entry = make()
            self._kept[key] = entry
        with contextlib.suppress(KeyError):  # another Python thread may have removed it
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return entry if entry.replays is not None else None

    def _record(self, model: Model, batch: Batch, shares: list[tuple[int, int]], threads: int, backward: bool) -> Entry:
        replays: list[Replay] | None
        try:
            made = recordings(model, batch, shares, threads, backward)
            shares = shares if len(made) > 1 else [(0, len(batch.tokens))]
            replays = [Replay(recording) for recording in made]
        except CannotRecord:
            replays = None
        return Entry.of(model, replays, shares)


def _shares(model: Model, batch: Batch, threads: int, backward: bool) -> list[tuple[int, int]]:
    """The sequences (begin, end) of each thread; one share with all of them if threads share every call."""
    n, tokens = batch.tokens.shape
    whole = [(0, n)]
    if threads == 1 or n < threads or not backward:
        return whole
    most = -(-n // threads)  # sequences of one thread: the others should not wait long for it
    sizes = {name: math.prod(p.shape) for name, p in model.params.items()}
    if 10 * n < 9 * most * threads or threads * sum(sizes[name] for name in model.trainable) > PARTS:
        return whole
    if max(sizes.values()) > SMALL:
        return whole
    if n * tokens * model.config.vocab_size > LOGITS:
        return whole
    return [(n * i // threads, n * (i + 1) // threads) for i in range(threads)]


def recorded_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as recorded arrays at their own addresses; quantized ones are constants and stay as they are."""
    return {name: p.view(RecordedArray) if type(p) is np.ndarray else p for name, p in params.items()}


def record(model: Model, batch: Batch, threads: int, backward: bool) -> Recording:
    """Records the calls of one step of this shape; nothing is computed."""
    recorder = Recorder(threads)
    with recorder.recording():
        run = model.new_run(keep_saved=backward, dropout_seed=batch.dropout_seed)
        run.params = recorded_params(model.params)
        run.gradients.on_gradient = recorder.event
        run.on_loss = lambda loss: recorder.event(LOSS, loss)
        forward_backward(run, model.config, *given(recorder, batch), backward)
        return recorder.finish()


def given(recorder: Recorder, batch: Batch) -> tuple[Any, Targets, Layout, Any]:
    """The batch as inputs of a recording, which `fill` fills in: tokens, targets, layout and divisor."""
    targets, layout = batch.targets, batch.layout

    def given_array(x: np.ndarray | None, key: str) -> Any:
        return None if x is None else recorder.input(x.shape, x.dtype, key)

    tokens = given_array(batch.tokens, "tokens")
    recorded_layout = layout.map(lambda name, x: recorder.input(x.shape, x.dtype, name))
    wanted = Targets(
        given_array(targets.ids, "targets"),
        given_array(targets.rows, "rows"),
        given_array(targets.chosen, "chosen"),
    )
    return tokens, wanted, recorded_layout, recorder.input((1,), np.float64, "divisor")


def recordings(
    model: Model, batch: Batch, shares: list[tuple[int, int]], threads: int, backward: bool
) -> list[Recording]:
    """One recording per share; a single one for all if the shares' gradients would differ in layout."""
    if len(shares) == 1:
        return [record(model, batch, threads, backward)]
    made: dict[Any, Recording] = {}
    out = []
    for part in parts_of(batch, shares):
        if part.shape not in made:
            made[part.shape] = record(model, part, 1, backward)
        out.append(made[part.shape])
    if len({result_layout(one) for one in made.values()}) > 1:
        return [record(model, batch, threads, backward)]
    return out


def parts_of(batch: Batch, shares: list[tuple[int, int]]) -> list[Batch]:
    """The batch of each share; all work on the same number of rows that have a target, so that few shapes occur."""
    if len(shares) == 1:
        return [batch]
    parts = [batch.rows(a, e) for a, e in shares]
    most = max(0 if part.targets.rows is None else part.targets.rows.size for part in parts)
    return [part.padded(most) for part in parts]


def step_memory(model: Model, tokens: np.ndarray, clip: bool) -> tuple[int, int]:
    """Bytes of the arena (with inputs) and of the gradients at their peak, for a training step on these tokens."""
    batch, threads = checked_batch(model, tokens, tokens), pool.threads()
    made = recordings(model, batch, _shares(model, batch, threads, True), threads, True)
    arena = sum(one.arena + one.bytes_of(INPUT) for one in made)
    if len(made) > 1 or clip:
        return arena, sum(one.bytes_of(RESULT) for one in made)
    return arena, results_at_peak(made[0])


def fill(replay: Replay, model: Model, batch: Batch, whole: Batch, a: int) -> None:
    """Fills in the inputs of a replay; `batch` is the part of `whole` that starts with sequence a."""
    values = {
        "tokens": batch.tokens,
        **batch.layout._asdict(),
        "targets": batch.targets.ids,
        "rows": batch.targets.rows,
        "chosen": batch.targets.chosen,
        "divisor": batch.divisor,
    }
    run: Run | None = None
    for key, array in replay.inputs():
        if isinstance(key, Dropped):
            run = run or model.new_run(dropout_seed=batch.dropout_seed)
            n = array.shape[0]
            array[...] = run.pattern(key.name, (whole.tokens.shape[0], *array.shape[1:]), key.p)[a : a + n]
        else:
            array[...] = values[key]


def _gradients(
    model: Model,
    entry: Entry,
    batch: Batch,
    on_gradient: Callable[[str, Array], None] | None,
    on_loss: Callable[[float], None] | None,
) -> tuple[float, dict[str, Array]]:
    assert entry.replays is not None
    with if_free(entry.lock) as free:  # if not, new replays of the same recordings: their results are bitwise the same
        replays = entry.replays if free else [Replay(replay.recording) for replay in entry.replays]
        return _replayed(model, replays, entry.shares, batch, on_gradient, on_loss)


def _replayed(
    model: Model,
    replays: list[Replay],
    shares: list[tuple[int, int]],
    batch: Batch,
    on_gradient: Callable[[str, Array], None] | None,
    on_loss: Callable[[float], None] | None,
) -> tuple[float, dict[str, Array]]:
    loss, grads = 0.0, {}
    for replay, part, (a, _) in zip(replays, parts_of(batch, shares), shares, strict=True):
        fill(replay, model, part, batch, a)

    def on_result(event: Event, array: np.ndarray) -> None:
        nonlocal loss
        if event.name == LOSS:
            loss += float(np.float32(array[0]))
            if on_loss is not None:
                on_loss(loss)
        elif on_gradient is None:
            grads[event.name] = array
        else:
            on_gradient(event.name, array)

    if len(replays) == 1:
        (replay,) = replays
        replay.run(on_result, as_final=on_gradient is not None)
    else:
        run_per_thread(replays, LOSS, on_result)
    return loss, grads


class Token(NamedTuple):
    """The recording of one more token per sequence with a KV cache."""

    replay: Replay | None
    entry: Entry
    key: Any

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the cache starts without one: its keys and values have other addresses."""


def next_logits(model: Model, tokens: np.ndarray, layout: Layout, cache: Any) -> np.ndarray | None:
    """The logits (B, V) of one more token per sequence (B, 1); None if this cannot be recorded."""
    if cache.length >= cache.capacity:
        raise IndexError(
            f"cannot add token {cache.length}: the KV cache has capacity {cache.capacity}; use a larger one"
        )
    if cache.capacity > model.config.n_positions:
        raise ValueError(f"a cache for {cache.capacity} tokens exceeds n_positions={model.config.n_positions}")
    check_tokens(tokens, model.config.vocab_size, model.config.n_positions)
    key = tokens.shape, layout.start is None, pool.threads()
    kept: Token | None = cache.step
    if kept is None or kept.key != key or not kept.entry.is_current(model):
        kept = cache.step = _record_token(model, tokens, layout, cache, key)
    return _replay_token(kept, {"tokens": tokens, **layout._asdict()})


class Rows:
    """The cache of one recorded token per row: each row's slot, and its length, are inputs of the recording."""

    def __init__(self, cache: Any, lengths: Any, slots: Any) -> None:
        self.room, self.lengths, self.slots = cache.room, lengths, slots

    def extend(self, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        """Only a kernel appends keys and values to slots."""
        raise CannotRecord("keys and values are copied by NumPy")


def slot_logits(
    model: Model, tokens: np.ndarray, lengths: np.ndarray, slots: np.ndarray, cache: Any
) -> np.ndarray | None:
    """The logits (B, V) of one more token (B,) in each of some slots of a cache; None if this cannot be recorded."""
    if int(lengths.max()) >= cache.capacity:
        raise IndexError(f"cannot add token {lengths.max()}: a slot has capacity {cache.capacity}; use a larger one")
    rows = check_tokens(tokens[:, None], model.config.vocab_size, model.config.n_positions)
    index = lengths[:, None]
    layout = in_window(model.config, Layout(index, None, cache.capacity), index, len(tokens))
    key = len(tokens), pool.threads()
    kept: Token | None = cache.steps.get(len(tokens))
    if kept is None or kept.key != key or not kept.entry.is_current(model):
        kept = cache.steps[len(tokens)] = _record_rows(model, layout, cache, key)
    values = {"tokens": rows, "lengths": lengths, "slots": slots, **layout._asdict()}
    return _replay_token(kept, values)


def _record_rows(model: Model, layout: Layout, cache: Any, key: Any) -> Token:
    shape = layout.positions.shape  # (B, 1)

    def run_with(recorder: Recorder) -> tuple[Layout, Any]:
        lengths, slots = (recorder.input(shape[:1], np.int64, name) for name in ("lengths", "slots"))
        return _as_inputs(recorder, layout), Rows(cache, lengths, slots)

    return _recorded(model, shape, key, run_with)


def _record_token(model: Model, tokens: np.ndarray, layout: Layout, cache: Any, key: Any) -> Token:
    return _recorded(model, tokens.shape, key, lambda recorder: (_as_inputs(recorder, layout), cache))


def _as_inputs(recorder: Recorder, layout: Layout) -> Layout:
    """The layout with inputs of a recording in place of its arrays."""
    return layout.map(lambda name, x: recorder.input(x.shape, np.int64, name))


def _recorded(
    model: Model, shape: tuple[int, ...], key: Any, run_with: Callable[[Recorder], tuple[Layout, Any]]
) -> Token:
    """The recording of one token per row; `run_with` makes its layout and cache."""
    recorder = Recorder(pool.threads())
    entry = Entry.of(model, None, [])
    try:
        with recorder.recording():
            layout, cache = run_with(recorder)
            run = model.new_run(keep_saved=False, cache=cache)
            run.params = recorded_params(model.params)
            net = network(model.config)
            ids = recorder.input(shape, np.int64, "tokens")
            features, _ = net.features_forward(run, model.config, ids, layout)
            recorder.event("logits", net.head_forward(run, model.config, features)[0])
            return Token(Replay(recorder.finish()), entry, key)
    except CannotRecord:
        return Token(None, entry, key)


def _replay_token(kept: Token, values: Mapping[str, Any]) -> np.ndarray | None:
    """The logits (B, V) of a recorded token; None if it was not recorded, or another Python thread replays it."""
    if kept.replay is None:
        return None
    found: list[np.ndarray] = []
    with if_free(kept.entry.lock) as free:
        if not free:
            return None
        for name, array in kept.replay.inputs():
            array[...] = values[name]
        kept.replay.run(lambda event, array: found.append(array), as_final=False)
    return found[0][:, 0]
