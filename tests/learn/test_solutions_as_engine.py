"""The solutions are an engine: a GPT that trains on them alone has the bits of the engine "numpy"."""

from __future__ import annotations

import numpy as np
import pytest

import onfoot
from onfoot.learn.course import SOLUTIONS
from onfoot.own_engine import OwnEngine

CONFIG = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=12, vocab_size=30)


def trained(engine: object, dtype: str) -> tuple[list[float], onfoot.Model]:
    model = onfoot.create(CONFIG, seed=3, dtype=dtype, engine=engine)  # type: ignore[arg-type]
    optimizer = onfoot.AdamW(model, lr=1e-2)
    rng = np.random.default_rng(0)
    batches = 3 * [rng.integers(0, CONFIG.vocab_size, (3, 12)) for _ in range(2)]
    return [model.train_step(optimizer, batch, clip=1.0) for batch in batches], model


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gpt_trained_on_all_solutions_has_the_bits_of_the_engine_numpy(dtype: str) -> None:
    losses, mine = trained(SOLUTIONS, dtype)
    expected, ours = trained("numpy", dtype)
    assert isinstance(mine.engine, OwnEngine) and {"linear", "attention", "layer_norm"} <= mine.engine.theirs
    assert losses == expected and losses[-1] < losses[0]
    for name, value in ours.params.items():
        assert np.array_equal(mine.params[name], value), name
