"""The embedded explorer: a comment `<!-- explorer #step=12: Title -->` becomes a frame with an exported page.

In the repository the comment is invisible. `onfoot explore --export` writes the page while the site is built, once for
all frames: what is behind `#` says what a frame opens, as in the address of the explorer itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
from html import escape
from pathlib import Path
from urllib.parse import parse_qs

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

COMMENT = re.compile(r"^<!-- explorer (#\S+): (.+?) -->$", re.MULTILINE)
FILE = "explorer/value.html"
OPTIONS = ["--text", "the value of the value"]


def exported(out: Path) -> str:
    """The exported page, which is written if there is none yet."""
    page = out / FILE
    if not page.exists():
        page.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "onfoot", "explore", *OPTIONS, "--export", str(page)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
    return page.read_text(encoding="utf-8")


class Explorer(SphinxDirective):
    """A frame that opens the exported page at an address."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        address, _, title = self.arguments[0].partition(" ")
        try:
            page = exported(Path(self.env.app.outdir))
        except ValueError as error:
            raise self.error(str(error)) from error
        for step in parse_qs(address.removeprefix("#")).get("step", []):
            if f'"id":"{step}"' not in page:
                raise self.error(f"the explorer has no step {step}")
        file = "../" * self.env.docname.count("/") + FILE + escape(address)
        frame = f'<div class="explorer"><iframe src="{file}" title="{escape(title)}" loading="lazy"></iframe></div>'
        link = f'<p><a href="{file}">{escape(title)}: the page by itself</a></p>'
        return [nodes.raw("", frame + link, format="html")]


def _read(app: Sphinx, docname: str, content: list[str]) -> None:
    content[0] = COMMENT.sub(r"```{explorer} \1 \2\n```", content[0])


def setup(app: Sphinx) -> None:
    app.add_directive("explorer", Explorer)
    app.connect("source-read", _read)
