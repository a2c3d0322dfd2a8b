"""The ranks of a run: who there is, what they say to each other, and what happens when one of them fails.

A run that was not started by mpiexec has one rank, and nothing here imports MPI. With several, each rank holds the
whole model, works on its own rows of every step, and hears the sum of all gradients; rank 0 alone writes and speaks.
What is sent is arrays and JSON, never pickles.
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

LAUNCHERS = (  # what tells a process its rank and the number of ranks: Hydra (MPICH, Intel), Open MPI, MVAPICH, srun
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
NAP = 0.002  # seconds between looks at something that may take long; MPI's own waiting would keep a core busy
GRACE = 1.0  # seconds that the other ranks leave to rank 0 to report what may be the same error
SIGHT = 60.0  # seconds until a file that one host has written must have appeared on all


class World:
    """The ranks of a run. Without a communicator there is one."""

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank: int = 0 if comm is None else comm.Get_rank()
        self.size: int = 1 if comm is None else comm.Get_size()
        self.share = Share(self.rank, self.size)
        self.writes = self.rank == 0  # files and the terminal are one rank's
        self.name = f"rank {self.rank} on {socket.gethostname()}"
        self.monitor: rank_monitor.MonitorConnection | None = None
        self.threads = False  # whether a second thread may call MPI
        self._agreed: BaseException | None = None  # an error that all ranks know of

    def sum(self, *values: float) -> list[float]:
        """The sums over all ranks."""
        return self.table(*values).sum(axis=0).tolist()

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.table(value).any())

    def table(self, *values: float) -> np.ndarray:
        """Every rank's numbers, (size, n). The same on all ranks to the last bit, and so is what follows from it."""
        mine = np.array(values, dtype=np.float64)
        if self.comm is None:
            return mine[None]
        out = np.empty((self.size, mine.size))
        self.comm.Allgather(mine, out)
        return out

    def wait(self) -> None:
        """Until all ranks are here, asleep."""
        if self.comm is not None:
            self.poll(self.comm.Ibarrier().Test)

    def poll(self, done: Callable[[], bool]) -> None:
        """Until it is done, asleep."""
        while not done():
            time.sleep(NAP)

    def allgather_json(self, value: Any) -> list[Any]:
        """What every rank says, by rank; anything that JSON can hold."""
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
        """What `work` returns here. Where it fails on any rank all end: rank 0 with the error, the others silently."""
        if self.comm is None:
            return work()
        value, error, said = None, None, None
        try:
            value = work()
        except Exception as caught:
            if caught is self._agreed:  # the others know, and do not wait here
                raise
            error = caught
            said = None if isinstance(error, _ElsewhereError) else _describe(error)
        failed = _failures(self.allgather_json([self.name, said]))
        if not failed:
            return value  # type: ignore[return-value]
        raise self.agreed(ValueError(failed[0]) if error is None or said is None else error)

    def agreed(self, error: Exception) -> BaseException:
        """What a rank has to raise for an error that all have come to: rank 0 the error, the others a silent end."""
        self._agreed = error
        return error if self.writes else SystemExit(2)

    def rank0_first(self, work: Callable[[], Value], then: Callable[[], Value]) -> Value:
        """What `work` returns on rank 0, and only then what `then` returns on the others."""
        if self.comm is None:
            return work()
        if not self.writes:
            heard = self.allgather_json(False)
            if failed := _failures(heard):
                raise self.agreed(ValueError(failed[0]))
            if not heard[0]:
                raise _ElsewhereError
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
        """Until a file that rank 0 has written can be seen here. Network file systems take their time."""
        end = time.monotonic() + SIGHT
        while not path.exists():
            if time.monotonic() > end:
                raise ValueError(
                    f"{path} cannot be seen from here; all ranks need the run's folder: put it on a file system that "
                    f"the hosts share"
                )
            time.sleep(NAP)

    def compare(self, arrays: Mapping[str, np.ndarray], when: str) -> None:
        """Ends the run where a rank's arrays are not rank 0's in every bit, and says which number of which."""
        if self.comm is None:
            return
        digest = 0
        for array in arrays.values():
            digest = zlib.crc32(np.ascontiguousarray(array).data, digest)
        heard = self.allgather_json(digest)
        if all(other == heard[0] for other in heard):
            return
        found: str | None = None
        for name, array in arrays.items():
            mine = np.ascontiguousarray(array)
            first = mine.copy()
            self.comm.Bcast(first, 0)
            bits = np.dtype(f"u{mine.itemsize}")
            apart = np.flatnonzero(mine.reshape(-1).view(bits) != first.reshape(-1).view(bits))
            if found is None and apart.size:
                place = tuple(int(i) for i in np.unravel_index(apart[0], mine.shape))
                found = f"{name}{list(place)} is {mine[place]} on {self.name}, and {first[place]} on rank 0"
        said = next((text for text in self.allgather_json(found) if text is not None), "in what cannot be told")
        raise self.agreed(
            ValueError(
                f"{when}: the ranks have drifted apart: {said}; a machine may compute wrongly. Nothing was saved "
                f"of this: go on from the last checkpoint with --resume"
            )
        )

    def silence_stdout(self) -> None:
        """Leaves the terminal to rank 0. Errors are still heard from every rank."""
        if not self.writes:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)

    @contextmanager
    def guard(self, run: Path, command: str) -> Iterator[None]:
        """Ends all ranks when this one fails: the others would wait for it for ever."""
        if self.comm is None:
            yield
            return
        if self.monitor is not None:
            self.monitor.tell(run=str(run), resume=f"mpiexec -n {self.size} onfoot {command} --resume {run}")
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            if error is self._agreed:
                raise
            self.fail(error, run, command)

    def fail(self, error: BaseException, run: Path, command: str) -> NoReturn:
        """Says which rank failed and why, where the run can go on, and ends all ranks."""
        if not self.writes:
            time.sleep(GRACE)
        if not isinstance(error, ValueError | OSError | KeyboardInterrupt) or os.environ.get("ONFOOT_DEBUG"):
            traceback.print_exception(error)
        resume = f"mpiexec -n {self.size} onfoot {command} --resume {run}"
        said = f"error: {self.name} failed: {_describe(error)}\n{rank_monitor.last_words(str(run), resume)}\n"
        sys.stderr.write(said)
        sys.stderr.flush()
        if self.monitor is not None:
            self.monitor.bye(failed=True)
        code = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, ValueError | OSError) else 1
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)
        raise SystemExit(code)  # not reached


