"""Every view can be used with a finger alone, with the keyboard alone, and with forced colours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from waiting import SHOWN, VIEWS, open_view, settled, until

from conftest import Watched

TIP = ".gloss-tip:not([hidden])"
TITLED = """() => { // the first of each kind of element with a title that is not a button
    const seen = new Set();
    return [...document.querySelectorAll(':is(main, .prediction) [title]:not([title=""])')].filter(x => {
        const kind = x.className.split(' ')[0] || x.localName;
        if (x.closest('button, .row, math') || !x.offsetWidth || seen.has(kind)) return false;
        return seen.add(kind);
    }).map((x, i) => { x.dataset.titled = i; return x.title; });
}"""


@pytest.fixture
def phone(browser: Any, port: int) -> Iterator[Any]:
    """The page on a phone: taps only, no pointer that could hover."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    watched = Watched(context)
    watched.page.add_init_script("try { localStorage.setItem('onfoot explore tour', 'done') } catch {}")
    page = watched.open(f"http://127.0.0.1:{port}/")
    settled(page)
    assert page.evaluate("matchMedia('(hover: none) and (pointer: coarse)').matches")
    yield page
    context.close()
    assert watched.errors == []


def tap_cells(page: Any, most: int) -> int:
    """Taps into the heat maps of the view: each must show the number of that cell. Returns how many there are."""
    maps = page.locator("main .figure:visible:has(canvas)")
    for i in range(min(maps.count(), most)):
        figure = maps.nth(i)
        cell = figure.locator("[role=gridcell]").first
        before = cell.text_content()
        box = figure.locator("canvas").first.bounding_box()
        figure.locator("canvas").first.tap(position={"x": box["width"] * (0.75 - 0.1 * i), "y": box["height"] * 0.6})
        page.wait_for_timeout(50)
        after = cell.text_content()
        assert after != before, i
        until(
            page,
            "[...document.querySelectorAll('main .figure output')].some(y => x.endsWith(': ' + y.textContent))",
            after,
        )
    return int(maps.count())


def tap_titles(page: Any) -> int:
    """Taps what has a title: the tip must say it. Returns how many there are."""
    titles: list[str] = page.evaluate(TITLED)
    for i, title in enumerate(titles):
        page.locator(f"[data-titled='{i}']").tap()
        assert page.locator(TIP).inner_text().strip() == title.strip()
        page.locator(".brand").dispatch_event("click")  # elsewhere
        assert page.locator(TIP).count() == 0
    return len(titles)


def test_on_the_map_everything_that_hovering_shows_is_shown_by_a_tap(phone: Any) -> None:
    phone.locator('.row[data-step="embedding"]').tap()
    # what autograd says comes after the finite difference
    until(phone, "document.querySelector('.detail .badge.proven[data-autograd]')")
    assert tap_cells(phone, 2) >= 2
    settled(phone)
    assert tap_titles(phone) >= 4  # the check of a gradient, all digits of a term, the target and its probability
    phone.locator(".is-gradient .formula math mi").first.tap()
    assert "error signal" in phone.locator(TIP).inner_text()
    phone.locator(".chip").nth(3).tap()
    assert phone.locator("#prediction").get_attribute("data-token") == "3"
    settled(phone)
    phone.locator(".detail .is-gradient .factor.go").first.tap()
    until(phone, "document.getElementById('step-name').textContent.startsWith('Skip 1')")


@pytest.mark.slow
@pytest.mark.parametrize("view", [view for view in VIEWS if view != "map"])
def test_in_every_view_numbers_and_explanations_are_reached_by_taps(phone: Any, view: str) -> None:
    phone.locator(f"#tab-{view}").tap()
    settled(phone)
    phone.locator("#prediction [data-by='-1']").tap()
    assert phone.locator("#prediction").get_attribute("data-token") == "2"  # it was 3, which went wrong
    figures = {
        "attention": 16,
        "training": 5,
        "step": 7,
    }  # one per head and array; the three tables, the norms, the targets
    assert tap_cells(phone, 4) >= figures.get(view, 0)
    assert tap_titles(phone) >= 2
    taps = {
        "step": ("#next-step", "document.querySelector('main').textContent.includes('loss after step 2')"),
        "live": ("#live-play", "document.getElementById('live-step').textContent.match(/[1-9]/)"),
        "whatif": ("#main form .primary", "document.querySelector('#what-result output, #what-result table')"),
        "mistakes": (
            ".mistake:not([aria-selected=true])",
            "document.querySelector('.mistake-result[aria-busy=false] h3')",
        ),
    }
    target, shown = taps.get(view, (".head-card button, .figures-table", "true"))
    phone.locator(target).first.tap()
    until(phone, shown)


