"""Numbers of the pages that follow from others: twice the parameters, the work, and clipping by the norm of all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import onfoot
from onfoot.models.params import count, shapes
from onfoot.train.optimizer import clip_scale, global_norm

CONSTANT, BLOCK = 78_032_977, 7_087_872


def test_twelve_blocks_have_twice_the_parameters_because_of_the_tables() -> None:
    one = onfoot.preset("paper")
    counts = {n: count(shapes(replace(one, n_layer=n))) for n in (1, 2, 12, 13)}
    assert counts == {n: CONSTANT + BLOCK * n for n in counts}
    assert (counts[1], counts[12]) == (85_120_849, 163_087_441)
    assert counts[12] / counts[1] == pytest.approx(1.92, abs=0.005)
    assert pytest.approx(11.01, abs=0.005) == CONSTANT / BLOCK
    tables = 2 * 50_257 * 768
    assert tables / CONSTANT > 0.98


@pytest.mark.parametrize(
    ("name", "one", "full", "ratio", "tied"),
    [
        ("gpt2", 85_120_849, 163_087_441, 1.92, 2.68),
        ("gpt2-medium", 116_623_441, 406_336_593, 3.48, 5.45),
        ("gpt2-large", 149_698_897, 838_409_297, 5.60, 9.07),
        ("gpt2-xl", 193_255_057, 1_638_072_657, 8.48, 13.81),
    ],
)
def test_larger_models_have_a_larger_part_in_their_blocks(
    name: str, one: int, full: int, ratio: float, tied: float
) -> None:
    config = onfoot.preset(name)
    untied = replace(config, tie_word_embeddings=False, lm_head_bias=True)
    assert (count(shapes(replace(untied, n_layer=1))), count(shapes(untied))) == (one, full)
    assert full / one == pytest.approx(ratio, abs=0.005)
    assert count(shapes(config)) / count(shapes(replace(config, n_layer=1))) == pytest.approx(tied, abs=0.005)


def test_twelve_blocks_are_not_twice_but_nearly_three_times_the_work() -> None:
    d, v = 768, 50_257
    block, logits = 12 * d * d, d * v  # the products with weights, per token
    assert (12 * block + logits) / (block + logits) == pytest.approx(2.7, abs=0.01)


def gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(3, 4)), "b": 10 * rng.normal(size=5), "c": 0.1 * rng.normal(size=(2, 2))}


@pytest.mark.parametrize("limit", [0.5, 5.0, 1000.0])
def test_clipping_keeps_the_direction_and_bounds_the_norm(limit: float) -> None:
    g = gradients(0)
    norm = float(torch.cat([torch.from_numpy(x).flatten() for x in g.values()]).norm())
    assert global_norm(g) == pytest.approx(norm, rel=1e-14)
    clipped = {name: x * clip_scale(global_norm(g), limit) for name, x in g.items()}
    assert global_norm(clipped) == pytest.approx(min(limit, norm), rel=1e-14)
    along = sum(float(np.vdot(clipped[name], g[name])) for name in g)
    assert along == pytest.approx(global_norm(clipped) * norm, rel=1e-14)  # parallel
    leaves = [torch.zeros(x.shape, dtype=torch.float64, requires_grad=True) for x in g.values()]
    for leaf, x in zip(leaves, g.values(), strict=True):
        leaf.grad = torch.from_numpy(x.copy())
    torch.nn.utils.clip_grad_norm_(leaves, limit)
    for leaf, x in zip(leaves, clipped.values(), strict=True):
        np.testing.assert_allclose(x, leaf.grad.numpy(), rtol=1e-5)  # PyTorch adds 1e-6 to the norm


def test_clipped_parts_do_not_add_up_to_the_clipped_whole() -> None:
    parts = [gradients(0), gradients(1)]
    whole = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    limit = 0.4 * global_norm(whole)
    clipped = {name: x * clip_scale(global_norm(whole), limit) for name, x in whole.items()}
    scales = [clip_scale(global_norm(part), limit) for part in parts]
    added = {name: sum(s * part[name] for s, part in zip(scales, parts, strict=True)) for name in whole}
    assert np.abs(added["b"] - clipped["b"]).max() > 0.1
