"""The wheel and the sdist: what is inside, and that each works where the repository is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from setup import INSIDE, PAGES, description

sys.path.insert(0, str(Path(__file__).parent))
import smoke

ROOT = smoke.ROOT
SOURCE = ROOT / "src"
ABSOLUTE = re.compile(rb"/(?:home|root|Users)/|[A-Z]:\\\\Users")
BESIDE_THE_PACKAGE = {
    "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg",
    "setup.py",
}  # fmt: skip


def files_of_the_package() -> set[str]:
    """The files in src/ that git would keep."""
    made = ("__pycache__", "onfoot.egg-info")
    paths = [path for path in SOURCE.rglob("*") if path.is_file() and not set(made) & set(path.parts)]
    return {path.relative_to(SOURCE).as_posix() for path in paths}


def pages_of_equations() -> set[str]:
    """The files that a build copies into the package."""
    return {f"{INSIDE}/{path.name}" for path in (ROOT / PAGES).glob("*.md")}


def contents(archive: Path) -> dict[str, bytes]:
    """The files of a wheel or an sdist, by their names in it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = [member for member in sdist.getmembers() if member.isfile()]
        found = {member.name.partition("/")[2]: sdist.extractfile(member) for member in members}
        return {name: file.read() for name, file in found.items() if file is not None}


def build(source: Path, out: Path, *kinds: str) -> list[Path]:
    subprocess.run([sys.executable, "-m", "build", *kinds, "--outdir", str(out), str(source)], check=True)
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist, from a copy without the list of files that an earlier build has left in src/.

    setuptools adds the files of that list again, and so hides that they are declared nowhere.
    """
    folder = tmp_path_factory.mktemp("dist")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(path, folder / "source")
    for name in ("src", "tests", "docs"):
        shutil.copytree(
            ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    wheel, sdist = build(folder / "source", folder / "dist")
    assert (wheel.suffix, sdist.suffix) == (".whl", ".gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    inside = {name for name in contents(built[0]) if ".dist-info/" not in name}
    assert inside == files_of_the_package() | pages_of_equations()
    assert {
        "onfoot/py.typed",
        "onfoot/explore/default/model.safetensors",
        "onfoot/learn/course/e01_linear.py",
    } <= inside


@pytest.mark.slow
def test_the_sdist_has_the_package_and_the_few_files_that_a_build_needs(built: tuple[Path, Path]) -> None:
    inside = {name for name in contents(built[1]) if "egg-info" not in name}
    package = {name.removeprefix("src/") for name in inside if name.startswith("src/")}
    assert package == files_of_the_package()
    beside = {name for name in inside if not name.startswith("src/")}
    pages = {name for name in beside if name.startswith(PAGES)}
    assert beside - pages <= BESIDE_THE_PACKAGE and len(pages) == len(pages_of_equations())


@pytest.mark.slow
def test_a_wheel_of_the_sdist_in_another_folder_has_the_same_files(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (again,) = build(source, tmp_path / "out", "--wheel")
    first, second = contents(built[0]), contents(again)
    assert set(first) == set(second)
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["wheel", "sdist"])
def test_no_path_of_a_machine_is_inside(built: tuple[Path, Path], which: int) -> None:
    found = {name: ABSOLUTE.findall(data) for name, data in contents(built[which]).items()}
    assert {name: paths for name, paths in found.items() if paths} == {}


@pytest.mark.slow
def test_the_description_in_wheel_and_sdist_is_the_readme_without_relative_links(built: tuple[Path, Path]) -> None:
    expected = description((ROOT / "README.md").read_text(encoding="utf-8"))
    for archive in built:
        (metadata,) = [
            text.decode() for name, text in contents(archive).items() if re.fullmatch(r"PKG-INFO|[^/]*/METADATA", name)
        ]
        head, _, text = metadata.partition("\n\n")
        assert "Description-Content-Type: text/markdown" in head
        assert text.strip() == expected.strip()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "wheel with extras", "sdist"])
def test_what_is_installed_does_what_the_readme_says(built: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    env = smoke.Installed(tmp_path, sys.executable)
    extras = kind == "wheel with extras"
    env.install(f"{built[kind == 'sdist']}{'[explore,serve]' if extras else ''}", *(["mypy==2.4.1"] if extras else []))
    steps = [smoke.imports, smoke.explores, smoke.serves, smoke.typed] if extras else smoke.STEPS
    for line in smoke.smoke(env, steps):
        print(line)
    assert (env.folder / "page.html").is_file()
