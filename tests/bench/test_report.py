"""What `onfoot bench` says of what it has measured."""

from __future__ import annotations

import pytest

from onfoot.bench.jobs import JOBS, find
from onfoot.bench.report import Result, rows, share


def test_ratios_are_against_ours_and_above_one_where_we_are_faster() -> None:
    job = JOBS["full-4x256"]
    results = [Result("onfoot", 2.0, 1_000_000), Result("eager", 3.0, 4_000_000)]
    ours, peer = rows(job, results, 100.0, 10.0)
    assert ours[1:3] == ("onfoot", "2,000.0 ms per step") and ours[-2:] == ("", "")
    assert peer[-2:] == ("1.50 ×", "0.25 ×")


def test_the_share_of_the_limit_counts_products_and_bytes() -> None:
    weights = 12 * 12 * 768 * 768 + 768 * 50257  # GPT-2's linear layers
    full, lora, generate = (JOBS[name] for name in ("full-4x256", "lora-4x256", "generate"))
    seconds = 6 * weights * 1024 / 150e9
    assert share(full, Result("onfoot", seconds, 1), 300.0, 1.0) == pytest.approx(0.5)
    assert share(lora, Result("onfoot-lora", seconds, 1), 300.0, 1.0) == pytest.approx(1 / 3)
    assert share(generate, Result("transformers", 64 * 4 * weights / 5e9, 1), 1.0, 10.0) == pytest.approx(0.5)


def test_jobs_that_grow_are_found_by_their_sizes_and_others_are_refused() -> None:
    job = find("grow-3x2x64")
    assert (job.config.n_layer, job.batch, job.tokens) == (3, 2, 64)
    with pytest.raises(ValueError, match="unknown job 'grow'; choose from full-4x256"):
        find("grow")
