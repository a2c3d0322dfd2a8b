"""The page in Firefox: it opens, the tour walks through it, and its numbers are those of the library."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from firefox import Firefox, running
from waiting import SHOWN, VIEWS

from onfoot.models.model import Model

pytestmark = [pytest.mark.slow, pytest.mark.optional("not every machine has Firefox")]

SETTLED = f"document.querySelector('main[aria-busy=false]') && !document.querySelector('[aria-busy=true]') && {SHOWN}"


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    program = os.environ.get("ONFOOT_FIREFOX") or shutil.which("firefox") or shutil.which("firefox-esr")
    if not program:
        pytest.skip("Firefox not found: install firefox or firefox-esr, or set ONFOOT_FIREFOX to its path")
    with running(program, tmp_path_factory.mktemp("firefox")) as one:
        yield one
        assert one.errors == []


def value_of(firefox: Firefox, tensor: str) -> float:
    """The selected number of an array's figure, with all its digits."""
    return float(firefox.evaluate(f"document.querySelector('.figure[data-tensor=\"{tensor}\"] output').dataset.value"))


def test_the_tour_walks_through_and_its_numbers_are_the_librarys(
    firefox: Firefox, port: int, model: Model, tokens: np.ndarray
) -> None:
    trace = model.trace(tokens)
    firefox.open(f"http://127.0.0.1:{port}/", 1280, 900)
    firefox.until(SETTLED)
    firefox.click_on("#tour-offer .primary")
    numbers = {}
    for stop in range(1, 9):
        firefox.until(f"document.querySelector('.tour[data-ready=\"{stop}\"]') && {SETTLED}")
        found = "[...document.querySelectorAll('.tour-number')].map(x => [x.dataset.name, JSON.parse(x.dataset.value)])"
        numbers |= dict(firefox.evaluate(found))
        firefox.click_on("[data-tour=next]")
    firefox.until("!document.getElementById('tour')")
    assert numbers["loss"] == trace.loss
    assert numbers["norm Δ_12"] == pytest.approx(np.linalg.norm(trace["Δ_12"]), rel=1e-12)
    assert numbers["norm last.Δ_5"] == pytest.approx(np.linalg.norm(trace["Δ_5", 1]), rel=1e-12)


def test_a_clicked_cell_and_a_followed_number_are_the_librarys(
    firefox: Firefox, port: int, model: Model, tokens: np.ndarray
) -> None:
    trace = model.trace(tokens)
    firefox.open("about:blank", 1280, 900)
    firefox.open(f"http://127.0.0.1:{port}/#view=map&step=1.5&cell=0,0", 1280, 900)
    firefox.until(SETTLED)
    before = firefox.evaluate("document.querySelector('.figure.is-gradient .explanation').dataset")
    firefox.click_on(".detail > .pair .figure.is-gradient canvas")
    firefox.until(f"document.querySelector('.figure.is-gradient .explanation').dataset.r != {before['r']} && {SETTLED}")
    at = firefox.evaluate("document.querySelector('.figure.is-gradient .explanation').dataset")
    row, column = int(at["r"]), int(at["c"])
    assert value_of(firefox, "1.Δ_5") == trace["Δ_5", 1][0, row, column]
    assert value_of(firefox, "1.a_5") == trace["a_5", 1][0, row, column]
    firefox.click_on(".figure.is-gradient .factor.go")  # Δ_10, the part of the skip
    firefox.until(f"document.querySelector('.figure[data-tensor=\"1.Δ_10\"]') && {SETTLED}")
    assert value_of(firefox, "1.Δ_10") == trace["Δ_10", 1][0, row, column]
    firefox.evaluate("document.querySelector('.detail [role=grid]').focus()")
    firefox.key("\ue014")  # the right arrow
    firefox.until(f"document.querySelector('.explanation').dataset.c == {column + 1} && {SETTLED}")
    assert value_of(firefox, "1.Δ_10") == trace["Δ_10", 1][0, row, column + 1]


def test_every_view_opens_and_no_view_is_wider_than_the_screen(firefox: Firefox, port: int) -> None:
    for width in (360, 1280):
        firefox.open("about:blank", width, 900)
        firefox.open(f"http://127.0.0.1:{port}/", width, 900)
        firefox.until(SETTLED)
        for view in VIEWS:
            firefox.click_on(f"#tab-{view}")
            firefox.until(
                f"document.getElementById('panel').getAttribute('aria-labelledby') === 'tab-{view}' && {SETTLED}"
            )
            assert firefox.evaluate("document.querySelectorAll('main .message:not([hidden])').length") == 0, view
            over = firefox.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, (view, width)
