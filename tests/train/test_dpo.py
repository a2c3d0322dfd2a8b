"""Preference tuning: gradients against transformers and PEFT, runs that learn, resume and are merged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from typer.testing import CliRunner

import onfoot
import onfoot.train.dpo as dpo
import onfoot.train.objective as objective
from llama_oracle import in_float64, in_transformers, scrambled_llama
from onfoot.cli import app
from onfoot.data.count import Count
from onfoot.data.preference_source import Pair, Pairs, PreferenceSource, fit_pairs
from onfoot.data.preferences import read_preferences
from onfoot.data.sft_examples import Example
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.models.model import Model
from onfoot.train import finetune
from onfoot.train.dpo import SeededPair, pair_gradients, pair_loss, set_reference
from onfoot.train.options import FinetuneOptions
from oracles import assert_close, directional_difference, scrambled

BETA, SMOOTHING = 0.3, 0.1
LENGTHS = [(5, 9), (11, 4), (7, 7)]  # of the chosen and the rejected answers, prompts included
PROMPTS = [2, 3, 2]


def gpt2() -> Model:
    config = onfoot.GPT2Config(vocab_size=19, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    return Model(config, scrambled(onfoot.create(config).params, 1), "float64", "numpy")


def llama() -> Model:
    config = onfoot.LlamaConfig(
        vocab_size=19, hidden_size=12, intermediate_size=10, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return scrambled_llama(config, 1, engine="numpy")


def examples() -> list[tuple[Example, Example]]:
    """Pairs of unequal lengths, with prompts that are not targets."""
    rng = np.random.default_rng(3)

    def one(prompt: int, length: int, start: np.ndarray) -> Example:
        ids = np.concatenate([start[:prompt], rng.integers(0, 19, length + 1 - prompt)])
        return Example(ids, np.arange(length + 1) >= prompt, "here")

    starts = [rng.integers(0, 19, 4) for _ in LENGTHS]
    return [(one(p, c, s), one(p, r, s)) for p, (c, r), s in zip(PROMPTS, LENGTHS, starts, strict=True)]


def moved(model: Model, seed: int) -> None:
    """Changes what trains, so that the policy is not the reference, nor an adapter at its initial value."""
    rng = np.random.default_rng(seed)
    for name in sorted(model.trainable):
        model.params[name][...] += rng.normal(0, 0.1, model.params[name].shape)


def prepared(make: Callable[[], Model], lora: bool) -> tuple[Model, list[Pair]]:
    """A policy, and pairs with the log-probabilities of its reference: the base, or the weights before a move."""
    model, pairs = make(), Pairs(examples(), 0)
    if lora:
        model.add_lora(r=2, alpha=3, seed=4)
    pairs.reference = dpo.reference_log_probs(model, pairs)
    moved(model, 7)
    return model, [pairs.pair(i) for i in range(len(pairs))]


def ours(model: Model, pairs: list[Pair]) -> tuple[float, dict[str, np.ndarray]]:
    grads: dict[str, np.ndarray] = {}

    def add(name: str, grad: np.ndarray) -> None:
        grads[name] = grads.get(name, 0) + grad

    results = [pair_gradients(model, SeededPair(pair), BETA, SMOOTHING, len(pairs), add) for pair in pairs]
    return sum(r.loss for r in results), grads


def sequence_log_probs(theirs: Any, rows: list[Example]) -> torch.Tensor:
    """As TRL computes them: one batch padded at the right, the logs of the targets summed where the mask is 1."""
    width = max(len(e.ids) for e in rows)
    ids, mask, learn = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for i, e in enumerate(rows):
        n = len(e.ids)
        ids[i, :n], mask[i, :n], learn[i, :n] = torch.tensor(e.ids), 1, torch.tensor(e.learn).long()
    logits = theirs(ids, attention_mask=mask).logits[:, :-1]
    logs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (logs * learn[:, 1:]).sum(1)


def dpo_by_autograd(policy: Any, reference: Any, off: Any) -> float:
    pairs = examples()
    rows = [c for c, _ in pairs] + [r for _, r in pairs]
    chosen, rejected = sequence_log_probs(policy, rows).chunk(2)
    with torch.no_grad(), off:
        ref_chosen, ref_rejected = sequence_log_probs(reference, rows).chunk(2)
    logits = BETA * ((chosen - rejected) - (ref_chosen - ref_rejected))
    loss = (-F.logsigmoid(logits) * (1 - SMOOTHING) - F.logsigmoid(-logits) * SMOOTHING).mean()
    loss.backward()
    return loss.item()


def theirs(make: Callable[[], Model], lora: bool, policy: Model, folder: Path) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and gradients of transformers' own model, and for LoRA of PEFT's, with the adapter switched off."""
    with in_float64():
        base = in_transformers(make(), folder / "base")
        if lora:
            policy.save_adapter(folder / "adapter")
            tuned = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
            loss = dpo_by_autograd(tuned, tuned, tuned.disable_adapter())
            prefix = "base_model.model."
        else:
            loss = dpo_by_autograd(tuned := in_transformers(policy, folder / "policy"), base, nullcontext())
            prefix = ""
    grads = {n.removeprefix(prefix): p.grad.numpy() for n, p in tuned.named_parameters() if p.grad is not None}
    return loss, grads


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_loss_and_every_gradient_equal_those_of_transformers(
    tmp_path: Path, make: Callable[[], Model], lora: bool
) -> None:
    model, pairs = prepared(make, lora)
    loss, grads = ours(model, pairs)
    expected_loss, expected = theirs(make, lora, model, tmp_path)
    assert_close(loss, expected_loss, 1e-12, "loss")
    assert set(grads) == set(expected) == model.trainable
    for name in grads:
        assert_close(grads[name], expected[name], 1e-10, name)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_gradient_is_the_slope_of_the_loss(make: Callable[[], Model]) -> None:
    model, pairs = prepared(make, lora=True)
    _, grads = ours(model, pairs)
    names = sorted(grads)
    start = [model.params[n].copy() for n in names]
    rng = np.random.default_rng(0)
    directions = [rng.normal(size=x.shape) for x in start]

    def value(*arrays: np.ndarray) -> np.ndarray:
        for name, x in zip(names, arrays, strict=True):
            model.params[name][...] = x
        return np.array(sum(pair_loss(model, p, BETA, SMOOTHING).loss for p in pairs) / len(pairs))

    slope = directional_difference(value, start, directions, 1.0, 1e-4)
    by_hand = sum(float((grads[n] * d).sum()) for n, d in zip(names, directions, strict=True))
    assert abs(slope - by_hand) <= 1e-8 * abs(slope)


