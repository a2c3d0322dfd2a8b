"""The Yours view: the gradients of a user's own pairs beside the right ones, cell by cell."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from waiting import until

import onfoot
from onfoot.cli import app
from onfoot.cli.explore import _own_engine, _written
from onfoot.explore.study import Study
from onfoot.learn.course import COURSE, SOLUTIONS
from onfoot.learn.folder import FILE, make_folder
from onfoot.models.model import Model
from onfoot.own_engine import OwnEngine, as_engine

PLAIN = (Path(__file__).parents[1] / "own_engine" / "plain_pairs.py").read_text(encoding="utf-8")
MISTAKE = ("dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * du)", "dy * 0.5 * (1 + tanh)")


def engine_of(folder: Path, *changes: tuple[str, str]) -> OwnEngine:
    """The plain pairs as a file, with parts of their text replaced."""
    text = PLAIN
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "my_ops.py"
    path.write_text(text, encoding="utf-8")
    engine = as_engine(str(path))
    assert isinstance(engine, OwnEngine)
    return engine


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> OwnEngine:
    return engine_of(tmp_path_factory.mktemp("wrong"), MISTAKE)


def test_right_pairs_have_no_wrong_gradient(model: Model, tokens: np.ndarray, tmp_path: Path) -> None:
    own = Study(model, tokens, engine_of(tmp_path)).own
    assert own["runs"] and own["first"] is None and own["loss"] == model.loss(tokens)
    assert len(own["rows"]) == len(model.params) + 3 + 7 * model.config.n_layer
    assert not any(row["wrong"] for row in own["rows"])
    assert [pair["yours"] for pair in own["pairs"]] == [True] * 6
    names = [row["name"] for row in own["rows"] if row["block"] == 0]
    at = names.index("transformer.h.0.attn.c_attn.weight")
    assert names.index("Δ_3") < at < names.index("Δ_2")  # in the order of the backward pass


def test_a_wrong_pair_is_wrong_from_its_step_down(model: Model, tokens: np.ndarray, wrong: OwnEngine) -> None:
    study = Study(model, tokens, wrong)
    rows = study.own["rows"]
    first = next(row for row in rows if row["wrong"])
    assert (first["name"], first["block"]) == ("Δ_7", model.config.n_layer - 1)
    assert study.own["first"].startswith(
        f"transformer.h.{model.config.n_layer - 1}.mlp.act: dx of your gelu_tanh_backw"
    )
    assert [pair["pair"] for pair in study.own["pairs"] if pair["wrong"]] == ["gelu_tanh"]
    _, grads = Model(model.config, model.params, "float64", wrong).loss_and_grads(tokens)
    name = "transformer.h.0.mlp.c_fc.weight"
    shown = next(row for row in rows if row["name"] == name)["arrays"]
    assert np.array_equal(study.tensors.value(shown["yours"]), grads[name])
    assert np.array_equal(study.tensors.value(shown["right"]), study.context.trace.grads[name])
    difference = study.tensors.value(shown["yours − right"])
    assert np.abs(difference).max() > 1e-6 and np.array_equal(difference, grads[name] - study.context.trace.grads[name])


def test_a_pair_that_is_not_written_is_named_instead_of_shown(model: Model, tokens: np.ndarray, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, ("    return dweight\n", "    return None\n"))
    own = Study(model, tokens, engine).own
    assert not own["runs"] and own["rows"] == []
    assert own["message"] == "your embedding_backward returns None; it must return dweight"
    assert [pair["pair"] for pair in own["pairs"] if pair["wrong"]] == ["embedding"]


def test_the_command_exports_the_view_and_refuses_other_engines(tmp_path: Path) -> None:
    engine_of(tmp_path, MISTAKE)
    page, model = tmp_path / "page.html", tmp_path / "model"
    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=9)
    onfoot.create(config, 0).save(model)
    arguments = ["explore", str(model), "--tokens", "1 2 3 2", "--export", str(page)]
    result = CliRunner().invoke(app, [*arguments, "--engine", str(tmp_path / "my_ops.py")])
    assert result.exit_code == 0, result.output
    (data,) = re.findall(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), flags=re.DOTALL)
    parts = json.loads(data)["parts"]
    assert json.loads(data)["opening"]["own"] == "my_ops.py"
    assert "gelu_tanh_backward" in parts["own"]["first"]
    refused = CliRunner().invoke(app, [*arguments, "--engine", "numba"])
    assert "importing" not in refused.output
    assert refused.exit_code == 2 and "takes a file of your own pairs" in refused.output
    without = Study(onfoot.load(model, "float64", "numpy"), np.array([[1, 2, 3]]))
    with pytest.raises(ValueError, match="onfoot explore --engine"):
        _ = without.own


@pytest.fixture
def own_page(opened_with: Any, wrong: OwnEngine) -> Iterator[Any]:
    with opened_with(wrong) as page:
        yield page


def test_the_page_opens_with_the_first_wrong_gradient_beside_the_right_one(
    own_page: Any, model: Model, tokens: np.ndarray, wrong: OwnEngine
) -> None:
    page, last = own_page, model.config.n_layer - 1
    assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Yours"
    until(page, "(document.querySelector('.compared') || {dataset: {}}).dataset.row === x", f"{last}.Δ_7")
    assert page.locator(".own-errors tr.first").get_attribute("data-gradient") == f"{last}.Δ_7"
    assert page.locator("tr[data-pair=gelu_tanh]").get_attribute("data-wrong") == "true"
    assert page.locator("tr[data-pair=linear]").get_attribute("data-wrong") == "false"
    trace = model.trace(tokens)
    theirs = Model(model.config, model.params, "float64", wrong).trace(tokens)
    right, yours = trace["Δ_7", last][0], theirs["Δ_7", last][0]
    r, c = np.unravel_index(np.abs(yours - right).argmax(), right.shape)  # the cell that is selected at first
    values = page.locator(".compared output.value").evaluate_all("all => all.map(x => +x.dataset.value)")
    assert values == [right[r, c], yours[r, c], yours[r, c] - right[r, c]]
    wrong_rows = int(page.locator(".verdict b").first.get_attribute("data-wrong"))
    assert wrong_rows == page.locator(".own-errors tr.wrong").count() > 10


def test_a_chosen_row_shows_its_arrays_and_the_step_opens_on_the_map(own_page: Any, model: Model) -> None:
    page, last = own_page, model.config.n_layer - 1
    until(page, "(document.querySelector('.compared') || {dataset: {}}).dataset.row === x", f"{last}.Δ_7")
    page.locator('.own-errors tr[data-gradient="transformer.wte.weight"] button').click()
    until(page, "document.querySelector('.compared').dataset.row === x", "transformer.wte.weight")
    assert page.locator('.compared .figure[data-tensor="yours: transformer.wte.weight"]').count() == 1
    page.get_by_role("button", name="Open this step").click()
    until(page, "(document.querySelector('.row[aria-selected=true]') || {dataset: {}}).dataset.step === x", f"{last}.7")


def test_without_an_engine_there_is_no_such_tab(page: Any) -> None:
    assert page.locator("#tab-own").count() == 0


def test_a_folder_of_exercises_shows_what_is_written_and_ours_for_the_rest(model: Model, tmp_path: Path) -> None:
    for name in ("e01_linear.py", "e05_layer_norm.py"):
        source = SOLUTIONS if name == "e01_linear.py" else COURSE
        shutil.copyfile(source / name, tmp_path / name)
    engine = as_engine(str(tmp_path))
    assert isinstance(engine, OwnEngine) and engine.theirs == {"linear", "layer_norm"}
    assert _written(engine, str(tmp_path), model).theirs == {"linear"}
    shutil.copyfile(COURSE / "e01_linear.py", tmp_path / "e01_linear.py")
    for name in ("e01_linear", "e05_layer_norm"):
        sys.modules.pop(name, None)
    unwritten = as_engine(str(tmp_path))
    assert isinstance(unwritten, OwnEngine)
    with pytest.raises(ValueError, match="no pair is written yet"):
        _written(unwritten, str(tmp_path), model)


def test_of_a_folder_of_exercises_only_their_files_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its README invites experiments there; any other folder is an engine of all its files."""
    folder = tmp_path / "course"
    make_folder(folder)
    shutil.copyfile(SOLUTIONS / "e01_linear.py", folder / "e01_linear.py")
    (folder / "scratch.py").write_text("raise SystemExit('an experiment')\n", encoding="utf-8")
    engine = _own_engine(str(folder))
    assert engine is not None and "linear" in engine.theirs
    said = " ".join(capsys.readouterr().err.split())
    assert "an experiment" not in said and "Ctrl-C ends a loop that does not end" in said
    (folder / FILE).unlink()
    assert _own_engine(str(folder)) is not None and "an experiment" in " ".join(capsys.readouterr().err.split())


def test_a_pair_that_exits_does_not_end_the_command(model: Model, tmp_path: Path) -> None:
    changes = (("    return dweight\n", "    raise SystemExit\n"),)
    own = _written(engine_of(tmp_path, *changes), "my_ops.py", model)
    assert "embedding" not in own.theirs and "linear" in own.theirs


def test_a_pair_that_raises_and_a_file_that_is_broken_leave_the_others_to_be_shown(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copyfile(SOLUTIONS / "e01_linear.py", tmp_path / "e01_linear.py")
    text = (SOLUTIONS / "e05_layer_norm.py").read_text(encoding="utf-8")
    raises = text.replace("def layer_norm_backward(dy, saved):", "def layer_norm_backward(dy, saved):\n    1 / 0")
    (tmp_path / "e05_layer_norm.py").write_text(raises, encoding="utf-8")
    (tmp_path / "e08_multi_head.py").write_text("def f(:\n", encoding="utf-8")
    engine = _own_engine(str(tmp_path))
    assert engine is not None and _written(engine, str(tmp_path), model).theirs == {"linear"}
    said = "".join(capsys.readouterr().err.split())  # a long path is broken anywhere
    assert "e08_multi_head.py,line1:invalidsyntax" in said and "ZeroDivisionError" in said
