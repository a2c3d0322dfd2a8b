"""The prediction at the chosen token is in view everywhere, and the swaps shown really lower the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from waiting import until

from onfoot.explore.study import Study
from onfoot.explore.texts import special_ids
from onfoot.models.model import Model


def shown(page: Any) -> tuple[int, list[tuple[int, float]]]:
    box = page.locator("#prediction")
    best = box.locator(".predicted li").evaluate_all("all => all.map(x => [+x.dataset.id, +x.dataset.probability])")
    return int(box.get_attribute("data-token")), [(int(id), p) for id, p in best]


def right(model: Model, tokens: np.ndarray, t: int) -> list[tuple[int, float]]:
    """The five most probable tokens after token t, by a softmax of the logits."""
    logits = np.asarray(model.logits(tokens))[0, t]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return [(int(i), float(p[i])) for i in np.argsort(-p, kind="stable")[:5]]


def agrees(page: Any, model: Model, tokens: np.ndarray, t: int) -> None:
    until(page, "document.getElementById('prediction').dataset.token === x", str(t))
    now, best = shown(page)
    expected = right(model, tokens, t)
    assert now == t and [id for id, _ in best] == [id for id, _ in expected]
    assert [p for _, p in best] == pytest.approx([p for _, p in expected], rel=1e-12)


def is_in_view(page: Any) -> bool:
    return bool(
        page.evaluate("""() => {
        const box = document.getElementById('prediction').getBoundingClientRect();
        return box.top >= 0 && box.bottom <= innerHeight && box.height > 20;
    }""")
    )


def test_the_prediction_stays_in_view_in_every_view_at_any_scroll(page: Any, model: Model, tokens: np.ndarray) -> None:
    for view, t in {"map": 3, "attention": 5, "training": 8, "step": 2, "mistakes": 11}.items():
        page.locator(f"#tab-{view}").click()
        page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
        page.wait_for_selector("main[aria-busy=false]")
        page.evaluate("scrollTo(0, 0)")
        page.locator(f'.chip[data-token="{t}"]').click()  # chips work in every view
        agrees(page, model, tokens, t)
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        assert is_in_view(page), view
        page.locator("#prediction [data-by='1']").click()
        agrees(page, model, tokens, t + 1)


def test_it_names_the_target_and_draws_bars_to_scale(page: Any, model: Model, tokens: np.ndarray) -> None:
    page.locator('.chip[data-token="4"]').click()
    agrees(page, model, tokens, 4)
    target = page.locator(".predicted-target [data-target]")
    assert int(target.get_attribute("data-target")) == tokens[0, 5]
    probability = float(page.locator(".predicted-target [data-probability]").get_attribute("data-probability"))
    assert f"{100 * probability:.1f} %" in page.locator(".predicted-target").inner_text()
    widths = page.locator(".predicted li").evaluate_all(
        "all => all.map(x => parseFloat(x.firstChild.style.width) / 100)"
    )
    assert widths == pytest.approx([p for _, p in right(model, tokens, 4)], abs=1e-4)
    page.locator(".chip").last.click()
    assert page.locator(".predicted-target").inner_text() == "last token: no target"
    assert page.locator("#prediction [data-by='1']").is_disabled()


def test_attention_opens_at_the_chosen_token(page: Any) -> None:
    for t in (3, 12, 21):  # the last has no target: its scores have no gradient
        page.locator("#tab-map").click()
        page.locator(f'.chip[data-token="{t}"]').click()
        page.locator("#tab-attention").click()
        page.wait_for_selector(".view.attention .answer .at")
        assert page.locator(".view.attention .answer .at").first.inner_text().startswith(f"[{t} ")
        assert page.locator("#prediction").get_attribute("data-token") == str(t)


def test_it_follows_the_selected_cell_and_the_keyboard(page: Any, model: Model, tokens: np.ndarray) -> None:
    page.locator("#tab-attention").click()
    page.wait_for_selector(".view.attention [role=grid]")
    page.locator(".view.attention [role=grid]").first.focus()
    page.keyboard.press("Control+Home")
    for _ in range(6):
        page.keyboard.press("ArrowDown")
    agrees(page, model, tokens, 6)
    page.locator('.chip[tabindex="0"]').focus()
    assert page.locator('.chip[tabindex="0"]').count() == 1  # one stop for all chips
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.token") == "8"
    assert page.locator('.chip[aria-checked="true"]').get_attribute("data-token") == "8"
    agrees(page, model, tokens, 8)
    assert page.locator(".view.attention .answer .at").first.inner_text().startswith("[8 ")
    page.keyboard.press("End")
    agrees(page, model, tokens, 21)


def test_it_can_be_chosen_by_touch_on_a_phone(browser: Any, port: int, model: Model, tokens: np.ndarray) -> None:
    phone = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page = phone.new_page()
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("main[aria-busy=false]")
    page.locator('.chip[data-token="3"]').tap()
    agrees(page, model, tokens, 3)
    page.locator("#prediction [data-by='1']").tap()
    agrees(page, model, tokens, 4)
    inside = "all => all.every(x => x.getBoundingClientRect().right <= innerWidth && x.scrollWidth <= x.clientWidth)"
    assert page.locator(".predicted li, .predicted-target").evaluate_all(inside)
    phone.close()


def test_swaps_lower_the_loss_and_leave_special_tokens_out(study: Study, model: Model, tokens: np.ndarray) -> None:
    special = special_ids(model)
    assert len(special) == 2 and all(model.tokenizer.backend.id_to_token(id).startswith("<") for id in special)
    found = study.training["attribution"]
    assert len(found["swaps"]) == min(found["lower"], 8) > 3 and found["tried"] == 22 * (37 - len(special) - 1)
    loss, targets = model.loss(tokens), study.targets
    for swap in found["swaps"]:
        swapped = tokens.copy()
        swapped[0, swap["position"]] = swap["new"]
        assert model.loss(swapped, targets) - loss == pytest.approx(swap["actual"], abs=1e-12)
        assert swap["actual"] < 0 and swap["new"] not in special
    changes = [swap["actual"] for swap in found["swaps"]]
    assert changes == sorted(changes)
