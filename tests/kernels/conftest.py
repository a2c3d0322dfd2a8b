"""What the tests of the kernels share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onfoot.kernels import pool


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets kernels run on so many threads, whatever the number of cores."""

    def on(n: int) -> None:
        if n > pool._most and pool.layer().__name__ != "omppool":
            pytest.skip("of the pools, only OpenMP's has more threads than cores")
        monkeypatch.setattr(pool, "_threads", n)

    return on


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, on_threads: Callable[[int], None]) -> int:
    """A test on 1, 2 and 3 threads."""
    on_threads(request.param)
    return request.param