def with_prompt(example: Example) -> Example:
    """The planted bug of counting the prompt's tokens too."""
    return Example(example.ids, np.ones(len(example.ids), bool), example.where)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_log_probabilities_are_those_of_transformers_without_the_prompt(
    tmp_path: Path, make: Callable[[], Model]
) -> None:
    with in_float64(), torch.no_grad():
        base = in_transformers(make(), tmp_path)
        expected = [sequence_log_probs(base, list(pair)).tolist() for pair in examples()]
    assert_close(dpo.reference_log_probs(make(), Pairs(examples(), 0)), expected, 1e-12)
    counted = Pairs([(with_prompt(c), with_prompt(r)) for c, r in examples()], 0)
    assert np.abs(dpo.reference_log_probs(make(), counted) - expected).min() > 0.1


def test_the_tokens_of_a_common_prompt_cancel_in_every_gradient() -> None:
    model, pairs = prepared(gpt2, lora=False)
    counted = Pairs([(with_prompt(c), with_prompt(r)) for c, r in examples()], 0)
    counted.reference = np.array([p.reference for p in pairs])
    _, grads = ours(model, pairs)
    _, others = ours(model, [counted.pair(i) for i in range(len(counted))])
    for name in grads:
        assert_close(others[name], grads[name], 1e-10, name)


def prompt_counted_once() -> list[Pair]:
    """The planted bug of counting the prompt's tokens of the chosen answer only."""
    pairs = Pairs([(with_prompt(c), r) for c, r in examples()], 0)
    pairs.reference = np.array([p.reference for p in prepared(gpt2, lora=False)[1]])
    return [pairs.pair(i) for i in range(len(pairs))]


