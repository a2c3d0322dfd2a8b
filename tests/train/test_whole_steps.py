"""A step is all or nothing: if rejected, interrupted or diverged, weights and optimizer stay unchanged."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.arrays import to_numpy
from onfoot.formats.run_folder import checkpoint_folder
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.models.model import Model
from onfoot.train import pretrain
from onfoot.train.checkpoint import restore_optimizer
from onfoot.train.options import TrainOptions

CONFIG = onfoot.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2)
TOKENS = np.arange(8)[None]
WEIGHT = "transformer.h.0.mlp.c_fc.weight"


def both(model: Model, optimizer: onfoot.AdamW) -> dict[str, np.ndarray]:
    """Everything that a step changes."""
    return {k: to_numpy(v).copy() for k, v in {**model.params, **optimizer.moments()}.items()}


def assert_as_before(model: Model, optimizer: onfoot.AdamW, before: dict[str, np.ndarray], steps: int) -> None:
    assert optimizer.steps == steps
    for name, value in both(model, optimizer).items():
        assert value.tobytes() == before[name].tobytes(), name


def pair(steps: int = 1, engine: str = "numpy") -> tuple[Model, onfoot.AdamW]:
    model = onfoot.create(CONFIG, engine=engine)
    optimizer = onfoot.AdamW(model, lr=1e-2)
    for _ in range(steps):
        model.train_step(optimizer, TOKENS)
    return model, optimizer


@pytest.mark.parametrize("engine", ["auto", "numpy", "torch"])
def test_a_rejected_batch_changes_nothing(engine: str) -> None:
    model, optimizer = pair(engine=engine)
    before = both(model, optimizer)
    with pytest.raises(ValueError, match="99"):
        model.train_step(optimizer, np.full((1, 8), 99))
    assert_as_before(model, optimizer, before, 1)
    model.train_step(optimizer, TOKENS)
    peer, others = pair(2, engine)
    for name, value in both(model, optimizer).items():
        assert value.tobytes() == both(peer, others)[name].tobytes(), name


@pytest.mark.parametrize("engine", ["auto", "numpy"])
def test_a_loss_that_is_not_finite_changes_nothing(engine: str) -> None:
    model, optimizer = pair(engine=engine)
    model.params["transformer.ln_f.weight"][0] = np.nan
    before = both(model, optimizer)
    with pytest.raises(ValueError, match="the loss is nan: the step was skipped and no weight has changed"):
        model.train_step(optimizer, TOKENS)
    assert_as_before(model, optimizer, before, 1)


class Interrupting:
    """Wraps a function and interrupts the process just before its n-th call."""

    def __init__(self, inner: Any, at: int) -> None:
        self.inner, self.at, self.calls = inner, at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_ctrl_c_between_two_updates_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr("onfoot.train.optimizer.UPDATE_ELEMENTS", 1)  # each parameter at once
    whole, peer = pair(2)
    model, optimizer = pair(1)
    optimizer.model.engine.table["adamw_updates"] = Interrupting(model.engine.adamw_updates, at)
    with pytest.raises(KeyboardInterrupt):
        model.train_step(optimizer, TOKENS)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for name, value in both(model, optimizer).items():
        assert value.tobytes() == both(whole, peer)[name].tobytes(), name
    assert optimizer.steps == 2
    model.train_step(optimizer, TOKENS)


def test_ctrl_c_before_the_first_update_leaves_everything_as_it_was() -> None:
    model, optimizer = pair()
    before = both(model, optimizer)
    model.engine.table["layer_norm_backward"] = Interrupting(model.engine.layer_norm_backward, 1)
    with pytest.raises(KeyboardInterrupt):
        model.train_step(optimizer, TOKENS)
    assert_as_before(model, optimizer, before, 1)
    model.train_step(optimizer, TOKENS)
    peer, others = pair(2)
    for name, value in both(model, optimizer).items():
        assert value.tobytes() == both(peer, others)[name].tobytes(), name


def test_after_a_step_that_failed_halfway_the_next_step_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onfoot.train.optimizer.UPDATE_ELEMENTS", 1)
    model, optimizer = pair()
    moments, params = dict(optimizer.moments()), {k: v.copy() for k, v in model.params.items()}
    saved = {k: v.copy() for k, v in moments.items()}
    update = model.engine.adamw_updates
    calls = 0

    def fails(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError
        update(*args)

    model.engine.table["adamw_updates"] = fails
    with pytest.raises(MemoryError):
        model.train_step(optimizer, TOKENS)
    assert optimizer.steps == 1
    for step in (lambda: model.train_step(optimizer, TOKENS), lambda: optimizer.step({})):
        with pytest.raises(ValueError, match="the last step failed halfway: some weights were updated"):
            step()
    for name, value in params.items():
        model.params[name][...] = value
    optimizer.restore(saved, 1)
    model.train_step(optimizer, TOKENS)
    peer, others = pair(2)
    for name, value in both(model, optimizer).items():
        assert value.tobytes() == both(peer, others)[name].tobytes(), name


def gradients(model: Model) -> dict[str, Any]:
    return model.loss_and_grads(TOKENS)[1]


WRONG: dict[str, tuple[Any, str]] = {
    "short": (lambda g: g[:-1], rf"gradient of {WEIGHT} has shape \(7, 32\), expected \(8, 32\)"),
    "turned": (lambda g: g.T, rf"gradient of {WEIGHT} has shape \(32, 8\), expected \(8, 32\)"),
    "flat": (lambda g: g.reshape(-1), rf"gradient of {WEIGHT} has shape \(256,\)"),
    "dtype": (lambda g: g.astype(np.float64), f"gradient of {WEIGHT} has dtype float64, expected float32"),
    "whole numbers": (lambda g: g.astype(np.int32), f"gradient of {WEIGHT} has dtype int32"),
    "a list": (lambda g: g.tolist(), f"gradient of {WEIGHT} is a list"),
    "a tensor": (torch.from_numpy, f"gradient of {WEIGHT} is a Tensor"),
}


@pytest.mark.parametrize("engine", ["auto", "numpy"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_gradient_that_does_not_match_is_rejected_before_anything_changes(wrong: str, engine: str) -> None:
    model, optimizer = pair(engine=engine)
    grads, (change, message) = gradients(model), WRONG[wrong]
    before = both(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.step({**grads, WEIGHT: change(grads[WEIGHT])})
    assert_as_before(model, optimizer, before, 1)
    with pytest.raises(ValueError, match="nowhere was not trainable when this optimizer was created"):
        optimizer.step({**grads, "nowhere": grads[WEIGHT]})
    assert_as_before(model, optimizer, before, 1)


@pytest.mark.parametrize("engine", ["auto", "numpy"])
def test_a_gradient_may_have_any_memory_layout(engine: str) -> None:
    model, optimizer = pair(engine=engine)
    peer, others = pair(engine=engine)
    grads = gradients(model)
    turned = np.asfortranarray(grads[WEIGHT])
    turned.flags.writeable = False
    assert not turned.flags.c_contiguous
    optimizer.step({**grads, WEIGHT: turned})
    others.step(grads)
    assert (model.params[WEIGHT] == peer.params[WEIGHT]).all()


def test_a_parameter_that_is_read_only_or_was_replaced_is_refused() -> None:
    model, optimizer = pair()
    grads, own = gradients(model), model.params[WEIGHT]
    frozen = own.copy()
    frozen.flags.writeable = False
    for value, message in (
        (frozen, f"{WEIGHT} is read-only"),
        (
            own[:, :-1].copy(),
            rf"{WEIGHT} is float32 \(8, 31\), but was float32 \(8, 32\) when this optimizer was created",
        ),
        (own.astype(np.float64), rf"{WEIGHT} is float64 \(8, 32\), but was float32"),
    ):
        dict.__setitem__(model.params, WEIGHT, value)
        for step in (lambda: optimizer.step(grads), lambda: model.train_step(optimizer, TOKENS)):
            with pytest.raises(ValueError, match=message):
                step()
        assert optimizer.steps == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop(f"m.{WEIGHT}"), f"the moment m.{WEIGHT} is missing"),
        (
            lambda m: m.update({f"v.{WEIGHT}": m[f"v.{WEIGHT}"][1:]}),
            r"has shape \(7, 32\), expected \(8, 32\)",
        ),
        (lambda m: m.update({f"v.{WEIGHT}": m[f"v.{WEIGHT}"].astype(np.int32)}), "has dtype int32"),
        (lambda m: m.update({"m.other": np.zeros(3, np.float32)}), "m.other does not belong to a trainable parameter"),
    ],
    ids=["missing", "shape", "dtype", "unknown"],
)
def test_moments_of_another_model_are_refused_with_the_files_name(tmp_path: Path, change: Any, message: str) -> None:
    model, optimizer = pair()
    moments = {k: np.array(v) for k, v in optimizer.moments().items()}
    change(moments)
    before = both(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.restore(moments, 7)
    (tmp_path / "trainer").mkdir()
    write_tensors(tmp_path / "trainer" / "optimizer.safetensors", moments)
    (tmp_path / "trainer" / "state.json").write_text('{"step": 1, "best_step": 1, "optimizer_steps": 1}')
    with pytest.raises(ValueError, match=rf"optimizer\.safetensors does not belong to this run: .*{message}"):
        restore_optimizer(tmp_path, optimizer)
    assert_as_before(model, optimizer, before, 1)


def unclipped(tmp_path: Path) -> Any:
    """A run without clipping, of one microbatch: each parameter is updated when its gradient is final."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = TrainOptions(
        texts=[str(tmp_path / "text.txt")], n_layer=1, n_head=1, n_embd=8, context=16, batch_size=2, steps=4, clip=0.0,
        save_every=1, eval_every=9, sample_tokens=0, engine="numpy", eval_windows=2,
    )  # fmt: skip
    return pretrain.start(tmp_path / "run", options)


