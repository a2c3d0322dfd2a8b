"""The run through the map: its norms and sums are the library's, its paths are the network's, and it can be stepped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from waiting import until

from onfoot.explore.study import Study
from onfoot.models.model import Model


@pytest.fixture
def calm(browser: Any, port: int) -> Iterator[Any]:
    """A page whose reader prefers reduced motion."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector(".motion")
    yield page
    context.close()


def at_row(page: Any) -> tuple[str, str]:
    """The direction and the step of the row that the run is at."""
    row = page.locator(".row.now-forward, .row.now-backward")
    way = "forward" if "now-forward" in row.get_attribute("class") else "backward"
    return way, row.get_attribute("data-step")


# --- what the page is told ---


def test_the_paths_are_those_of_the_network(study: Study) -> None:
    edges = {tuple(edge) for edge in study.document["motion"]["edges"]}
    skips = {("embedding", "0.5"), ("0.5", "0.10"), ("0.10", "1.5"), ("1.5", "1.10")}
    branches = {
        ("embedding", "0.2"),
        ("0.2", "0.3"),
        ("0.3", "0.4"),
        ("0.4", "0.5"),
        ("1.10", "11"),
        ("softmax", "loss"),
    }
    head = {("0.2", "0.0.a_2"), ("0.0.a_2", "0.0.v"), ("0.0.k", "0.0.raw"), ("0.0.v", "0.0.out"), ("0.0.out", "0.3")}
    assert skips | branches | head <= edges
    assert {to for _, to in edges} == {step.id for step in study.steps} - {"input", "pos"}
    outside = [(a, b) for a, b in edges if "." not in a + b]  # the position table reads no token
    assert sorted(outside) == [
        ("11", "12"), ("12", "softmax"), ("input", "tok"), ("pos", "embedding"), ("softmax", "loss"),
        ("tok", "embedding"),
    ]  # fmt: skip


def test_an_error_signal_is_made_of_those_of_the_steps_that_read_the_activation(study: Study) -> None:
    """The edges come from the forward formulas; the backward formulas name the same steps."""
    steps = {step.id: step for step in study.steps}
    edges = [tuple(edge) for edge in study.document["motion"]["edges"]]
    for name in ("embedding", "0.5", "0.10", "1.5", "0.9", "0.7", "0.6", "11"):
        readers = {steps[to].backward for a, to in edges if a == name}
        reached, waiting = set(), [steps[name].backward]
        while waiting:
            for term in study.tensors[waiting.pop()].terms:
                for factor in term.factors:
                    is_signal = "Δ" in factor.tensor
                    reached |= {factor.tensor} if is_signal else set()
                    if not is_signal and ("x_" in factor.tensor or "mean" in factor.tensor):
                        waiting.append(factor.tensor)
        assert reached == readers, name


def test_norms_and_the_parts_of_sums_are_the_librarys(study: Study, model: Model, tokens: np.ndarray) -> None:
    trace, told = model.trace(tokens), study.document["motion"]
    assert told["norms"]["1.Δ_5"] == pytest.approx(np.linalg.norm(trace["Δ_5", 1]), rel=1e-12)
    assert told["norms"]["0.a_10"] == pytest.approx(np.linalg.norm(trace["a_10", 0]), rel=1e-12)
    assert "a_0" not in told["norms"]  # token ids have no size
    skip, branch = told["sums"]["1.Δ_5"]
    assert skip["label"] == "Δ_10" and skip["norm"] == told["norms"]["1.Δ_10"]
    assert branch["norm"] == pytest.approx(np.linalg.norm(trace["Δ_5", 1] - trace["Δ_10", 1]), rel=1e-12)
    assert [part["label"] for part in told["sums"]["0.a_5"]] == ["a_1", "a_4"]
    assert all(np.isfinite(norm) for norm in told["norms"].values())


# --- on the page ---


def assert_paths_are_inside_the_map(page: Any) -> None:
    outside = page.locator(".path").evaluate_all("""all => all.map(x => x.getBoundingClientRect()).filter(x => {
        const map = document.querySelector('.map').getBoundingClientRect();
        return x.left < map.left || x.right > map.left + document.querySelector('.map').clientWidth;
    }).length""")
    assert outside == 0


def test_reduced_motion_has_no_play_button_and_goes_row_by_row(
    calm: Any, study: Study, model: Model, tokens: np.ndarray
) -> None:
    assert calm.locator(".motion .play").is_hidden() and calm.locator(".motion .speed").is_hidden()
    on = calm.get_by_role("button", name="One row on")
    rows = calm.locator(".row:visible").evaluate_all("all => all.map(x => x.dataset.step)")
    seen = []
    for _ in range(2 * len(rows) - 2):  # softmax and the loss have no error signal
        on.click()
        seen.append(at_row(calm))
    up = [("backward", id) for id in reversed(rows) if id not in ("softmax", "loss")]
    assert seen == [("forward", id) for id in rows] + up
    trace = model.trace(tokens)
    shown = calm.locator('.row[data-step="1.5"] .flow-backward')
    assert float(shown.get_attribute("data-value")) == pytest.approx(np.linalg.norm(trace["Δ_5", 1]), rel=1e-12)
    assert shown.locator("b").inner_text() == f"{np.linalg.norm(trace['Δ_5', 1]):.3f}"
    on.click()
    assert at_row(calm) == seen[-1]  # the end
    calm.get_by_role("button", name="Clear").click()
    assert calm.locator(".lit-forward, .lit-backward").count() == 0