def test_a_planted_bug_is_caught(tmp_path: Path) -> None:
    model, pairs = prepared(gpt2, lora=False)
    expected_loss, expected = theirs(gpt2, False, model, tmp_path)
    name = "transformer.h.0.attn.c_attn.weight"

    def wrong(loss: float, grads: dict[str, np.ndarray]) -> bool:
        off = np.linalg.norm(grads[name] - expected[name]) / np.linalg.norm(expected[name])
        return bool(abs(loss - expected_loss) > 1e-3 or off > 1e-2)

    assert not wrong(*ours(model, pairs))
    swapped = [Pair(p.rejected, p.chosen, (p.reference[1], p.reference[0])) for p in pairs]
    assert wrong(*ours(model, swapped))
    assert wrong(*ours(model, [p._replace(reference=(0.0, 0.0)) for p in pairs]))
    assert wrong(*ours(model, prompt_counted_once()))
    loss, grads = ours(model, pairs)
    assert wrong(loss, {n: -g for n, g in grads.items()})
    assert wrong(loss, {n: g / BETA for n, g in grads.items()})


def test_the_engine_numba_gives_the_same_gradients() -> None:
    model, pairs = prepared(gpt2, lora=False)
    loss, grads = ours(model, pairs)
    kernels = Model(model.config, model.params, "float32", "numba")
    loss32, grads32 = ours(kernels, pairs)
    assert_close(loss32, loss, 1e-5, "loss")
    for name in grads:
        assert_close(grads32[name], grads[name], 1e-4, name)


def test_padding_changes_nothing() -> None:
    model, pairs = prepared(gpt2, lora=False)
    _, grads = ours(model, pairs)
    wider = Pairs([*examples(), (Example(np.arange(15), np.ones(15, bool), ""),) * 2], 0)  # other widths
    wider.reference = np.array([*[p.reference for p in pairs], (0.0, 0.0)])
    others = [wider.pair(i) for i in range(len(pairs))]
    assert [p.chosen.tokens.shape for p in others] != [p.chosen.tokens.shape for p in pairs]
    _, padded = ours(model, others)
    for name in grads:
        assert_close(padded[name], grads[name], 1e-12, name)


def test_the_reference_of_a_lora_model_is_its_base_and_the_adapter_is_on_again_afterwards() -> None:
    model, pairs = gpt2(), Pairs(examples(), 0)
    before = dpo.reference_log_probs(model, pairs)
    model.add_lora(r=2, seed=4)
    moved(model, 7)
    assert (dpo.reference_log_probs(model, pairs) == before).all()
    assert model.active_adapter == "default"
    assert all(".lora_" in name for name in model.trainable)


# Runs

