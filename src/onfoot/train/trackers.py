"""Callbacks that log a run to TensorBoard or to Weights & Biases, imported only when they are asked for."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onfoot.formats.files import one_line
from onfoot.train.callbacks import Callback, Step, Validation

if TYPE_CHECKING:
    from onfoot.train.loop import Outcome, Trainer


class Tracker(Callback):
    """Logs the loss, learning rate, gradient norm and speed of every step, and every validation loss."""

    def log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Writes what is not written yet."""

    def on_step(self, trainer: Trainer, step: Step) -> None:
        values = {"train/loss": step.loss, "train/lr": step.lr, "train/grad_norm": step.grad_norm}
        values |= {"train/tokens_per_s": step.tokens_per_s}
        values |= {f"train/{name}": x for name, x in step.more.items() if isinstance(x, int | float)}
        self.log(step.step, values)

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        means = {"loss": evaluation.loss, **evaluation.means}
        self.log(evaluation.step, {f"validation/{name}": mean for name, mean in means.items()})

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        self.close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self.close()


class TensorBoard(Tracker):
    """Event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ValueError('logging to TensorBoard needs its package: pip install "onfoot[tensorboard]"') from None
        self._event, self._summary, self._open = event_pb2.Event, summary_pb2.Summary, EventFileWriter
        self._session = event_pb2.SessionLog
        self._writer: Any = None

    def log(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open(str(self.folder))
            start = self._session(status=self._session.START)  # of a resumed run: later events are dropped
            self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=start))
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=x) for name, x in values.items()])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases(Tracker):
    """A run of `wandb`, which the user has logged in to, or which is offline (WANDB_MODE=offline)."""

    def __init__(self, folder: str | Path | None = None, project: str = "onfoot", **settings: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError('logging to Weights & Biases needs its package: pip install "onfoot[wandb]"') from None
        self._wandb: Any = wandb
        self._run: Any = None
        self.settings = {"project": project, "dir": None if folder is None else str(folder), **settings}

    def on_begin(self, trainer: Trainer) -> None:
        if self._run is not None:  # evaluated before
            return
        name = None if trainer.folder is None else trainer.folder.name
        try:
            self._run = self._wandb.init(**{"name": name, "config": asdict(trainer.options), **self.settings})
        except self._wandb.Error as error:  # not logged in, no network, ...
            raise ValueError(
                f"Weights & Biases cannot start: {one_line(error)}; or log to files with WANDB_MODE=offline"
            ) from None

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        self.on_begin(trainer)  # an evaluation may come before the first step, and after the last
        super().on_evaluation(trainer, evaluation)

    def log(self, step: int, values: dict[str, float]) -> None:
        assert self._run is not None
        self._run.log(values, step=step)

    def close(self) -> None:
        if self._run is not None:
            self.settings |= {"id": self._run.id, "resume": "allow"}  # a trainer that goes on goes on there, too
            self._run.finish()
            self._run = None


def check_tracker(name: str) -> None:
    """Raises ValueError if the package that --log names is missing, before any work is done."""
    tracker(name, None)


def tracker(name: str, folder: Path | None) -> list[Callback]:
    """The callback of --log, in a list: none, or one."""
    if name == "tensorboard":
        return [TensorBoard("tensorboard" if folder is None else folder / "tensorboard")]
    return [WeightsAndBiases(folder)] if name == "wandb" else []
