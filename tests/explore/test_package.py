"""The page's files are in the package, and it is imported only when used."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it before Python 3.11

ROOT = Path(__file__).resolve().parents[2]


def test_importing_onfoot_or_its_command_line_loads_no_server_and_no_page() -> None:
    code = (
        "import sys, onfoot, onfoot.cli\n"
        "heavy = ('starlette', 'uvicorn', 'onfoot.explore.server', 'onfoot.explore.study')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_exporting_a_page_loads_no_server() -> None:
    code = (
        "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
        "import onfoot.explore.page, onfoot.explore.study\n"
        "print(len(onfoot.explore.page.script()) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_every_file_that_is_not_a_module_is_declared_as_package_data() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = [
        "/".join(["src", *package.split("."), pattern])
        for package, listed in settings["tool"]["setuptools"]["package-data"].items()
        for pattern in listed
    ]
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src" / "onfoot").rglob("*") if path.is_file()]
    others = [file for file in files if not file.endswith((".py", ".pyc"))]
    assert "src/onfoot/explore/default/model.safetensors" in others
    assert [file for file in others if not any(fnmatch(file, pattern) for pattern in patterns)] == []


def test_the_pictures_of_the_documentation_exist_and_are_small() -> None:
    images = ROOT / "docs" / "images"
    named = re.findall(r"\(images/([\w-]+\.\w+)\)", (ROOT / "docs" / "explore.md").read_text(encoding="utf-8"))
    assert {"explore-map.png", "explore-stop.png", "explore-symbols.png"} <= set(named)
    sizes = {name: (images / name).stat().st_size for name in [*named, "explore-tour.gif"]}
    limits = {".png": 150_000, ".gif": 2_000_000}  # those of screenshots.py, which makes them
    assert [name for name, size in sizes.items() if not 1_000 < size < limits[Path(name).suffix]] == []
