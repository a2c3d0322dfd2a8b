"""Replays a run: the states before each of its steps, last step first, bit by bit as they were in training.

A step number determines its batch, dropout seed and learning rate, so a step can be repeated from the state before it.
States are known at step 0 and at the kept checkpoints. Between two of them, steps are replayed forwards and kept, in
memory or in temporary files, and then handed out backwards. A replay must arrive at the next checkpoint's state.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.blame.adjoint import UpdateSettings
from onfoot.data.batches import Batch
from onfoot.formats.peft import restore_adapter
from onfoot.formats.run_folder import MOMENTS
from onfoot.formats.tensors import TensorFile
from onfoot.models.load import load
from onfoot.train.loop import Trainer
from onfoot.train.optimizer import AdamW
from onfoot.train.step import Microbatch


class State(NamedTuple):
    """The trained parameters and their moments before a step, (P,) each."""

    params: np.ndarray
    m: np.ndarray
    v: np.ndarray


class Step(NamedTuple):
    """One step of the run: what its adjoint needs, arrays of (P,)."""

    number: int  # 0, 1, ...
    params: np.ndarray  # before the step
    m: np.ndarray  # after the step
    v: np.ndarray  # after the step
    gradient: np.ndarray  # before clipping
    settings: UpdateSettings


class FlatLayout:
    """Arrays by name as one vector, and back."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(sorted(shapes.items()))
        self.ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])

    def flat(self, arrays: Mapping[str, Array]) -> np.ndarray:
        """A copy of the arrays as one vector, (P,)."""
        return np.concatenate([to_numpy(arrays[name]).reshape(-1) for name in self.shapes])

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The parts of a vector by name, in their shapes."""
        parts = np.split(vector, self.ends[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class KeepingAdamW(AdamW):
    """AdamW that keeps a copy of the gradients of its last step, and the factor by which they were clipped."""

    layout: FlatLayout
    gradient: np.ndarray  # (P,)
    scale: float

    def make_moments(self) -> None:
        super().make_moments()
        self.layout = FlatLayout({name: tuple(m.shape) for name, m in self.m.items()})

    @contextmanager
    def one_step(self, lr: float | None = None, scale: float = 1.0) -> Iterator[None]:
        self.gradient, self.scale = np.zeros(self.layout.ends[-1], self.model.dtype), scale
        self._views = self.layout.views(self.gradient)
        with super().one_step(lr, scale):
            yield

    def update(self, name: str, g: Array) -> None:
        self._views[name][...] = to_numpy(g)
        super().update(name, g)


class Replay:
    """The steps of a run, repeated by its trainer, which must be at step 0.

    `checkpoints` maps steps to the folders of valid checkpoints. `memory` limits the bytes for kept states; beyond it,
    they are in temporary files.
    """

    def __init__(self, trainer: Trainer, checkpoints: Mapping[int, Path], memory: int) -> None:
        self.trainer, self.model, self.checkpoints, self.memory = trainer, trainer.model, checkpoints, memory
        old = trainer.optimizer
        settings: dict[str, Any] = {"lr": old.lr, "betas": old.betas, "eps": old.eps, "weight_decay": old.weight_decay}
        self.optimizer = trainer.optimizer = KeepingAdamW(self.model, **settings)
        self.layout = self.optimizer.layout
        self.initial = self.state()
        self.decay = np.zeros_like(self.initial.params)  # (P,): matrices decay, biases and norms do not
        for name, view in self.layout.views(self.decay).items():
            view[...] = old.weight_decay if self.model.params[name].ndim > 1 else 0.0

    @property
    def state_bytes(self) -> int:
        """The bytes of the trained parameters, or of one of their moments."""
        return self.initial.params.nbytes

    def state(self) -> State:
        """A copy of the present state."""
        return State(*map(self.layout.flat, (self.model.params, self.optimizer.m, self.optimizer.v)))

    def put_params(self, params: np.ndarray) -> None:
        """Writes the parameters into the model, in place."""
        for name, values in self.layout.views(params).items():
            self.model.params[name][...] = self.model.engine.floats(values, self.model.dtype)

    def put(self, step: int, state: State) -> None:
        """Goes to the state before a step."""
        self.put_params(state.params)
        m, v = self.layout.views(state.m), self.layout.views(state.v)
        self.optimizer.restore({f"m.{k}": x for k, x in m.items()} | {f"v.{k}": x for k, x in v.items()}, step)
        self.trainer.state.step = step

    def at(self, step: int) -> State:
        """The state before a step, from its checkpoint or at step 0."""
        if step not in self.checkpoints:
            assert step == 0
            return self.initial
        folder = self.checkpoints[step]
        moments = TensorFile(folder / MOMENTS)
        m, v = (self.layout.flat({name: moments[f"{kind}.{name}"] for name in self.layout.shapes}) for kind in "mv")
        return State(self._params_of(folder), m, v)

    def _params_of(self, folder: Path) -> np.ndarray:
        """The trained parameters in a checkpoint."""
        model = self.model
        if model.active_adapter is None:
            return self.layout.flat(load(folder, model.dtype, "numpy").params)
        held = {name: model.params[name] for name in self.layout.shapes}
        restore_adapter(model, folder)
        found = self.layout.flat(model.params)
        model.params.update(held)
        return found

    def microbatches(self, step: int) -> list[Microbatch]:
        """The batches of a step, with their dropout seeds."""
        self.trainer.state.step = step
        batches: list[Batch] = self.trainer.source.microbatches(step)
        return [Microbatch(*batch, self.trainer.dropout_seed(i)) for i, batch in enumerate(batches)]

    def forward(self) -> Step:
        """Repeats the step at the present state."""
        number, options = self.trainer.state.step, self.trainer.options
        params, lr = self.layout.flat(self.model.params), options.learning_rate(number)
        norm = self.trainer.step(lr).grad_norm
        self.trainer.state.step += 1
        optimizer = self.optimizer
        settings = UpdateSettings(lr, optimizer.betas, optimizer.eps, optimizer.steps, optimizer.scale, norm)
        m, v = map(self.layout.flat, (optimizer.m, optimizer.v))
        return Step(number, params, m, v, optimizer.gradient, settings)

    def plan(self, last: int, first: int = 0) -> Plan:
        """What the replay of steps first ... last − 1 needs."""
        starts = sorted({0, *(step for step in self.checkpoints if step < last)})
        starts = starts[sum(start <= first for start in starts) - 1 :]
        segments = list(zip(starts, [*starts[1:], last], strict=True))
        longest = max(end - start for start, end in segments)
        whole = longest * 4 * self.state_bytes
        if whole <= self.memory:
            return Plan(segments, first, longest, whole, 0)
        stride = math.ceil(math.sqrt(0.75 * longest))  # 3 arrays per snapshot, 4 per step: the smallest sum
        size = (stride * 4 + (-(-longest // stride) - 1) * 3) * self.state_bytes
        return Plan(segments, first, stride, size if size <= self.memory else 0, size if size > self.memory else 0)

    def backwards(self, plan: Plan) -> Iterator[Step]:
        """The steps, last first."""
        with tempfile.TemporaryDirectory(prefix="onfoot-blame-") as folder:
            spool = Spool(Path(folder) if plan.disk else None)
            for start, end in reversed(plan.segments):
                for step in self._segment(start, end, plan.stride, spool):
                    if step.number >= plan.first:
                        yield step

    def _segment(self, start: int, end: int, stride: int, spool: Spool) -> Iterator[Step]:
        """The steps between two known states: replayed once to keep every `stride`-th state, then from each of them."""
        begins = range(start, end, stride)
        self.put(start, self.at(start))
        snapshots = []
        for begin in begins[:-1]:
            snapshots.append(spool.put(self.state()))
            for _ in range(begin, begin + stride):
                self.forward()
        steps = [spool.put(self.forward()) for _ in range(begins[-1], end)]
        self._verify(end)
        yield from map(spool.take, reversed(steps))
        for begin, snapshot in zip(reversed(begins[:-1]), reversed(snapshots), strict=True):
            self.put(begin, spool.take(snapshot))
            steps = [spool.put(self.forward()) for _ in range(stride)]
            yield from map(spool.take, reversed(steps))

    def _verify(self, step: int) -> None:
        """Raises ValueError unless the present state is that of the checkpoint, if there is one, bit by bit."""
        if step not in self.checkpoints:
            return
        for now, kept in zip(self.state(), self.at(step), strict=True):
            if not np.array_equal(now, kept):
                raise ValueError(
                    f"replaying the run does not give its checkpoint of step {step}: the states differ by up to "
                    f"{np.abs(now - kept).max():.1e}. A replay needs the machine, software versions, engine and number "
                    f"of threads of the training (see made_with in run.json)"
                )


@dataclass(frozen=True)
class Plan:
    """The segments of a replay, the steps that are kept at a time, and the memory or disk space for them in bytes."""

    segments: list[tuple[int, int]]
    first: int
    stride: int
    memory: int
    disk: int

    @property
    def steps(self) -> int:
        """The steps to differentiate."""
        return self.segments[-1][1] - self.first

    @property
    def replayed(self) -> int:
        """The forward steps in all, with those that are replayed twice."""
        twice = (max(0, (-(-(end - start) // self.stride) - 1)) * self.stride for start, end in self.segments)
        return self.segments[-1][1] - self.segments[0][0] + sum(twice)


class Spool:
    """Keeps states and steps in memory, or in files of a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._count = folder, 0

    def put(self, value: Any) -> Any:
        """Keeps a value; returns what `take` needs."""
        if self.folder is None:
            return value
        self._count += 1
        return type(value)(*(self._write(i, x) if isinstance(x, np.ndarray) else x for i, x in enumerate(value)))

    def take(self, kept: Any) -> Any:
        """The value; its files are removed."""
        if self.folder is None:
            return kept
        return type(kept)(*(_read(x) if isinstance(x, Path) else x for x in kept))

    def _write(self, part: int, vector: np.ndarray) -> Path:
        assert self.folder is not None
        path = self.folder / f"{self._count}-{part}.npy"
        np.save(path, vector)
        return path


def _read(path: Path) -> np.ndarray:
    vector: np.ndarray = np.load(path, allow_pickle=False)
    path.unlink()
    return vector
