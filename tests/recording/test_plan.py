"""The plan of a recording's memory, against every pair of buffers and every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onfoot.recording import plan

LINE = 64
Buffers = tuple[np.ndarray, np.ndarray, np.ndarray]
sizes_in_bytes = st.one_of(st.integers(0, 130), st.integers(0, 5000), st.sampled_from([1, 63, 64, 65, 128, 1 << 33]))


@st.composite
def buffers(draw: Callable[..., Any]) -> Buffers:
    """Sizes, first and last calls."""
    calls = draw(st.integers(1, 30))
    lives = st.tuples(sizes_in_bytes, st.integers(0, calls - 1), st.integers(0, calls - 1))
    rows = [(size, min(a, e), max(a, e)) for size, a, e in draw(st.lists(lives, max_size=40))]
    sizes, first, last = np.array(rows, np.int64).reshape(-1, 3).T
    return sizes, first, last


def room(size: int) -> int:
    """The bytes that a buffer occupies: full cache lines, at least one."""
    return max(-(-size // LINE), 1) * LINE


def wrong(given: Buffers, begins: np.ndarray, arena: int) -> list[str]:
    """The errors in a plan; empty if it is valid."""
    sizes, first, last = (x.tolist() for x in given)
    rooms, found = [room(size) for size in sizes], []
    for i, begin in enumerate(begins.tolist()):
        if begin % LINE:
            found.append(f"{i} begins within a line")
        if begin < 0 or begin + sizes[i] > arena:
            found.append(f"{i} is not in the arena")
        for j in range(i):
            together = first[i] <= last[j] and first[j] <= last[i]
            apart = begin + sizes[i] <= begins[j] or begins[j] + sizes[j] <= begin
            if together and not apart:
                found.append(f"{i} and {j} overlap")
    if arena > sum(rooms):
        found.append("larger than all buffers side by side")
    lives = list(zip(rooms, first, last, strict=True))
    loads = [sum(r for r, a, e in lives if a <= n <= e) for n in range(max(last, default=0) + 1)]
    if arena < max(loads, default=0):
        found.append("smaller than what is alive in one call")
    return found


@settings(max_examples=150)
@given(buffers())
def test_what_is_alive_together_lies_apart(lives: Buffers) -> None:
    begins, arena = plan.assign_offsets(*lives)
    assert begins.shape == lives[0].shape and wrong(lives, begins, arena) == []


@settings(max_examples=50)
@given(buffers())
def test_the_same_buffers_have_the_same_places(lives: Buffers) -> None:
    (begins, arena), (again, other) = plan.assign_offsets(*lives), plan.assign_offsets(*(x.copy() for x in lives))
    assert arena == other and (begins == again).all()


@settings(max_examples=50)
@given(st.lists(sizes_in_bytes, min_size=1, max_size=20))
def test_buffers_of_one_call_each_share_the_place_of_the_largest(sizes: list[int]) -> None:
    calls = np.arange(len(sizes))
    begins, arena = plan.assign_offsets(np.array(sizes), calls, calls)
    assert not begins.any() and arena == max(map(room, sizes))


@settings(max_examples=50)
@given(st.lists(sizes_in_bytes, min_size=1, max_size=20))
def test_buffers_that_live_all_along_lie_side_by_side(sizes: list[int]) -> None:
    n = len(sizes)
    lives = np.array(sizes), np.zeros(n, np.int64), np.full(n, 9)
    begins, arena = plan.assign_offsets(*lives)
    assert arena == sum(map(room, sizes)) and wrong(lives, begins, arena) == []


def test_no_buffer_needs_no_memory() -> None:
    none = np.empty(0, np.int64)
    begins, arena = plan.assign_offsets(none, none, none)
    assert begins.shape == (0,) and arena == 0


@pytest.mark.parametrize(("size", "arena"), [(0, 64), (1, 64), (64, 64), (65, 128), (1 << 40, 1 << 40)])
def test_one_buffer_takes_whole_lines(size: int, arena: int) -> None:
    begins, found = plan.assign_offsets(np.array([size]), np.array([3]), np.array([7]))
    assert begins.tolist() == [0] and found == arena


def test_a_gap_is_filled() -> None:
    """The middle one ends before the last starts, which reuses its memory."""
    sizes, first, last = np.array([640, 320, 256, 128]), np.array([0, 0, 0, 5]), np.array([9, 4, 9, 9])
    begins, arena = plan.assign_offsets(sizes, first, last)
    assert begins.tolist() == [0, 640, 960, 640] and arena == 1216


@pytest.mark.parametrize(
    ("right", "planted", "seen"),
    [
        ("last[others] >= first[buffer]", "last[others] > first[buffer]", "overlap"),  # the last call does not count
        ("first[others] <= last[buffer]", "first[others] < last[buffer]", "overlap"),
        ("free[:-1] >= rounded[buffer]", "free[:-1] >= 64", "overlap"),  # any gap
        ("np.maximum.accumulate(", "np.asarray(", "overlap"),
        ("(np.maximum(sizes, 1) + LINE - 1) // LINE * LINE", "sizes", "begins within a line"),
        ("int(ends.max(initial=0))", "int(rounded.max(initial=0))", "not in the arena"),
        ("int(ends.max(initial=0))", "int(rounded.sum()) + LINE", "larger than all"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_seen(right: str, planted: str, seen: str) -> None:
    source = Path(plan.__file__).read_text("utf-8")
    assert source.count(right) == 1
    space: dict[str, Any] = {"__name__": "planted"}
    exec(source.replace(right, planted), space)
    rng = np.random.default_rng(0)
    found: list[str] = []
    for _ in range(60):
        n = int(rng.integers(2, 20))
        calls = np.sort(rng.integers(0, 8, (n, 2)), axis=1)
        lives = rng.integers(0, 700, n), calls[:, 0], calls[:, 1]
        found += wrong(lives, *space["assign_offsets"](*lives))
    assert any(seen in one for one in found)
