"""Training live in the browser: the numbers are those of the library's AdamW, and every view can show a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import SHOWN, until

from conftest import Watched, serving
from onfoot.explore.copies import copy_of
from onfoot.explore.server import Explorer
from onfoot.models.model import Model
from onfoot.train.checkpoint import save_checkpoint
from onfoot.train.optimizer import AdamW

LOSS = "document.querySelector('[data-live=loss]')"
DIFFERENCE = "document.querySelector('.live-difference').dataset.step"


def trained(model: Model, tokens: np.ndarray, rates: list[float]) -> tuple[Model, list[float]]:
    """The library's AdamW, with one learning rate per step: the model, and the loss after each number of steps."""
    copy = copy_of(model)
    optimizer, losses = AdamW(copy), [copy.loss(tokens)]
    for rate in rates:
        optimizer.lr = rate
        copy.train_step(optimizer, tokens)
        losses.append(copy.loss(tokens))
    return copy, losses


def open_live(page: Any) -> None:
    page.get_by_role("tab", name="Live").click()
    page.wait_for_selector(".live-difference")


def play_to(page: Any, step: int) -> int:
    """Plays until at least that step, and pauses; returns the step it paused at."""
    page.locator("#live-play").click()
    until(page, "Number(document.getElementById('live-scrub').value) >= x", step)
    page.locator("#live-play").click()
    until(page, "document.getElementById('live-play').textContent === 'Play'")
    until(page, f"{DIFFERENCE} === document.getElementById('live-scrub').value")
    return int(page.locator("#live-scrub").input_value())


def shown(page: Any, key: str) -> float:
    return float(page.locator(f"[data-live={key}]").get_attribute("data-value"))


def scrub(page: Any, step: int) -> None:
    page.locator("#live-scrub").evaluate(
        "(e, x) => { e.value = String(x); e.dispatchEvent(new Event('input')); }", step
    )
    until(page, f"{DIFFERENCE} === String(x)", step)


def test_the_loss_at_every_step_is_the_librarys(page: Any, model: Model, tokens: np.ndarray) -> None:
    open_live(page)
    end = play_to(page, 12)
    after, losses = trained(model, tokens, [0.001] * end)
    assert shown(page, "loss") == pytest.approx(losses[end], rel=1e-9)
    assert int(page.locator(".live-chart .curve").get_attribute("data-points")) == end + 1
    rows = page.locator("#live-weights tbody tr").evaluate_all(
        "all => all.map(x => [x.dataset.parameter, +x.dataset.change])"
    )
    for name, change in rows:
        difference = after.params[name] - model.params[name]
        assert change == pytest.approx(math.sqrt((difference**2).sum()), rel=1e-8), name
    scrub(page, 5)
    assert shown(page, "loss") == pytest.approx(losses[5], rel=1e-9) and shown(page, "first") == losses[0]
    five, _ = trained(model, tokens, [0.001] * 5)
    per_token = five.trace(tokens).token_losses[0]
    found = page.locator("#live-tokens tbody tr").evaluate_all("all => all.map(x => +x.dataset.loss)")
    assert found == pytest.approx(list(per_token[:-1]), rel=1e-8)


def test_the_learning_rate_changes_while_it_runs_and_the_curve_says_where(
    page: Any, model: Model, tokens: np.ndarray
) -> None:
    open_live(page)
    page.locator("#live-play").click()
    until(page, "Number(document.getElementById('live-scrub').value) >= 4")
    page.locator("#live-rate").fill("0.0003")
    page.locator("#live-rate").press("Enter")
    until(page, "document.querySelectorAll('.live-chart .rate').length === 2")
    changed = page.locator(".live-chart .rate").nth(1).get_attribute("data-rate")
    at, rate = changed.split(":")
    until(page, "Number(document.getElementById('live-scrub').value) > x + 3", int(at))
    assert page.locator("#live-play").inner_text() == "Pause"  # it goes on
    page.locator("#live-play").click()
    until(page, f"{DIFFERENCE} === document.getElementById('live-scrub').value")
    end = int(page.locator("#live-scrub").input_value())
    _, losses = trained(model, tokens, [0.001] * int(at) + [0.0003] * (end - int(at)))
    assert rate == "0.0003" and shown(page, "loss") == pytest.approx(losses[end], rel=1e-9)


