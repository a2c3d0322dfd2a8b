"""The MPI ranks of a run: collectives, error handling and start-up.

A run that was not started by mpiexec has one rank, and nothing here imports MPI. With several, each rank holds the
full model, works on its own rows of every step, and receives the sum of all gradients. Only rank 0 writes files and
prints. Ranks exchange arrays and JSON, never pickles.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from onfoot import threads
from onfoot.data.batches import Share
from onfoot.train import rank_monitor

Value = TypeVar("Value")

LAUNCHERS = (  # environment variables of rank and size: Hydra (MPICH, Intel), Open MPI, MVAPICH, srun
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
POLL_SECONDS = 0.002  # between polls of a long wait; MPI's own wait would keep a core busy
RANK0_HEAD_START = 1.0  # seconds in which rank 0 can report an error first, as it may be the same on all ranks
FILE_TIMEOUT = 60.0  # seconds in which a file that rank 0 has written must appear on all hosts


class World:
    """The ranks of a run; a single one without a communicator."""

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank: int = 0 if comm is None else comm.Get_rank()
        self.size: int = 1 if comm is None else comm.Get_size()
        self.share = Share(self.rank, self.size)
        self.writes = self.rank == 0  # only rank 0 writes files and to the terminal
        self.name = f"rank {self.rank} on {socket.gethostname()}"
        self.monitor: rank_monitor.MonitorConnection | None = None
        self.threads = False  # whether a second thread may call MPI
        self._agreed: BaseException | None = None  # an error that all ranks raise

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks."""
        return self.table(*values).sum(axis=0).tolist()

    def any(self, value: bool) -> bool:
        """Whether `value` is True on any rank."""
        return bool(self.table(value).any())

    def table(self, *values: float) -> np.ndarray:
        """All-gathers every rank's numbers, (size, n): bitwise the same on all ranks."""
        mine = np.array(values, dtype=np.float64)
        if self.comm is None:
            return mine[None]
        out = np.empty((self.size, mine.size))
        self.comm.Allgather(mine, out)
        return out

    def wait(self) -> None:
        """Barrier that sleeps while waiting."""
        if self.comm is not None:
            self.poll(self.comm.Ibarrier().Test)

    def poll(self, done: Callable[[], bool]) -> None:
        """Sleeps until `done()` is True."""
        while not done():
            time.sleep(POLL_SECONDS)

    def allgather_json(self, value: Any) -> list[Any]:
        """All-gathers a JSON value; returns one value per rank."""
        if self.comm is None:
            return [value]
        self.wait()
        mine = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = np.empty(self.size, dtype=np.int64)
        self.comm.Allgather(np.array([mine.size], dtype=np.int64), sizes)
        out = np.empty(int(sizes.sum()), dtype=np.uint8)
        self.comm.Allgatherv(mine, [out, sizes.tolist()])
        return [json.loads(part.tobytes()) for part in np.split(out, np.cumsum(sizes)[:-1])]

    def run_all_or_raise(self, work: Callable[[], Value]) -> Value:
        """The result of `work`. If it fails on any rank, all ranks exit: rank 0 with the error, the others silently."""
        if self.comm is None:
            return work()
        value, error, description = None, None, None
        try:
            value = work()
        except Exception as caught:
            if caught is self._agreed:  # the other ranks have it too, and do not wait here
                raise
            error = caught
            description = None if isinstance(error, _Rank0Error) else _describe(error)
        failed = _failures(self.allgather_json([self.name, description]))
        if not failed:
            return value  # type: ignore[return-value]
        raise self.agreed(ValueError(failed[0]) if error is None or description is None else error)

    def agreed(self, error: Exception) -> BaseException:
        """The exception to raise for an error that occurs on all ranks: on rank 0 the error, elsewhere SystemExit."""
        self._agreed = error
        return error if self.writes else SystemExit(2)

    def rank0_first(self, work: Callable[[], Value], then: Callable[[], Value]) -> Value:
        """Runs `work` on rank 0, then `then` on the other ranks; returns the result on each."""
        if self.comm is None:
            return work()
        if not self.writes:
            received = self.allgather_json(False)
            if failed := _failures(received):
                raise self.agreed(ValueError(failed[0]))
            if not received[0]:
                raise _Rank0Error
            return then()
        try:
            value = work()
        except Exception as error:
            if _failures(self.allgather_json(False)):
                raise self.agreed(error) from None
            raise
        if failed := _failures(self.allgather_json(True)):
            raise self.agreed(ValueError(failed[0]))
        return value

    def wait_for_path(self, path: Path) -> None:
        """Waits until a file that rank 0 has written appears here. Network file systems may delay it."""
        deadline = time.monotonic() + FILE_TIMEOUT
        while not path.exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{path} did not appear within {FILE_TIMEOUT:g} seconds; put the run folder on a file system "
                    f"that all hosts share"
                )
            time.sleep(POLL_SECONDS)

    def compare(self, arrays: Mapping[str, np.ndarray], when: str) -> None:
        """Raises ValueError if a rank's arrays differ from rank 0's in any bit; names the first different element."""
        if self.comm is None:
            return
        digest = 0
        for array in arrays.values():
            digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
        digests = self.allgather_json(digest)
        if all(other == digests[0] for other in digests):
            return
        found: str | None = None
        for name, array in arrays.items():
            mine = np.ascontiguousarray(array)
            rank0 = mine.copy()
            self.comm.Bcast(rank0, 0)
            bits = np.dtype(f"u{mine.itemsize}")
            different = np.flatnonzero(mine.reshape(-1).view(bits) != rank0.reshape(-1).view(bits))
            if found is None and different.size:
                index = tuple(int(i) for i in np.unravel_index(different[0], mine.shape))
                found = f"{name}{list(index)} is {mine[index]} on {self.name}, but {rank0[index]} on rank 0"
        difference = next(
            (text for text in self.allgather_json(found) if text is not None), "the differing element is unknown"
        )
        raise self.agreed(
            ValueError(
                f"{when}: the ranks are out of sync: {difference}; a host may compute wrong results. This step was "
                f"not saved: continue from the last checkpoint with --resume"
            )
        )

    def silence_stdout(self) -> None:
        """Silences stdout on all ranks but 0. Every rank can still write to stderr."""
        if not self.writes:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)

    @contextmanager
    def guard(self, run: Path, command: str) -> Iterator[None]:
        """Aborts all ranks when this one fails: the others would wait for it forever."""
        if self.comm is None:
            yield
            return
        if self.monitor is not None:
            self.monitor.send(run=str(run), resume=self.how_to_resume(run, command))
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            if error is self._agreed:
                raise
            self.fail(error, run, command)

    def how_to_resume(self, run: Path, command: str) -> str:
        """The command that resumes a run; one that a user's script trains has none."""
        if not command:
            return "your script, where trainer.restore(checkpoint) continues from a checkpoint"
        return f"mpiexec -n {self.size} onfoot {command} --resume {run}"

    def fail(self, error: BaseException, run: Path, command: str) -> NoReturn:
        """Prints which rank failed and why, and how to resume the run; aborts all ranks."""
        if not self.writes:
            time.sleep(RANK0_HEAD_START)
        if not isinstance(error, ValueError | OSError | KeyboardInterrupt) or os.environ.get("ONFOOT_DEBUG"):
            traceback.print_exception(error)
        hint = rank_monitor.resume_hint(str(run), self.how_to_resume(run, command))
        sys.stderr.write(f"error: {self.name} failed: {_describe(error)}\n{hint}\n")
        sys.stderr.flush()
        if self.monitor is not None:
            self.monitor.close(failed=True)
        code = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, ValueError | OSError) else 1
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)
        raise SystemExit(code)  # not reached


