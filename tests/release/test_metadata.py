"""What a release says about itself is true: versions, classifiers, citation, and the tests that back them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import onfoot
from setup import NOTE, description

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it before Python 3.11

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = re.findall(r":: (3\.\d+)\b", "\n".join(PROJECT["classifiers"]))


def test_the_classifiers_name_the_pythons_that_the_road_map_says_were_tested() -> None:
    page = (ROOT / "docs" / "roadmap.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| Python |"))
    tested = re.findall(r"\b3\.\d+\b", row.split("|")[2])
    assert sorted(tested) == sorted(PYTHONS) == ["3.10", "3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_no_system_is_claimed_that_nothing_was_run_on() -> None:
    assert [text for text in PROJECT["classifiers"] if "Operating System" in text] == [
        "Operating System :: POSIX :: Linux"
    ]


def test_the_citation_has_the_version_the_licence_and_both_papers() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    fields = dict(re.findall(r'^([a-z-]+): "?([^"\n]+)"?$', text, re.MULTILINE))
    assert fields["title"] == PROJECT["name"] == "onfoot"
    assert fields["version"] == onfoot.__version__
    assert fields["license"] == PROJECT["license"].split(" AND ")[0]  # of the code; the other is of a font in it
    assert re.findall(r"arXiv:[\d.]+", text) == ["arXiv:2512.23329", "arXiv:1811.11987"]
    heading = re.search(r"^## (.+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading and heading[1] == onfoot.__version__
    assert fields.get("date-released", "unreleased") == heading[2]  # the one says it when the other does
    assert {author["name"] for author in PROJECT["authors"]} == {"The onfoot authors"}
    assert 'name: "The onfoot authors"' in text


def test_the_wheel_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "onfoot" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_an_index_gets_the_readme_without_links_to_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = description(readme)
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    assert [address for address in re.findall(r"\]\(([^)]+)\)", prose) if not address.startswith("https://")] == []
    assert "<!--" not in text and "![" not in text and "<img" not in text
    assert NOTE in text.splitlines()
    assert re.findall(r"(?ms)^```.*?^```$", text) == re.findall(r"(?ms)^```.*?^```$", readme)
    words = re.sub(r"[^\w]+", " ", re.sub(r"(?s)<!--.*?-->|!\[.*?\]\(.*?\)|\]\([^)]*\)", " ", readme))
    assert set(words.split()) <= set(re.sub(r"[^\w]+", " ", text).split())  # nothing else is lost


@pytest.mark.parametrize(
    ("readme", "shown"),
    [
        ("[a `b` c](docs/d.md#e)", "a `b` c"),
        ("[a](https://b.c/d)", "[a](https://b.c/d)"),
        ("x ![a picture](docs/e.gif) y", "x  y"),
        ("```\n[a](b.md)\n```", "```\n[a](b.md)\n```"),
        ("<!-- run\nx -->\nwords", "words"),
    ],
)
def test_links_and_pictures_of_the_description(readme: str, shown: str) -> None:
    assert description(f"# T\n\n{readme}\n") == f"# T\n\n{NOTE}\n\n{shown}\n"


def test_the_addresses_of_the_project_are_those_that_exist() -> None:
    """No address of a repository or a home page is invented; the paper has one."""
    assert PROJECT["urls"] == {"Paper": "https://arxiv.org/abs/2512.23329"}


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/roadmap.md"])
def test_the_pages_about_the_project_link_to_files_that_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_a_python_that_is_not_installed_is_named_and_left_out() -> None:
    program = [sys.executable, str(ROOT / "tests" / "release" / "pythons.py"), "none.whl", "--only", "3.99"]
    done = subprocess.run(program, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Python 3.99: not installed here, so not tested\n"