def test_every_view_shows_the_step_and_a_button_returns(page: Any, model: Model, tokens: np.ndarray) -> None:
    before = page.locator("#loss").get_attribute("data-value")
    page.locator('.row[data-step="embedding"]').click()
    until(page, SHOWN)
    open_live(page)
    end = play_to(page, 6)
    page.locator("#live-show").click()
    page.wait_for_selector(f"[data-trained='{end}']")
    until(page, SHOWN)
    after, losses = trained(model, tokens, [0.001] * end)
    assert float(page.locator("#loss").get_attribute("data-value")) == pytest.approx(losses[end], rel=1e-9)
    cell = page.locator(".explanation").first
    r, c = int(cell.get_attribute("data-r")), int(cell.get_attribute("data-c"))
    value = float(page.locator('.figure[data-tensor="Δ_1"] output.value').first.get_attribute("data-value"))
    assert value == pytest.approx(float(after.trace(tokens)["Δ_1", 0][0][r, c]), rel=1e-6)
    page.get_by_role("tab", name="Training").click()
    page.wait_for_selector("tr[data-parameter]")
    name = "transformer.h.1.mlp.c_fc.weight"
    norm = float(page.locator(f"tr[data-parameter='{name}']").get_attribute("data-norm"))
    assert norm == pytest.approx(float(np.linalg.norm(after.loss_and_grads(tokens)[1][name])), rel=1e-7)
    page.locator("#trained-back").click()
    until(page, "document.getElementById('trained').hidden")
    until(page, "document.getElementById('loss').dataset.value === x", before)


def test_at_step_0_there_is_nothing_to_compare(page: Any) -> None:
    open_live(page)
    facts = page.locator(".live-facts dt").all_inner_texts()
    assert facts == ["loss at step 0"] and page.locator("#live-tokens, #live-weights").count() == 0
    assert "Play: the predictions" in page.locator(".live-difference").inner_text()
    play_to(page, 2)
    assert len(page.locator(".live-facts dt").all_inner_texts()) == 3 and page.locator("#live-tokens").count() == 1


def test_the_map_and_attention_show_the_difference_from_step_0(page: Any, model: Model, tokens: np.ndarray) -> None:
    open_live(page)
    end = play_to(page, 6)
    page.locator("#live-show").click()
    page.wait_for_selector(f"[data-trained='{end}']")
    until(page, SHOWN)
    page.locator('.row[data-step="embedding"]').click()
    page.locator("#trained-difference").check()
    page.wait_for_selector('.figure.is-difference[data-tensor="Δ_1"] output.value')
    before, after = model.trace(tokens), trained(model, tokens, [0.001] * end)[0].trace(tokens)
    assert "difference=1" in page.url

    def compare(id: str, key: Any) -> None:
        cell = page.locator(f'.figure[data-tensor="{id}"] .explanation')
        cell.wait_for()
        at = (0, int(cell.get_attribute("data-r")), int(cell.get_attribute("data-c")))
        found = {
            name: float(cell.locator("output").get_attribute(f"data-{name}")) for name in ("value", "now", "first")
        }
        assert found["first"] == float(before[key][at])
        assert found["now"] == pytest.approx(float(after[key][at]), rel=1e-6)
        assert found["value"] == found["now"] - found["first"] != 0

    compare("a_1", ("a_1", 0))
    compare("Δ_1", ("Δ_1", 0))
    page.get_by_role("tab", name="Attention").click()
    page.wait_for_selector('.is-difference[data-tensor="1.2.Δ_causal"] output.value')
    for b, h in ((0, 1), (1, 2)):
        rho, delta = (page.locator(f'.figure[data-tensor="{b}.{h}.{x}"] .explanation') for x in ("ρ", "Δ_causal"))
        at = (0, h, int(rho.get_attribute("data-r")), int(rho.get_attribute("data-c")))
        for cell, key in ((rho, ("ρ", b)), (delta, ("Δ_causal", b))):
            expected = float(after[key][at]) - float(before[key][at])
            assert float(cell.locator("output").get_attribute("data-value")) == pytest.approx(
                expected, rel=1e-6, abs=1e-12
            )
    page.locator("#trained-difference").uncheck()
    until(page, "!document.querySelector('.is-difference')")
    page.locator("#trained-back").click()
    until(page, "document.getElementById('trained').hidden && !location.hash.includes('difference')")


def test_a_link_names_the_step(page: Any) -> None:
    open_live(page)
    end = play_to(page, 3)
    page.locator("#live-show").click()
    page.wait_for_selector(f"[data-trained='{end}']")
    text = page.evaluate("document.querySelector('#trained p').textContent")
    assert f"after {end} training steps on this text" in text