# --- the keyboard ---

REACHED = """() => document.addEventListener('focusin', event => {
    const { outlineStyle, outlineWidth } = getComputedStyle(event.target);
    event.target.dataset.reached = outlineStyle !== 'none' && parseFloat(outlineWidth) >= 1 ? 'seen' : 'unseen';
})"""
USABLE = """() => [...document.querySelectorAll(
    'main :is(button, input, select, summary, a[href], [role=grid], [tabindex="0"])'
)].filter(x => !x.disabled && x.tabIndex >= 0 && x.checkVisibility())
.filter(x => !(x.type === 'radio' && x.matches('tr ~ tr *')))"""


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_tab_reaches_everything_of_a_view_and_the_focus_is_seen(page: Any, view: str) -> None:
    open_view(page, view)
    until(page, "!document.querySelector('.badge.waiting')", seconds=60)
    page.evaluate(REACHED)
    page.locator(f"#tab-{view}").focus()
    count = page.evaluate(f"({USABLE})().length")
    assert count >= 2
    for _ in range(count + 10):
        page.keyboard.press("Tab")
    missed = page.evaluate(
        f"({USABLE})().filter(x => x.dataset.reached !== 'seen').map(x => x.outerHTML.slice(0, 150))"
    )
    assert missed == []


def test_every_view_is_worked_by_the_keyboard(page: Any) -> None:
    """Tabs by arrows; then the keys of each view, without a click."""
    page.locator("#tab-map").focus()
    cell = "document.querySelector('main [role=gridcell]').textContent"
    for view in ("attention", "training"):
        page.keyboard.press("ArrowRight")
        settled(page)
        page.locator("main [role=grid]").first.focus()
        before = page.evaluate(cell)
        page.keyboard.press("ArrowDown")
        until(page, f"{cell} !== x && document.querySelector('main .figure output')", before)
        page.locator(f"#tab-{view}").focus()
    page.keyboard.press("ArrowRight")
    settled(page)
    page.locator("#next-step").focus()
    page.keyboard.press("Enter")
    until(page, "document.querySelector('main').textContent.includes('loss after step 2')")
    page.locator("#tab-step").focus()
    page.keyboard.press("ArrowRight")
    settled(page)
    page.locator("#live-play").focus()
    page.keyboard.press("Enter")
    until(page, "document.getElementById('live-step').textContent.match(/[1-9]/)")
    page.keyboard.press("Enter")
    page.locator("#tab-live").focus()
    page.keyboard.press("ArrowRight")
    settled(page)
    page.locator("#what-change").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("0.25")
    before = page.locator("#what-result").inner_text()
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#what-result').innerText !== x", before)
    page.locator("#tab-whatif").focus()
    page.keyboard.press("ArrowRight")
    settled(page)
    page.locator(".mistake[aria-selected=true]").focus()
    first = page.locator(".mistake-result").get_attribute("data-key")
    page.keyboard.press("ArrowDown")
    until(page, "document.querySelector('.mistake-result').dataset.key !== x", first)


def test_a_focused_check_and_term_show_what_their_titles_say(page: Any) -> None:
    page.locator('.row[data-step="embedding"]').click()
    until(page, "document.querySelector('.detail .badge.proven[data-autograd]')")
    until(page, SHOWN)
    page.locator(".detail .eq").first.focus()
    page.keyboard.press("Tab")
    assert page.locator(TIP).inner_text() == page.locator(".detail .badge").first.get_attribute("title")
    page.locator(".detail .is-gradient .factor.go").first.focus()
    page.keyboard.press("Tab")
    value = page.locator(".detail .is-gradient .term-value").first
    assert page.locator(TIP).inner_text() == value.get_attribute("title")
    assert value.get_attribute("aria-describedby") == "gloss-tip"


