"""Training on a user's pairs: the bits of "numpy" if they are right, stopped or visibly worse if one is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import plain_pairs
import pytest
from own_models import GPT2, plain
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.data.batches import Batch, Share
from onfoot.train.engine_check import WrongPairError

TEXT = Path(plain_pairs.__file__).read_text(encoding="utf-8")
SOLUTIONS = Path(onfoot.__file__).parent / "learn" / "course" / "solutions"
COURSE = [SOLUTIONS] if SOLUTIONS.is_dir() else []  # the course's, a folder of files
SMALL = [
    "--arch", "gpt2", "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--context", "16", "--batch-size", "4",
    "--tokenizer", "byte", "--eval-windows", "4", "--sample-tokens", "4", "--eval-every", "4",
]  # fmt: skip


class Counting(onfoot.Source):
    """Sequences that count upwards from a random number, modulo the vocabulary: easily learned."""

    def microbatches(self, step: int, share: Any = None) -> list[Any]:
        return [self._batch(step)]

    def validation(self, share: Any = None) -> list[Any]:
        return [self._batch(-1)]

    def _batch(self, step: int) -> Batch:
        first = np.random.default_rng(step + 1).integers(0, 17, (8, 1))
        tokens = (first + np.arange(13)) % 17
        return Batch(tokens[:, :-1], tokens[:, 1:])


def trained(engine: Any, steps: int, **options: Any) -> tuple[onfoot.Model, list[float]]:
    """A GPT-2 trained on this engine, and the loss of each step."""
    model = onfoot.create(GPT2, 0, engine=engine)
    settings = onfoot.TrainingOptions(steps=steps, lr=1e-2, eval_every=1000, quiet=True, sample_tokens=0, **options)
    return model, [step.loss for step in onfoot.Trainer(model, Counting(), settings)]


@pytest.mark.parametrize("engine", [plain_pairs, *COURSE], ids=str)
def test_a_gpt_trained_on_plain_copies_of_all_pairs_has_the_bits_of_the_engine_numpy(engine: Any) -> None:
    (mine, losses), (theirs, expected) = trained(engine, 60), trained("numpy", 60)
    assert all(mine.pairs_used().values())
    assert losses == expected
    assert losses[-1] < 0.5 * losses[0]  # it has learned something
    for name, value in theirs.params.items():
        assert np.array_equal(mine.params[name], value), name


def mean_and_variance_constant(dy: Any, saved: Any) -> Any:
    """A layer norm whose mean and variance count as constants."""
    _, rstd, weight = saved
    return dy * weight * rstd, *plain_pairs.layer_norm_backward(dy, saved)[1:]


def wrong_softmax(dy: Any, saved: Any) -> Any:
    """Attention whose queries and keys get a gradient of the wrong sign."""
    dq, dk, dv = plain_pairs.attention_backward(dy, saved)
    return -dq, -dk, dv


def wrong_sign_below(dy: Any, saved: Any) -> Any:
    """A linear layer that passes on the gradient of x with the wrong sign."""
    dx, dweight, dbias = plain_pairs.linear_backward(dy, saved)
    return -dx, dweight, dbias


WRONG = [
    ({"layer_norm_backward": mean_and_variance_constant}, "transformer.ln_f: dx of your layer_norm_backward"),
    ({"attention_backward": wrong_softmax}, "transformer.h.1.attn: dq of your attention_backward"),
    ({"linear_backward": wrong_sign_below}, "lm_head: dx of your linear_backward"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_one_wrong_op_stops_the_run_before_the_first_update_and_is_named(change: Any, words: str) -> None:
    model = onfoot.create(GPT2, 0, engine=plain(**change))
    before = {name: p.copy() for name, p in model.params.items()}
    trainer = onfoot.Trainer(model, Counting(), onfoot.TrainingOptions(steps=3, quiet=True))
    with pytest.raises(WrongPairError, match=f"^step 1: {words} is wrong: relative error"):
        trainer.run()
    assert all(np.array_equal(model.params[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([], r"it must return a list of batches \(tokens, targets\), got \[\]"),
        ([([[17]], [[0]])], r"token id 17 is outside 0 \.\.\. 16 .*"),
        ([([[3, 4, 5]], [[4, 5, 6]])], None),
    ],
)
def test_the_first_batch_of_an_own_source_is_checked_where_pairs_are_compared(returned: Any, said: str | None) -> None:
    mine = type("Mine", (), {"microbatches": lambda self, step: returned})()
    model = onfoot.create(GPT2, 0, engine=plain_pairs)
    trainer = onfoot.Trainer(model, mine, onfoot.TrainingOptions(steps=1, quiet=True))
    if said is None:
        assert trainer.run().state.step == 1
        return
    with pytest.raises(ValueError, match=f"^Mine.microbatches failed after step 0: ValueError: {said}$"):
        trainer.run()


def test_a_rank_without_rows_compares_nothing() -> None:
    model = onfoot.create(GPT2, 0, engine=plain_pairs)
    trainer = onfoot.Trainer(model, np.arange(400) % 17, onfoot.TrainingOptions(steps=1, batch_size=1, quiet=True))
    trainer.share_args = (Share(1, 2),)
    trainer.check_engine()
    assert trainer._engine_check.found is None


@pytest.mark.parametrize(("change", "margin"), [(WRONG[0][0], 0.5), (WRONG[2][0], 1.0)])
def test_a_wrong_op_that_is_trained_all_the_same_trains_visibly_worse(change: Any, margin: float) -> None:
    _, right = trained(plain_pairs, 60)
    _, wrong = trained(plain(**change), 60, engine_unchecked=True)
    assert wrong[0] == right[0]  # the same initial values and batch
    assert np.mean(wrong[-10:]) > np.mean(right[-10:]) + margin


def test_with_watch_the_pairs_are_compared_at_each_evaluation(tmp_path: Path) -> None:
    model = onfoot.create(GPT2, 0, engine=plain_pairs)
    options = onfoot.TrainingOptions(steps=4, eval_every=2, watch=True, quiet=True, sample_tokens=0)
    onfoot.Trainer(model, Counting(), options, out=tmp_path).run()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["pairs"] for record in records if "val_loss" in record] == [0.0, 0.0]


# --- the command line ---


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_ops.py").write_text(TEXT, encoding="utf-8")
    wrong = TEXT.replace("dweight = rows.T @ drows", "dweight = 2 * rows.T @ drows")
    assert wrong != TEXT
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200, encoding="utf-8")
    return tmp_path


def test_the_command_trains_on_a_file_resumes_it_and_says_when_it_has_changed(folder: Path) -> None:
    mine = run("train", "text.txt", *SMALL, "--steps", "8", "--engine", "my_ops.py", "--out", "mine")
    assert "engine my_ops.py" in mine and "6 of 6 pairs used by this model are yours" in mine
    run("train", "text.txt", *SMALL, "--steps", "8", "--engine", "numpy", "--out", "numpy", "--quiet")
    weights = [(folder / name / "best" / "model.safetensors").read_bytes() for name in ("mine", "numpy")]
    assert weights[0] == weights[1]
    values = json.loads((folder / "mine" / "run.json").read_text(encoding="utf-8"))
    sha256 = hashlib.sha256((folder / "my_ops.py").read_bytes()).hexdigest()
    assert values["engine"] == "my_ops.py"
    assert values["made_with"]["engine_files"] == {str((folder / "my_ops.py").resolve()): sha256}

    shutil.copytree(folder / "mine", folder / "copy")
    refused = run("train", "--resume", "mine", "--steps", "12", code=2)
    assert "Python code, which runs only if you name it; add --engine my_ops.py" in refused
    same = run("train", "--resume", "mine", "--steps", "12", "--engine", "my_ops.py")
    assert "resuming mine at step 8" in same and "has changed" not in same
    (folder / "my_ops.py").write_text(TEXT + "# a comment\n", encoding="utf-8")
    changed = run("train", "--resume", "copy", "--steps", "12", "--engine", "my_ops.py")
    assert "my_ops.py has changed since this run started" in changed


def test_a_wrong_file_leaves_no_run_behind_unless_it_is_trained_on_purpose(folder: Path) -> None:
    arguments = ["train", "text.txt", *SMALL, "--steps", "4", "--engine", "wrong.py", "--out", "new/run"]
    stopped = run(*arguments, code=2)
    assert "step 1: lm_head: dweight of your linear_backward is wrong: relative error 1." in stopped
    assert "--engine-unchecked trains it as it is" in stopped
    assert not (folder / "new").exists()
    trained_anyway = run(*arguments, "--engine-unchecked")
    assert "warning: lm_head: dweight of your linear_backward is wrong: relative error 1" in trained_anyway
    refused = run("train", "text.txt", *SMALL, "--engine", "numpy", "--engine-unchecked", code=2)
    assert "--engine-unchecked is for pairs of your own" in refused


def test_a_run_folder_or_a_configuration_never_starts_code_that_the_user_does_not_name(folder: Path) -> None:
    run("train", "text.txt", *SMALL, "--steps", "2", "--engine", "numpy", "--out", "mine", "--quiet")
    evil = folder / "evil.py"
    evil.write_text("from pathlib import Path\nPath('started').touch()\n", encoding="utf-8")
    path = folder / "mine" / "run.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("sha256")
    path.write_text(json.dumps({**values, "engine": "evil.py"}), encoding="utf-8")
    run("train", "--resume", "mine", "--steps", "4", code=2)
    run("blame", "mine", "--prompt", "the", "--completion", " cat", code=2)
    (folder / "other.json").write_text(json.dumps({"command": "train", "engine": "evil.py"}), encoding="utf-8")
    assert "name it on the command line" in run("train", "text.txt", "--config", "other.json", code=2)
    made = {**values["made_with"], "engine": "evil.py"}
    path.write_text(json.dumps({**values, "keep_trajectory": 1, "made_with": made}), encoding="utf-8")
    run("blame", "mine", "--prompt", "the", "--completion", " cat", code=2)
    assert not (folder / "started").exists()
    run("generate", "mine", "--engine", "evil.py", "--prompt", "the", code=2)  # named by the user, but without pairs
    assert (folder / "started").exists()


def test_other_commands_take_the_file_too(folder: Path) -> None:
    onfoot.create(GPT2, 0).save(folder / "model")
    arguments = ["generate", "model", "--tokens", "1 2 3", "--max-new-tokens", "3", "--temperature", "0", "--engine"]
    assert run(*arguments, "my_ops.py") == run(*arguments, "numpy")
    head = "def linear_forward(x, weight, bias=None):"
    (folder / "broken.py").write_text(TEXT.replace(head, f"{head}\n    1 / 0"), encoding="utf-8")
    broken = run(*arguments, "broken.py", code=2)
    assert "your linear_forward raises ZeroDivisionError: division by zero" in broken and "broken.py, line" in broken


def test_private_training_and_blame_refuse_a_users_pairs(folder: Path) -> None:
    private = ["--dp-clip", "1", "--dp-noise", "1", "--dp-delta", "1e-5"]
    refused = run("train", "text.txt", "--engine", "my_ops.py", *private, code=2)
    assert "--dp-clip needs the gradient of each example" in refused
    blamed = run("train", "text.txt", "--engine", "my_ops.py", "--keep-trajectory", "2", code=2)
    assert "cannot replay a run with --engine my_ops.py" in blamed
