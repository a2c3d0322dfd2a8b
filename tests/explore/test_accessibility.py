"""axe-core finds nothing wrong on any view and any stop of the tour, on a phone and a desktop, light and dark."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import VIEWS, open_view, settled

from conftest import Watched
from onfoot.own_engine import OwnEngine, as_engine

pytestmark = pytest.mark.optional("axe-core comes from npm, which not every machine has")

WIDTHS = {"phone": 360, "desktop": 1280}
CONTRAST = "color-contrast"  # by far the slowest rule


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, which tests/explore/install_axe.sh fetches."""
    install = (Path(__file__).parent / "install_axe.sh").read_text(encoding="utf-8")
    version = re.findall(r"VERSION=(\S+)", install)[0]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("ONFOOT_AXE") or cache / "onfoot-tests" / f"axe-core-{version}.js")
    if not path.is_file():
        pytest.skip(f"{path} not found: run `make setup-browser`, or set ONFOOT_AXE to the path of axe.min.js")
    return path.read_text(encoding="utf-8")


def violations(page: Any, axe: str, *off: str) -> list[str]:
    """What every rule of axe-core finds on the page, except those that are off."""
    page.evaluate(axe)
    options = {"resultTypes": ["violations"], "rules": {rule: {"enabled": False} for rule in off}}
    found = page.evaluate("options => axe.run(options)", options)["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


@contextmanager
def visiting(browser: Any, address: str, width: int, scheme: str) -> Iterator[Any]:
    """A first visitor's page, in a window and a colour scheme."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    watched = Watched(context)
    watched.open(address)
    settled(watched.page)
    yield watched.page
    context.close()
    assert watched.errors == []


def test_axe_finds_what_is_planted(page: Any, axe: str) -> None:
    page.evaluate("document.querySelector('label[for=text]').remove()")
    page.evaluate("document.querySelector('.run span').style.color = '#ccc'")
    rules = {line.split(":")[0] for line in violations(page, axe)}
    assert {"label", CONTRAST} <= rules


def test_every_view_is_accessible_on_a_phone(page: Any, axe: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for view in VIEWS:
        open_view(page, view)
        assert violations(page, axe, CONTRAST) == [], view


def test_the_progress_of_long_work_is_accessible(page: Any, axe: str) -> None:
    page.evaluate("document.getElementById('work').hidden = false")
    assert violations(page, axe, CONTRAST) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", WIDTHS)
def test_every_view_and_every_stop_of_the_tour_is_accessible(
    browser: Any, port: int, axe: str, screen: str, scheme: str
) -> None:
    found: dict[str, list[str]] = {}
    with visiting(browser, f"http://127.0.0.1:{port}/", WIDTHS[screen], scheme) as page:
        found["first visit"] = violations(page, axe)
        page.get_by_role("button", name="Take the tour, one minute").click()
        for stop in range(1, 9):
            page.wait_for_selector(f'.tour[data-ready="{stop}"]')
            settled(page)
            found[f"stop {stop}"] = violations(page, axe)
            page.locator("[data-tour=next]").click()
        for view in VIEWS:
            open_view(page, view)
            found[view] = violations(page, axe)
        page.get_by_role("button", name="Symbols").click()
        found["symbols"] = violations(page, axe)
    assert {place: lines for place, lines in found.items() if lines} == {}
    assert len(found) == 1 + 8 + len(VIEWS) + 1


@pytest.mark.slow
def test_the_view_of_your_own_pairs_is_accessible(opened_with: Any, axe: str) -> None:
    engine = as_engine(str(Path(__file__).parents[1] / "own_engine" / "plain_pairs.py"))
    assert isinstance(engine, OwnEngine)
    with opened_with(engine) as page:
        open_view(page, "own")
        page.locator(".own-errors button").first.click()
        page.wait_for_selector(".compared canvas")
        assert violations(page, axe) == []
