"""What `model.params` accepts, copies and refuses; and what happens if arrays are changed from outside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.formats.peft import restore_adapter
from onfoot.models.model import Model
from onfoot.quantized import quantize

CONFIG = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=8, vocab_size=11)
NAME = "transformer.h.0.mlp.c_fc.weight"
SQUARE = "transformer.h.1.attn.c_proj.weight"
ENGINES = ["numpy", "numba", "torch"]
TOKENS = np.arange(8).reshape(2, 4)


@pytest.fixture(params=ENGINES)
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "numba":
        pytest.importorskip("numba")
    return onfoot.create(CONFIG, 1, engine=request.param)


@pytest.mark.parametrize("shape", [(32, 127), (128, 32), (32, 128, 1), (4096,), (), (0, 128)])
def test_an_array_of_another_shape_is_refused_with_both_shapes(model: Model, shape: tuple[int, ...]) -> None:
    before = model.params[NAME]
    with pytest.raises(ValueError, match=r"mlp.c_fc.weight has shape \(.*\); the configuration expects \(32, 128\)"):
        model.params[NAME] = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match="expects"):
        model.params.update({SQUARE: np.ones((32, 32)), NAME: np.ones(shape)})
    with pytest.raises(ValueError, match="expects"):
        model.params |= {NAME: np.ones(shape)}
    assert model.params[NAME] is before and not (np.asarray(model.params[SQUARE]) == 1).all()


def test_names_without_a_place_and_missing_names_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="unexpected parameter 'wte'"):
        model.params["wte"] = np.ones(3)
    with pytest.raises(ValueError, match="unexpected parameter 'wte'"):
        model.params.setdefault("wte", np.ones(3))
    for take in (lambda p: p.pop(NAME), lambda p: p.popitem(), lambda p: p.clear(), lambda p: p.__delitem__(NAME)):
        with pytest.raises(ValueError, match="cannot remove parameters"):
            take(model.params)
    with pytest.raises(ValueError, match=r"missing parameter 'transformer.wpe.weight'"):
        model.params = {k: v for k, v in model.params.items() if "wpe" not in k}
    assert isinstance(model.params, dict) and model.loss(TOKENS) > 0


def odd_arrays(folder: Path, x: np.ndarray) -> dict[str, Any]:
    frozen = x.copy()
    frozen.flags.writeable = False
    memory = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = np.ndarray(x.shape, x.dtype, memory, 1)
    unaligned[...] = x
    x.tofile(folder / "x")
    return {
        "float64": x.astype(np.float64),
        "float16": x.astype(np.float16),
        "big-endian": x.astype(">f4"),
        "Fortran order": np.asfortranarray(x),
        "reversed": x[::-1, ::-1].copy()[::-1, ::-1],
        "read-only": frozen,
        "unaligned": unaligned,
        "broadcast": np.broadcast_to(x[:1], x.shape),
        "list": x.tolist(),
        "mapped": np.memmap(folder / "x", np.float32, "r", shape=x.shape),
        "mapped for writing": np.asarray(np.memmap(folder / "x", np.float32, "r+", shape=x.shape)),
        "matrix": np.asmatrix(x),
    }


def test_arrays_that_lie_oddly_are_copied_and_train(model: Model, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((32, 128)).astype(np.float32)
    for what, odd in odd_arrays(tmp_path, x).items():
        before = np.array(odd, np.float32)
        model.params[NAME] = odd
        assert (np.asarray(model.params[NAME]) == before).all() and model.params[NAME] is not odd, what
        model.train_step(onfoot.AdamW(model), TOKENS)
        assert (np.array(odd, np.float32) == before).all(), what  # the array that was given is untouched
        assert not (np.asarray(model.params[NAME]) == before).all(), what


def test_an_array_that_lies_well_is_taken_as_it_is_and_may_be_changed_in_place() -> None:
    model = onfoot.create(CONFIG, engine="numpy")
    mine = np.ones((32, 128), np.float32)
    model.params[NAME] = mine
    assert model.params[NAME] is mine
    before = model.loss(TOKENS)
    model.params[NAME][3] = 0.5
    assert model.loss(TOKENS) != before and (mine[3] == 0.5).all()


@pytest.mark.parametrize("bad", [np.ones((32, 128), complex), np.full((32, 128), "a"), np.ma.ones((32, 128))])
def test_what_is_no_array_of_real_numbers_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="must be an array of real numbers"):
        onfoot.create(CONFIG, engine="numpy").params[NAME] = bad


def test_two_parameters_never_share_memory(model: Model) -> None:
    other = SQUARE.replace("h.1", "h.0")
    model.params[other] = model.params[SQUARE]
    assert not np.shares_memory(np.asarray(model.params[other]), np.asarray(model.params[SQUARE]))
    model.params[SQUARE] = np.asarray(model.params[SQUARE])  # itself: nothing is copied
    twin = copy.copy(model)
    twin.params = dict(model.params)
    assert twin.params[SQUARE] is model.params[SQUARE] and twin.params is not model.params


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_parameter_made_read_only_is_not_updated_and_says_so(engine: str) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    model = onfoot.create(CONFIG, engine=engine)
    optimizer = onfoot.AdamW(model)
    before = {name: p.copy() for name, p in model.params.items()}
    model.params[NAME].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        model.train_step(optimizer, TOKENS)
    assert all((p == before[name]).all() for name, p in model.params.items())


@pytest.mark.parametrize("name", [NAME, SQUARE, "transformer.h.0.attn.c_attn.weight", "transformer.wpe.weight"])
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_parameter_reshaped_in_place_is_refused_where_it_is_used(engine: str, name: str) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    model = onfoot.create(CONFIG, engine=engine)
    optimizer = onfoot.AdamW(model)
    model.params[name].shape = (2, -1)
    for use in (
        lambda: model.loss_and_grads(TOKENS),
        lambda: model.train_step(optimizer, TOKENS),
        lambda: model.logits(TOKENS),
        lambda: model.generate(TOKENS, 3),
    ):
        with pytest.raises((ValueError, IndexError)):
            use()


def test_a_generation_goes_on_with_the_weights_that_it_began_with() -> None:
    pytest.importorskip("numba")
    from onfoot.generate.loop import stream
    from onfoot.generate.sampling import Sampling

    def tokens(change: bool) -> list[int]:
        model = onfoot.create(CONFIG, engine="numba")
        out = []
        for i, new in enumerate(stream(model, [np.arange(2)], 6, Sampling(temperature=0))):
            if change and i == 2:
                model.params[NAME].shape = (-1,)
                model.params["transformer.h.0.attn.c_attn.weight"].shape = (-1,)
            out.append(int(new[0]))
        return out

    assert tokens(change=True) == tokens(change=False)


def test_a_quantised_weight_of_another_shape_is_refused() -> None:
    model = onfoot.create(CONFIG, engine="numpy")
    with pytest.raises(ValueError, match="expects"):
        model.params[NAME] = quantize(np.ones((128, 64), np.float32)).T
    model.params[NAME] = quantize(np.ones((128, 32), np.float32)).T
    assert NAME in model.quantized
    with pytest.raises(ValueError, match="quantised weights need the engine"):
        onfoot.create(CONFIG, engine="torch").params[NAME] = quantize(np.ones((128, 32), np.float32)).T


def test_an_adapter_is_resumed_only_with_arrays_of_its_shapes(tmp_path: Path) -> None:
    first, other = (onfoot.create(CONFIG, engine="numpy") for _ in range(2))
    first.add_lora(r=2, targets=["c_fc"])
    first.save_adapter(tmp_path)
    for r in (1, 3):
        other = onfoot.create(CONFIG, engine="numpy")
        other.add_lora(r=r, targets=["c_fc"])
        with pytest.raises(ValueError, match=rf"c_fc has A \(2, 32\) and B \(128, 2\); this run expects \({r}, 32\)"):
            restore_adapter(other, tmp_path)


def test_merging_and_unmerging_a_head_keeps_what_belongs_to_the_model() -> None:
    model = onfoot.create(CONFIG, engine="numpy")
    model.add_lora(r=2, targets=["lm_head"])
    before = set(model.params)
    model.merge_adapter()
    assert "lm_head.weight" in model.params
    model.unmerge_adapter()
    assert set(model.params) == before == set(model.params.shapes)
