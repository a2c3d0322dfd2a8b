"""`onfoot explore RUN` without a text opens with one that suits the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onfoot
from onfoot.explore.opening import choose_input
from onfoot.formats.tokenizer import char_tokenizer
from onfoot.models.model import Model

LINES = ["no", "a line of this run", "a line that is much too long to be shown on a page without scrolling it sideways"]


def model_of(text: str | None, positions: int = 64) -> Model:
    tokenizer = None if text is None else char_tokenizer([text])
    size = 9 if tokenizer is None else tokenizer.backend.get_vocab_size()
    model = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=positions, vocab_size=size), 0)
    model.tokenizer = tokenizer
    return model


def make_run(folder: Path, model: Model, text: str) -> Path:
    """The files of a run that are read: run.json and its tokens."""
    from onfoot.data import corpus

    (folder / "data").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "text.txt").write_text(text, encoding="utf-8")
    assert model.tokenizer is not None
    corpus.write_tokens(corpus.find_texts([folder / "text.txt"]), model.tokenizer, folder / "data")
    return folder


def test_a_run_opens_with_a_line_of_its_data(tmp_path: Path) -> None:
    text = "\n".join(LINES) + "\n"
    model = model_of(text)
    run = make_run(tmp_path / "run", model, text)
    assert choose_input(model, run) == {"kind": "text", "value": LINES[1]}
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    assert choose_input(model, run / "checkpoints" / "step-1")["value"] == LINES[1]


def test_without_lines_it_opens_with_the_beginning(tmp_path: Path) -> None:
    text = "ab" * 200
    model = model_of(text)
    assert choose_input(model, make_run(tmp_path / "run", model, text)) == {"kind": "text", "value": "ab" * 16}


def test_a_model_without_data_opens_with_the_default_text_or_with_ids(tmp_path: Path) -> None:
    assert choose_input(model_of("the value of\n"), tmp_path)["value"] == "the value of the value"
    assert choose_input(model_of("xyz"), tmp_path) == {"kind": "ids", "value": "1 2 3 4 0 1 2 3"}  # its five tokens
    assert choose_input(model_of(None), tmp_path) == {"kind": "ids", "value": "1 2 3 4 5 6 7 8"}
    assert choose_input(model_of(None, positions=3), None) == {"kind": "ids", "value": "1 2 3"}


@pytest.mark.parametrize("broken", ["", "{}"])
def test_data_that_cannot_be_read_are_passed_over(tmp_path: Path, broken: str) -> None:
    model = model_of("the value of\n")
    run = make_run(tmp_path / "run", model, "the value\n")
    (run / "data" / "tokens.json").write_text(broken)
    assert choose_input(model, run) == {"kind": "text", "value": "the value of the value"}


def test_the_choice_can_be_run() -> None:
    model = model_of(None)
    ids = [int(i) for i in choose_input(model, None)["value"].split()]
    assert np.isfinite(model.loss(np.array([ids])))