class _Rank0Error(Exception):
    """Rank 0 failed, and reports the error itself."""


@lru_cache(maxsize=1)
def world() -> World:
    """The ranks that this process was started with."""
    rank, size = launched()
    if size <= 1:
        return World()
    try:
        from mpi4py import MPI
    except ImportError:
        problem = "mpi4py is not installed"
    except RuntimeError as error:  # mpi4py is installed, but finds no MPI library
        problem = " ".join(str(error).split())
    else:
        comm = MPI.COMM_WORLD
        if comm.Get_size() == size:
            return _set_up(World(comm.Dup()), MPI.Query_thread() >= MPI.THREAD_SERIALIZED)
        problem = (
            f"its MPI library ({MPI.get_vendor()[0]}) sees {comm.Get_size()} rank: it does not match the mpiexec (or "
            f"srun) that started it, so each process would train on its own"
        )
    raise ValueError(
        f"this is rank {rank} of {size} of an MPI run, but {problem}. "
        f'Install MPI with pip install "onfoot[mpi]" (mpi4py, and MPICH with its mpiexec), or start a single process'
    )


def launched() -> tuple[int, int]:
    """This process's rank and the number of ranks, from the launcher's environment; (0, 1) without a launcher."""
    for rank, size in LAUNCHERS:
        if os.environ.get(size, "").isdecimal() and os.environ.get(rank, "").isdecimal():
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def _set_up(ranks: World, threaded: bool) -> World:
    """Sets the number of threads of this rank, and connects it to the rank monitor."""
    ranks.threads = bool(ranks.table(threaded).all())  # all ranks must use the same order of collectives
    if ranks.writes and not ranks.threads:
        print("this MPI library is single-threaded: gradients are summed after the backward pass", file=sys.stderr)
    hosts = ranks.allgather_json([socket.gethostname(), sorted(threads.cores())])
    mine = hosts[ranks.rank]
    threads.limit(max(1, len(mine[1]) // sum(other == mine for other in hosts)))  # ranks that share the same cores
    one_host = all(host == hosts[0][0] for host, _ in hosts)
    address = ranks.allgather_json(rank_monitor.start(one_host, ranks.size) if ranks.writes else None)[0]
    ranks.monitor = rank_monitor.join(address, ranks.rank)
    if ranks.monitor is not None:
        atexit.register(ranks.monitor.close)
    return ranks


def _failures(received: list[Any]) -> list[str]:
    """The errors that ranks report in `run_all_or_raise`; ranks in `rank0_first` send a boolean instead."""
    return [f"{one[0]}: {one[1]}" for one in received if isinstance(one, list) and one[1] is not None]


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"
