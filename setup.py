"""What pyproject.toml cannot say: the description on a package index, and the pages of equations in the wheel.

The description is the README without what works only beside its files. A link such as `docs/check.md` leads nowhere on
an index, and the project has no public address that it could be completed with. So relative links become their text,
and relative pictures and invisible comments are left out; links to the web stay.

`onfoot learn derivation` shows the pages of docs/equations. A build copies them into the package; in the repository,
and in an editable installation of it, they are read where they are, so that there is one copy.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PAGES = "docs/equations"
INSIDE = "onfoot/learn/derivations"

NOTE = "*This is the README of onfoot's repository: paths such as `docs/check.md` name files there.*"
BLOCK = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)  # of code: left as it is


def description(readme: str) -> str:
    """The text of a README that can be read anywhere."""
    text = re.sub(r"<!--.*?-->\n*", "", readme, flags=re.DOTALL)
    parts = BLOCK.split(text)
    parts[::2] = [re.sub(r"!?\[([^]]*)\]\(([^)\s]+)\)", _without_link, part) for part in parts[::2]]
    title, rest = re.sub(r"\n{3,}", "\n\n", "".join(parts)).split("\n", 1)
    return f"{title}\n\n{NOTE}\n{rest}"


def _without_link(link: re.Match) -> str:
    words, address = link.groups()
    if re.match(r"https?:", address):
        return link[0]
    return "" if link[0].startswith("!") else words


class BuildWithPages(build_py):
    """Builds the package, with the pages of equations in it."""

    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            return
        target = Path(self.build_lib) / INSIDE
        target.mkdir(parents=True, exist_ok=True)
        for page in sorted((ROOT / PAGES).glob("*.md")):
            shutil.copyfile(page, target / page.name)


if __name__ == "__main__":
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(text),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": BuildWithPages},
    )
