"""The HTML page: assembled for the server, or as one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from onfoot.explore import tour
from onfoot.explore.describe import encoded
from onfoot.explore.export_size import plan_export
from onfoot.explore.glossary import glossary
from onfoot.explore.overview import overview
from onfoot.explore.study import Study, Track, untracked

STATIC = Path(__file__).parent / "static"
FONT = "onfoot-math.woff2"


@cache
def style() -> str:
    """All style sheets in order of file name."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.css")))


@cache
def script() -> str:
    """The glossary and all scripts in order of file name, in their own scope."""
    parts = [f"const GLOSSARY = {json.dumps(glossary(), ensure_ascii=False, separators=(',', ':'))};"]
    parts += [path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


@cache
def font() -> bytes:
    """The mathematics font, as the style sheet names it."""
    return (STATIC / FONT).read_bytes()


@cache
def icon() -> str:
    return (STATIC / "icon.svg").read_text(encoding="utf-8").strip()


def _page(**parts: str) -> str:
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def served_page(opening: dict[str, Any], answer: dict[str, Any]) -> str:
    """The page that loads its style, script and numbers from the server; the first response is embedded in it."""
    return _page(
        policy="",
        icon="icon.svg",
        style=f'<link rel="preload" href="{FONT}" as="font" type="font/woff2" crossorigin>\n'
        '<link rel="stylesheet" href="style.css">',
        data=_data("opening", {"opening": opening, "answer": answer}),
        script='<script src="app.js"></script>',
    )


def _data(id: str, value: dict[str, Any]) -> str:
    """Data for the script, as a JSON element that is never executed."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{id}">{text}</script>'


def single_page(data: dict[str, Any]) -> str:
    """The self-contained page. Its Content-Security-Policy allows only its one script and style, by their hashes."""
    code = script().replace("</script", "<\\/script")
    css = style().replace(f'url("{FONT}")', f"url(data:font/woff2;base64,{base64.b64encode(font()).decode()})")
    policy = f"default-src 'none'; img-src data:; font-src data:; script-src '{_hash(code)}'; "
    policy += f"style-src '{_hash(css)}'"
    picture = base64.b64encode(icon().encode()).decode()
    return _page(
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        icon=f"data:image/svg+xml;base64,{picture}",
        style=f"<style>{css}</style>",
        data=_data("data", data),
        script=f"<script>{code}</script>",
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def export(study: Study, opening: dict[str, Any], track: Track = untracked, say: Callable[[str], None] = print) -> str:
    """The study as one page that needs no server: every array that fits, gradient check and view.

    `say` is called with the estimated size before the work begins, if it is large or something is left out.
    """
    plan = plan_export(study)
    if plan.left_out or study.is_large:
        say(f"the page has {plan}")
    left_out = set(plan.left_out)
    parts = {**study.all_parts(track), "tour": tour.filled(study, opening.get("tour"))}
    arrays: dict[str, str] = {}
    tensors = {}
    for id in track([tensor.id for tensor in study.tensors], "arrays"):
        value = study.tensors[id].value
        if id in left_out:
            parts[f"overview {id}"] = overview(value)
            continue
        text = encoded(value)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]  # equal arrays, such as Δ_4 and Δ_5, are stored once
        tensors[id] = key
        arrays.setdefault(key, text)
    data = {"opening": opening, "document": study.document, "parts": parts, "tensors": tensors, "arrays": arrays}
    return single_page(data)
