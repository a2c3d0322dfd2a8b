"""A rank that fails between two `rank0_first` calls: all ranks exit with its error, none waits forever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from onfoot.train.parallel import World

HANG = 20  # seconds


def two_ranks(work: Callable[[World], Any]) -> list[Any]:
    """What `run_all_or_raise(work)` returns or raises on each of two ranks, which communicate without MPI."""
    meeting, said = threading.Barrier(2), dict[int, Any]()
    ended: list[Any] = [None, None]

    class Rank(World):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.size, self.comm, self.writes = rank, 2, True, rank == 0

        def allgather_json(self, value: Any) -> list[Any]:
            said[self.rank] = value
            meeting.wait(HANG)
            values = [said[0], said[1]]
            meeting.wait(HANG)
            return values

    def run(rank: int) -> None:
        try:
            world = Rank(rank)
            ended[rank] = world.run_all_or_raise(lambda: work(world))
        except BaseException as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * HANG)
        assert not thread.is_alive()
    return ended


def stages(failing: int, when: str) -> Callable[[World], str]:
    """Two `rank0_first` calls, with a rank that fails before, between or in one of them."""

    def fail(world: World, now: str) -> None:
        if world.rank == failing and when == now:
            raise OSError(f"no disk {now}")

    def work(world: World) -> str:
        fail(world, "at the beginning")
        world.rank0_first(lambda: fail(world, "in the first"), lambda: fail(world, "in the first"))
        fail(world, "between")
        world.rank0_first(lambda: fail(world, "in the second"), lambda: fail(world, "in the second"))
        fail(world, "at the end")
        return "done"

    return work


@pytest.mark.parametrize("when", ["at the beginning", "in the first", "between", "in the second", "at the end"])
@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_end_with_the_error_of_the_one_that_failed(failing: int, when: str) -> None:
    here, there = two_ranks(stages(failing, when))
    assert isinstance(here, OSError | ValueError) and f"no disk {when}" in str(here)
    assert isinstance(there, SystemExit)


def test_ranks_that_do_not_fail_come_to_the_end() -> None:
    assert two_ranks(stages(2, "never")) == ["done", "done"]