def test_the_skips_are_paths_on_which_the_signal_runs_and_is_added(calm: Any) -> None:
    def share(way: str, start: str, end: str) -> float:
        path = calm.locator(f'.path.{way}[data-from="{start}"][data-to="{end}"]')
        return float(path.get_attribute("data-share"))

    on = calm.get_by_role("button", name="One row on")
    while calm.locator('.now-forward[data-step="1.7"]').count() == 0:
        on.click()
    assert share("forward", "1.5", "1.10") == 0.4 and share("forward", "0.10", "1.5") == 1  # two of five rows
    assert share("backward", "1.5", "1.10") == 0
    while calm.locator('.now-backward[data-step="1.5"]').count() == 0:
        on.click()
    assert share("backward", "1.5", "1.10") == 1 and share("backward", "0.10", "1.5") == 0
    words = calm.locator(".motion-status").inner_text().replace("\n", "")
    assert "Skip 1, block 2: ‖Δ5‖ = 0.560, added from Δ10 (0.370) + the branch (0.432)" in words
    assert (
        calm.locator('.path[data-from="1.5"] .plus').count()
        == calm.locator('.path[data-from="1.5"] .split').count()
        == 2
    )
    assert calm.locator(".path.forward[data-from=tok] .split, .path.backward[data-from=tok] .plus").count() == 0
    calm.get_by_role("button", name="One row back").click()
    assert at_row(calm) == ("backward", "1.6")
    calm.locator('.row[data-step="1.0.k"]').evaluate("row => row.click()")  # opens a head, which has paths of its own
    until(calm, "document.querySelectorAll('.path').length >= 24")
    for width in (1280, 360):
        calm.set_viewport_size({"width": width, "height": 900})
        until(calm, "innerWidth === x && document.querySelector('svg.paths').clientWidth <= x", width)
        assert_paths_are_inside_the_map(calm)


def test_play_runs_until_it_is_paused(page: Any) -> None:
    page.locator(".motion .speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    until(page, "document.querySelectorAll('.lit-forward').length > 3")
    page.get_by_role("button", name="Pause").click()
    stopped = at_row(page)
    time.sleep(0.4)
    assert at_row(page) == stopped
    page.get_by_role("button", name="Play").click()
    until(page, "document.querySelectorAll('.lit-forward').length > 6")
    page.get_by_role("tab", name="Attention").click()
    page.wait_for_selector(".head-card")
    assert page.locator(".motion").count() == 0


def test_the_open_step_is_that_of_the_row_that_is_played(page: Any) -> None:
    """Play does not open the heads of a block, which would change the rows that it runs through."""
    rows = page.locator(".row:visible").count()
    page.locator(".motion .speed").select_option("2")
    page.get_by_role("button", name="Play").click()
    until(page, "document.querySelectorAll('.lit-forward').length > 8")
    page.get_by_role("button", name="Pause").click()
    _, step = at_row(page)
    until(page, "document.querySelector('.row[aria-selected=true]').dataset.step === x", step)
    until(
        page,
        "document.getElementById('step-name').textContent.startsWith(x)",
        page.evaluate(f"""
        document.querySelector('.row[data-step="{step}"] .name').firstChild.textContent"""),
    )
    assert page.locator(".row:visible").count() == rows
    assert page.locator("#prediction").get_attribute("data-token") == "3"


def test_a_row_and_its_step_say_whose_backward_pass_made_the_error_signal(page: Any) -> None:
    made = page.locator('.row[data-step="0.5"] .made-by')
    assert made.inner_text() == "↑ made by LayerNorm 2 + Skip 2"
    assert (
        page.locator('.row[data-step="0.10"] .made-by').inner_text()
        == "↑ made by LayerNorm 1 of block 2 + Skip 1 of block 2"
    )
    page.locator('.row[data-step="0.9"]').click()
    until(page, "document.getElementById('step-name').textContent.startsWith('FC contract')")
    page.wait_for_selector(".made-of")
    words = " ".join(page.locator(".made-of").inner_text().split())
    assert (
        "made by the backward pass of Skip 2; the gradients of the parameters below are made by this step’s own"
        in words
    )
    page.locator(".made-of button").click()
    until(page, "document.getElementById('step-name').textContent.startsWith('Skip 2')")