class _ElsewhereError(Exception):
    """Rank 0 failed, and says so itself."""


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
    except RuntimeError as error:  # mpi4py is there, but finds no MPI library
        problem = " ".join(str(error).split())
    else:
        comm = MPI.COMM_WORLD
        if comm.Get_size() == size:
            return _joined(World(comm.Dup()), MPI.Query_thread() >= MPI.THREAD_SERIALIZED)
        problem = (
            f"its MPI library ({MPI.get_vendor()[0]}) sees {comm.Get_size()} rank: it does not belong to the mpiexec "
            f"(or srun) that started it, so each process would train by itself"
        )
    raise ValueError(
        f"this is rank {rank} of {size} of an MPI run, but {problem}. "
        f'Install MPI with pip install "onfoot[mpi]" (mpi4py and MPICH with its own mpiexec), or start one process'
    )


def launched() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the launcher's environment has them; (0, 1) without one."""
    for rank, size in LAUNCHERS:
        if os.environ.get(size, "").isdecimal() and os.environ.get(rank, "").isdecimal():
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def _joined(ranks: World, threaded: bool) -> World:
    """Sets this rank's threads, and puts up the monitor."""
    ranks.threads = bool(ranks.table(threaded).all())  # the same on all: they must start the same sums
    if ranks.writes and not ranks.threads:
        print("this MPI library is for one thread: gradients are summed after the backward pass", file=sys.stderr)
    hosts = ranks.allgather_json([socket.gethostname(), sorted(threads.cores())])
    mine = hosts[ranks.rank]
    threads.limit(max(1, len(mine[1]) // sum(other == mine for other in hosts)))  # those with whom cores are shared
    alone = all(host == hosts[0][0] for host, _ in hosts)
    where = ranks.allgather_json(rank_monitor.start(alone, ranks.size) if ranks.writes else None)[0]
    ranks.monitor = rank_monitor.join(where, ranks.rank)
    if ranks.monitor is not None:
        atexit.register(ranks.monitor.bye)
    return ranks


def _failures(heard: list[Any]) -> list[str]:
    """The errors that ranks have reported in `run_all_or_raise`; a rank inside `rank0_first` sends a boolean."""
    return [f"{one[0]}: {one[1]}" for one in heard if isinstance(one, list) and one[1] is not None]


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}"
