"""Ranks that are out of sync stop the run and name the element; a single-threaded MPI is used from one thread.

mpiexec starts this file as a program, `test_drift_ranks.py FOLDER`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.formats.run_folder import checkpoints, newest_valid
from onfoot.train import parallel, pretrain
from onfoot.train.buckets import AllReduceGradients
from onfoot.train.options import TrainOptions
from onfoot.train.parallel import World, world
from onfoot.train.vector import BucketLayout

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
try:
    import mpi4py  # (not mpi4py.MPI, which would start MPI here)
except ImportError:
    mpi4py = None  # type: ignore[assignment]
ranks_needed = pytest.mark.skipif(MPIEXEC is None or mpi4py is None, reason='needs pip install "onfoot[mpi]"')
WEIGHT = "transformer.h.0.mlp.c_fc.weight"


def drift(folder: Path) -> None:
    """A run one of whose ranks computes wrongly: one bit of one weight, in step 6."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = TrainOptions(
        texts=[str(folder / "text.txt")], arch="gpt2", n_layer=1, n_head=1, n_embd=8, context=16,
        batch_size=4, steps=6, save_every=3, eval_every=9, sample_tokens=0, engine="numpy", eval_windows=2,
    )  # fmt: skip
    trainer = pretrain.start(folder / "run", options)
    step = trainer.step

    def poisoned(lr: float) -> Any:
        result = step(lr)
        if trainer.state.step == 5 and world().rank == 1:
            trainer.model.params[WEIGHT].view(np.uint32)[3, 5] ^= 1
        return result

    trainer.step = poisoned  # type: ignore[method-assign]
    trainer.run()


@ranks_needed
def test_a_bit_that_differs_on_one_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    assert MPIEXEC is not None
    command = [MPIEXEC, "-n", "2", sys.executable, __file__, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    found = re.search(
        rf"step 6: the ranks are out of sync: {re.escape(WEIGHT)}\[3, 5\] is (\S+) on rank 1 on \S+, but (\S+) on "
        rf"rank 0",
        result.stderr,
    )
    assert found and found[1] != found[2] and float(found[1]) == pytest.approx(float(found[2]), rel=1e-5), result.stderr
    (only,) = checkpoints(tmp_path / "run")
    assert only.name == "step-0000003" and newest_valid(tmp_path / "run") == (only, [])


class OneThread:
    """A communicator of one rank that records the threads that call it."""

    def __init__(self) -> None:
        self.callers: set[int] = set()

    def Get_rank(self) -> int:  # noqa: N802 (MPI's names)
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1

    def Iallreduce(self, *args: Any) -> Any:  # noqa: N802
        self.callers.add(threading.get_ident())
        return SimpleNamespace()


def test_a_single_threaded_mpi_is_called_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    mpi = SimpleNamespace(IN_PLACE=None, Request=SimpleNamespace(Waitall=lambda requests: waited.append(len(requests))))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    comm = OneThread()
    ranks = World(comm)
    assert not ranks.threads
    config = onfoot.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = onfoot.create(config, engine="numpy")
    layout = BucketLayout.of(model, 0.001, 1)
    before = threading.active_count()
    sums = AllReduceGradients(ranks, layout, model)
    assert threading.active_count() == before
    sums.begin()
    sums.last()
    _, grads = model.loss_and_grads(np.arange(8)[None])
    for name in layout.places:
        sums.add(name, grads[name])
    assert comm.callers == set()  # nothing was sent during the backward pass
    got = sums.finish()
    assert comm.callers == {threading.get_ident()} and waited == [len(layout.lengths)]
    assert all((got[name] == grads[name]).all() for name in grads)


@pytest.mark.parametrize(("level", "expected"), [(0, False), (1, False), (2, True), (3, True)])
def test_the_thread_level_of_mpi_is_queried(monkeypatch: pytest.MonkeyPatch, level: int, expected: bool) -> None:
    seen: list[bool] = []

    def joined(ranks: World, threaded: bool) -> World:
        seen.append(threaded)
        return ranks

    comm = SimpleNamespace(Get_size=lambda: 2, Get_rank=lambda: 0)
    comm.Dup = lambda: comm
    mpi = SimpleNamespace(COMM_WORLD=comm, Query_thread=lambda: level, THREAD_SERIALIZED=2)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(parallel, "launched", lambda: (0, 2))
    monkeypatch.setattr(parallel, "_set_up", joined)
    parallel.world.__wrapped__()
    assert seen == [expected]


if __name__ == "__main__":
    drift(Path(sys.argv[1]))
