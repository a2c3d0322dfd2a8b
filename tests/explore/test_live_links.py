"""Links to a training step and to a change: what the address says is reopened."""

from __future__ import annotations

from typing import Any

from test_live import open_live, play_to
from test_what_if import choose, open_what_if
from waiting import SHOWN, until


def test_a_link_reopens_the_study_of_a_training_step_and_back_leaves_it(page: Any) -> None:
    open_live(page)
    end = play_to(page, 6)
    page.locator("#live-show").click()
    page.wait_for_selector(f"[data-trained='{end}']")
    until(page, SHOWN)
    loss = page.locator("#loss").get_attribute("data-value")
    until(page, "location.hash.includes('trained=')")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(f"[data-trained='{end}']")
    until(page, "document.getElementById('loss').dataset.value === x", loss)
    page.locator("#trained-back").click()
    until(page, "document.getElementById('trained').hidden && !location.hash.includes('trained=')")
    page.go_back()
    page.wait_for_selector(f"[data-trained='{end}']")
    page.go_forward()
    until(page, "document.getElementById('trained').hidden")


def test_a_link_reopens_the_step_of_the_live_view(page: Any) -> None:
    open_live(page)
    end = play_to(page, 4)
    until(page, "location.hash.includes(`live=${x}%40`)", end)
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    until(page, "document.querySelector('.live-difference')?.dataset.step === String(x)", end)


def test_a_link_reopens_a_change(page: Any) -> None:
    open_what_if(page)
    choose(page, "score", "1.2", 14, 9, 0.125)
    until(page, "location.hash.includes('whatif=')")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    until(page, "document.querySelector('#what-sizes [data-change=\"0.125\"]')")
    assert page.locator("#what-name").input_value() == "1.2"
