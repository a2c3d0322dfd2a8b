"""`onfoot train`, `finetune` and `eval` on data as it comes: any text, standard input, tables, bad records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.data.sft_examples import read_examples
from onfoot.formats.chat import ChatTemplate
from onfoot.train import pretrain
from onfoot.train.options import TrainOptions

TINY = [
    "--n-layer", "1", "--n-head", "2", "--n-embd", "8", "--context", "12", "--batch-size", "2", "--steps", "2",
    "--eval-every", "2", "--sample-tokens", "0", "--warmup", "1", "--quiet",
]  # fmt: skip
TUNE = ["--steps", "2", "--eval-every", "2", "--sample-tokens", "0", "--warmup", "1", "--quiet", "--r", "2"]
TEXT = "to be or not to be, that is the question.\n" * 20
TEXTS = [{"text": f"{i}: to be or not to be, that is the question"} for i in range(30)]


def run(*arguments: Any, status: int = 0, stdin: bytes | None = None) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    (path / "text.md").write_text(TEXT)
    run("train", path / "text.md", "--out", path / "run", *TINY, "--context", "64")
    return path / "run"


def tokens_of(folder: Path) -> list[int]:
    return pretrain.corpus.open_tokens(folder / "data").tolist()


def test_standard_input_is_trained_on_and_kept_for_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    run("train", tmp_path / "text.txt", "--out", tmp_path / "file", *TINY)
    output = run("train", "-", "--out", tmp_path / "piped", *TINY, stdin=TEXT.encode())
    assert "1 document from standard input" in output
    assert tokens_of(tmp_path / "piped") == tokens_of(tmp_path / "file")
    assert (tmp_path / "piped" / "stdin.txt").read_text() == TEXT
    resumed = run("train", "--resume", tmp_path / "piped", "--steps", 4, stdin=b"something else")
    assert "resuming" in resumed and "1 document from standard input" in resumed


@pytest.mark.parametrize(
    ("given", "said"),
    [(b"", "standard input is empty"), (b"%PDF-1.7 x", "standard input is a PDF file, not UTF-8 text")],
)
def test_standard_input_that_cannot_be_trained_on_is_named_as_such(given: bytes, said: str, tmp_path: Path) -> None:
    output = run("train", "-", "--out", tmp_path / "run", *TINY, "--no-quiet", stdin=given, status=2)
    assert "reading standard input" in output and said in " ".join(output.split())
    assert not (tmp_path / "run").exists()


def test_examples_given_as_text_are_led_to_the_right_command(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    output = " ".join(run("train", path, "--out", tmp_path / "run", *TINY, status=2).split())
    assert "examples are for onfoot finetune MODEL --data FILE" in output
    output = " ".join(run("train", path, "--out", tmp_path / "run", *TINY, "--skip-bad", status=2).split())
    assert "no text is left: 40 bad records skipped, the first: " in output and "onfoot finetune" in output


def test_less_than_one_step_of_a_pass_is_one_step(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    run("train", tmp_path / "text.txt", "--out", tmp_path / "run", "--epochs", "1e-9", "--n-embd", 16,
        "--n-layer", 1, "--n-head", 1, "--context", 16, "--sample-tokens", 0, "--tokenizer", "byte")  # fmt: skip
    assert TrainOptions.load(tmp_path / "run" / "run.json").steps == 1


def test_an_interrupted_start_does_not_read_standard_input_again(tmp_path: Path) -> None:
    (tmp_path / "stdin.txt").write_text(TEXT)
    (text,) = pretrain.find_texts(TrainOptions(texts=["-"]), tmp_path)
    assert "".join(pretrain.corpus.all_pieces([text])) == TEXT


@pytest.mark.parametrize("name", ["notes.md", "code.py", "README", "table.csv", "table.parquet", "list.json", "saved"])
def test_text_of_any_kind_is_trained_on(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "saved":
        Dataset.from_list(TEXTS).save_to_disk(path)
    elif name == "table.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEXTS), path)
    elif name == "list.json":
        path.write_text(json.dumps(TEXTS))
    else:
        lines = [f'"{value["text"]}"' for value in TEXTS]
        path.write_text("\n".join(["text", *lines]))
    output = run("train", path, "--out", tmp_path / "run", *TINY)
    n = 30 if name in ("table.csv", "table.parquet", "list.json", "saved") else 1
    assert f"{n} document{'s' * (n > 1)} from {path}" in output.replace("\n", "")
    assert tokens_of(tmp_path / "run").count(256) == (30 if n > 1 else 0)  # EOS after each document of several


def test_a_folder_says_what_was_read(tmp_path: Path) -> None:
    for name in ("a.md", "b.md", "c.txt", "d.png"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(TEXT)
    assert "3 documents from 3 files (2 .md, 1 .txt)" in run("train", tmp_path / "in", "--out", tmp_path / "run", *TINY)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x7fELF\0", "a.bin is a binary file"),
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"good" * 99 + b"\xff", "not valid UTF-8"),
        ("a.csv", b"title,body\n1,2\n", 'line 2: the field "text" is missing or not a string; it has the fields title'),
        ("a.jsonl", b'{"text": "x"}\n{"text": 5}\n', 'line 2: the field "text" is missing'),
        ("a.jsonl", b'{"prompt": "x", "completion": "y"}\n', 'line 1: the field "text" is missing'),
        ("a.parquet", b"PAR1", "a.parquet cannot be read"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_failed_start_leaves_nothing_behind(
    tmp_path: Path, name: str, content: bytes, message: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in ([], ["--out", "new/deep/run"]):
        output = run("train", tmp_path / name, *TINY, "--tokenizer", tokenizer, *out, status=2)
        assert message in output.replace("\n", " ")
        assert list((tmp_path / "here").iterdir()) == []


def test_a_failed_finetune_leaves_nothing_behind(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n1,2\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    output = run("finetune", base, "--data", tmp_path / "a.csv", *TUNE, status=2).replace("\n", " ")
    assert "a.csv, line 2: found the fields question, answer; expected" in output
    assert list((tmp_path / "here").iterdir()) == []


def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "mine").mkdir()
    run("train", tmp_path / "a.txt", "--out", tmp_path / "mine" / "x" / "y", *TINY, status=2)
    assert (tmp_path / "mine").is_dir() and not list((tmp_path / "mine").iterdir())


def test_bad_records_are_skipped_and_counted_by_both_commands(tmp_path: Path, base: Path) -> None:
    lines = [json.dumps(value) for value in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{", '{"txt": 1}']))
    trained = run("train", tmp_path / "a.jsonl", "--out", tmp_path / "run", *TINY, "--skip-bad")
    assert "2 bad records skipped, the first:" in trained and "line 31: not valid JSON" in trained.replace("\n", "")
    tuned = run("finetune", base, "--data", tmp_path / "a.jsonl", "--out", tmp_path / "tuned", *TUNE, "--skip-bad")
    assert "texts, in which every token is a target, 30 examples" in tuned and "2 bad records skipped" in tuned
    run("finetune", base, "--data", tmp_path / "a.jsonl", "--out", tmp_path / "no", *TUNE, status=2)


def test_lora_on_texts_learns_every_token(tmp_path: Path, base: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(value) for value in TEXTS))
    output = run("finetune", base, "--data", tmp_path / "a.jsonl", "--out", tmp_path / "run", *TUNE)
    model = onfoot.load(base)
    assert model.tokenizer is not None
    n = sum(len(model.tokenizer.encode(value["text"])) for value in TEXTS)  # all but the first, and EOS
    assert f"30 of 30 examples, {n:,} tokens, {n:,} of them targets" in output
    prompt = re.search(r"^next +onfoot generate \S+ --prompt (\w+)$", output, re.MULTILINE)  # a word of the texts
    assert prompt is not None and any(prompt[1] in value["text"] for value in TEXTS)
    assert (tmp_path / "run" / "best" / "adapter_model.safetensors").is_file()


def test_the_trainer_and_eval_read_the_same_formats(tmp_path: Path, base: Path) -> None:
    turns = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c?"},
             {"from": "gpt", "value": "d"}]  # fmt: skip
    values = [{"conversations": turns}] * 6
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(values))
    model = onfoot.load(base, dtype="float64", engine="numpy")
    assert model.tokenizer is not None
    options = onfoot.TrainingOptions(steps=1, batch_size=2, sample_tokens=0, quiet=True)
    with pytest.raises(ValueError, match=r"chats\.json, entry 1: .* tokens exceed max_length=64"):
        onfoot.Trainer(model, path, options)
    path.write_text(json.dumps([{"prompt": "a?", "completion": "b"}] * 6))
    trainer, again = onfoot.Trainer(model, path, options), onfoot.Trainer(model, json.loads(path.read_text()), options)
    assert trainer.source.report() == again.source.report()
    assert trainer.source.report().startswith("prompts and completions, 6 examples\n6 of 6 examples")
    path.write_text(json.dumps(values))
    examples = read_examples([path], model.tokenizer, ChatTemplate())
    result = onfoot.evaluate(model, path, context=64, stride=32)
    assert result.n_tokens == sum(e.n_targets for e in examples)
