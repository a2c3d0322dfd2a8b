"""A recorded step is bitwise equal to the step without a recording, every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policies import POLICIES, Policy, config_of, in_16_bits, lora, quantized, scrambled_model

import onfoot
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.generate import loop
from onfoot.generate.cache import KVCache
from onfoot.models import recorded
from onfoot.models.model import Model
from onfoot.train import finetune
from onfoot.train.options import FinetuneOptions

pytest.importorskip("numba")
Result = tuple[float, dict[str, np.ndarray]]


def unrecorded(policy: Policy) -> Model:
    """The same model without recordings."""
    model = policy.model()
    model._steps = None
    return model


def assert_same_bits(one: Result, other: Result) -> None:
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    for name, grad in one[1].items():
        same = grad.shape == other[1][name].shape and (grad == other[1][name]).all()
        assert same and grad.dtype == np.float32, name


def through_take(model: Model, *batch: Any, **options: Any) -> Result:
    """The same through `on_gradient`, which keeps none of the gradients."""
    taken: dict[str, np.ndarray] = {}

    def on_gradient(name: str, grad: np.ndarray) -> None:
        assert name not in taken
        taken[name] = np.array(grad)
        grad[...] = np.nan  # the array belongs to the callback

    loss, left = model.loss_and_grads(*batch, **options, on_gradient=on_gradient)
    assert left == {}
    return loss, taken


@pytest.mark.parametrize("name", POLICIES)
def test_a_recorded_step_is_the_step_bit_for_bit(name: str, on_threads: Callable[[int], None]) -> None:
    on_threads(1)
    policy = POLICIES[name]
    model, plain = policy.model(), unrecorded(policy)
    for seed, sequences in ((0, 6), (1, 6), (2, 1)):
        tokens, targets, options = policy.batch(seed, sequences)
        expected = plain.loss_and_grads(tokens, targets, **options)
        assert_same_bits(model.loss_and_grads(tokens, targets, **options), expected)
        assert_same_bits(through_take(model, tokens, targets, **options), expected)
        options.pop("dropout_seed", None)
        assert model.loss(tokens, targets, **options) == plain.loss(tokens, targets, **options)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_has_the_same_bits_each_time(name: str, threads: int, on_threads: Callable[[int], None]) -> None:
    on_threads(threads)
    policy = POLICIES[name]
    model, other = policy.model(), policy.model()
    batches = [policy.batch(seed, sequences) for seed, sequences in ((0, 6), (1, 5))]
    first = [model.loss_and_grads(tokens, targets, **options) for tokens, targets, options in batches]
    for i in (1, 0):
        tokens, targets, options = batches[i]
        assert_same_bits(model.loss_and_grads(tokens, targets, **options), first[i])
        assert_same_bits(through_take(other, tokens, targets, **options), first[i])


BIG = Policy("gpt2", {"n_embd": 96, "vocab_size": 12000, "tie_word_embeddings": False})
BIG_LLAMA = Policy("llama", {"hidden_size": 96, "intermediate_size": 1500, "vocab_size": 6000})


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", [BIG, BIG_LLAMA], ids=["gpt2", "llama"])
def test_gradients_that_are_handed_out_on_the_way_are_the_same(
    policy: Policy, threads: int, on_threads: Callable[[int], None]
) -> None:
    """More than 4 MB of gradients, so that some are returned before the last call."""
    on_threads(threads)
    model = policy.model()
    tokens, targets, _ = policy.batch(sequences=1)
    expected = model.loss_and_grads(tokens, targets)
    (entry,) = model._steps._kept.values()
    (replay,) = entry.replays
    assert len(replay._cuts) > 1
    for _ in range(2):
        assert_same_bits(through_take(model, tokens, targets), expected)
    on_threads(1)
    assert_same_bits(through_take(policy.model(), tokens, targets), unrecorded(policy).loss_and_grads(tokens, targets))


def test_the_loss_is_heard_first_and_what_it_raises_ends_the_step(on_threads: Callable[[int], None]) -> None:
    on_threads(2)
    model, heard = POLICIES["gpt2"].model(), []
    tokens, targets, _ = POLICIES["gpt2"].batch()

    def on_gradient(name: str, grad: np.ndarray) -> None:
        heard.append(name)

    loss, _ = model.loss_and_grads(tokens, targets, on_gradient=on_gradient, on_loss=heard.append)
    assert heard[0] == loss == model.loss(tokens, targets) and set(heard[1:]) == set(model.params)
    heard.clear()

    def refuse(loss: float) -> None:
        raise ValueError(f"{loss} is too much")

    with pytest.raises(ValueError, match="is too much"):
        model.loss_and_grads(tokens, targets, on_gradient=on_gradient, on_loss=refuse)
    assert heard == [] and model.loss_and_grads(tokens, targets)[0] == loss


TRAINED = {name: POLICIES[name] for name in ("gpt2", "gpt2 lora, dropout", "llama tied", "gpt2 packed")}
TRAINED |= {"big gpt2": BIG, "big llama": BIG_LLAMA}  # parameters change before the last call


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_the_same_bit_for_bit(name: str, on_threads: Callable[[int], None]) -> None:
    on_threads(1)
    policy = TRAINED[name]
    model, plain = policy.model(), unrecorded(policy)
    optimizers = [onfoot.AdamW(one, lr=1e-2) for one in (model, plain)]
    for step in range(4):
        tokens, targets, options = policy.batch(step)
        losses = [
            one.train_step(optimizer, tokens, targets, **options)
            for one, optimizer in zip((model, plain), optimizers, strict=True)
        ]
        assert losses[0] == losses[1]
    assert len(model._steps) == 1
    assert all((model.params[name] == plain.params[name]).all() for name in model.params)


@pytest.mark.parametrize(
    ("fields", "sequences", "n", "replays"),
    [
        (
            {"n_embd": 224, "n_layer": 1, "n_positions": 64},
            19,
            64,
            2,
        ),  # one share's inputs are not kept, the other's are
        ({}, 17, 1, 1),  # in one share a bias' gradient is adjacent to its weight's, in the other not
        ({}, 8, 9, 2),
    ],
)
def test_threads_with_unlike_shares_give_the_right_gradients(
    fields: dict[str, Any], sequences: int, n: int, replays: int, on_threads: Callable[[int], None]
) -> None:
    on_threads(2)
    policy = Policy("gpt2", fields)
    model, exact = policy.model(), policy.model("numpy", "float64")
    tokens, targets, _ = policy.batch(0, sequences, n)
    loss, grads = model.loss_and_grads(tokens, targets)
    (entry,) = model._steps._kept.values()
    assert len(entry.replays) == replays
    right, expected = exact.loss_and_grads(tokens, targets)
    assert loss == pytest.approx(right, rel=1e-6)
    for name, grad in grads.items():
        assert np.linalg.norm(grad - expected[name]) <= 1e-5 * max(np.linalg.norm(expected[name]), 1e-3), name


TOKEN_POLICIES = {
    "gpt2": Policy("gpt2"),
    "gpt2 lora": Policy("gpt2", change=lora()),
    "gpt2 Q8_0": Policy("gpt2", change=quantized("Q8_0")),
    "gpt2 F16": Policy("gpt2", change=in_16_bits("F16")),
    "llama BF16": Policy("llama", change=in_16_bits("BF16")),
    "llama": Policy("llama"),
    "llama tied, lora": Policy("llama", {"tie_word_embeddings": True}, lora(dropout=0.2)),
    "llama Q4_1": Policy("llama", change=quantized("Q4_1")),
}


@pytest.mark.parametrize("pad", [[0], [0, 2, 1]], ids=["one", "padded"])
@pytest.mark.parametrize("name", TOKEN_POLICIES)
def test_a_recorded_token_is_the_token_bit_for_bit(
    name: str, pad: list[int], on_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_threads(1)
    model = TOKEN_POLICIES[name].model()
    rows = len(pad)
    tokens = np.random.default_rng(0).integers(0, 61, (rows, 9))

    def logits() -> list[np.ndarray]:
        cache = KVCache(9)
        parts = np.split(tokens, [3, 4, 5, 7, 8], axis=1)  # 3 tokens, 1, 1, 2, 1, 1
        return [np.array(loop.step(model, part, np.array(pad), cache)) for part in parts]

    found, again = logits(), logits()
    monkeypatch.setattr(recorded, "next_logits", lambda *args: None)
    expected = logits()
    for one, twice, other in zip(found, again, expected, strict=True):
        assert one.shape == (rows, 61) and (one == other).all() and (one == twice).all()


def test_a_head_with_an_adapter_takes_batches_with_few_targets(on_threads: Callable[[int], None]) -> None:
    on_threads(2)
    policy = POLICIES["gpt2 lora on the head, few targets"]
    tokens, targets, _ = policy.batch()
    loss, grads = policy.model().loss_and_grads(tokens, targets)
    right, expected = policy.model("numpy", "float64").loss_and_grads(tokens, targets)
    assert loss == pytest.approx(right, rel=1e-6)
    for name, grad in grads.items():
        assert np.linalg.norm(grad - expected[name]) <= 1e-5 * max(np.linalg.norm(expected[name]), 1e-3), name


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_with_an_adapter_resumes_to_the_same_bits(
    threads: int, tmp_path: Path, on_threads: Callable[[int], None]
) -> None:
    on_threads(threads)
    tokenizer = byte_tokenizer()
    end = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    model = scrambled_model(config_of("gpt2", vocab_size=tokenizer.size, n_positions=40, **end))
    model.tokenizer = tokenizer
    model.save(tmp_path / "base")
    lines = [{"prompt": f"{i} and one:", "completion": f" {i + 1}"} for i in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = FinetuneOptions(
        model=str(tmp_path / "base"), data=[str(tmp_path / "data.jsonl")], steps=6, batch_size=2, accumulate=2, r=2,
        lr=1e-2, warmup=2, eval_every=3, save_every=2, keep=9, sample_tokens=3, dropout=0.0, lora_dropout=0.2,
    )  # fmt: skip
    whole = finetune.start(tmp_path / "whole", settings)
    whole.run()
    assert len(whole.model._steps) > 0
    cut = finetune.start(tmp_path / "cut", settings)
    step = cut.step

    def stopping(lr: float) -> Any:
        if cut.state.step == 4:
            raise KeyboardInterrupt
        return step(lr)

    cut.step = stopping  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    resumed, complaints = finetune.resume(tmp_path / "cut")
    assert complaints == [] and resumed.state.step == 4
    resumed.run()
    one, other = (
        {k: np.array(v) for k, v in TensorFile(tmp_path / run / "last" / "adapter_model.safetensors").items()}
        for run in ("whole", "cut")
    )
    assert one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)
