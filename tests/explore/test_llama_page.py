"""The page of a LLaMA in the browser: every step adds up, every view works; wide arrays by overview and zoom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from waiting import SHOWN, until

import onfoot
from conftest import Watched, serving
from llama_oracle import scrambled_llama
from onfoot.cli import app
from onfoot.explore.default_model import TEXT
from onfoot.explore.texts import read_text
from onfoot.explore.walk import small_model
from onfoot.models.model import Model

LLAMA = onfoot.LlamaConfig(
    vocab_size=23, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip

FIGURE = '.figure[data-tensor="0.Δ_5"]'


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    scrambled_llama(LLAMA, 0).save(folder / "model")
    path = folder / "page.html"
    command = ["explore", str(folder / "model"), "--tokens", "3 1 4 1 5", "--export", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return path


def test_every_step_adds_up_and_every_view_works(llama_file: Path, watched: Any) -> None:
    page = watched.open(llama_file.as_uri())
    steps = page.locator('.row:not([data-step^="0.1."]):not([data-step^="0.2."]):not([data-step^="0.3."])').all()
    assert len(steps) > 25
    for row in steps:
        row.evaluate("row => row.click()")
        until(page, SHOWN)
        assert page.locator('.sum[data-right="false"]').count() == 0
        assert page.locator(".badge.failed").count() == 0
    page.get_by_role("tab", name="Attention").click()
    page.wait_for_selector("[data-fact=first-row]")
    assert "4 query heads read 2 key heads" in page.locator("main").text_content()
    assert "∂" not in page.locator(".points").text_content()  # with RoPE, the gradient of b_k is not 0
    for name, selector in {
        "Training": "[data-attribution]",
        "One step": ".arithmetic .sum",
        "Mistakes": ".mistake-result .verdict",
    }.items():
        page.get_by_role("tab", name=name).click()
        page.wait_for_selector(selector)


@pytest.fixture(scope="module")
def wide(model: Model) -> Model:
    config = onfoot.GPT2Config(n_layer=1, n_head=4, n_embd=520, n_inner=24, n_positions=64, vocab_size=37)
    made = small_model(config, 0)
    made.tokenizer = model.tokenizer
    return made


def test_a_wide_array_has_an_overview_and_a_window_with_the_librarys_numbers(context: Any, wide: Model) -> None:
    delta = wide.trace(read_text(wide, TEXT))["Δ_5", 0][0]
    with serving(wide) as number:
        one = Watched(context)
        page = one.open(f"http://127.0.0.1:{number}/#view=map&step=0.5&cell=3,500")
        figure = page.locator(FIGURE)
        figure.locator("output.value").wait_for()
        assert float(figure.locator("output.value").get_attribute("data-value")) == delta[3, 500]
        assert figure.locator(".sum").get_attribute("data-right") == "true"
        assert "columns 456 to 519 of 520" in figure.locator(".window-range").text_content()
        coarse, fine = figure.locator(".coarse [role=grid]"), figure.locator(".fine [role=grid]")
        assert coarse.get_attribute("aria-colcount") == "96" and fine.get_attribute("aria-colcount") == "64"
        fine.focus()
        page.keyboard.press("ArrowLeft")
        until(page, f"+document.querySelector('{FIGURE} output.value').dataset.value === {float(delta[3, 499])!r}")
        coarse.focus()
        page.keyboard.press("Home")
        until(page, f"document.querySelector('{FIGURE} .window-range').textContent.includes('columns 0 to 63')")
        until(page, f"+document.querySelector('{FIGURE} output.value').dataset.value === {float(delta[3, 0])!r}")
        one.page.close()
        assert one.errors == []