SMALL: dict[str, Any] = {
    "steps": 12, "batch_size": 3, "accumulate": 2, "r": 2, "lr": 1e-2, "warmup": 2, "eval_every": 4, "save_every": 3,
    "keep": 9, "sample_tokens": 3, "dpo": True, "quiet": True,
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    config = onfoot.GPT2Config(
        vocab_size=tokenizer.size, n_positions=48, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=tokenizer.eos_id, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    model = onfoot.create(config, seed=1)
    model.tokenizer = tokenizer
    model.save(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Answers in upper case are chosen, those in lower case rejected."""
    path = tmp_path / "pairs.jsonl"
    words = ["yes", "no", "maybe", "never", "often", "rarely"]
    lines = [
        {"prompt": f"{i} {word}?", "chosen": f" {word.upper()}", "rejected": f" {word} or so"}
        for i in range(5)
        for word in words
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(base: Path, data: Path, **changes: Any) -> FinetuneOptions:
    return FinetuneOptions(model=str(base), data=[str(data)], **{**SMALL, **changes})


def weights(folder: Path, full: bool) -> dict[str, np.ndarray]:
    name = "model.safetensors" if full else "adapter_model.safetensors"
    return {k: np.array(v) for k, v in TensorFile(folder / name).items()}


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_a_run_raises_the_margin_of_held_out_pairs_and_resumes_to_bit_identical_weights(
    tmp_path: Path, base: Path, data: Path, full: bool
) -> None:
    settings = options(base, data, full=full, dropout=0.1, lr=2e-3 if full else 1e-2)
    trainer = finetune.start(tmp_path / "whole", settings)
    before = trainer.evaluate()
    assert before is not None and before.record["val_margin"] == pytest.approx(0, abs=1e-4)
    outcome = trainer.run()
    assert outcome.validation_loss is not None and outcome.validation_loss < before.loss - 0.05
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    last = [record for record in log if "val_margin" in record][-1]
    assert last["val_margin"] > 0.1 and last["val_accuracy"] == 1
    assert {"loss", "margin", "accuracy"} <= set(log[1])

    run = tmp_path / "resumed"
    cut = finetune.start(run, settings)

    class Stop(onfoot.Callback):
        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            if step.step == 6:
                trainer.stop()

    cut.callbacks.append(Stop())
    cut.run()
    resumed, complaints = finetune.resume(run)
    assert resumed.state.step == 6 and complaints == []
    resumed.run()
    one, other = weights(tmp_path / "whole" / "last", full), weights(run / "last", full)
    assert set(one) == set(other)
    assert all((one[k] == other[k]).all() for k in one)


def test_the_reference_is_that_of_the_base_after_full_training_was_resumed(
    tmp_path: Path, base: Path, data: Path
) -> None:
    run = tmp_path / "run"
    first = finetune.start(run, options(base, data, full=True, steps=4))
    first.run()
    kept = first.source.train.reference
    (run / "reference.json").unlink()
    again, _ = finetune.resume(run, steps=6)
    assert (again.source.train.reference == kept).all()
    table = json.loads((run / "reference.json").read_text())
    (run / "reference.json").write_text(json.dumps({**table, "of": ["another", "base"]}))
    again.lock.release(force=True)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="belongs to another base model or to other data"):
        finetune.resume(run)


def test_a_runs_adapter_is_merged_as_any_other(tmp_path: Path, base: Path, data: Path) -> None:
    run = tmp_path / "run"
    finetune.start(run, options(base, data, steps=4)).run()
    model = onfoot.load(run)
    tokens = np.arange(12)[None]
    logits = model.logits(tokens)
    model.merge_adapter()
    assert_close(model.logits(tokens), logits, 1e-5)


def test_a_step_is_the_update_by_the_gradient_of_its_pairs(tmp_path: Path, base: Path, data: Path) -> None:
    settings = options(base, data, dtype="float64", clip=0.0, warmup=0, engine="numpy")
    trainer = finetune.start(tmp_path / "run", settings)
    model = trainer.model
    moved(model, 2)
    pairs = trainer.source.microbatches(0)
    assert len(pairs) == 6
    total: dict[str, Any] = {}

    def add(name: str, grad: np.ndarray) -> None:
        total[name] = total.get(name, 0) + grad

    for pair in pairs:
        pair_gradients(model, SeededPair(pair), 0.1, 0.0, 6, add)
    seen: dict[str, Any] = {}

    class See(onfoot.Callback):
        def on_gradient(self, trainer: onfoot.Trainer, grads: dict[str, Any]) -> None:
            seen.update({n: g.copy() for n, g in grads.items()})

    trainer.callbacks.append(See())
    loss, _, _, more = trainer.step(1e-3)
    assert set(seen) == set(total)
    for name in seen:
        assert_close(seen[name], total[name], 1e-12, name)
    assert loss > 0 and set(more) == {"margin", "accuracy"}


def test_every_pass_of_every_pair_has_its_own_dropout_seed(
    tmp_path: Path, base: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = finetune.start(tmp_path / "run", options(base, data, warmup=0, dropout=0.1))
    seen: list[int | None] = []

    def watched(model: Any, pair: SeededPair, *rest: Any) -> Any:
        seen.extend(pair.seeds)
        return pair_gradients(model, pair, *rest)

    monkeypatch.setattr(objective, "pair_gradients", watched)
    trainer.step(1e-3)
    assert len(seen) == len(set(seen)) == 12 and None not in seen


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_the_public_trainer_takes_pairs_and_trains_as_the_command_does(
    tmp_path: Path, base: Path, data: Path, full: bool
) -> None:
    given = {"dpo": True, "epochs": 1.0, "validation": 0.2, "dpo_beta": 0.3, "sample_tokens": 0, "quiet": True}
    command = finetune.start(tmp_path / "run", FinetuneOptions(model=str(base), data=[str(data)], full=full, **given))
    expected = [(step.loss, step.lr, step.more["margin"]) for step in command]
    assert len(expected) == 6 and expected[0][0] == pytest.approx(np.log(2)) and expected[-1][0] < expected[0][0]
    for mine in (data, [json.loads(line) for line in data.read_text().splitlines()]):  # a file, and the same as a list
        model = onfoot.load(base)
        if not full:
            model.add_lora()
        trainer = onfoot.Trainer(model, mine, onfoot.FinetuneOptions(**given))
        assert [(step.loss, step.lr, step.more["margin"]) for step in trainer] == expected
        assert trainer.validation_loss == command.validation_loss
        files = {"model": str(base), "data": [str(data)], "template": command.options.template}
        assert replace(trainer.options, **files) == command.options


def test_a_trainer_on_pairs_is_resumed_with_the_same_reference_or_refuses(
    tmp_path: Path, base: Path, data: Path
) -> None:
    settings = onfoot.FinetuneOptions(dpo=True, steps=4, lr=1e-2, sample_tokens=0, quiet=True)

    def trainer(model: Model, out: str) -> onfoot.Trainer:
        return onfoot.Trainer(model, data, settings, out=tmp_path / out)

    def adapted() -> Model:
        model = onfoot.load(base)
        model.add_lora(r=2)
        return model

    whole = [step.loss for step in trainer(adapted(), "whole")]
    cut = trainer(adapted(), "cut")
    assert [step.loss for step, _ in zip(cut, range(2), strict=False)] == whole[:2]
    checkpoint = cut.outcome.checkpoint
    model = onfoot.load(base)
    model.load_adapter(checkpoint)
    rest = trainer(model, "cut")
    rest.restore(checkpoint)
    assert [step.loss for step in rest] == whole[cut.state.step :]
    full = trainer(onfoot.load(base), "full")
    saved = full.run().checkpoint
    assert saved is not None
    with pytest.raises(ValueError, match="step-0000004 does not have the weights before preference tuning"):
        trainer(onfoot.load(saved), "full").restore(saved)


def test_what_is_not_pairs_and_pairs_without_dpo_are_refused_with_the_way_out(base: Path, data: Path) -> None:
    model, pairs = onfoot.load(base), onfoot.FinetuneOptions(dpo=True)
    for wrong, settings, said in (
        (
            data,
            onfoot.FinetuneOptions(),
            r"pairs.jsonl, line 1: a preference pair .*pass --dpo, or FinetuneOptions\(dpo",
        ),
        (data, None, r"pairs.jsonl, line 1: a preference pair .*pass --dpo, or FinetuneOptions\(dpo=True\)"),
        ([{"prompt": "a", "completion": "b"}], pairs, "pair 1: found the fields prompt, completion; expected"),
        (np.arange(500), pairs, "dpo=True needs files or a list of .*, got ndarray"),
        (onfoot.Source(), pairs, "dpo=True needs preference pairs, but Source is not a PreferenceSource"),
    ):
        with pytest.raises(ValueError, match=said):
            onfoot.Trainer(model, wrong, settings)


def test_a_source_of_ones_own_in_the_public_trainer(base: Path, data: Path) -> None:
    model = onfoot.load(base)
    assert model.tokenizer is not None
    pairs, _ = fit_pairs(read_preferences([data], model.tokenizer, ChatTemplate()), 48, "refuse")
    model.add_lora(r=2)
    source = PreferenceSource(Pairs(pairs[:20], 0), Pairs(pairs[20:], 0), batch_size=4)
    set_reference(model, source)
    settings = onfoot.TrainingOptions(steps=8, lr=1e-2, warmup=1, eval_every=4, sample_tokens=0, quiet=True)
    outcome = onfoot.Trainer(model, source, settings).run()
    assert outcome.validation_loss is not None and outcome.validation_loss < 0.68


# Data


def read(tmp_path: Path, *lines: Any) -> list[tuple[Example, Example]]:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_preferences([path], byte_tokenizer(), ChatTemplate())


def test_pairs_that_are_all_too_long_say_what_can_be_done(tmp_path: Path) -> None:
    pairs: Any = read(tmp_path, {"prompt": "ask", "chosen": "b", "rejected": "a long answer"})
    with pytest.raises(
        ValueError, match=r"max_length=6: the shortest has 16 tokens; shorten them, pass --on-long trunc"
    ):
        fit_pairs(pairs, 6, "skip")


def test_reference_log_probs_count_the_answers(tmp_path: Path) -> None:
    model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    made = Pairs(read(tmp_path, *({"prompt": "a", "chosen": "b", "rejected": c} for c in "cde")), 0)
    dpo.reference_log_probs(model, made, count := Count("answers", 6))
    assert str(count) == "6 of 6 answers"


def learned(example: Example) -> str:
    return byte_tokenizer().decode(example.ids[example.learn].tolist())


def test_only_the_answers_are_targets(tmp_path: Path) -> None:
    ask, earlier = {"role": "user", "content": "7+1?"}, {"role": "assistant", "content": "soon"}
    good, bad = {"role": "assistant", "content": "8"}, {"role": "assistant", "content": "seven"}
    pairs = read(
        tmp_path,
        {"prompt": "7+1=", "chosen": "8", "rejected": "seven"},
        {"prompt": [ask, earlier, ask], "chosen": [good], "rejected": [bad]},
        {"chosen": [ask, earlier, ask, good], "rejected": [ask, earlier, ask, bad]},
    )
    plain, explicit, implicit = pairs
    assert learned(plain[0]).startswith("8") and learned(plain[1]).startswith("seven")
    assert learned(explicit[0]).startswith("8") and learned(explicit[1]).startswith("seven")
    assert "soon" in byte_tokenizer().decode(explicit[0].ids.tolist())
    for one, other in zip(explicit, implicit, strict=True):
        assert (one.ids == other.ids).all() and (one.learn == other.learn).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "line 1: found the fields prompt, completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same, so there is nothing to prefer"),
        ({"chosen": "b", "rejected": "c"}, 'no "prompt", and'),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "must both be texts"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "user", "content": "b"}],
             "rejected": [{"role": "assistant", "content": "c"}]},
            "no assistant message after the prompt",
        ),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, line)


def test_long_pairs_are_refused_truncated_or_dropped_together(tmp_path: Path) -> None:
    pairs = read(
        tmp_path,
        {"prompt": "p", "chosen": "short", "rejected": "r"},
        {"prompt": "p", "chosen": "c", "rejected": "a very long answer"},
        {"prompt": "a prompt that is long", "chosen": "c", "rejected": "d"},
    )
    with pytest.raises(ValueError, match="exceed max_length=10"):
        fit_pairs(pairs, 10, "refuse")
    kept, report = fit_pairs(pairs, 10, "skip")
    assert len(kept) == 1 and report.splitlines()[1] == "2 longer than max_length=10: dropped"
    kept, report = fit_pairs(pairs, 10, "truncate")
    assert [len(e) for pair in kept for e in pair] == [6, 2, 2, 10]
    assert "1 longer than max_length=10: truncated" in report and "1 longer than max_length=10: dropped" in report


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dpo_beta": 0.0}, "dpo_beta must be > 0, got 0.0"),
        ({"dpo_smoothing": 0.5}, r"dpo_smoothing must be in \[0, 0.5\), got 0.5"),
        ({"dp_clip": 1.0, "dp_noise": 0.0}, "--dpo cannot be used with --dp-clip"),
        ({"keep_trajectory": 2}, "cannot replay a run with --dpo"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FinetuneOptions(model="m", data=["d"], dpo=True, **changes)


# The command line


def run_command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["finetune", *map(str, arguments)])


def test_the_command_trains_reports_and_resumes(tmp_path: Path, base: Path, data: Path) -> None:
    sizes = "--steps", 4, "--batch-size", 3, "--eval-every", 2, "--lr", 1e-2, "--warmup", 1, "--sample-tokens", 0
    more = "--dpo-beta", 0.5, "--ema", 0.5, "--lora-plus", 2, "--threads", 1
    done = run_command(base, "--data", data, "--dpo", "--out", tmp_path / "run", *sizes, *more)
    assert done.exit_code == 0, done.output
    assert "27 pairs for training, 3 for validation" in done.output
    assert "nats per pair (0.6931 is that of the reference)" in done.output and "perplexity" not in done.output
    assert re.search(r"step 4: validation loss 0\.\d+  margin 0\.\d+  accuracy \d+%", done.output)
    again = run_command("--resume", tmp_path / "run", "--steps", 6)
    assert again.exit_code == 0 and "step 6: validation loss" in again.output, again.output


def test_the_command_says_that_pairs_need_dpo(tmp_path: Path, base: Path, data: Path) -> None:
    done = run_command(base, "--data", data, "--out", tmp_path / "run")
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and 'a preference pair ("chosen" and "rejected"): pass --dpo' in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dpo-beta", 0.2], "--dpo-beta: only valid with --dpo"),
        (["--dpo", "--no-pack"], "--dpo cannot be used with --no-pack: each answer of a pair is a row of its own"),
        (["--dpo", "--pack"], "--dpo cannot be used with --pack: each answer"),
        (["--dpo", "--row-length", 40], "--dpo cannot be used with --row-length: each answer"),
        (["--dpo", "--dpo-smoothing", 0.7], "dpo_smoothing must be in [0, 0.5), got 0.7"),
    ],
)
def test_the_command_refuses_options_without_effect(arguments: list[Any], message: str) -> None:
    done = run_command("m", "--data", "d", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