def test_it_is_played_by_keyboard_alone(page: Any) -> None:
    page.get_by_role("tab", name="One step").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".live-difference")
    page.locator("#live-play").focus()
    page.keyboard.press("Enter")
    until(page, "Number(document.getElementById('live-scrub').value) >= 4")
    assert page.evaluate("document.activeElement.id") == "live-play"
    page.keyboard.press("Enter")
    until(page, "document.getElementById('live-status').textContent.startsWith('Paused at step')")
    end = int(page.locator("#live-scrub").input_value())
    page.locator("#live-scrub").focus()
    page.keyboard.press("ArrowLeft")
    until(page, f"{DIFFERENCE} === String(x)", end - 1)
    assert "loss" in page.locator("#live-scrub").get_attribute("aria-valuetext")


def test_a_rate_out_of_range_is_refused_and_the_message_goes(page: Any) -> None:
    open_live(page)
    for rate, message in (("2", "The learning rate must be > 0 and <= 1."), ("0.01", "")):
        page.locator("#live-rate").fill(rate)
        page.locator("#live-rate").press("Enter")
        until(page, "document.getElementById('live-problem').textContent === x", message)
    assert page.locator("#live-problem").is_hidden()


def test_an_exported_page_has_the_first_hundred_steps(
    watched: Any, exported: Path, model: Model, tokens: np.ndarray
) -> None:
    page = watched.open(exported.as_uri())
    open_live(page)
    assert "run onfoot explore to play on" in page.locator(".live-controls").inner_text()
    assert page.locator(".live-chart .curve").get_attribute("data-points") == "101"
    _, losses = trained(model, tokens, [0.001] * 40)
    page.locator("#live-scrub").evaluate("e => { e.value = '40'; e.dispatchEvent(new Event('input')); }")
    until(page, f"Number({LOSS}.dataset.value) > 0")
    assert shown(page, "loss") == pytest.approx(losses[40], rel=1e-8)
    assert page.locator("#live-rate").is_disabled()


def test_the_checkpoints_of_a_run_are_played(context: Any, model: Model, tokens: np.ndarray, tmp_path: Path) -> None:
    copy, losses = copy_of(model), []
    optimizer = AdamW(copy, lr=1e-4)
    for step in (0, 4, 8):
        while optimizer.steps < step:
            copy.train_step(optimizer, tokens)
        losses.append(copy.loss(tokens))
        state = {"step": step, "best_step": 0, "optimizer_steps": step, "best_loss": 0.0, "seconds": 0.0}
        save_checkpoint(tmp_path, copy.save, optimizer, state, keep=9)
    opened = copy_of(model)
    opened.tokenizer, opened.source = model.tokenizer, str(tmp_path)
    with serving(opened) as number:
        one = Watched(context)
        page = one.open(f"http://127.0.0.1:{number}/")
        open_live(page)
        page.locator("#live-source").select_option("run")
        page.wait_for_selector("main[aria-busy=false]")
        until(page, "!document.getElementById('live-rate')")
        page.locator("#live-play").click()
        until(page, "document.getElementById('live-step').textContent === 'step 8 of 8'")
        until(page, f"{DIFFERENCE} === '2' && document.getElementById('live-play').textContent === 'Play'")
        assert shown(page, "loss") == pytest.approx(losses[2], rel=1e-5)  # the files are float32
        scrub(page, 1)
        assert shown(page, "loss") == pytest.approx(losses[1], rel=1e-5)
        page.locator("#live-show").click()
        page.wait_for_selector("[data-trained='4']")
        assert float(page.locator("#loss").get_attribute("data-value")) == pytest.approx(losses[1], rel=1e-5)
        assert "Back to the opened model" in page.locator("#trained").inner_text()
        page.close()
        assert one.errors == []


def test_a_step_is_a_study_of_its_own_and_few_are_kept(model: Model) -> None:
    explorer = Explorer(model, {"kind": "text", "value": "the name", "ids_only": False})
    keys = []
    for step in range(1, 7):
        answer = explorer.answer({"text": "the name", "trained": f"{step}@0:0.001"})
        keys.append(answer["document"]["key"])
        assert explorer.find(keys[-1]).document["trained"]["step"] == step
    assert len(set(keys)) == 6 and len(explorer.studies) <= 4
    base = explorer.find(answer["document"]["trained"]["base"])
    assert base.key == keys[0].partition("-")[0]
    for wrong in ("80", "x@0:0.001", 3, "1@"):
        with pytest.raises(ValueError, match="trained must be like"):
            explorer.answer({"text": "the name", "trained": wrong})
