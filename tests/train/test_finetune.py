"""Fine-tuning runs: LoRA and full, resumed, opened by PEFT, and rejected options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import onfoot
from onfoot.formats.run_folder import model_folder
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import finetune
from onfoot.train.options import FinetuneOptions
from oracles import assert_close

SMALL: dict[str, Any] = {
    "steps": 12, "batch_size": 2, "accumulate": 2, "r": 2, "lr": 1e-2, "warmup": 2, "eval_every": 4, "save_every": 3,
    "keep": 9, "sample_tokens": 3,
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
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{i} and one:", "completion": f" {i + 1}"} for i in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(base: Path, data: Path, **changes: Any) -> FinetuneOptions:
    return FinetuneOptions(model=str(base), data=[str(data)], **{**SMALL, **changes})


def tensors(folder: Path, name: str) -> dict[str, np.ndarray]:
    return {k: np.array(v) for k, v in TensorFile(folder / name).items()}


@pytest.mark.parametrize("targets", ["", "c_attn.q,c_attn.v", "full"])
def test_a_run_learns_and_resumes_to_bit_identical_weights(
    tmp_path: Path, base: Path, data: Path, targets: str
) -> None:
    full = targets == "full"
    chosen = "" if full else targets
    settings = options(base, data, full=full, targets=chosen, dropout=0.1, lora_dropout=0.0 if full else 0.2)
    outcome = finetune.start(tmp_path / "whole", settings).run()
    assert outcome.validation_loss is not None
    plain = onfoot.load(base)
    batches = list(finetune.start(tmp_path / "other", settings).source.validation())
    n = sum(int((b.targets != -100).sum()) for b in batches)
    before = sum(plain.loss(b.tokens, b.targets, divisor=n, segments=b.segments) for b in batches)
    assert outcome.validation_loss < before - 0.1
    run = tmp_path / "resumed"
    cut = finetune.start(run, settings)
    step, stop_at = cut.step, 6

    def stopping(lr: float) -> Any:
        if cut.state.step == stop_at:
            raise KeyboardInterrupt
        return step(lr)

    cut.step = stopping  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    resumed, complaints = finetune.resume(run)
    assert resumed.state.step == 6 and complaints == []
    resumed.run()
    name = "model.safetensors" if full else "adapter_model.safetensors"
    one, other = tensors(tmp_path / "whole" / "last", name), tensors(run / "last", name)
    assert set(one) == set(other)
    assert all((one[k] == other[k]).all() for k in one)


def test_the_dropout_option_overrides_the_models_configuration(tmp_path: Path, base: Path, data: Path) -> None:
    trainer = finetune.start(tmp_path / "run", options(base, data, dropout=0.3))
    assert trainer.model.config.resid_pdrop == 0.3
    seeds = [trainer.dropout_seed(0), trainer.dropout_seed(1)]
    trainer.state.step += 1
    assert len({*seeds, trainer.dropout_seed(0)}) == 3  # another pattern in every microbatch of every step


def test_full_fine_tuning_keeps_the_chat_template(tmp_path: Path, base: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }};{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    (base / "chat_template.jinja").write_text(template)
    chats = tmp_path / "chats.jsonl"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chats.write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(6)))
    run = tmp_path / "run"
    trainer = finetune.start(run, options(base, chats, full=True, steps=4))
    before = trainer.source.microbatches(0)[0].tokens
    trainer.run()
    resumed, _ = finetune.resume(run)
    assert (resumed.source.microbatches(0)[0].tokens == before).all()
    assert (run / "best" / "chat_template.jinja").read_text() == template


def test_an_adapter_is_not_a_base(tmp_path: Path, base: Path, data: Path) -> None:
    finetune.start(tmp_path / "first", options(base, data)).run()
    for full in (False, True):
        with pytest.raises(ValueError, match="is an adapter; merge it into its base model first with: onfoot merge"):
            finetune.start(tmp_path / "second", options(tmp_path / "first", data, full=full))


def test_a_runs_adapter_opens_in_peft_and_merged_in_transformers(tmp_path: Path, base: Path, data: Path) -> None:
    run = tmp_path / "run"
    finetune.start(run, options(base, data, targets="c_attn, c_fc")).run()
    tokens = np.random.default_rng(0).integers(0, 256, (2, 12))
    model = onfoot.load(run)  # brings its base along
    logits = model.logits(tokens)
    assert np.abs(logits - onfoot.load(base).logits(tokens)).max() > 1e-3
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), model_folder(run))
    assert np.abs(theirs(torch.tensor(tokens)).logits.detach().numpy() - logits).max() <= 1e-4
    model.merge_adapter()
    model.save(tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert np.abs(theirs(torch.tensor(tokens)).logits.detach().numpy() - logits).max() <= 1e-4


def test_the_gradient_of_a_packed_step_is_the_sum_of_its_examples(tmp_path: Path, base: Path, data: Path) -> None:
    trainer = finetune.start(tmp_path / "run", options(base, data, dtype="float64"))
    model = trainer.model
    rng = np.random.default_rng(0)
    for name in model.trainable:
        model.params[name] += rng.normal(0, 0.3, model.params[name].shape)
    batch = trainer.source.microbatches(0)[0]
    assert batch.segments is not None and batch.segments.max() > 0  # several examples in a row
    n = int((batch.targets != -100).sum())
    loss, grads = model.loss_and_grads(batch.tokens, batch.targets, divisor=n, segments=batch.segments)
    total, sums = 0.0, dict[str, Any]()
    for row in range(len(batch.tokens)):
        for number in np.unique(batch.segments[row]):
            part = batch.segments[row] == number
            targets = batch.targets[row, part][None]
            if (targets != -100).any():
                one, one_grads = model.loss_and_grads(batch.tokens[row, part][None], targets, divisor=n)
                total += one
                sums = {k: sums.get(k, 0) + g for k, g in one_grads.items()}
    assert total == pytest.approx(loss, rel=1e-12)
    for name, grad in grads.items():
        assert_close(sums[name], grad, 1e-12, name)


def test_a_run_whose_data_has_changed_is_not_resumed(tmp_path: Path, base: Path, data: Path) -> None:
    finetune.start(tmp_path / "run", options(base, data))
    data.write_text(data.read_text().replace("and one", "plus one"))
    with pytest.raises(ValueError, match="has changed since the run started"):
        finetune.resume(tmp_path / "run")


def test_steps_are_counted_from_the_epochs_and_kept_with_the_run(tmp_path: Path, base: Path, data: Path) -> None:
    trainer = finetune.start(tmp_path / "run", options(base, data, steps=0, epochs=2.0))
    rows = trainer.source.rows  # type: ignore[attr-defined]
    assert trainer.options.steps == -(-2 * rows // 4)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["steps"] == trainer.options.steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r must be in 1 ... 16 for .*, got 0"),
        ({"r": 17}, "r must be in 1 ... 16 for .*, got 17"),
        ({"targets": "q_proj"}, "no layer matches 'q_proj'"),
        ({"max_length": 100}, "max_length=100 exceeds n_positions=48"),
        ({"max_length": 8}, "data.jsonl"),
        ({"model": "missing"}, "missing is not a folder"),
        ({"data": ["missing.jsonl"]}, "missing.jsonl"),
    ],
    ids=str,
)
def test_a_run_that_cannot_begin_leaves_nothing_behind(
    tmp_path: Path, base: Path, data: Path, changes: dict[str, Any], message: str
) -> None:
    settings = FinetuneOptions(**{"model": str(base), "data": [str(data)], **SMALL, **changes})
    with pytest.raises(ValueError, match=message):
        finetune.start(tmp_path / "run", settings)
    assert not (tmp_path / "run").exists()


def test_options_that_make_no_sense_are_refused(tmp_path: Path, base: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="no data: pass --data FILE"):
        finetune.start(tmp_path / "run", FinetuneOptions(model=str(base)))
    assert not (tmp_path / "run").exists()
    for changes, message in (
        ({"epochs": -1.0}, "epochs must be >= 0 and <= 1,000,000, got -1.0"),
        ({"epochs": float("inf"), "steps": 0}, "epochs must be finite, got inf"),
        ({"batch_size": -1, "steps": 0}, "batch_size must be >= 0, got -1"),
        ({"seed": -1, "steps": 0}, "seed must be >= 0, got -1"),
        ({"validation": 0.0}, "validation must be in .*, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            FinetuneOptions(**{"model": str(base), "data": [str(data)], **SMALL, **changes})
    finetune.start(tmp_path / "run", options(base, data))
    from onfoot.train import pretrain

    with pytest.raises(ValueError, match="is a run of onfoot finetune; resume it with that command"):
        pretrain.resume(tmp_path / "run")
