"""The page fits every screen, has enough contrast, and works without a mouse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from waiting import until

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
    blocks = [block for block in re.findall(r"\{([^{}]*)\}", style()) if "--ground:" in block]
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


VIEWS = ["map", "attention", "training", "step", "mistakes"]


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [("light", [(360, 740), (768, 1024), (1920, 1080)]), ("dark", [(360, 740), (1280, 800)])],
    ids=["light", "dark"],
)
def test_no_view_is_wider_than_the_screen(
    watched: Any, exported: Path, scheme: str, sizes: list[tuple[int, int]]
) -> None:
    """On the exported page, which has all its badges from the start."""
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(exported.as_uri())
    page.wait_for_selector("body[data-proven]")
    for width, height in sizes:
        page.set_viewport_size({"width": width, "height": height})
        for view in VIEWS:
            page.locator(f"[data-view={view}]").click()
            page.wait_for_selector("main[aria-busy=false]")
            until(page, "document.querySelector('main canvas, .errors')")
            assert page.locator(".badge.waiting").count() == 0
            over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, (view, width)


def test_signs_are_told_apart_by_lightness_as_well_as_by_colour_blind_people(page: Any) -> None:
    """Blue and orange stay apart without red-green vision; 0 is the page's own ground, light or dark."""
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
