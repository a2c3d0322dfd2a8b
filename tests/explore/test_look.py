"""The page fits every screen, has enough contrast, and works without a mouse."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import VIEWS, mark_seen, open_view, settled, until

from onfoot.explore.page import style

TEXT_COLOURS = ("ink", "muted", "forward", "backward", "good", "bad")


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def palettes() -> list[dict[str, str]]:
    blocks = [block for block in re.findall(r"\{([^{}]*)\}", style()) if "--forward:" in block]
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def test_every_text_colour_has_the_contrast_of_aa_on_every_ground() -> None:
    light, dark, chosen_dark = palettes()
    assert dark == chosen_dark
    for palette in (light, dark):
        for ground in ("ground", "panel", "sunk"):
            for name in TEXT_COLOURS:
                assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
            for name in ("plus", "minus", "focus"):  # bars and outlines, not text
                assert contrast(palette[name], palette[ground]) >= 3, (name, ground)
        assert contrast(palette["backward"], palette["back-tint"]) >= 4.5


def test_animations_respect_prefers_reduced_motion() -> None:
    moving = [m.start() for m in re.finditer(r"transition|animation|(?<!over)scroll-behavior", style())]
    allowed = style().index("prefers-reduced-motion: no-preference")
    assert moving and all(place > allowed for place in moving)


WIDTHS = (360, 768, 1024, 1280, 1400, 1920)
SCROLL = (
    ".scroller, .table-scroll, .chips, .tabs, pre, .visually-hidden, .skip-link"  # scrolls, or is not seen, by design
)


def cut_off(page: Any) -> list[str]:
    """What is wider than its box or than the window, except what scrolls by design and what ends in an ellipsis."""
    found: list[str] = page.evaluate(
        """scroll => [...document.querySelectorAll('body *')].filter(x => {
            const { overflowX, textOverflow } = getComputedStyle(x);
            const isCut = overflowX !== 'visible' && x.scrollWidth > x.clientWidth + 1 && x.innerText;
            return isCut && textOverflow !== 'ellipsis' && !x.closest(scroll);
        }).map(x => `${x.className}, ${x.scrollWidth} > ${x.clientWidth}: ${x.textContent.slice(0, 50)}`)""",
        SCROLL,
    )
    over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found + [f"the page is {over} pixels wider than the window"] * (over > 0)


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [("light", [(360, 740), (768, 1024), (1920, 1080)]), ("dark", [(360, 740), (1280, 800)])],
    ids=["light", "dark"],
)
def test_no_view_is_wider_than_the_screen_and_nothing_in_it_is_cut_off(
    watched: Any, exported: Path, scheme: str, sizes: list[tuple[int, int]]
) -> None:
    """On the exported page, which has all its badges from the start."""
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(exported.as_uri())
    page.wait_for_selector("body[data-proven]")
    for width, height in sizes:
        page.set_viewport_size({"width": width, "height": height})
        for view in VIEWS:
            open_view(page, view)
            until(page, "document.querySelector('main canvas, .errors, .live-chart')")
            assert page.locator(".badge.waiting").count() == 0
            assert cut_off(page) == [], (view, width)


def lines_of(boxes: list[list[float]]) -> Iterator[tuple[list[float], list[float]]]:
    """Per line but the first, the tops of its boxes (left, top, bottom) and the bottoms of the line above."""
    starts = [0, *(i for i in range(1, len(boxes)) if boxes[i][0] < boxes[i - 1][0]), len(boxes)]
    lines = [boxes[i:j] for i, j in itertools.pairwise(starts)]
    for above, line in itertools.pairwise(lines):
        yield [top for _, top, _ in line], [bottom for _, _, bottom in above]


def test_on_a_phone_the_lines_of_a_broken_formula_are_apart_and_the_knock_outs_fit(
    watched: Any, exported: Path
) -> None:
    page = watched.open(exported.as_uri() + "#step=embedding&cell=11,21")
    page.set_viewport_size({"width": 300, "height": 740})  # on a wider one the longest formula fits
    settled(page)
    until(page, "document.querySelector('.detail math.broken')")
    formulas = page.locator(".detail math.broken").evaluate_all(
        """all => all.filter(x => x.offsetParent !== null || x.getClientRects().length).map(x =>
            [...x.children].map(y => y.getBoundingClientRect()).map(y => [y.left, y.top, y.bottom]))"""
    )
    lines = [line for boxes in formulas for line in lines_of(boxes)]
    assert lines
    for tops, bottoms_above in lines:
        assert min(tops) >= max(bottoms_above)
    page.set_viewport_size({"width": 360, "height": 740})
    open_view(page, "whatif")
    page.wait_for_selector("#knockouts td.num")
    assert (
        page.evaluate("(x => x.scrollWidth - x.clientWidth)(document.querySelector('#knockouts').parentElement)") == 0
    )
    assert page.locator("#knockouts thead th:visible").all_text_contents() == [
        "without", "promised", "true change", "loss then"
    ]  # fmt: skip


def test_both_losses_of_a_step_are_inside_their_chart(page: Any) -> None:
    open_view(page, "step")
    page.locator("#lr").fill("1e-7")  # the loss hardly falls
    page.locator("#first-step").click()
    until(page, "document.querySelector('[data-figure=actual]').dataset.value > -0.01")
    chart = page.locator(".line-chart").bounding_box()
    for label in page.locator(".line-chart text").all():
        assert label.bounding_box()["y"] >= chart["y"]


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_off_on_any_stop_of_the_tour_and_in_any_row_of_the_map(
    watched: Any, exported: Path, width: int
) -> None:
    page = watched.open(exported.as_uri() + "#tour=1")
    page.set_viewport_size({"width": width, "height": 900})
    for stop in range(1, 9):
        page.wait_for_selector(f'.tour[data-ready="{stop}"]')
        settled(page)
        page.wait_for_timeout(100)  # formulas are broken into lines when they are painted
        assert cut_off(page) == [], stop
        page.locator("[data-tour=next]").click()
    for view in VIEWS:
        open_view(page, view)
        page.wait_for_timeout(100)
        assert cut_off(page) == [], view
    open_view(page, "map")
    page.locator("[data-step='0.3']").click()  # opens a head
    for step in page.locator(".row:not([hidden])").evaluate_all("all => all.map(x => x.dataset.step)"):
        page.locator(f'[data-step="{step}"]').click()
        settled(page)
        page.wait_for_timeout(50)
        assert cut_off(page) == [], step


def test_on_a_phone_every_stop_of_the_tour_shows_its_sentence_and_its_buttons(watched: Any, port: int) -> None:
    """Without scrolling, in less than half of the window; details that are opened scroll, and the buttons stay."""
    watched.page.set_viewport_size({"width": 360, "height": 740})
    page = watched.open(f"http://127.0.0.1:{port}/#tour=1")
    for stop in range(1, 9):
        page.wait_for_selector(f'.tour[data-ready="{stop}"]')
        mark_seen(page)
        panel, words = (page.locator(one).bounding_box() for one in (".tour", ".tour-words"))
        assert panel["y"] + panel["height"] <= 740 and panel["height"] <= 0.45 * 740, stop
        for part in page.locator(".tour h2, .tour-text, .tour-try, .tour-more summary").all():
            box = part.bounding_box()
            assert words["y"] <= box["y"] and box["y"] + box["height"] <= words["y"] + words["height"] + 1, stop
        page.locator(".tour-more summary").click()
        for button in page.locator(".tour-moves button").all():
            box = button.bounding_box()
            assert panel["y"] <= box["y"] + 400 and box["y"] + box["height"] <= 740 and box["x"] + box["width"] <= 360
        page.locator(".tour-more p").last.scroll_into_view_if_needed()
        assert page.locator(".tour").bounding_box()["height"] <= 0.45 * 740, stop
        tabs = page.locator(".tabs").bounding_box()
        assert tabs["height"] < 50  # one row
        page.locator("[data-tour=next]").click()


def test_a_product_is_on_one_line_and_has_no_bar_that_looks_like_a_fractions(watched: Any, port: int) -> None:
    """In wide and in narrow columns: the numbers of both factors are beside each other."""
    page = watched.open(f"http://127.0.0.1:{port}/#step=1.8&cell=3,5")
    for width in (360, 1180, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        settled(page)
        lines = page.locator(".products .product").evaluate_all(
            "all => all.map(x => [...x.querySelectorAll('.small-number')].map(y => y.getBoundingClientRect().bottom))"
        )
        assert len(lines) >= 6 and all(len(line) == 2 and abs(line[0] - line[1]) < 2 for line in lines), width
        over = page.locator(".products").evaluate_all("all => all.map(x => x.scrollWidth - x.clientWidth)")
        assert max(over) <= 0, width


def test_wide_screens_are_used(watched: Any, port: int) -> None:
    """One step, Live and What if have two columns; the matrices of attention grow."""
    page = watched.open(f"http://127.0.0.1:{port}/")
    right = {"step": ".lora", "live": "#live-difference", "whatif": "#knockouts"}
    sizes = []
    for width in (1280, 1920):
        page.set_viewport_size({"width": width, "height": 1000})
        for view, part in right.items():
            open_view(page, view)
            assert (page.locator(part).bounding_box()["x"] > width / 2) == (width == 1920), view
        open_view(page, "attention")
        page.wait_for_selector(".head-card canvas")
        sizes.append(page.locator(".head-card canvas").first.bounding_box()["width"])
    assert sizes[0] <= 330 < sizes[1]


def test_signs_are_told_apart_by_lightness_as_well_as_by_colour_blind_people(page: Any) -> None:
    """Blue and orange stay apart without red-green vision; 0 is the page's own ground, light or dark."""
    page.locator('.row[data-step="embedding"]').click()
    until(page, "document.querySelector('.figure.is-gradient output')")
    colours = page.evaluate("""() => {
        const map = document.querySelector('.figure.is-gradient canvas');
        const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
        let blue = 0, orange = 0;
        for (let i = 0; i < data.length; i += 4) {
            if (data[i + 2] - data[i] > 60) blue++;
            if (data[i] - data[i + 2] > 60) orange++;
        }
        return [blue, orange];
    }""")
    assert min(colours) > 100


def test_everything_that_can_be_used_has_a_name_and_can_be_reached(page: Any) -> None:
    usable = "button, input, select, a, [role=grid], [role=tab]"
    nameless = page.evaluate(
        """usable => [...document.querySelectorAll(usable)]
        .filter(x => !(x.getAttribute('aria-label') || x.textContent.trim() || (x.labels && x.labels.length)))
        .map(x => x.outerHTML)""",
        usable,
    )
    assert nameless == []
    assert page.locator(".detail button[tabindex='-1'], .detail [role=grid]:not([tabindex='0'])").count() == 0
    assert page.locator(".row[tabindex='0']").count() == 1  # one stop for the whole map, arrows inside it


def test_arrow_keys_move_between_tabs(page: Any) -> None:
    page.locator("#tab-map").focus()
    for name in ("attention", "training", "step", "live", "whatif", "mistakes", "map"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{name}"
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{name}"


def test_the_theme_can_be_chosen(page: Any) -> None:
    page.emulate_media(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) == light
    page.locator("#theme").click()
    assert page.evaluate(ground) != light
    assert "dark" in page.locator("#theme").get_attribute("aria-label")
