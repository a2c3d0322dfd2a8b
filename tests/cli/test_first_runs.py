"""What a first run of `onfoot train` and `onfoot finetune` needs: names, templates, sizes, and lines that fit."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.cli.aliases import ALIASES
from onfoot.cli.train import starting
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import finetune as finetune_runs
from onfoot.train import pretrain, runs
from onfoot.train.options import FinetuneOptions, TrainOptions
from onfoot.train.progress import fitting
from onfoot.train.start import Working, announce

SMALL = [
    "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--context", "24", "--batch-size", "2",
    "--eval-every", "4", "--eval-windows", "4", "--sample-tokens", "4",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def run(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 60)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    config = onfoot.GPT2Config(
        vocab_size=257, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=256, eos_token_id=256
    )
    model = onfoot.create(config)
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "base")
    return tmp_path / "base"


def data(folder: Path, *examples: dict[str, Any]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(examples[i % len(examples)]) + "\n" for i in range(12)))
    return path


# The chat template


def texts(base: Path, path: Path, out: Path, **options: Any) -> tuple[list[str], list[str]]:
    """The whole texts that a fine-tune trains on, and their learned parts."""
    chosen = FinetuneOptions(model=str(base), data=[str(path)], **options)
    trainer = finetune_runs.start(out, chosen)
    tokenizer, examples = trainer.model.tokenizer, trainer.source.train.examples
    whole = [tokenizer.backend.decode(e.ids.tolist(), skip_special_tokens=False) for e in examples]
    return whole, [tokenizer.decode(e.ids[e.learn].tolist()) for e in examples]


@pytest.mark.parametrize(
    ("example", "question"),
    [
        ({"prompt": "how?\n", "completion": " so."}, "how?"),
        ({"instruction": "how?", "output": "so."}, "how?"),
        ({"instruction": "how?", "input": "now", "output": "so."}, "how?\n\nnow"),
    ],
)
def test_prompts_go_through_the_models_template(
    base: Path, tmp_path: Path, example: dict[str, str], question: str
) -> None:
    (base / "chat_template.jinja").write_text(TEMPLATE)
    whole, learned = texts(base, data(tmp_path, example), tmp_path / "run")
    assert {w.split("<|")[0] for w in whole} == {f"[user] {question};[assistant] so.;"} and set(learned) == {"so.;"}


def test_without_a_template_of_its_own_or_with_the_switch_prompts_stay_as_they_are(base: Path, tmp_path: Path) -> None:
    path = data(tmp_path, {"prompt": "how?\n", "completion": " so."})
    plain, learned = texts(base, path, tmp_path / "plain")
    assert {w.split("<|")[0] for w in plain} == {"how?\n so."} and set(learned) == {" so."}
    recorded = json.loads((tmp_path / "plain" / "run.json").read_text())
    assert recorded["template"] is False  # also later, when the run's own folder has a template
    (base / "chat_template.jinja").write_text(TEMPLATE)
    assert texts(base, path, tmp_path / "switched", template=False)[0] == plain


@pytest.mark.parametrize("prompt", ["", "<|endoftext|>how?"])
def test_a_prompt_that_is_blank_or_formatted_already_stays_as_it_is(base: Path, tmp_path: Path, prompt: str) -> None:
    (base / "chat_template.jinja").write_text(TEMPLATE)
    path = data(tmp_path, {"prompt": prompt, "completion": "so."})
    assert (
        texts(base, path, tmp_path / "templated")[0] == texts(base, path, tmp_path / "as_they_are", template=False)[0]
    )


def test_the_printed_command_asks_a_real_question_in_the_way_of_the_training(base: Path, tmp_path: Path) -> None:
    path = data(tmp_path, {"prompt": "isn't it?", "completion": "so."})
    small = ("--steps", 2, "--sample-tokens", 0)
    plain = run("finetune", base, "--data", path, "--out", tmp_path / "plain", *small)
    assert next_command(plain)[-2:] == ["--prompt", "isn't it?"] and "--chat" not in next_command(plain)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    output = run("finetune", base, "--data", path, "--out", tmp_path / "run", *small)
    assert "12 prompts and completions are in the model's chat template" in output and "--no-template" in output
    command = next_command(output)
    assert command[:2] == ["onfoot", "generate"] and command[3:] == ["--chat", "--prompt", "isn't it?"]
    run(*command[1:], "--max-new-tokens", 2)
    assert ChatTemplate.find(base).source == TEMPLATE


def next_command(output: str) -> list[str]:
    """The words of the command after "next"."""
    return shlex.split(re.findall(r"^next +(.*)$", output, re.MULTILINE)[0])


# Names, lengths and sizes


@pytest.mark.parametrize("style", ["-", "_"])
def test_the_names_of_nanogpt_and_transformers_are_understood(
    style: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[TrainOptions] = []

    def start(folder: Path, options: Any) -> None:
        started.append(options)
        raise ValueError("started")

    monkeypatch.setattr(pretrain, "start", start)
    names = {"learning-rate": "0.5", "max-iters": "7", "block-size": "9", "gradient-accumulation-steps": "3"}
    typed = [f"--{name.replace('-', style)}={value}" for name, value in names.items()]
    run("train", *typed, "--per-device-train-batch-size", "5", "--weight_decay", "0.25", status=2)
    one = started[0]
    assert (one.lr, one.steps, one.context, one.accumulate, one.batch_size) == (0.5, 7, 9, 3, 5)
    assert one.weight_decay == 0.25


def test_every_other_name_stands_for_an_option_that_exists() -> None:
    pages = run("train", "--help") + run("finetune", "--help")
    assert [name for name in ALIASES.values() if f"--{name}" not in pages] == []
    assert "--max-iters" not in pages
    assert "No such option" in run("train", "--no-such-name", status=2)


def test_epochs_set_the_number_of_steps(text: Path, tmp_path: Path) -> None:
    output = run("train", text, "--out", tmp_path / "run", *SMALL, "--epochs", 0.5)
    options = TrainOptions.load(tmp_path / "run" / "run.json")
    windows = (int(len(text.read_text()) * 0.9) + 1) // 24
    assert abs(options.steps - 0.5 * windows / 2) <= 2 and options.epochs == 0.5
    assert f"{options.steps} steps of 2 rows, 0.5" in output
    assert "--epochs cannot be used with --steps" in run("train", text, "--epochs", 1, "--steps", 5, status=2)


def test_a_warmup_that_takes_the_whole_run_is_warned_of(text: Path, tmp_path: Path) -> None:
    output = run("train", text, "--out", tmp_path / "a", *SMALL, "--steps", 4, "--warmup", 4)
    assert "warning: the warmup of 4 steps is not less than the 4 steps of the run" in output
    output = run("train", text, "--out", tmp_path / "b", *SMALL, "--steps", 4, "--warmup", 3)
    assert output.count("warning") == 1
    assert "warning: the warmup of 3 steps takes more than half of the 4 steps of the run; pass --warmup 1" in output
    quiet = run("train", text, "--out", tmp_path / "q", *SMALL, "--steps", 4, "--warmup", 3, "--quiet")
    assert quiet.count("the warmup of 3") == 1
    assert "warning" not in run("train", text, "--out", tmp_path / "c", *SMALL, "--steps", 4, "--warmup", 2)
    assert TrainOptions(steps=200).warmup == 20 and TrainOptions(steps=3).warmup == 1


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], (64, 2, 8)),
        (["--n-kv-head", "1"], (64, 1, 8)),
        (["--n-inner", "40", "--head-dim", "6"], (40, 2, 6)),
    ],
)
def test_a_llama_is_trained_from_the_command_line(
    text: Path, tmp_path: Path, typed: list[str], expected: tuple[int, int, int]
) -> None:
    output = run(
        "train", text, "--out", tmp_path / "run", "--arch", "llama", *SMALL, "--steps", 12, "--lr", 0.01, *typed
    )
    config: Any = onfoot.load(tmp_path / "run").config
    assert config.model_type == "llama" and config.hidden_size == 16 and config.tie_word_embeddings
    assert (config.intermediate_size, config.n_kv_head, config.key_width) == expected
    losses = [float(x) for x in re.findall(r"validation loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] - 0.1


def test_the_inner_size_of_a_llama_has_the_weights_of_a_usual_mlp() -> None:
    assert [pretrain.swiglu_size(n) for n in (12, 48, 576, 4096)] == [32, 128, 1536, 10944]


def test_a_head_may_have_any_size(text: Path, tmp_path: Path) -> None:
    run("train", text, "--out", tmp_path / "run", *SMALL, "--steps", 1, "--head-dim", 5, "--arch", "gpt2")
    config: Any = onfoot.load(tmp_path / "run").config
    assert config.head_dim == 5 and config.n_embd == 16
    assert "needs --arch llama" in run("train", text, "--arch", "gpt2", "--n-kv-head", 1, status=2)
    assert "unknown arch 'rnn'; choose from gpt2, llama" in run("train", text, "--arch", "rnn", status=2)


# The start and the lines


@pytest.mark.parametrize("existing", ["", "a", "a/b"])
def test_a_failed_start_leaves_no_folder_behind(text: Path, tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    text.write_text("short")
    run("train", text, "--out", tmp_path / "a" / "b", status=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_start_says_what_it_does(text: Path, tmp_path: Path) -> None:
    bpe = ("--tokenizer", "bpe", "--vocab-size", 260)
    output = run("train", text, "--out", tmp_path / "run", *SMALL, "--steps", 1, *bpe)
    for line in ("training a BPE tokenizer of 260 tokens", "tokenizing the text", "creating the model"):
        assert f"{line}\n" in output
    assert "tokenizing" not in run("train", text, "--out", tmp_path / "quiet", *SMALL, "--steps", 1, "--quiet")


def test_what_takes_long_is_shown_with_its_count_unless_quiet(
    text: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[Any] = []
    begin = Working.begin

    def noted(self: Working, what: str, count: Any = None) -> None:
        counts.append((what.split()[0], count))
        begin(self, what, count)

    monkeypatch.setattr(Working, "begin", noted)
    output = run("train", text, "--out", tmp_path / "run", *SMALL, "--steps", 1)
    assert output.index("compressing the text with xz -9") < output.index("in bits per byte of the held-out text")
    size = text.stat().st_size
    assert {what: (count.done, count.total) for what, count in counts if count} == {"tokenizing": (size, size)}
    counts.clear()
    pairs = data(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"})
    tuned = ("--data", pairs, "--dpo", "--steps", 1, "--sample-tokens", 0)
    assert "computing the reference log-probabilities of 24 answers\n" in run(
        "finetune", base, *tuned, "--out", tmp_path / "tuned"
    )
    assert {what: str(count) for what, count in counts[2:] if count} == {
        "reading": "12 pairs", "computing": "24 of 24 answers",
    }  # fmt: skip
    counts.clear()
    assert "computing" not in run("finetune", base, *tuned, "--out", tmp_path / "quiet", "--quiet")
    assert "xz -9, to" not in run("train", text, "--out", tmp_path / "still", *SMALL, "--steps", 1, "--quiet")
    assert counts == []


def test_a_resumed_run_is_said_to_be_read_before_its_checkpoints_are(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("train", text, "--out", tmp_path / "run", *SMALL, "--steps", 1)
    said = list[str]()
    newest = runs.checkpoint_to_resume
    monkeypatch.setattr(Working, "begin", lambda self, what, count: said.append(what))
    monkeypatch.setattr(runs, "checkpoint_to_resume", lambda folder: (said.append("hashing"), newest(folder))[1])  # type: ignore[func-returns-value]
    run("train", "--resume", tmp_path / "run", "--steps", 2)
    assert said[:2] == [f"reading {tmp_path / 'run'}", "hashing"]


def test_other_ranks_than_the_first_show_nothing_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, said in ((1, ""), (0, "reading a book\n")):
        monkeypatch.setenv("PMI_RANK", str(rank))
        monkeypatch.setenv("PMI_SIZE", "2")
        with starting(quiet=False):
            announce("reading a book")
        assert capsys.readouterr().out == said


def test_the_start_of_a_fine_tune_says_what_it_does(base: Path, tmp_path: Path) -> None:
    path = data(tmp_path, {"prompt": "a", "completion": "b"})
    output = run("finetune", base, "--data", path, "--out", tmp_path / "run", "--steps", 1, "--sample-tokens", 0)
    first = [f"fine-tuning {base} on {path}", f"loading {base}", f"computing the fingerprint of {base}"]
    assert " ".join(output.split()).startswith(" ".join(first))


def test_the_progress_line_leaves_out_what_does_not_fit() -> None:
    figures = {"loss": "1.2345", "val": "1.3456", "lr": "1.00e-03", "norm": "0.50", "tokens/s": "12,345"}
    assert fitting(figures, 64) == "loss 1.2345  val 1.3456  lr 1.00e-03  norm 0.50  tokens/s 12,345"
    assert fitting(figures, 63) == "loss 1.2345  val 1.3456  lr 1.00e-03  tokens/s 12,345"
    assert fitting(figures, 40) == "loss 1.2345  val 1.3456  tokens/s 12,345"


def test_the_progress_line_fits_a_terminal_of_80_columns(text: Path, tmp_path: Path) -> None:
    arguments = ["train", str(text), "--out", str(tmp_path / "run"), *SMALL, "--steps", "120", "--eval-every", "40"]
    shown = at_80_columns([sys.executable, "-m", "onfoot", *arguments, "--engine", "numpy"])
    lines = [line for line in re.split(r"[\r\n]+", shown) if re.match(r"step +\d+/120", line)]
    with_val = [line for line in lines if " val " in line]
    assert with_val and max(map(len, lines)) <= 80
    for line in with_val:
        assert re.fullmatch(r"step +\d+/120 \S.*loss \d\.\d{4}  val \d\.\d{4}  .*tokens/s [\d,]+ [\d:-]+ *", line), line


def at_80_columns(command: list[str]) -> str:
    """What a program shows in a terminal of 80 columns, without colours and cursor movements."""
    here, there = pty.openpty()
    ioctl(there, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "CI")} | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdout=there, stderr=there, stdin=there, env=environment)
    os.close(there)
    out = b""
    while True:
        try:
            block = os.read(here, 4096)
        except OSError:  # the other side is closed
            break
        out += block
    process.wait(60)
    os.close(here)
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.decode())


def test_a_run_with_defaults_is_bitwise_the_same_when_resumed(base: Path, tmp_path: Path) -> None:
    path = data(tmp_path, {"prompt": "a?", "completion": "b"}, {"prompt": "c?", "completion": "dd"})
    options = FinetuneOptions(model=str(base), data=[str(path)], sample_tokens=0, quiet=True)
    whole = finetune_runs.start(tmp_path / "whole", options)
    whole.run()
    for step in finetune_runs.start(tmp_path / "cut", options):
        if step.step == 30:
            break
    resumed, _ = finetune_runs.resume(tmp_path / "cut")
    assert resumed.run().state.step == whole.options.steps > 30
    for name in whole.model.trainable:
        np.testing.assert_array_equal(whole.model.params[name], resumed.model.params[name])
