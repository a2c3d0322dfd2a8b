"""What 16-bit numbers would do to training: the figures of docs/equations/mixed_precision.md, measured again."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import BRAIN, HALF, errors_of_ops, lost_updates, network, network_errors, sum_of_ones, underflow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "equations" / "mixed_precision.md"


def figures(row: str) -> list[float]:
    """The numbers of the row of the page that begins with this; percentages as shares."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    cells = [cell.strip() for cell in line.split("|")]
    return [float(cell.removesuffix(" %")) / (100 if cell.endswith("%") else 1) for cell in cells]


def test_the_formats_are_those_of_the_table() -> None:
    for name, dtype, p in (("float32", torch.float32, 24), ("bfloat16", BRAIN, 8), ("float16", HALF, 11)):
        (line,) = re.findall(rf"^\| {name} \|(.*\|.*\|.*\|.*\|.*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
        info = torch.finfo(dtype)
        smallest = info.tiny * info.eps
        assert info.eps == 2.0 ** (1 - p)
        expected = [info.bits, p, 2.0**-p, info.tiny, smallest, info.max]
        assert [float(cell) for cell in line.split("|")] == pytest.approx(expected, rel=0.02)
        one = torch.ones((), dtype=torch.float64)
        assert (one + 2.0**-p).to(dtype) == 1 != (one + 2.1 * 2.0**-p).to(dtype)  # ties go to even
        x = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, 100_000))
        worst = ((x.to(dtype).double() - x) / x).abs().max().item()
        assert 0.9 * 2.0**-p < worst <= 2.0**-p


def test_the_figures_of_the_page_are_those_that_are_measured() -> None:
    for name, errors in errors_of_ops().items():
        assert list(errors) == pytest.approx(figures(name), rel=0.1), name
    for name, error in network_errors().items():
        printed = figures(name)[-1]
        assert printed / 2 < error < 2 * printed, name  # other machines sum in another order
    for power in (0, 8, 16):
        zero, tiny = underflow(2.0**power, HALF)
        row = "$s=1$" if power == 0 else f"$s=2^{power}$" if power < 10 else f"$s=2^{{{power}}}$"
        assert [zero, tiny] == pytest.approx(figures(row), rel=0.25, abs=1e-5)
        assert underflow(2.0**power, BRAIN) == (0, 0)
    for rate in ("3e-4", "1e-4", "3e-5", "1e-5"):
        lost = [lost_updates(float(rate), dtype) for dtype in (BRAIN, HALF, torch.float32)]
        assert lost == pytest.approx(figures(f"$\\eta$ = {rate}"), rel=0.1, abs=1e-9)


def test_a_sum_of_ones_stops() -> None:
    assert [sum_of_ones(3000, dtype) for dtype in (BRAIN, HALF, torch.float32)] == [256, 2048, 3000]


def test_scaling_the_loss_scales_every_gradient_exactly() -> None:
    model, tokens = network()
    tokens = tokens[:2, :16]
    (_, plain), (_, scaled) = (model.loss_and_grads(tokens, divisor=n) for n in (64, 64 / 2**16))
    assert all(np.array_equal(scaled[name], 2.0**16 * plain[name]) for name in plain)


def test_many_small_steps_are_lost_without_master_weights() -> None:
    weight, master = torch.ones((), dtype=BRAIN), torch.ones(())
    for _ in range(1000):
        weight = weight + 1e-3
        master = master + 1e-3
    assert weight == 1
    assert master.to(BRAIN) == 2
