"""The plan of a run's memory, part by part: what can be counted by hand, and what each option saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

import onfoot
from onfoot.memory import PROGRAM, Job, advice, plan

CONFIG = onfoot.preset("gpt2")
N = 124_439_808
JOB = Job(CONFIG, 4, 256)


def test_weights_and_means_are_counted() -> None:
    planned = plan(JOB)
    assert planned.weights == 4 * N and planned.moments == 2 * 4 * N
    assert 50 << 20 <= PROGRAM <= 200 << 20
    parts = (planned.weights, planned.moments, planned.arena, planned.gradients, PROGRAM)
    assert planned.peak == sum(parts)


def test_an_adapters_means_are_its_own_and_a_quantised_base_is_small() -> None:
    in_lora = 12 * 16 * ((768 + 2304) + (768 + 768) + (768 + 3072) + (3072 + 768))
    lora = plan(replace(JOB, lora=16))
    assert lora.weights == 4 * (N + in_lora) and lora.moments == 2 * 4 * in_lora
    small = plan(replace(JOB, lora=16, quantized=True))
    linear = 12 * 12 * 768**2 + 50257 * 768
    assert small.weights == 4 * (N - linear + in_lora) + linear + 2 * linear // 32  # a code each, a scale for 32


def test_a_frozen_base_in_16_bits_takes_half_and_nothing_else_changes() -> None:
    floats, half = (plan(Job(CONFIG, 1, 64, lora=16, half=half)) for half in (False, True))
    linear = 12 * 12 * 768**2 + 50257 * 768
    assert half.weights == floats.weights - 2 * linear
    assert (half.moments, half.gradients) == (floats.moments, floats.gradients)
    assert half.arena == pytest.approx(floats.arena, abs=4 << 20)  # a block of the weight per thread
    assert plan(Job(CONFIG, 1, 64, half=True)) == plan(Job(CONFIG, 1, 64))  # all weights train, in float32


def test_clipping_keeps_all_gradients_at_once() -> None:
    tight = Job(CONFIG, 1, 64)
    assert plan(tight).gradients == pytest.approx(4 * N, abs=64)  # and the loss
    assert plan(replace(tight, clip=False)).gradients < 4 * N / 2


def test_advice_is_what_fits_and_saves() -> None:
    job = Job(CONFIG, 8, 1024)
    peak = plan(job).peak
    said = dict(advice(job, peak))
    assert all(size < peak for size in said.values())
    assert dict(advice(job, 10 * peak)) == said  # what needs more than the job itself is no advice
    middle = sorted(said.values())[1]
    assert set(dict(advice(job, middle)).values()) == {size for size in said.values() if size < middle}
    half = next(text for text in said if text.startswith("--batch-size 4 "))
    assert said[half] == plan(replace(job, batch=4)).peak
    assert not any(text.startswith("--batch-size") for text in dict(advice(Job(CONFIG, 1, 1024), 10 * peak)))
