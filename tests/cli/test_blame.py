"""`onfoot blame` as a user types it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.blame.page import pieces
from onfoot.cli import app
from onfoot.formats.run_folder import checkpoint_folder
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train.lock import take_lock
from pages import run_page

SMALL = [
    "--steps", "6", "--batch-size", "2", "--eval-every", "3", "--save-every", "3", "--eval-windows", "4",
    "--sample-tokens", "0", "--warmup", "2", "--keep-trajectory", "2",
]  # fmt: skip
SIZES = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--context", "16"]
ASK = ["--prompt", "to be or", "--completion", " not"]


def run(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two texts, lines of each form, and runs trained on them."""
    path = tmp_path_factory.mktemp("blame")
    (path / "a.txt").write_text("to be or not to be,\nthat is the question.\n" * 12)
    (path / "b.jsonl").write_text("".join(json.dumps({"text": f"be number {i}\nor not"}) + "\n" for i in range(20)))
    run("train", path / "a.txt", path / "b.jsonl", "--out", path / "run", *SMALL, *SIZES)
    model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=99, n_embd=16, n_layer=1, n_head=2))
    model.tokenizer = byte_tokenizer()
    model.save(path / "base")
    for form, line in {
        "prompt": lambda i: {"prompt": f"{i}:", "completion": f" {i + 1}"},
        "instruction": lambda i: {"instruction": f"after {i}", "output": f"{i + 1}"},
        "messages": lambda i: {
            "messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i + 1}"}]
        },
    }.items():
        (path / f"{form}.jsonl").write_text("\n".join(json.dumps(line(i)) for i in range(9)) + "\n")
        tune = ["--data", path / f"{form}.jsonl", "--out", path / form, "-r", "2", *SMALL]
        run("finetune", path / "base", *tune)
    return path


def names(path: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_mtime_ns) for p in path.rglob("*"))


def test_a_training_run_names_windows_by_file_and_line_in_all_outputs(folder: Path, tmp_path: Path) -> None:
    before = names(folder / "run")
    scores, page = tmp_path / "scores.json", tmp_path / "page.html"
    said = run("blame", folder / "run", *ASK, "--json", scores, "--html", page, "--top", 3, "--verify", 1)
    assert "'to be or' → ' not'" in said and "nats over 4 tokens" in said
    assert re.search(r"replaying \d+ steps backwards from \d known states: about \d+:\d\d, \d+ MB of memory", said)
    assert "helped most" in said and "hurt most" in said and "retrained" in said
    examples = json.loads(scores.read_text())
    values = [e["score"] for e in examples]
    assert sorted(e["example"] for e in examples) == list(range(len(examples)))
    assert values == sorted(values, reverse=True) and abs(sum(values)) < 1e-3 * max(map(abs, values))
    unseen = [e for e in examples if not e["steps"]]
    assert unseen and all(e["score"] == 0 for e in unseen)
    assert f"{len(unseen)} of {len(examples)} examples were seen by no step: score 0" in said
    assert sum(len(e["steps"]) for e in examples) >= 6 and {"retrained"} <= examples[0].keys()
    text = (folder / "a.txt").read_text()
    in_a = [e for e in examples if e["file"].endswith("a.txt")]
    assert in_a and len(in_a) < len(examples)
    for e in in_a[:-1]:
        begin = e["position"]
        assert text[begin : begin + 4] == e["text"][:4] and e["line"] == 1 + text[:begin].count("\n")
    in_b = [e for e in examples if e["file"].endswith("b.jsonl") and "number" in e["text"]]
    assert any(f"number {e['line'] - 1}" in e["text"] or f"number {e['line']}" in e["text"] for e in in_b)
    html = page.read_text()
    assert html.count("<article>") == 6 and "<svg" in html and "http" not in html and "<script" not in html
    assert "background: rgba(var(--up)" in html and "a.txt" in html
    assert names(folder / "run") == before  # nothing was written into the run


@pytest.mark.parametrize(
    ("form", "seen"),
    [
        ("prompt", "'3:' → ' 4'"),
        ("instruction", "'Instruction:\\n3:\\n\\nAnswer:\\n' → ' 4'"),
        ("messages", "'<|im_start|>user\\n3:<|im_end|>\\n<|im_start|>assistant\\n' → ' 4<|im_end|>\\n'"),
    ],
)
def test_the_query_of_a_fine_tuning_run_is_rendered_as_its_lines(
    folder: Path, tmp_path: Path, form: str, seen: str
) -> None:
    said = run("blame", folder / form, "--prompt", "3:", "--completion", " 4", "--json", tmp_path / "s.json")
    assert seen in said
    examples = json.loads((tmp_path / "s.json").read_text())
    assert len(examples) == 8  # one of nine is held out
    assert {e["file"] for e in examples} == {str(folder / f"{form}.jsonl")}
    assert len({e["line"] for e in examples}) == 8 and all(1 <= e["line"] <= 9 for e in examples)
    for e in examples:
        assert str(e["line"]) in e["text"]  # line n answers n


