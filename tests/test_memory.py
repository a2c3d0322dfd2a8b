"""The memory that a recording says a run will need, against what processes really need."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.memory import Job, advice, plan

pytest.importorskip("numba")
CONFIG = onfoot.GPT2Config(n_layer=6, n_head=8, n_embd=512, n_positions=512, vocab_size=20000)
LLAMA = onfoot.LlamaConfig(
    vocab_size=20000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
JOBS = {
    "full": Job(CONFIG, 4, 256, clip=False),
    "clipped": Job(CONFIG, 4, 256),
    "recomputed": Job(replace(CONFIG, n_layer=12), 6, 256, clip=False, recompute=True),
    "lora": Job(CONFIG, 4, 256, lora=16),
    "llama": Job(LLAMA, 8, 512),
    "small": Job(replace(CONFIG, n_layer=8, n_embd=128, vocab_size=300), 24, 512),
}
LARGE = ("recomputed", "llama", "clipped", "small")  # up to half a minute each

PEAK = """
import sys, numpy as np, onfoot
from onfoot.bench.machine import peak_bytes
from onfoot.train.optimizer import clip_scale
from onfoot import GPT2Config, LlamaConfig
c = eval(sys.argv[1])
batch, tokens, lora, clip, recompute = map(int, sys.argv[2:])
m = onfoot.create(c)
if lora: m.add_lora(r=lora)
m.recompute = bool(recompute)
o = onfoot.AdamW(m)
t = np.random.default_rng(0).integers(0, c.vocab_size, (batch, tokens))
for _ in range(2):
    if clip: o.step(m.loss_and_grads(t)[1])
    else: m.train_step(o, t)
print(peak_bytes())
"""


@pytest.mark.optional("only Linux has /proc")
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else []) for name in JOBS])
def test_the_peak_of_a_run_is_predicted_within_three_percent(name: str) -> None:
    job = JOBS[name]
    numbers = [job.batch, job.tokens, job.lora, int(job.clip), int(job.recompute)]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, repr(job.config), *map(str, numbers)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    measured = int(done.stdout.split()[-1])
    assert plan(job).peak == pytest.approx(measured, rel=0.03)


def test_each_option_saves_what_it_says() -> None:
    job = Job(onfoot.preset("gpt2"), 8, 1024)
    peak = plan(job).peak
    less = dict(advice(job, peak))
    assert len(less) >= 4 and all(size < peak for size in less.values())
    assert advice(job, 0) == []  # nothing fits into nothing
    blocks = [plan(Job(replace(CONFIG, n_layer=n), 8, 512, recompute=True, clip=False)) for n in (6, 12)]
    kept = [plan(Job(replace(CONFIG, n_layer=n), 8, 512, clip=False)) for n in (6, 12)]
    assert blocks[1].arena - blocks[0].arena < 0.15 * (kept[1].arena - kept[0].arena)


def test_the_command_says_the_peak_and_refuses_what_makes_no_sense() -> None:
    run = CliRunner().invoke
    said = run(app, ["info", "gpt2", "--memory", "--batch-size", "4", "--tokens", "256", "--clip", "0"])
    assert (
        said.exit_code == 0 and f"{plan(Job(onfoot.preset('gpt2'), 4, 256, clip=False)).peak / 1e6:,.0f}" in said.output
    )
    for wrong in (
        ["--lora", "4"],
        ["--memory", "--quantized"],
        ["--memory", "--tokens", "2000"],
        ["--memory", "--lora", "-1"],
    ):
        assert run(app, ["info", "gpt2", *wrong]).exit_code != 0
