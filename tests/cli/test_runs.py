"""`onfoot train`, `finetune`, `generate`, `merge` and `info` as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.train.log import Log

SMALL = [
    "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--context", "24", "--batch-size", "2", "--steps", "8",
    "--eval-every", "4", "--save-every", "4", "--eval-windows", "4", "--sample-tokens", "4", "--warmup", "1",
]  # fmt: skip


def run(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, data for fine-tuning, and a trained run."""
    path = tmp_path_factory.mktemp("cli")
    (path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    lines = [{"prompt": f"{i}:", "completion": f" {i + 1}"} for i in range(12)]
    (path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = run("train", path / "text.txt", "--out", path / "run", *SMALL)
    assert "validation loss" in output and "\nsample:" in output
    assert "a bigram model fitted on the training text has" in output
    assert f"onfoot generate {path / 'run'}" in output.replace("\n", " ")
    return path


def test_greedy_generation_is_the_same_every_time(folder: Path) -> None:
    first = run("generate", folder / "run", "--prompt", "to be", "--max-new-tokens", 10, "--temperature", 0)
    assert first.startswith("to be") and first == run(
        "generate", folder / "run" / "best", "--prompt", "to be", "--max-new-tokens", 10, "--temperature", 0
    )


@pytest.mark.parametrize("seed", [0, 7])
def test_generated_text_is_that_of_the_model_with_the_same_settings(folder: Path, seed: int) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.7, "top_k": 20, "seed": seed}
    typed = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    model = onfoot.load(folder / "run")
    assert model.tokenizer is not None

    def expected(*texts: str, **more: Any) -> list[str]:
        prompts = [np.asarray(model.tokenizer.encode(text)) for text in texts]
        return [model.tokenizer.decode(ids.tolist()) for ids in model.generate(prompts, **{**settings, **more})]

    whole = run("generate", folder / "run", "--prompt", "to be", *typed)
    assert whole == expected("to be")[0] + "\n"
    assert whole != run("generate", folder / "run", "--prompt", "to be", *typed[:-1], seed + 1)
    new = whole[len("to be") : -1]
    stop = next(c for c in new if c.isascii() and c.isprintable())
    cut = run("generate", folder / "run", "--prompt", "to be", *typed, "--stop", stop)
    assert cut == expected("to be", stop=[stop])[0] + "\n" == f"to be{new[: new.index(stop) + 1]}\n"
    two = run("generate", folder / "run", "--prompt", "to be", "--prompt", "or", *typed, "--stop", stop)
    first, second = expected("to be", "or", stop=[stop])
    assert two == f"--- 1 ---\n{first}\n--- 2 ---\n{second}\n"


def test_several_prompts_give_several_texts(folder: Path) -> None:
    output = run("generate", folder / "run", "--prompt", "to", "--prompt", "question", "--max-new-tokens", 5)
    assert "--- 1 ---" in output and "--- 2 ---" in output and "question" in output


def test_sliding_goes_beyond_the_context(folder: Path) -> None:
    output = run(
        "generate", folder / "run", "--prompt", "to be", "--max-new-tokens", 100, "--slide", "--temperature", 0
    )
    assert len(output) > 60  # bytes that make no character are not shown


def test_info_shows_runs_and_models(folder: Path) -> None:
    output = run("info", folder / "run", "--tensors")
    assert "8 of 8" in output and "step 8, valid" in output and "model.layers.0.self_attn.v_proj.weight" in output
    assert "257 tokens" in output


def test_info_on_a_run_before_its_first_checkpoint_says_so(folder: Path, tmp_path: Path) -> None:
    from onfoot.train import pretrain
    from onfoot.train.options import TrainOptions

    pretrain.start(tmp_path / "new", TrainOptions(texts=[str(folder / "text.txt")], context=24, steps=8))
    output = run("info", tmp_path / "new").replace("\n", " ")
    assert "0 of 8" in output and "no checkpoint yet" in output and "onfoot train --resume" in output


def test_attribution_of_a_trained_model_names_its_tokens(folder: Path) -> None:
    output = run("attribute", folder / "run", "--text", "to be", "--top", 2)
    assert "'t'" in output and "actual change of the loss" in output


def test_finetune_merge_and_generate_agree(folder: Path) -> None:
    tuned = folder / "tuned"
    output = run("finetune", folder / "run", "--data", folder / "chats.jsonl", "--out", tuned, "--r", 2, "--epochs", 1)
    assert "12 of 12 examples" in output and "adapter" in output and "onfoot merge" in output
    assert "LoRA adapter" in run("info", tuned)
    ask = ("--prompt", "3:", "--max-new-tokens", 6, "--temperature", 0)
    with_adapter = run("generate", folder / "run", "--adapter", tuned, *ask)
    assert with_adapter == run("generate", tuned, *ask)
    run("merge", folder / "run", "--adapter", tuned, "--out", folder / "merged")
    assert run("generate", folder / "merged", *ask) == with_adapter
    assert "is complete" in run("finetune", "--resume", tuned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.txt"], "missing.txt does not exist"),
        (["train", "{folder}/empty.txt"], "empty.txt is empty"),
        (["train", "{folder}/latin1.txt"], "latin1.txt is not valid UTF-8"),
        (["train", "{folder}/short.txt"], "less than one window"),
        (
            ["train", "{folder}/text.txt", "--init", "{folder}/run", "--n-embd", "32", "--tokenizer", "char"],
            "--init cannot be used with --n-embd, --tokenizer: {folder}/run has its own configuration and tokenizer",
        ),
        (
            ["train", "{folder}/text.txt", "--tokenizer", "byte", "--vocab-size", "300"],
            "--tokenizer byte cannot be used with --vocab-size",
        ),
        (
            ["finetune", "{folder}/run", "--data", "{folder}/chats.jsonl", "--full", "--r", "8", "--alpha", "8"],
            "--full cannot be used with --r, --alpha: full fine-tuning has no LoRA layers",
        ),
        (
            ["finetune", "{folder}/run", "--data", "{folder}/chats.jsonl", "--full", "--use-rslora"],
            "--full cannot be used with --use-rslora",
        ),
        (
            ["finetune", "{folder}/run", "--data", "{folder}/chats.jsonl", "--steps", "5", "--epochs", "2"],
            "--steps cannot be used with --epochs: both set the length of the run",
        ),
        (
            [
                "finetune",
                "{folder}/run",
                "--data",
                "{folder}/chats.jsonl",
                "--validation-data",
                "{folder}/chats.jsonl",
                "--validation",
                "0.2",
            ],
            "--validation-data cannot be used with --validation",
        ),
        (
            ["attribute", "{folder}/run", "--text", "to be", "--n-layer", "2", "--seed", "1"],
            "MODEL cannot be used with --n-layer, --seed: {folder}/run has its own configuration and weights",
        ),
        (["generate", "{folder}/run", "--chat", "--tokens", "1 2"], "--chat cannot be used with --tokens"),
        (["generate", "{folder}/run", "--chat", "--slide"], "--chat cannot be used with --slide"),
        (["train", "--resume", "{folder}"], "it has no run.json"),
        (["train", "--resume", "{folder}/run", "--n-embd", "9"], "--n-embd cannot change"),
        (["train", "--resume", "{folder}/run", "--steps", "3"], "--steps 3 is less than the 8 steps that are done"),
        (["train", "{folder}/text.txt", "--out", "{folder}/run"], "already contains a run"),
        (["train", "{folder}/text.txt", "--n-embd", "15"], "n_embd=15 is not divisible by n_head=4"),
        (["train", "{folder}/text.txt", "--tokenizer", "words"], "built-in tokenizers: byte, char, bpe"),
        (["generate", "{folder}"], "it has no config.json"),
        (["generate", "missing"], "missing is not a folder"),
        (["generate", "{folder}/run", "--prompt", ""], "an empty prompt has no tokens"),
        (["generate", "{folder}/run", "--prompt", "x" * 40], "a sequence of 40 tokens exceeds n_positions=24"),
        (
            ["generate", "{folder}/run", "--prompt", "to", "--max-new-tokens", "99"],
            "at most 22 new tokens, or use slide",
        ),
        (["generate", "{folder}/run", "--prompt", "to", "--top-p", "3"], "top_p must be in (0, 1] or None, got 3.0"),
        (["generate", "{folder}/run", "--tokens", "1 999"], "token id 999 is outside 0 ... 256"),
        (["generate", "{folder}/run", "--adapter", "{folder}"], "it has no adapter_config.json"),
        (["generate", "{folder}/run", "--prompt", "to", "--max-new-tokens", "0"], "max_new_tokens must be >= 1, got 0"),
        (["generate", "{folder}/run", "--prompt", "to", "--tokens", "1"], "give only one of --prompt and --tokens"),
        (["generate", "{folder}/run", "--prompt", "to", "--stop", ""], "--stop must not be empty"),
        (["generate", "{folder}/run", "--prompt-file", "{folder}/latin1.txt"], "latin1.txt is not valid UTF-8"),
        (["generate", "{folder}/run", "--tokens", "9" * 30], "is too large for a token id"),
        (["info", "{folder}"], "it has no config.json"),
        (["bench", "nothing"], "unknown job 'nothing'; choose from full-4x256"),
        (["finetune", "{folder}/run"], "no data"),
        (["finetune", "--data", "x.jsonl"], "no model: give one, as in onfoot finetune MODEL"),
        (["finetune", "{folder}/run", "--data", "{folder}/bad.jsonl"], "bad.jsonl, line 2"),
        (["finetune", "{folder}/run", "--data", "{folder}/chats.jsonl", "--r", "0"], "r must be in 1 ... 16 for"),
        (["merge", "{folder}/run", "--out", "{folder}/nowhere"], "is not an adapter; give one with --adapter"),
        (["merge", "{folder}/run", "--out", "{folder}"], "is not empty"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else a,
)
def test_bad_input_is_one_clear_line_and_status_2(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    (folder / "empty.txt").write_text("")
    (folder / "latin1.txt").write_bytes("straße".encode("latin1") * 900)
    (folder / "short.txt").write_text("too short")
    (folder / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    monkeypatch.chdir(tmp_path)
    before = sorted(folder.rglob("*"))
    result = CliRunner().invoke(app, [a.replace("{folder}", str(folder)) for a in arguments])
    assert result.exit_code == 2
    assert message.replace("{folder}", str(folder)) in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert sorted(folder.rglob("*")) == before  # no file removed or added
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_compatible_options_are_accepted(folder: Path, tmp_path: Path) -> None:
    small = ["--steps", 2, "--eval-every", 2, "--context", 24, "--batch-size", 2, "--sample-tokens", 0]
    run("train", folder / "text.txt", "--init", folder / "run", "--out", tmp_path / "further", *small)
    run("train", folder / "text.txt", "--tokenizer", "bpe", "--vocab-size", 270, "--out", tmp_path / "bpe", *small)
    data = ["finetune", folder / "run", "--data", folder / "chats.jsonl"]
    run(*data, "--out", tmp_path / "all", "--full", "--steps", 0, "--epochs", 1)  # 0 steps: as many as epochs make
    assert all((tmp_path / name / "last" / "model.safetensors").is_file() for name in ("further", "bpe", "all"))


def test_ctrl_c_saves_and_prints_how_to_resume(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    arguments = ["train", str(text), "--out", str(tmp_path / "run"), *SMALL, "--steps", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "onfoot", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = Log(tmp_path / "run" / "log.jsonl")
    deadline = time.monotonic() + 600  # generous, for a slow machine
    while len(log.read()) < 3 and process.poll() is None:
        assert time.monotonic() < deadline, process.kill()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "stopped and saved at step" in output
    assert f"onfoot train --resume {tmp_path / 'run'}" in output
    assert (tmp_path / "run" / "last" / "model.safetensors").is_file()
