"""Every number that `onfoot info` and `onfoot merge` print, counted here from the files themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from info_output import info, row
from safetensors.numpy import load_file
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.cli import info_memory as memory_command
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.memory import Job, advice, plan

CONFIG = onfoot.GPT2Config(
    vocab_size=300, n_positions=51234, n_embd=24, n_layer=3, n_head=4, n_inner=37, head_dim=5, qk_head_dim=7,
    tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("info") / "model"
    model = onfoot.create(CONFIG)
    model.tokenizer = byte_tokenizer()
    model.save(path)
    return path


def test_the_numbers_of_a_model_are_those_of_its_files(folder: Path) -> None:
    output, tensors = info(folder), load_file(folder / "model.safetensors")
    n = sum(t.size for t in tensors.values())
    assert row(output, "parameters") == f"{n:,}"
    assert row(output, "blocks") == "3"
    assert row(output, "hidden size") == "24"
    assert row(output, "heads") == "4 of size 5"
    assert row(output, "positions") == "51,234"
    assert row(output, "vocabulary") == "300"
    assert row(output, "tensors") == f"{len(tensors)}, F32, {n:,} elements"
    assert row(output, "tokenizer").startswith("257 tokens")
    assert row(output, "MLP hidden size") == "37, gelu_new"
    per_token = 3 * 4 * (7 + 5)
    mebibytes = f"{per_token * 51234 * 4 / 2**20:,.1f} MiB"
    assert row(output, "KV cache").startswith(f"{per_token:,} elements") and mebibytes in row(output, "KV cache")


def test_tensors_are_listed_with_their_shapes(folder: Path) -> None:
    output = info(folder, "--tensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert re.search(rf"^{re.escape(name)} +{' × '.join(map(str, tensor.shape))} +F32$", output, re.MULTILINE)


def test_the_numbers_of_an_adapter_are_those_of_its_files(folder: Path, tmp_path: Path) -> None:
    model = onfoot.load(folder)
    model.add_lora(r=3, alpha=12, targets=["c_fc", "mlp.c_proj"])
    for name in model.trainable:
        model.params[name] = np.random.default_rng(0).normal(0, 0.1, model.params[name].shape).astype(np.float32)
    model.save_adapter(tmp_path / "adapter")
    output = info(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    n = sum(t.size for t in tensors.values())
    assert n == 3 * 2 * 3 * (24 + 37)
    assert row(output, "rank, alpha") in ("3, 12", "3, 12.0")
    assert row(output, "layers") == "6"
    assert row(output, "parameters") == f"{n:,}"
    typed = ["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "merged")]
    merged = CliRunner().invoke(app, typed)
    total = sum(t.size for t in load_file(tmp_path / "merged" / "model.safetensors").values())
    assert merged.exit_code == 0 and f"{total:,} parameters" in merged.output


def test_the_numbers_of_a_run_are_those_of_its_log(tmp_path: Path) -> None:
    from onfoot.train import pretrain
    from onfoot.train.options import TrainOptions

    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    options = TrainOptions(
        texts=[str(tmp_path / "text.txt")], n_layer=1, n_head=1, n_embd=8, context=16, batch_size=2, steps=6,
        eval_every=2, save_every=2, eval_windows=2, sample_tokens=0, warmup=1,
    )  # fmt: skip
    run_folder = tmp_path / "run"
    pretrain.start(run_folder, options).run()
    output = info(run_folder)
    assert row(output, "steps") == "6 of 6" and "--resume" not in output
    log = run_folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for step, loss in ((2, 3.5), (4, 1.25), (6, 2.75)):  # the best is neither the first nor the last
        (one,) = [r for r in lines if r.get("step") == step and "val_loss" in r]
        one["val_loss"] = loss
    lines = [r for r in lines if not ("loss" in r and r["step"] in (1, 6))]  # the last that is logged is 5
    log.write_text("".join(json.dumps(r) + "\n" for r in lines))
    output = info(run_folder)
    assert row(output, "validation loss") == "2.7500, best 1.2500 at step 4"
    assert row(output, "steps") == "5 of 6" and f"--resume {run_folder}" in output.replace("\n", "")


def test_memory_is_shown_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = onfoot.preset("gpt2")
    jobs = {
        (): Job(gpt2, 12, 1024),
        ("--batch-size", 4, "--tokens", 256): Job(gpt2, 4, 256),
        ("--batch-size", 1, "--tokens", 64): Job(gpt2, 1, 64),
        ("--batch-size", 1, "--tokens", 64, "--clip", 0): Job(gpt2, 1, 64, clip=False),
        ("--recompute", "block"): Job(gpt2, 12, 1024, recompute=True),
        ("--lora", 8): Job(gpt2, 12, 1024, lora=8),
        ("--lora", 8, "--quantized"): Job(gpt2, 12, 1024, lora=8, quantized=True),
    }
    assert len({plan(job) for job in jobs.values()}) == len(jobs)  # every option makes a difference
    for typed, job in jobs.items():
        output, planned = info("gpt2", "--memory", *typed), plan(job)
        assert f"{job.batch} × {job.tokens} tokens" in output
        numbers = {
            "weights": planned.weights, "AdamW moments": planned.moments,
            "activations and workspace": planned.arena, "gradients at the peak": planned.gradients,
            "Python and the kernels": planned.program, "peak": planned.peak,
        }  # fmt: skip
        for name, size in numbers.items():
            assert row(output, name) == f"{size / 1e6:,.0f}", (typed, name)
    for options, said in (
        (("--batch-size", 0), "--batch-size and --tokens must be >= 1, --lora and --clip >= 0"),
        (("--batch-size", 1, "--tokens", 0), "--batch-size and --tokens must be >= 1"),
        (("--batch-size", 1, "--lora", -1), "--lora and --clip >= 0"),
        (("--batch-size", 1, "--tokens", 1025), "--tokens 1025 exceeds n_positions=1024"),
    ):
        refused = CliRunner().invoke(app, ["info", "gpt2", "--memory", *map(str, options)])
        assert refused.exit_code == 2 and said in refused.stderr


def test_what_does_not_fit_is_reported_with_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(onfoot.preset("gpt2"), 12, 1024)
    peak = plan(job).peak
    sizes = sorted(size for _, size in advice(job, peak))
    for there, fits in ((int(peak / 0.89), True), (int(peak / 0.91), False), (int(sizes[1] / 0.95), False)):
        monkeypatch.setattr(memory_command, "machine_memory", lambda there=there: there)
        output = info("gpt2", "--memory")
        assert f"{there / 1e9:,.1f} GB" in output
        assert ("it fits" in output) == fits
        for text, size in advice(job, peak):
            assert (text in output) == (not fits and size < int(0.9 * there)), (there, text)
