"""The size of an exported page is known before the work begins; large tables are left out, and the page says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from llama_oracle import scrambled_llama
from onfoot.cli import app
from onfoot.explore import export_size, page
from onfoot.explore import study as study_module
from onfoot.explore.export_size import plan_export
from onfoot.explore.study import Study
from onfoot.explore.walk import small_model
from onfoot.explore.wide import widen
from onfoot.models.model import Model

TOKENS = np.array([[3, 1, 4, 1]])
CONFIG = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=8, vocab_size=11)
LLAMA = onfoot.LlamaConfig(
    vocab_size=23, hidden_size=16, intermediate_size=600, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
OPENING = {"kind": "ids", "value": "3 1 4 1", "ids_only": True}


def test_the_estimate_is_above_the_size_but_not_far(study: Study, exported: Path) -> None:
    plan, size = plan_export(study), exported.stat().st_size
    assert plan.left_out == [] and 0.4 * plan.n_bytes < size < 1.3 * plan.n_bytes


def no_work(*_: Any) -> Any:
    raise AssertionError("work began")


def test_a_page_that_cannot_fit_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(small_model(CONFIG, 0), TOKENS)
    monkeypatch.setattr(export_size, "MAX_PAGE_BYTES", 10_000)
    monkeypatch.setattr(Study, "all_parts", no_work)
    with pytest.raises(ValueError, match=r"about .* MB even without large tables, .* shorter text or a smaller model"):
        page.export(study, OPENING)


def test_the_largest_tables_are_left_out_until_the_page_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(widen(Model(LLAMA, scrambled_llama(LLAMA, 0).params, "float32", "numpy")), TOKENS)
    sizes = sorted((tensor.size for tensor in study.tensors), reverse=True)
    whole = plan_export(study).n_bytes
    monkeypatch.setattr(export_size, "MAX_PAGE_BYTES", whole - 1)
    plan = plan_export(study)
    assert len(plan.left_out) == 1 and study.tensors[plan.left_out[0]].size == sizes[0] == plan.smallest
    said: list[str] = []
    html = page.export(study, OPENING, say=said.append)
    assert f'"overview {plan.left_out[0]}":{{"rows":[0,' in html
    assert "1 array of 9,600 cells or more is left out" in said[0] and "without --export shows all" in said[0]


def test_a_page_of_a_model_that_is_too_large_to_check_has_no_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "MAX_AUTOGRAD", 1000)
    single = Model(LLAMA, scrambled_llama(LLAMA, 0).params, "float32", "numpy")
    study = Study(widen(single), TOKENS)
    assert study.all_parts() == {}


def test_the_command_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = scrambled_llama(LLAMA, 0)
    model.save(tmp_path / "model")
    limit = plan_export(Study(model, TOKENS)).n_bytes - 1
    monkeypatch.setattr(export_size, "MAX_PAGE_BYTES", limit)
    monkeypatch.setattr(Study, "all_parts", lambda *_: {})
    out = tmp_path / "page.html"
    command = ["explore", str(tmp_path / "model"), "--tokens", "3 1 4 1", "--export", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "1 array of 9,600 cells or more is left out, with an overview in its place" in result.stdout
    assert out.stat().st_size < limit


def test_the_exported_page_shows_overviews_and_says_what_is_missing(
    tmp_path: Path, watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(widen(Model(LLAMA, scrambled_llama(LLAMA, 0).params, "float32", "numpy")), TOKENS)
    monkeypatch.setattr(study_module, "MAX_AUTOGRAD", 1000)
    monkeypatch.setattr(export_size, "MAX_PAGE_BYTES", 0)
    monkeypatch.setattr(export_size, "BYTES_PER_ARRAY", 0)
    left_out = {tensor.id for tensor in study.tensors if tensor.size >= export_size.LARGE_TABLE}
    monkeypatch.setattr(page, "plan_export", lambda _: export_size.ExportPlan(sorted(left_out), 1, 4096))
    path = tmp_path / "page.html"
    path.write_text(page.export(study, OPENING, say=lambda _: None), encoding="utf-8")
    shown = watched.open(path.as_uri())
    shown.locator('.row[data-step="0.g"]').evaluate("row => row.click()")
    shown.wait_for_selector('.figure[data-tensor="0.∂w_g"] .coarse canvas')
    figure = shown.locator('.figure[data-tensor="0.∂w_g"]')
    assert "16 × 600 numbers were left out of this exported page" in figure.text_content()
    assert "left out of this exported page" in shown.locator('.figure[data-tensor="0.a_g"] .answer').text_content()
    assert shown.locator('.figure[data-tensor="0.a_g"] output.value').count() == 1
    assert shown.locator(".badge").first.text_content() == "not checked in this file"