def saved(tmp_path: Path, step: int) -> dict[str, np.ndarray]:
    folder = checkpoint_folder(tmp_path / "run", step)
    return {k: np.array(v) for k, v in TensorFile(folder / "model.safetensors").items()}


def test_a_diverged_step_without_clipping_leaves_the_weights_unchanged(tmp_path: Path) -> None:
    trainer = unclipped(tmp_path)
    step = trainer.step

    def poisoned(lr: float) -> Any:
        if trainer.state.step == 2:
            trainer.model.engine.table["cross_entropy_forward"] = lambda *args: (float("inf"), None)
        return step(lr)

    trainer.step = poisoned
    with pytest.raises(ValueError, match=r"step 3: the loss is inf; training stopped; no checkpoint was overwritten"):
        trainer.run()
    assert all((trainer.model.params[k] == v).all() for k, v in saved(tmp_path, 2).items())
    assert trainer.optimizer.steps == 2


def test_non_finite_gradients_without_clipping_are_reported_with_the_changed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onfoot.train.optimizer.UPDATE_ELEMENTS", 1)
    trainer = unclipped(tmp_path)
    step, table = trainer.step, trainer.model.engine.table
    backward = table["embedding_backward"]

    def poisoned(lr: float) -> Any:
        if trainer.state.step == 2:
            table["embedding_backward"] = lambda *args: backward(*args) + np.float32(np.inf)
        return step(lr)

    trainer.step = poisoned
    with pytest.raises(ValueError, match=r"is not finite; .*some weights in memory were already updated"):
        trainer.run()
    assert trainer.optimizer.steps == 2 and all(np.isfinite(v).all() for v in saved(tmp_path, 2).values())
    with pytest.raises(ValueError, match="the last step failed halfway"):
        trainer.optimizer.step({})
