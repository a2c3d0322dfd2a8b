"""What if, knock-outs and exercises in the browser: promised and true changes are the library's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import SHOWN, until

from onfoot.explore.copies import copy_of
from onfoot.explore.study import Study
from onfoot.models.model import Model

READY = "document.querySelector('#what-result[aria-busy=false] #what-sizes')"


def open_what_if(page: Any) -> None:
    page.get_by_role("tab", name="What if").click()
    page.wait_for_selector("#knockouts")
    page.wait_for_selector("#sign-exercise button")
    page.wait_for_selector("#planted-check")


def choose(page: Any, kind: str, name: str, row: int, column: int, change: float) -> None:
    page.locator("#what-kind").select_option(kind)
    page.locator("#what-name").select_option(name)
    for key, value in (("row", row), ("column", column), ("change", change)):
        field = page.locator(f"#what-{key}")
        if field.is_enabled():
            field.fill(str(value))
    page.locator(".what-form button").click()
    until(
        page,
        f"{READY} && [...document.querySelectorAll('#what-sizes tbody tr')].some(r => +r.dataset.change === x)",
        change,
    )


def sizes(page: Any) -> list[tuple[float, float, float]]:
    rows = page.locator("#what-sizes tbody tr")
    return rows.evaluate_all("all => all.map(r => [+r.dataset.change, +r.dataset.promised, +r.dataset.true])")


def test_a_weight_is_changed_and_both_changes_are_the_librarys(page: Any, model: Model, tokens: np.ndarray) -> None:
    open_what_if(page)
    name = "transformer.h.0.attn.c_proj.weight"
    choose(page, "weight", name, 3, 7, 0.25)
    loss, grads = model.loss_and_grads(tokens)
    gradient = float(page.locator("[data-what=gradient]").get_attribute("data-value"))
    assert gradient == float(grads[name][3, 7])
    found = sizes(page)
    assert len(found) == 5
    for change, promised, true in found:
        fresh = copy_of(model)
        fresh.params[name][3, 7] += change
        assert promised == gradient * change and true == fresh.loss(tokens) - loss


@pytest.mark.parametrize(
    ("kind", "name", "row", "column"),
    [("activation", "1.a_5", 4, 9), ("score", "1.2", 14, 9), ("weight", "transformer.ln_f.bias", 0, 5)],
    ids=["activation", "score", "bias"],
)
def test_activations_scores_and_biases_can_be_changed(
    page: Any, study: Study, kind: str, name: str, row: int, column: int
) -> None:
    open_what_if(page)
    choose(page, kind, name, row, column, 0.125)
    expected = study.what_if(kind, name, row, column, 0.125)
    assert sizes(page) == [[one["change"], one["promised"], one["true"]] for one in expected["sizes"]]
    trace = study.context.trace
    gradient = {
        "activation": lambda: trace["Δ_5", 1][0, row, column],
        "score": lambda: trace.blocks[1].delta_causal[0, 2, row, column],
        "weight": lambda: trace.grads[name][column],
    }[kind]()
    assert float(page.locator("[data-what=gradient]").get_attribute("data-value")) == float(gradient)


def test_it_opens_at_the_cell_selected_in_the_map(page: Any) -> None:
    page.locator('.row[data-step="0.6"]').click()
    until(page, SHOWN)
    cell = page.locator('.figure[data-tensor="0.a_6"] .explanation').first
    row, column = cell.get_attribute("data-r"), cell.get_attribute("data-c")
    open_what_if(page)
    found = [page.locator(f"#what-{key}").input_value() for key in ("kind", "name", "row", "column")]
    assert found == ["activation", "0.a_6", row, column]


@pytest.mark.parametrize("step", ["loss", "embedding"])
def test_it_opens_where_the_gradient_keeps_its_promise_and_larger_changes_are_one_click_away(
    page: Any, step: str
) -> None:
    """At an activation of the token that went wrong. Ten times the change may break the promise."""
    page.locator(f'.row[data-step="{step}"]').click()
    until(page, SHOWN)
    open_what_if(page)
    until(page, READY)
    change = float(page.locator("#what-change").input_value())
    found = {row[0]: row[2] / row[1] for row in sizes(page)}
    assert 1e-4 <= change <= 0.01 and found[change] == pytest.approx(1, abs=0.1)
    assert page.locator("#what-kind").input_value() == "activation" and page.locator("#what-row").input_value() == "3"
    larger = max(found)
    page.locator("#what-sizes button").last.click()
    until(page, "Math.abs(document.getElementById('what-change').value / x - 1) < 1e-9", larger)
    until(page, f"{READY} && document.querySelector('#what-sizes b')")
    assert float(page.locator("#what-sizes tr:has(b)").get_attribute("data-change")) == pytest.approx(larger)


def test_a_change_that_makes_no_sense_says_why(page: Any) -> None:
    open_what_if(page)
    page.locator("#what-change").fill("0")
    page.locator(".what-form button").click()
    until(page, "document.getElementById('what-result').textContent.includes('the change must not be 0')")
    choose(page, "activation", "a_1", 0, 0, 0.1)
    assert "must not" not in page.locator("#what-result").inner_text()


def test_the_knock_outs_are_the_librarys(page: Any, study: Study) -> None:
    open_what_if(page)
    rows = page.locator("#knockouts tbody tr").evaluate_all(
        "all => all.map(r => [r.dataset.knockout, +r.dataset.promised, +r.dataset.true])"
    )
    expected = study.what_if_choices["knockouts"]["rows"]
    assert rows == [[f"{row['block']} {row['name']}", row["promised"], row["true"]] for row in expected]
    assert len(rows) == 2 * (4 + 2 + 2 + 1)


def test_the_sign_is_hidden_until_it_is_answered_and_the_score_stays(page: Any, study: Study) -> None:
    open_what_if(page)
    page.locator("#score-reset").click()
    for number, (answer, score) in enumerate([(True, "1/1"), (False, "1/2")]):
        until(page, "document.querySelector('#sign-exercise .verdict').textContent === ''")
        exercise = study.exercise("sign", number)
        rises = exercise["answer"]["true"] > 0
        page.locator(f"#sign-exercise [data-rises={'true' if rises == answer else 'false'}]").click()
        verdict = page.locator("#sign-exercise .verdict")
        assert verdict.get_attribute("data-right") == ("true" if answer else "false")
        shown = page.locator("#sign-exercise [data-gradient]")
        assert float(shown.get_attribute("data-true")) == exercise["answer"]["true"]
        assert float(shown.get_attribute("data-promised")) == exercise["answer"]["promised"]
        assert page.locator("[data-score=sign]").get_attribute("data-value") == score
        page.locator("#sign-exercise .next").click()
    page.reload()
    page.wait_for_selector("main[aria-busy=false]")
    open_what_if(page)
    assert page.locator("[data-score=sign]").get_attribute("data-value") == "1/2"
    page.locator("#score-reset").click()


def test_the_hidden_mistake_is_found_by_keyboard(page: Any, study: Study) -> None:
    open_what_if(page)
    page.locator("#score-reset").click()
    expected = study.exercise("mistake", 0)
    first, rows = expected["answer"], expected["rows"]
    table = page.locator(".planted-rows tbody tr")
    assert table.count() == len(rows) and page.locator(".planted-rows .wrong").count() == 0
    page.locator("#planted-0").focus()
    for _ in range(first):
        page.keyboard.press("ArrowDown")
    page.locator("#planted-check").focus()
    page.keyboard.press("Enter")
    assert page.locator(".planted-rows .wrong").count() == 1
    page.locator("#planted-point").focus()
    page.keyboard.press("Enter")
    assert page.locator("#mistake-exercise .verdict").get_attribute("data-right") == "true"
    assert page.locator("[data-score=mistake]").get_attribute("data-value") == "9/1"  # one check cost a point
    assert expected["name"] in page.locator("#mistake-exercise .verdict").inner_text()
    assert page.locator(".planted-rows .wrong").count() == sum(row["wrong"] for row in rows)
    page.keyboard.press("Enter")  # the focus is on Next
    until(page, "!document.querySelector('#mistake-exercise .verdict').textContent")
    page.locator("#planted-point").click()
    right = study.exercise("mistake", 1)["answer"] == 0
    assert page.locator("#mistake-exercise .verdict").get_attribute("data-right") == str(right).lower()
    page.locator("#score-reset").click()


def test_without_storage_the_score_is_kept_in_memory(watched: Any, port: int) -> None:
    watched.page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden'); } });"
    )
    page = watched.open(f"http://127.0.0.1:{port}/")
    open_what_if(page)
    page.locator("#sign-exercise [data-rises=true]").click()
    assert page.locator("[data-score=sign]").get_attribute("data-value").endswith("/1")
    page.get_by_role("tab", name="Map").click()
    open_what_if(page)
    assert page.locator("[data-score=sign]").get_attribute("data-value").endswith("/1")


def test_an_exported_page_has_knock_outs_and_exercises(watched: Any, exported: Path) -> None:
    page = watched.open(exported.as_uri())
    open_what_if(page)
    assert "run onfoot explore to try it" in page.locator(".what-if").inner_text()
    assert page.locator(".what-form").count() == 0 and page.locator("#knockouts tbody tr").count() == 18
    page.locator("#score-reset").click()
    for _ in range(6):
        until(page, "document.querySelector('#sign-exercise .verdict')?.textContent === ''")
        page.locator("#sign-exercise [data-rises=true]").click()
        page.locator("#sign-exercise .next").click()
    until(page, "document.getElementById('sign-exercise').textContent.includes('run onfoot explore for more')")
    page.locator("#score-reset").click()


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_both_views_fit_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    open_what_if(page)
    until(page, READY)
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wider) <= 0
    page.get_by_role("tab", name="Live").click()
    page.wait_for_selector(".live-difference")
    assert page.evaluate(wider) <= 0
