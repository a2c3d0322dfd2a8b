"""Every compiled kernel on 1, 2 and 3 threads: the comparisons of the self-test, and a list of what they ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onfoot import kernels
from onfoot.kernels import self_test, shapes, update
from onfoot.kernels.few_rows import FEW
from onfoot.kernels.jit import Kernel
from onfoot.recording import pool

pytest.importorskip("numba")
TABLE = kernels.table()
CLOSE = 5e-6  # relative to the norm of the formula's array


def only_in_recordings(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Kernels that no function of an engine calls, with whole numbers, whose sums are exact."""
    total, others = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((70_001,), (3, 70_001)))
    expected = total + others.sum(axis=0)
    update.sum_into_first(total, others)
    yield "sum_into_first", total, expected
    shapes.filled(total, 2.5)
    yield "filled", total, np.full_like(total, 2.5)


def test_every_kernel_agrees_with_its_formula_on_1_2_and_3_threads(
    monkeypatch: pytest.MonkeyPatch, on_threads: Callable[[int], None]
) -> None:
    ran: set[tuple[str, int]] = set()
    call = Kernel.__call__

    def noted(self: Kernel, *args: Any) -> None:
        ran.add((self.name, pool.threads()))
        call(self, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    for threads in (1, 2, 3):
        on_threads(threads)
        rng = np.random.default_rng(threads)
        for file, comparisons in self_test.COMPARISONS.items():
            for what, got, truth in comparisons(TABLE, rng):
                error = np.linalg.norm(np.subtract(got, truth, dtype=np.float64))
                assert error <= CLOSE * np.linalg.norm(truth), f"{file}, {what}, {threads} threads: {error}"
        for what, got, truth in only_in_recordings(rng):
            assert (got == truth).all(), f"{what}, {threads} threads"
    files = [path for path in Path(str(kernels.__file__)).parent.glob("*.py") if "\nKERNELS" in path.read_text("utf-8")]
    every = {kernel.name for path in files for kernel in import_module(f"onfoot.kernels.{path.stem}").KERNELS}
    assert every and ran >= {(name, threads) for name in every for threads in (1, 2, 3)}


def test_only_products_of_few_rows_depend_on_the_number_of_threads(on_threads: Callable[[int], None]) -> None:
    """All other kernels add each entry in the same order, so that its bits are the same."""
    results = []
    for threads in (1, 2, 3):
        on_threads(threads)
        found = [
            (file, comparisons(TABLE, np.random.default_rng(0))) for file, comparisons in self_test.COMPARISONS.items()
        ]
        results.append([(file, what, np.array(got)) for file, rows in found for what, got, _ in rows])
    differ = {
        (file, np.shape(one)[0])
        for (file, _, one), *others in zip(*results, strict=True)
        if not all(np.array_equal(one, other, equal_nan=True) for _, _, other in others)
    }
    assert {file for file, _ in differ} == {"linear", "lora"}
    assert all(rows <= FEW for _, rows in differ)
