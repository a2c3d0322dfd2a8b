"""What the tests of the kernels share."""

from __future__ import annotations

import pytest

from onfoot.kernels import pool


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many threads, on any number of cores."""
    if request.param > pool._most and pool.layer().__name__ != "omppool":
        pytest.skip("this pool has no more threads than cores")
    monkeypatch.setattr(pool, "_threads", request.param)
    return request.param
