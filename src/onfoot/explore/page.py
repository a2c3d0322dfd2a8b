"""The page: its files, put together for a server or into one file that stands alone."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from onfoot.explore.describe import encoded
from onfoot.explore.study import Study, Track, untracked

STATIC = Path(__file__).parent / "static"
LARGEST_PAGE = 64 * 2**20  # bytes of an exported page


@cache
def style() -> str:
    """All style sheets in the order of their names."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.css")))


@cache
def script() -> str:
    """All scripts in the order of their names, in a scope of their own."""
    parts = [path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


@cache
def icon() -> str:
    return (STATIC / "icon.svg").read_text(encoding="utf-8").strip()


def _page(**parts: str) -> str:
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


def served_page(opening: dict[str, Any], answer: dict[str, Any]) -> str:
    """The page that asks its server for style, script and numbers, with the answer to its first question in it."""
    return _page(
        policy="",
        icon="icon.svg",
        style='<link rel="stylesheet" href="style.css">',
        data=_data("opening", {"opening": opening, "answer": answer}),
        script='<script src="app.js"></script>',
    )


def _data(id: str, value: dict[str, Any]) -> str:
    """Numbers for the script, as an element that is never run."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{id}">{text}</script>'


def single_page(data: dict[str, Any]) -> str:
    """The page with everything in it. Its policy names the one script and the one style that may act."""
    code, css = script().replace("</script", "<\\/script"), style()
    policy = f"default-src 'none'; img-src data:; script-src '{_hash(code)}'; style-src '{_hash(css)}'"
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


def export(study: Study, opening: dict[str, Any], track: Track = untracked) -> str:
    """The study as one page that needs no server: every array, every proof, every view."""
    parts = study.all_parts(track)
    arrays: dict[str, str] = {}
    tensors = {}
    size = 0
    for tensor in study.tensors:
        text = encoded(tensor.value)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]  # equal arrays (Δ_4 and Δ_5, say) are kept once
        tensors[tensor.id] = key
        if key not in arrays:
            arrays[key] = text
            size += len(text)
        if size > LARGEST_PAGE:
            raise ValueError(
                f"the page would be larger than {LARGEST_PAGE // 2**20} MiB: export a smaller model or a shorter text, "
                f"or leave out --export and look at this one in the browser"
            )
    data = {"opening": opening, "document": study.document, "parts": parts, "tensors": tensors, "arrays": arrays}
    return single_page(data)
