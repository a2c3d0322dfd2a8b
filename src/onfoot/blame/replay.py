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
from onfoot.blame.adjoint import Arrays, UpdateSettings
from onfoot.formats.peft import restore_adapter
from onfoot.formats.run_folder import MOMENTS
from onfoot.formats.tensors import TensorFile
from onfoot.models.model import load
from onfoot.train.loop import Trainer
from onfoot.train.optimizer import AdamW
from onfoot.train.step import Microbatch


class State(NamedTuple):
    """The trained parameters and their moments before a step."""

    params: Arrays
    m: Arrays
    v: Arrays


class Step(NamedTuple):
    """One step of the run: what its adjoint needs."""

    number: int  # 0, 1, ...
    params: Arrays  # before the step
    m: Arrays  # after the step
    v: Arrays  # after the step
    grads: Arrays  # before clipping
    settings: UpdateSettings


class KeepingAdamW(AdamW):
    """AdamW that keeps a copy of the gradients of its last step."""

    grads: Arrays
    scale: float

    @contextmanager
    def one_step(self, lr: float | None = None, scale: float = 1.0) -> Iterator[None]:
        self.grads, self.scale = {}, scale
        with super().one_step(lr, scale):
            yield

    def update(self, name: str, g: Array) -> None:
        self.grads[name] = to_numpy(g).copy()
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
        self.names = sorted(self.optimizer.m)
        self.initial = self.state()
        matrices = {name for name in self.names if self.initial.params[name].ndim > 1}
        self.decays = {name: old.weight_decay if name in matrices else 0.0 for name in self.names}

    @property
    def state_bytes(self) -> int:
        """The bytes of the trained parameters, or of one of their moments."""
        return sum(x.nbytes for x in self.initial.params.values())

    def state(self) -> State:
        """A copy of the present state."""
        return State(*(_copies(x, self.names) for x in (self.model.params, self.optimizer.m, self.optimizer.v)))

    def put_params(self, params: Arrays) -> None:
        """Writes the parameters into the model, in place."""
        for name in self.names:
            self.model.params[name][...] = self.model.engine.floats(params[name], self.model.dtype)

    def put(self, step: int, state: State) -> None:
        """Goes to the state before a step."""
        self.put_params(state.params)
        moments = {f"m.{name}": x for name, x in state.m.items()} | {f"v.{name}": x for name, x in state.v.items()}
        self.optimizer.restore(moments, step)
        self.trainer.state.step = step

    def at(self, step: int) -> State:
        """The state before a step, from its checkpoint or at step 0."""
        if step not in self.checkpoints:
            assert step == 0
            return self.initial
        folder = self.checkpoints[step]
        moments = TensorFile(folder / MOMENTS)
        m, v = ({name: moments[f"{kind}.{name}"] for name in self.names} for kind in "mv")
        return State(self._params_of(folder), m, v)

    def _params_of(self, folder: Path) -> Arrays:
        """The trained parameters in a checkpoint."""
        model = self.model
        if model.active_adapter is None:
            return _copies(load(folder, model.dtype, "numpy").params, self.names)
        held = {name: model.params[name] for name in self.names}
        restore_adapter(model, folder)
        found = _copies(model.params, self.names)
        model.params.update(held)
        return found

    def microbatches(self, step: int) -> list[Microbatch]:
        """The batches of a step, with their dropout seeds."""
        self.trainer.state.step = step
        batches = self.trainer.source.microbatches(step)
        return [Microbatch(*batch, self.trainer.dropout_seed(i)) for i, batch in enumerate(batches)]

    def forward(self) -> Step:
        """Repeats the step at the present state."""
        number, options = self.trainer.state.step, self.trainer.options
        params, lr = _copies(self.model.params, self.names), options.learning_rate(number)
        norm = self.trainer.step(lr)[1]
        self.trainer.state.step += 1
        optimizer = self.optimizer
        settings = UpdateSettings(lr, optimizer.betas, optimizer.eps, optimizer.steps, optimizer.scale, norm)
        m, v = (_copies(x, self.names) for x in (optimizer.m, optimizer.v))
        return Step(number, params, m, v, optimizer.grads, settings)

    def plan(self, last: int) -> Plan:
        """What the replay of steps 0 ... last − 1 needs."""
        starts = sorted({0, *(step for step in self.checkpoints if step < last)})
        segments = list(zip(starts, [*starts[1:], last], strict=True))
        longest = max(end - start for start, end in segments)
        whole = longest * 4 * self.state_bytes
        if whole <= self.memory:
            return Plan(segments, longest, whole, 0)
        stride = math.ceil(math.sqrt(0.75 * longest))  # 3 arrays per snapshot, 4 per step: the smallest sum
        size = (stride * 4 + (-(-longest // stride) - 1) * 3) * self.state_bytes
        return Plan(segments, stride, size if size <= self.memory else 0, size if size > self.memory else 0)

    def backwards(self, plan: Plan) -> Iterator[Step]:
        """The steps, last first."""
        with tempfile.TemporaryDirectory(prefix="onfoot-blame-") as folder:
            spool = Spool(Path(folder) if plan.disk else None)
            for start, end in reversed(plan.segments):
                yield from self._segment(start, end, plan.stride, spool)

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
            for name in self.names:
                if not np.array_equal(now[name], kept[name]):
                    difference = np.abs(now[name] - kept[name]).max()
                    raise ValueError(
                        f"replaying the run does not give its checkpoint of step {step}: {name} differs by up to "
                        f"{difference:.1e}. A replay needs the machine, software versions, engine and number of "
                        f"threads of the training (see made_with in run.json)"
                    )


@dataclass(frozen=True)
class Plan:
    """The segments of a replay, the steps that are kept at a time, and the memory or disk space for them in bytes."""

    segments: list[tuple[int, int]]
    stride: int
    memory: int
    disk: int

    @property
    def steps(self) -> int:
        """The steps to differentiate."""
        return self.segments[-1][1]

    @property
    def replayed(self) -> int:
        """The forward steps in all, with those that are replayed twice."""
        twice = (max(0, (-(-(end - start) // self.stride) - 1)) * self.stride for start, end in self.segments)
        return self.steps + sum(twice)


class Spool:
    """Keeps states and steps in memory, or in files of a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._count = folder, 0

    def put(self, value: Any) -> Any:
        """Keeps a value; returns what `take` needs."""
        if self.folder is None:
            return value
        self._count += 1
        return type(value)(*(self._write(i, x) if isinstance(x, dict) else x for i, x in enumerate(value)))

    def take(self, kept: Any) -> Any:
        """The value; its files are removed."""
        if self.folder is None:
            return kept
        return type(kept)(*(_read(x) if isinstance(x, _Files) else x for x in kept))

    def _write(self, part: int, arrays: Arrays) -> _Files:
        assert self.folder is not None
        path = self.folder / f"{self._count}-{part}.npy"
        np.save(path, np.concatenate([x.reshape(-1) for x in arrays.values()]))
        return _Files(path, {name: x.shape for name, x in arrays.items()})


class _Files(NamedTuple):
    path: Path
    shapes: dict[str, tuple[int, ...]]


def _read(files: _Files) -> Arrays:
    flat = np.load(files.path, allow_pickle=False)
    files.path.unlink()
    arrays, begin = {}, 0
    for name, shape in files.shapes.items():
        end = begin + math.prod(shape)
        arrays[name], begin = flat[begin:end].reshape(shape), end
    return arrays


def _copies(arrays: Mapping[str, Array], names: list[str]) -> Arrays:
    return {name: to_numpy(arrays[name]).copy() for name in names}