def test_queries_are_added_or_explained_one_by_one(folder: Path, tmp_path: Path) -> None:
    queries = tmp_path / "queries.jsonl"
    lines = [{"prompt": "to be", "completion": " or"}, {"prompt": "that", "completion": " is the"}]
    queries.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for fast in ([], ["--fast"]):
        run("blame", folder / "run", "--queries", queries, "--json", tmp_path / "sum.json", *fast)
        run("blame", folder / "run", "--queries", queries, "--each", "--json", tmp_path / "each.json", *fast)
        summed = {e["example"]: e["score"] for e in json.loads((tmp_path / "sum.json").read_text())}
        each = json.loads((tmp_path / "each.json").read_text())
        assert [one["query"] for one in each] == lines and all(one["loss"] > 0 for one in each)
        parts = [{e["example"]: e["score"] for e in one["examples"]} for one in each]
        numbers = sorted(summed)
        total = np.array([parts[0][i] + parts[1][i] for i in numbers])
        np.testing.assert_allclose([summed[i] for i in numbers], total, rtol=1e-3, atol=1e-5 * np.abs(total).max())


def test_fast_scores_are_gradient_dot_products_at_the_kept_checkpoints(folder: Path, tmp_path: Path) -> None:
    run("blame", folder / "run", *ASK, "--fast", "--checkpoint", "6", "--json", tmp_path / "fast.json")
    found = {e["example"]: e["score"] for e in json.loads((tmp_path / "fast.json").read_text())}
    from onfoot.train.options import TrainOptions
    from onfoot.train.pretrain import make_trainer

    options = TrainOptions.load(folder / "run" / "run.json")
    source = make_trainer(folder / "run", options, None).source
    expected = dict.fromkeys(found, 0.0)
    kept = [2, 4, 6]
    ids = byte_tokenizer().encode("to be or not")
    targets = np.full((1, 11), -100)
    targets[0, -4:] = ids[-4:]
    for step in range(6):
        model = onfoot.load(checkpoint_folder(folder / "run", min(k for k in kept if k > step)), dtype="float64")
        _, query = model.loss_and_grads(np.array([ids[:-1]]), targets, divisor=1.0)
        ((tokens, wanted, _),), (numbers,) = source.microbatches(step), source.example_numbers(step)
        for row, number in enumerate(numbers.max(axis=1)):
            only = np.where(np.arange(2)[:, None] == row, wanted, -100)
            divisor = int((wanted != -100).sum())
            _, grads = model.loss_and_grads(tokens, only, divisor=divisor)
            expected[number] += options.learning_rate(step) * sum(float((g * query[k]).sum()) for k, g in grads.items())
    largest = max(map(abs, expected.values()))
    for number, value in expected.items():
        assert found[number] == pytest.approx(value, rel=1e-3, abs=1e-4 * largest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", *ASK], "nowhere is not a run folder: it has no run.json"),
        (["RUN"], "give either --completion (with or without --prompt) or --queries FILE.jsonl"),
        (["RUN", *ASK, "--queries", "x.jsonl"], "give either --completion"),
        (["RUN", "--queries", "x.jsonl", "--prompt", "a"], "--prompt cannot be used with --queries"),
        (["RUN", *ASK, "--each"], "--each: only valid with --queries"),
        (["RUN", "--queries", "x.jsonl"], "x.jsonl cannot be read: No such file or directory"),
        (["RUN", "--prompt", "a", "--completion", ""], "the completion is empty, so the query has no loss"),
        (["RUN", "--prompt", "a" * 20, "--completion", "b"], "20 tokens, more than n_positions=16 of the model"),
        (["RUN", *ASK, "--checkpoint", "5"], "choose best, last, or the step of one: 0, 2, 4, 6"),
        (["RUN", *ASK, "--checkpoint", "0"], "step 0 is the initial state: no example has been trained on yet"),
        (["RUN", *ASK, "--since", "6"], "--since must be below the checkpoint's step, 6; got 6"),
        (["RUN", *ASK, "--json", "none/s.json"], "--json: the folder none does not exist; create it first"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(folder: Path, arguments: list[str], message: str) -> None:
    typed = [str(folder / "run") if word == "RUN" else word for word in arguments]
    said = run("blame", *typed, status=2)
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("run", lambda p: (p / "data" / "tokens.bin").unlink(), "tokens.bin is missing, so the run cannot be replayed"),
        ("run", lambda p: (p / "data.json").unlink(), "data.json is missing, so the run cannot be replayed"),
        ("run", lambda p: _flip(p / "data" / "tokens.bin"), "tokens.bin has changed since the run started"),
        ("run", lambda p: shutil.rmtree(p / "checkpoints"), "has no valid checkpoint"),
        ("run", lambda p: _log(p, {"step": 1, "loss": 1.0, "waiting": 0.1}), "was trained on several ranks"),
        ("prompt", lambda p: _append(p.parent / "prompt.jsonl"), "the data of "),
        ("prompt", lambda p: (p.parent / "prompt.jsonl").unlink(), "prompt.jsonl does not exist"),
        ("prompt", lambda p: shutil.rmtree(p.parent / "base"), "base"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_replayed_are_refused_and_left_alone(
    folder: Path, tmp_path: Path, name: str, damage: Any, message: str
) -> None:
    for part in (name, "base", "prompt.jsonl"):
        copy = shutil.copytree if (folder / part).is_dir() else shutil.copy
        copy(folder / part, tmp_path / part)
    text = (tmp_path / name / "run.json").read_text()
    values = json.loads(text.replace(str(folder), str(tmp_path)))
    del values["sha256"]
    (tmp_path / name / "run.json").write_text(json.dumps(values))
    damage(tmp_path / name)
    before = names(tmp_path)
    said = run("blame", tmp_path / name, *ASK, status=2)
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
    assert names(tmp_path) == before


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4] ^= 1
    path.write_bytes(data)


def _log(run_folder: Path, record: dict[str, Any]) -> None:
    with (run_folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def _append(path: Path) -> None:
    path.write_text(path.read_text() + json.dumps({"prompt": "a", "completion": "b"}) + "\n")


def test_a_damaged_checkpoint_is_reported_and_not_used(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    _flip(checkpoint_folder(tmp_path / "run", 4) / "model.safetensors")
    before = names(tmp_path)
    said = run("blame", tmp_path / "run", *ASK, "--checkpoint", "last")
    assert "step-0000004 cannot be used: model.safetensors is corrupted (its checksum differs)" in said
    assert "from 2 known states" in said  # 0 and 2
    assert names(tmp_path) == before


def test_scores_since_a_step_are_those_of_later_steps_only(folder: Path, tmp_path: Path) -> None:
    for more in ([], ["--fast"]):
        said = run(
            "blame", folder / "run", *ASK, "--since", 4, "--checkpoint", 6, "--json", tmp_path / "late.json", *more
        )
        assert "step 2/2" in said
        steps = {step for e in json.loads((tmp_path / "late.json").read_text()) for step in e["steps"]}
        assert steps == {5, 6}


def test_a_run_that_is_being_trained_and_several_ranks_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    lock = take_lock(tmp_path / "run")
    said = run("blame", tmp_path / "run", *ASK, status=2)
    assert "run is being trained by another process; wait for it, or stop it first" in said
    lock.release()
    run("blame", tmp_path / "run", *ASK)
    monkeypatch.setattr("onfoot.blame.run.world", lambda: SimpleNamespace(size=2))
    assert "onfoot blame runs on one rank; start it without mpiexec" in run("blame", tmp_path / "run", *ASK, status=2)


def test_a_private_run_is_refused(folder: Path, tmp_path: Path) -> None:
    run("train", folder / "a.txt", "--out", tmp_path / "run", *SMALL, *SIZES, "--dp-clip", 1.0, "--dp-noise", 0)
    said = run("blame", tmp_path / "run", *ASK, status=2)
    assert "was trained with --dp-clip: steps that clip each example cannot be replayed backwards" in said


def test_every_character_of_the_page_belongs_to_one_token() -> None:
    tokenizer = byte_tokenizer()
    text = "aé€😀b"
    found = pieces(tokenizer, np.array(tokenizer.encode(text)))
    assert "".join(found) == text and found == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


@pytest.mark.slow
def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    said = run_page("docs/blame.md", tmp_path, slow=True).printed
    assert "\nRosa lives in Oslo." in said[1]
    highest = json.loads((tmp_path / "work" / "why.json").read_text())[:4]
    assert [e["text"] for e in highest] == ["Rosa lives in Oslo."] * 4
    assert {e["line"] for e in highest} == {20, 23, 50, 55}
    assert [e["retrained"] > 0 for e in highest[:2]] == [True, True]
    assert "exceeds the loss" not in said[-1] and "Rosa lives in London" in said[-1]