# --- forced colours ---

BARS = ".bar i, .share i, .length i, .chip-loss, .predicted-bar, .strip i"
LINES = ".line-chart polyline, .live-chart .curve, .what-chart .truth, .path .track"
CHOSEN = (
    "[role=tab][aria-selected=true], .chip[aria-checked=true], .row[aria-selected=true], .mistake[aria-selected=true]"
)


INVISIBLE = """ground => [...document.querySelectorAll('body *')].filter(x => x.checkVisibility()
    && [...x.childNodes].some(one => one.nodeType === 3 && one.data.trim())).filter(x => {
    const { forcedColorAdjust, backgroundColor, color } = getComputedStyle(x);
    return color === (forcedColorAdjust === 'none' ? backgroundColor : ground); // which is painted behind forced text
}).map(x => x.outerHTML.slice(0, 80))"""


def test_text_bars_lines_and_selection_are_seen_with_forced_colours_in_every_view(watched: Any, port: int) -> None:
    watched.page.emulate_media(forced_colors="active", reduced_motion="reduce")
    page = watched.open(f"http://127.0.0.1:{port}/")
    ground = "getComputedStyle(document.body).backgroundColor"
    drawn = set()
    for view in VIEWS:
        open_view(page, view)
        assert page.evaluate(INVISIBLE, page.evaluate(ground)) == [], view
        bars = page.locator(BARS).evaluate_all(
            f"""all => all.filter(x => x.getBoundingClientRect().width > 1 && x.getBoundingClientRect().height > 1)
            .map(x => [x.parentElement.className + ' ' + x.className, getComputedStyle(x).backgroundColor])
            .filter(([_, own]) => own === {ground} || own === 'rgba(0, 0, 0, 0)')"""
        )
        assert [one for one in bars if "strip" not in one[0]] == [], view  # a scale begins with the colour of 0
        lines = page.locator(LINES).evaluate_all(
            f"all => all.map(x => getComputedStyle(x)).map(x => [x.stroke, x.stroke === {ground}])"
        )
        assert not any(hidden for _, hidden in lines), view
        drawn |= {stroke for stroke, _ in lines}
        chosen = page.locator(CHOSEN).evaluate_all(
            f"""all => all.map(x => getComputedStyle(x)).map(x => x.outlineStyle !== 'none'
            ? x.outlineColor : x.borderBottomColor).filter(x => x === {ground})"""
        )
        assert chosen == [], view
        page.locator(f"#tab-{view}").focus()
        page.keyboard.press("Tab")
        outline = page.evaluate("(x => [x.outlineStyle, x.outlineColor])(getComputedStyle(document.activeElement))")
        assert outline[0] != "none" and outline[1] != page.evaluate(ground), view
    assert drawn


def test_the_labels_of_a_heat_map_have_the_systems_colours_with_forced_colours(watched: Any, port: int) -> None:
    watched.page.emulate_media(forced_colors="active", color_scheme="dark")
    page = watched.open(f"http://127.0.0.1:{port}/")
    settled(page)
    system = page.evaluate("(x => [x.color, x.backgroundColor])(getComputedStyle(document.body))")
    darkest, lightest = page.evaluate("""() => { // in the strip of the column labels
        const map = document.querySelector('.figure canvas'), ratio = devicePixelRatio;
        const { data } = map.getContext('2d').getImageData(44 * ratio, 0, map.width - 44 * ratio, 14 * ratio);
        const grey = [];
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 200) grey.push((data[i] + data[i + 1] + data[i + 2]) / 3);
        return [Math.min(...grey), Math.max(...grey)];
    }""")
    text = sum(int(x) for x in system[0].strip("rgb()").split(",")[:3]) / 3
    assert system[0] != system[1] and min(abs(darkest - text), abs(lightest - text)) < 40
