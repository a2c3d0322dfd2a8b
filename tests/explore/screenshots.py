"""Remakes the pictures in docs/images and the recording of the tour: `python tests/explore/screenshots.py [NAME ...]`.

Install the Inter font first. Without names, all are remade. Pictures of views that the page does not have are left out.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright
from test_own_engine import MISTAKE, engine_of
from waiting import settled, until

from conftest import CHROMIUM_FLAGS, chromium, serving
from onfoot.explore.default_model import default_model

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MAX_PICTURE, MAX_RECORDING = 150_000, 2_000_000  # bytes
RECORDING = "explore-tour.gif"
SEEN = "try { localStorage.setItem('onfoot explore tour', 'done') } catch {}"  # the tour is not offered


def rows(page: Any, way: str, step: str) -> None:
    """Runs through the map, row by row, to a step."""
    while page.locator(f'.now-{way}[data-step="{step}"]').count() == 0:
        page.locator(".motion .on").click()


def play_live(page: Any) -> None:
    page.get_by_role("button", name="Play").first.click()
    page.wait_for_timeout(6000)
    page.get_by_role("button", name="Pause").first.click()


def open_symbols(page: Any) -> None:
    page.get_by_role("button", name="Symbols").click()


PICTURES: dict[str, tuple[str, int, int, str, Callable[[Any], None] | None]] = {
    # name -> (URL hash, width, height, colour scheme, what is done on the page)
    "explore-map": ("view=map&step=0.5&cell=11,21", 1280, 900, "light", lambda page: rows(page, "backward", "0.5")),
    "explore-stop": ("tour=4", 1280, 900, "light", None),
    "explore-head": ("view=map&step=0.1.causal&cell=14,12", 1280, 900, "dark", None),
    "explore-attention": ("view=attention", 1280, 900, "light", None),
    "explore-training": ("view=training", 1280, 1150, "light", None),
    "explore-step": ("view=step", 1280, 1000, "light", None),
    "explore-live": ("view=live", 1280, 900, "light", play_live),
    "explore-whatif": ("view=whatif", 1280, 900, "light", None),
    "explore-mistakes": ("view=mistakes", 1600, 900, "dark", None),
    "explore-own": ("view=own", 1280, 900, "light", None),
    "explore-symbols": ("view=map", 1280, 900, "light", open_symbols),
    "explore-phone": ("view=map&step=embedding&cell=11,21", 360, 1300, "light", None),
}


def main(names: list[str]) -> None:
    unknown = set(names) - {*PICTURES, "recording"}
    if unknown:
        raise SystemExit(f"unknown picture {sorted(unknown)[0]}; known are {', '.join([*PICTURES, 'recording'])}")
    model, folder = default_model(), tempfile.TemporaryDirectory()
    engine = engine_of(Path(folder.name), MISTAKE)  # for "Yours"
    with folder, serving(model) as port, serving(model, engine) as own, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        for name in names or PICTURES:
            if name != "recording":
                take(browser, f"http://127.0.0.1:{own if name == 'explore-own' else port}/", name)
        if not names or "recording" in names:
            record(browser, f"http://127.0.0.1:{port}/")
        browser.close()


def take(browser: Any, address: str, name: str) -> None:
    """Saves one picture, after the gradients of the first step were checked."""
    place, width, height, scheme, act = PICTURES[name]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.add_init_script(SEEN)
    tab = context.new_page()
    tab.goto(f"{address}#{place}")
    settled(tab)
    view = dict(part.split("=") for part in place.split("&")).get("view", "map")
    if tab.locator(f"[data-view={view}]").count() == 0:
        print(f"{name}: the page has no view {view!r}")
    else:
        if place.startswith("tour="):
            tab.wait_for_selector(".tour[data-ready]")
        until(tab, "document.body.dataset.proven", seconds=120)
        if act is not None:
            act(tab)
            tab.wait_for_timeout(400)
        path = IMAGES / f"{name}.png"
        save(tab.screenshot(), path)
        print(f"{name}: {path.stat().st_size:,} bytes")
        assert path.stat().st_size < MAX_PICTURE, name
    context.close()


def record(browser: Any, address: str) -> None:
    """Saves 20 seconds of a first visit: the offer, the tour, and the error signal climbing."""
    context = browser.new_context(viewport={"width": 1200, "height": 760}, color_scheme="light")
    tab = context.new_page()
    tab.goto(address)
    settled(tab)
    frames: list[tuple[Image.Image, int]] = []

    def keep(milliseconds: int) -> None:
        frames.append((Image.open(io.BytesIO(tab.screenshot())).convert("RGB"), milliseconds))

    def go_on(stop: int) -> None:
        tab.locator("[data-tour=next]").click()
        tab.wait_for_selector(f'.tour[data-ready="{stop}"]')
        settled(tab)

    keep(1500)
    tab.get_by_role("button", name="Take the tour, one minute").click()
    tab.wait_for_selector('.tour[data-ready="1"]')
    settled(tab)
    keep(2400)
    go_on(2)
    keep(2200)
    go_on(3)
    keep(1200)
    for _ in range(20):  # the error signal climbs through both blocks, to the input
        tab.locator(".motion .on").click()
        keep(220)
    for stop, milliseconds in ((4, 2000), (5, 1800), (7, 2000), (8, 2000)):
        while tab.locator(f'.tour[data-ready="{stop}"]').count() == 0:
            go_on(int(tab.locator(".tour").get_attribute("data-stop")) + 1)
        keep(milliseconds)
    context.close()
    save_recording(frames, IMAGES / RECORDING)
    print(f"{RECORDING}: {(IMAGES / RECORDING).stat().st_size:,} bytes, {sum(ms for _, ms in frames) / 1000:.1f} s")
    assert (IMAGES / RECORDING).stat().st_size < MAX_RECORDING


def palette_of(pictures: list[Image.Image], frequent: int, rare: int) -> Image.Image:
    """A palette with the frequent colours exactly, and one colour after another that is farthest from all before."""
    counts: dict[tuple[int, ...], int] = {}
    for picture in pictures:
        for count, colour in picture.getcolors(picture.width * picture.height):
            counts[colour] = counts.get(colour, 0) + count
    colours = np.array(sorted(counts, key=lambda colour: -counts[colour]), dtype=float)  # (N, 3)
    chosen = list(range(min(frequent, len(colours))))
    far = np.full(len(colours), np.inf)  # squared distance to the nearest colour of the palette
    for i in range(frequent + rare):
        if i == len(chosen):
            chosen.append(int(far.argmax()))
        if i >= len(colours):
            break
        far = np.minimum(far, ((colours - colours[chosen[i]]) ** 2).sum(axis=1))
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours[chosen].astype(int).ravel().tolist())
    return palette


def save(png: bytes, path: Path) -> None:
    """Saves a picture with a palette, at a third of the size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(palette=palette_of([picture], 128, 128), dither=Image.Dither.NONE).save(path, optimize=True)


def save_recording(frames: list[tuple[Image.Image, int]], path: Path) -> None:
    """Saves the frames as a GIF at two thirds of the width, with one palette for all."""
    small = [picture.resize((840, 532), Image.Resampling.LANCZOS) for picture, _ in frames]
    palette = palette_of(small[:: max(len(small) // 8, 1)], 32, 96)
    first, *others = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in small]
    times = [milliseconds for _, milliseconds in frames]
    first.save(path, save_all=True, append_images=others, duration=times, loop=0, optimize=True, disposal=1)


if __name__ == "__main__":
    main(sys.argv[1:])
