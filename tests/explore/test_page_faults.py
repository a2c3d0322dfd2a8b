"""What was once broken on the page: races, the busy state, labels, bars, formulas, contrast and the tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from test_look import contrast, palettes
from waiting import SHOWN, until

from onfoot.explore.page import style
from onfoot.explore.study import Study
from onfoot.models.model import Model


def loss_of(model: Model, text: str) -> str:
    return str(model.loss(np.array([model.tokenizer.encode(text)])))


def ask(page: Any, text: str) -> None:
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")


def open_step(page: Any, step: str) -> None:
    page.locator(f'.row[data-step="{step}"]').evaluate("row => row.click()")
    until(page, "document.querySelector('.row[aria-selected=true]').dataset.step === x", step)
    until(page, SHOWN)


# --- requests ---


def test_a_slow_first_answer_does_not_replace_a_faster_second(page: Any, model: Model) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.post_data_json == {"text": "a name"}:
            held.append((route, route.fetch()))  # answered later
        else:
            route.continue_()

    page.route(re.compile(r"/api/study\?"), hold)
    ask(page, "a name")
    until(page, "document.body.classList.contains('is-busy')")
    ask(page, "the value")
    until(page, "document.getElementById('loss').dataset.value === x", loss_of(model, "the value"))
    assert len(held) == 1
    for route, answer in held:
        route.fulfill(response=answer)
    page.wait_for_timeout(300)
    assert page.locator("#loss").get_attribute("data-value") == loss_of(model, "the value")
    assert page.locator("#text").input_value() == "the value" and page.locator(".chip").count() == 9
    assert page.locator("#message").is_hidden() and page.locator("main[aria-busy=false]").count() == 1


def test_what_is_computed_is_said_and_the_old_view_keeps_its_shape(page: Any) -> None:
    until(page, SHOWN)
    width = "document.querySelector('.map').getBoundingClientRect().width"
    before, held = page.evaluate(width), []
    page.route("**/training*", lambda route: held.append(route))
    page.locator("#tab-training").click()
    until(page, "document.getElementById('busy').textContent === 'Computing “Training” …'")
    assert page.locator("main").get_attribute("aria-busy") == "true" and page.locator("#busy").is_visible()
    assert page.evaluate(width) == before
    page.locator("#tab-map").click()
    assert page.locator("main").get_attribute("aria-busy") == "false" and page.locator("#busy").is_hidden()
    for route in held:
        route.continue_()
    page.wait_for_timeout(300)
    assert page.locator(".map").count() == 1  # the late answer does not replace the map


def test_a_shorter_text_selects_a_row_with_an_error_signal(page: Any) -> None:
    page.locator('.row[data-step="embedding"]').click()
    until(page, f"document.querySelector('.figure[data-tensor=\"Δ_1\"]') && {SHOWN}")
    page.locator('.chip[data-token="20"]').click()
    ask(page, "the name")
    until(page, "document.querySelectorAll('.chip').length === 8")
    page.wait_for_selector("main[aria-busy=false]")
    until(page, SHOWN)
    assert float(page.locator('.figure[data-tensor="Δ_1"] output.value').get_attribute("data-value")) != 0
    assert page.locator("#prediction").get_attribute("data-token") != "7"


def test_the_message_about_the_learning_rate_goes_when_it_is_mended(page: Any) -> None:
    page.locator("#tab-step").click()
    page.wait_for_selector("#lr")
    page.locator("#lr").fill("3")
    page.locator("#first-step").click()
    assert page.locator("#message").inner_text() == "the learning rate must be > 0 and <= 1"
    page.locator("#lr").fill("0.01")
    assert page.locator("#message").is_hidden()


# --- numbers and bars ---


def test_a_value_has_one_sign(page: Any) -> None:
    open_step(page, "0.5")
    terms = page.locator('.figure[data-tensor="0.Δ_5"] .term').evaluate_all(
        "all => all.map(x => [x.querySelector('.term-label').textContent, x.querySelector('.term-value').textContent])"
    )
    assert len(terms) == 4 and sum(label.startswith("− ") for label, _ in terms) == 2
    for _, value in terms:
        assert re.fullmatch(r"= −?[\d.]+(e−?\d+)?", value), value


def test_rounding_is_not_drawn_as_a_magnitude(page: Any, study: Study) -> None:
    """∂b_k is 0, and its terms add up to 0 but for rounding. A library that computes it leaves such numbers there."""
    left = np.array([5e-20, -3e-20, 1e-20, 0, 0, 0, 0, -5e-20])
    assert not study.tensors.value("0.0.∂b_k").any()
    page.route(
        re.compile(r"tensor\?id=0\.0\.%E2%88%82b_k$"), lambda route: route.fulfill(body=left.astype("<f8").tobytes())
    )
    open_step(page, "0.0.k")
    figure = page.locator('.figure[data-tensor="0.0.∂b_k"]')
    figure.locator(".rounding").wait_for()
    assert figure.locator(".rounding").inner_text() == "rounding only: at most 5e−20"
    figure.locator(".sum").wait_for()
    colours = figure.locator("canvas").evaluate("""map => {
        const data = map.getContext('2d').getImageData(0, map.height / 2, map.width, 1).data;
        return Math.max(...Array.from({length: map.width}, (_, i) => Math.abs(data[4 * i] - data[4 * i + 2])));
    }""")
    assert colours < 60  # neither orange nor blue
    widths = figure.locator(".term > .bar i").evaluate_all("all => all.map(x => parseFloat(x.style.width))")
    assert widths and max(widths) < 5  # percent; a full bar has 50


def test_ids_are_written_and_not_drawn_as_magnitudes(page: Any) -> None:
    open_step(page, "input")
    figure = page.locator('.figure[data-tensor="a_0"]')
    assert figure.locator(".legend").count() == 0 and page.locator('.figure[data-tensor="Δ_0"] .legend').count() == 1
    page.locator('.chip[data-token="4"]').click()
    until(page, "document.querySelector('.figure[data-tensor=a_0] .at').textContent.startsWith('[4 ')")


def test_a_long_label_is_shortened_and_thins_no_other(page: Any, model: Model) -> None:
    page.locator("#kind").select_option("ids")
    end = model.tokenizer.backend.token_to_id("<|endoftext|>")
    ask(page, f"3 {end} 4 5 6 7")
    until(page, "document.querySelectorAll('.chip').length === 6")
    chip = page.locator('.chip[data-token="1"]')
    assert chip.inner_text() == "<|endof…" and "<|endoftext|>" in chip.get_attribute("title")
    page.locator("#tab-attention").click()
    page.wait_for_selector(".view.attention canvas")
    labels = page.locator(".view.attention canvas").first.evaluate("""map => {
        const data = map.getContext('2d').getImageData(0, 0, map.width, 14).data;
        let runs = 0, blank = 9;
        for (let x = 0; x < map.width; x++) {
            let ink = false;
            for (let y = 0; y < 14; y++) if (data[4 * (y * map.width + x) + 3] > 60) ink = true;
            if (ink && blank > 4) runs++;
            blank = ink ? 0 : blank + 1;
        }
        return runs;
    }""")
    assert labels >= 3  # six columns; the longest label takes the place of two more


# --- the tree and the chips ---


def test_the_map_is_a_tree_with_one_tab_stop(page: Any) -> None:
    inside = "all => all.filter(x => !x.closest('[aria-hidden=true]')).map(x => x.getAttribute('role'))"
    roles = page.locator("[role=tree] button, [role=tree] > *").evaluate_all(inside)
    assert set(roles) == {"treeitem", "group"}
    stops = page.locator("[role=tree] [tabindex='0'], [role=tree] button:not([tabindex])")
    assert stops.count() == 1
    page.locator('.row[data-step="0.6"]').click()
    page.keyboard.press("ArrowLeft")  # to its block
    head = page.locator('.block-head[data-block="0"]')
    assert page.evaluate("document.activeElement.id") == "block-0" and head.get_attribute("aria-level") == "1"
    page.keyboard.press("ArrowLeft")
    assert head.get_attribute("aria-expanded") == "false" and page.locator('.row[data-step="0.6"]').is_hidden()
    assert stops.count() == 1
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.step") == "1.2"
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.id") == "block-0"  # a closed block is a stop of its own
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.step") == "0.2"
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "2"


# --- looks ---


def test_scripts_sit_where_a_mathematics_font_has_them(page: Any) -> None:
    """With or without one: below and above the base, and not past it."""
    open_step(page, "0.5")
    scripts = page.locator(".detail .formula :is(msub, msup, msubsup)")
    places = scripts.evaluate_all("""all => all.map(x => {
        const size = parseFloat(getComputedStyle(x.firstChild).fontSize);
        const bottom = y => y.getBoundingClientRect().bottom;
        return [x.localName, ...[...x.children].slice(1).map(y => (bottom(y) - bottom(x.firstChild)) / size)];
    })""")
    assert len(places) > 4
    below = [place for name, place, *_ in places if name != "msup"]
    above = [offsets[-1] for name, *offsets in places if name != "msub"]
    assert below and all(0.05 < place < 0.45 for place in below), places
    assert above and all(-0.75 < place < -0.15 for place in above), places


def test_nothing_overlaps_at_768_and_formulas_scroll_inside_on_a_phone(watched: Any, exported: Path) -> None:
    page = watched.open(exported.as_uri())
    for width in (768, 360):
        page.set_viewport_size({"width": width, "height": 900})
        for step in ("0.5", "1.2", "0.0.causal"):
            open_step(page, step)
            page.wait_for_timeout(50)
            overlaps = page.evaluate("""() => [...document.querySelectorAll('.term')].filter(term => {
                const parts = ['.term-label', '.bar', '.term-value'].map(x => term.querySelector(x));
                const boxes = parts.map(x => x.getBoundingClientRect());
                const beside = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1;
                const meet = (a, b) => !beside(a, b) && a.top < b.bottom - 1 && b.top < a.bottom - 1;
                return meet(boxes[0], boxes[1]) || meet(boxes[1], boxes[2]) || meet(boxes[0], boxes[2]);
            }).length""")
            assert overlaps == 0, (width, step)
            clipped = page.evaluate("""() => [...document.querySelectorAll('.detail math')].filter(x => {
                let box = x.parentElement;
                while (box && !['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) box = box.parentElement;
                return x.getBoundingClientRect().right > (box ? 1e9 : innerWidth);
            }).length""")
            assert clipped == 0, (width, step)


ROW_LABELS = """
    const { clearRect, fillText } = CanvasRenderingContext2D.prototype;
    window.rowLabels = new Map(); // canvas -> the heights of the labels of its rows
    Object.assign(CanvasRenderingContext2D.prototype, {
        clearRect(...box) { rowLabels.set(this.canvas, []); clearRect.apply(this, box); },
        fillText(text, x, y, ...more) {
            if (this.textAlign === 'right' && rowLabels.has(this.canvas)) rowLabels.get(this.canvas).push(y);
            fillText.call(this, text, x, y, ...more);
        },
    });"""


def test_the_label_of_the_selected_row_covers_no_other_on_a_phone(watched: Any, port: int) -> None:
    watched.page.set_viewport_size({"width": 360, "height": 740})
    watched.page.add_init_script(ROW_LABELS)
    page = watched.open(f"http://127.0.0.1:{port}/#view=attention&token=3")
    until(page, "document.querySelectorAll('.head-card canvas').length > 1")
    gaps = page.evaluate("""() => [...rowLabels.values()].filter(all => all.length > 1).map(
        all => Math.min(...all.slice(1).map((y, i) => y - all[i])))""")
    assert gaps and min(gaps) > 9  # letters of 11 pixels


def test_attention_is_not_smaller_on_a_larger_screen(watched: Any, exported: Path) -> None:
    page = watched.open(exported.as_uri())
    sizes = []
    for width in (1400, 1920):
        page.set_viewport_size({"width": width, "height": 1000})
        page.locator("#tab-attention").click()
        page.wait_for_selector(".head-card canvas")
        page.wait_for_timeout(100)
        sizes.append(page.locator(".head-card canvas").first.evaluate("x => x.getBoundingClientRect().width"))
    assert sizes[1] >= sizes[0] > 250


def test_a_link_to_a_number_has_the_contrast_of_text() -> None:
    rules = re.findall(r"\.factor\.go \{([^}]*)\}", style())
    assert ["border: 1px solid currentColor" in rule for rule in rules if "border:" in rule] == [True]
    for palette in palettes():
        assert contrast(palette["muted"], palette["ground"]) >= 4.5


def test_bars_are_visible_with_forced_colours(watched: Any, port: int) -> None:
    watched.page.emulate_media(forced_colors="active")
    page = watched.open(f"http://127.0.0.1:{port}/")
    until(page, SHOWN)
    for selector in (".chip-loss", ".term .bar i", ".predicted-bar"):
        colours = page.locator(selector).evaluate_all(
            "all => all.map(x => [x, document.body].map(y => getComputedStyle(y).backgroundColor))"
        )
        assert colours and all(own != ground and own != "rgba(0, 0, 0, 0)" for own, ground in colours), selector


def test_long_numbers_stay_in_their_columns(watched: Any, exported: Path) -> None:
    page = watched.open(exported.as_uri())
    for width in (360, 768, 1400, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        for view in ("training", "step", "attention"):
            page.locator(f"#tab-{view}").click()
            page.wait_for_selector(f".view.{'one-step' if view == 'step' else view}")
            until(page, "document.querySelector('main canvas')")
            values = page.locator("main").locator(".num, .value, dd, .token")  # a table that is too wide scrolls
            out = values.evaluate_all("""all => all.filter(x => !x.closest('.table-scroll')).filter(x => {
                const home = x.closest('.figure, .pairs, .attribution li, .arithmetic').getBoundingClientRect();
                const { display, overflowX, fontSize } = getComputedStyle(x);
                const spills = display !== 'inline' && overflowX === 'visible' && x.scrollWidth > x.clientWidth + 1;
                const isBroken = x.matches('.pair.tight .value') && x.offsetHeight > 2 * parseFloat(fontSize);
                return spills || isBroken || x.getBoundingClientRect().right > home.right + 1.5;
            }).map(x => x.outerHTML.slice(0, 120))""")
            assert out == [], (view, width)
