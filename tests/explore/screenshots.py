"""Updates the screenshots in docs/explore.md: `python tests/explore/screenshots.py`. Install the Inter font first."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from waiting import SHOWN, until

from conftest import CHROMIUM_FLAGS, chromium
from onfoot.explore.default_model import TEXT, default_model
from onfoot.explore.page import export
from onfoot.explore.study import Study
from onfoot.explore.texts import read_text

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES = {  # name -> (URL hash, width, height, colour scheme)
    "explore-map": ("view=map&step=0.5&cell=11,21", 1280, 900, "light"),
    "explore-head": ("view=map&step=0.1.causal&cell=14,12", 1280, 900, "dark"),
    "explore-attention": ("view=attention", 1280, 900, "light"),
    "explore-training": ("view=training", 1280, 1150, "light"),
    "explore-step": ("view=step", 1280, 1000, "light"),
    "explore-mistakes": ("view=mistakes", 1600, 900, "dark"),
    "explore-phone": ("view=map&step=embedding&cell=11,21", 360, 1300, "light"),
}


def main() -> None:
    model = default_model()
    page = export(Study(model, read_text(model, TEXT)), {"kind": "text", "value": TEXT, "ids_only": False})
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        for name, (address, width, height, scheme) in PICTURES.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab = context.new_page()
            tab.goto(f"{path.as_uri()}#{address}")
            tab.wait_for_selector("main[aria-busy=false]")
            until(tab, "document.body.dataset.proven", seconds=60)
            until(tab, f"{SHOWN} && !document.querySelector('[aria-busy=true]')")
            _save(tab.screenshot(), IMAGES / f"{name}.png")
            context.close()
        browser.close()


def _save(png: bytes, path: Path) -> None:
    """Saves with a palette, at a third of the size: frequent colours exactly, the others by the nearest one."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    counted = sorted(picture.getcolors(picture.width * picture.height), reverse=True)
    colours = [colour for _, colour in counted]
    frequent, others = colours[:128], colours[128:] or colours[:1]
    rare = Image.new("RGB", (len(others), 1))
    rare.putdata(others)  # each colour once, so that rare ones count as much
    nearest = rare.quantize(128, kmeans=2).getpalette()[: 3 * 128]
    palette = Image.new("P", (1, 1))
    palette.putpalette([x for colour in frequent for x in colour] + nearest)
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
