"""Code and pages hold together: every `# eq` in the code has its formula in docs/equations, and the reverse.

In the code, `# eq 25, 26` names the equations that a line realises. On the pages, a label `**(25)**` opens each
formula. Behind a label stand either links to the source files that carry the id, or `(definition)` or `(property)`
where no line does. So each side can be checked against the other; so can the names of tests. Links and examples are
checked in tests/docs, with those of all other pages.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

from pages import ROOT, prose

SOURCE = ROOT / "src" / "onfoot"
DOCS = ROOT / "docs"
PAGES = DOCS / "equations"
INDEX = PAGES / "README.md"

ID = r"(?:\d+(?:\.[a-d])?|[A-Z]+\.\d+)"
ANY_EQ_COMMENT = re.compile(r"#\s*eqs?\b", re.IGNORECASE)
EQ_COMMENT = re.compile(rf"# eq ({ID}(?:, {ID})*)(?![\w.])(?!, ?(?:\d|[A-Z]+\.))")  # what follows the ids is free
LABEL = re.compile(rf"\*\*\(({ID})\)\*\*")
LABEL_LINE = re.compile(rf'^(?:- )?<a id="([^"]*)"></a>\*\*\(({ID})\)\*\* (.*)$')
PLACE = re.compile(r"\((?:definition|property)\)|(?:\[[^]]+\]\([^)]+\)(?:, )?)+")
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")

LETTERS = {5: "abcd", 9: "ab", 30: "ab", 31: "ab", 32: "ab", 55: "ab"}  # the paper's equations of several parts
OF_THE_PAPER = [f"{n}.{letter}" if letter else f"{n}" for n in range(1, 56) for letter in LETTERS.get(n, [""])]


class Label(NamedTuple):
    id: str
    page: str
    anchor: str
    place: str  # "(definition)", "(property)" or the names of source files, relative to src/onfoot, with commas


def ids_of_comments(source: str) -> Iterator[tuple[int, list[str] | None]]:
    """(line, ids) of every `# eq` comment; None where the ids are not of the agreed form."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and ANY_EQ_COMMENT.search(token.string):
            ids = EQ_COMMENT.search(token.string)
            yield token.start[0], ids[1].split(", ") if ids else None


def ids_in_code() -> dict[str, set[str]]:
    """Id -> the files that carry it, relative to src/onfoot."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for line, ids in ids_of_comments(path.read_text(encoding="utf-8")):
            assert ids, f"{path}:{line}: `# eq` needs ids such as `25, 26`, `9.a` or `FC.1` right behind it"
            for one in ids:
                found.setdefault(one, set()).add(path.relative_to(SOURCE).as_posix())
    return found


def labels_of(page: str, text: str) -> list[Label]:
    """The labels of a page. Each must stand at the start of a line, behind its anchor, and say where it lives."""
    labels = []
    for line in text.splitlines():
        if not LABEL.search(line):
            continue
        parts = LABEL_LINE.match(line)
        assert parts, f"{page}: a label must open its line, behind its anchor: {line[:60]}"
        place = PLACE.match(parts[3])
        assert place, f"{page}: ({parts[2]}) needs links to its source, (definition) or (property) behind it"
        links = [(PAGES / target).resolve() for target in LINK.findall(place[0])]
        outside = [str(path) for path in links if SOURCE not in path.parents]
        assert not outside, f"{page}: ({parts[2]}) links to {outside}, not to a file of src/onfoot"
        files = ",".join(path.relative_to(SOURCE).as_posix() for path in links)
        labels.append(Label(parts[2], page, parts[1], files or place[0]))
    return labels


def all_labels() -> list[Label]:
    return [
        one for path in sorted(PAGES.glob("*.md")) for one in labels_of(path.name, path.read_text(encoding="utf-8"))
    ]


def disagreements(code: dict[str, set[str]], labels: Iterable[Label]) -> list[str]:
    """Everything that code and labels say against each other."""
    labels = list(labels)
    known = {label.id for label in labels}
    said = [f"({one}) of {', '.join(sorted(code[one]))} has no label in docs/equations" for one in code.keys() - known]
    said += [f"({one}) of the paper has no label" for one in OF_THE_PAPER if one not in known]
    said += [f"({one}) has {n} labels" for one, n in Counter(label.id for label in labels).items() if n > 1]
    for label in labels:
        if label.place not in ("(definition)", "(property)"):
            wrong = [file for file in label.place.split(",") if file not in code.get(label.id, ())]
            said += [f"({label.id}) of {label.page} links to {file}, where no line carries it" for file in wrong]
        elif label.id in code:
            files = ", ".join(sorted(code[label.id]))
            said.append(f"({label.id}) of {label.page} is marked {label.place}, but {files} carries it")
        elif label.id[0].isalpha():
            said.append(f"({label.id}) of {label.page} is an id of our own, and no line carries it")
    return sorted(said)


def test_code_and_pages_name_the_same_equations() -> None:
    assert disagreements(ids_in_code(), all_labels()) == []


def test_every_label_can_be_reached_from_the_index() -> None:
    index = INDEX.read_text(encoding="utf-8")
    for label in all_labels():
        assert label.anchor == "eq-" + label.id.lower().replace(".", "-")
        page = "" if label.page == INDEX.name else label.page
        assert f"[{label.id}]({page}#{label.anchor})" in index, f"({label.id}) is missing in the index"


@pytest.mark.parametrize(
    ("comment", "ids"),
    [
        ("x = 1  # eq 25, 26", ["25", "26"]),
        ("x = 1  # eq 9.a  (..., T)", ["9.a"]),
        ("x = 1  # eq FC.1: why", ["FC.1"]),
        ("x = 1  # the keys, eq 3", None),  # no such comment: the ids come first
        ("x = '# eq 99'", None),
    ],
)
def test_ids_are_read_from_comments(comment: str, ids: list[str] | None) -> None:
    assert [found for _, found in ids_of_comments(comment)] == ([ids] if ids else [])


@pytest.mark.parametrize(
    "comment", ["# eq", "# eq 5.e", "# eq fc.1", "# eq 25,26", "# eqs 25", "# eq 25.", "# eq 25, 5.e"]
)
def test_ids_of_another_form_are_refused(comment: str) -> None:
    assert [found for _, found in ids_of_comments(comment)] == [None]


def test_planted_disagreements_are_found() -> None:
    code, labels = ids_in_code(), all_labels()

    def new(code: dict[str, set[str]], labels: list[Label]) -> list[str]:
        return [one for one in disagreements(code, labels) if one not in before]

    before = disagreements(code, labels)
    unknown = {**code, "XYZ.7": {"ops/linear.py"}}
    assert new(unknown, labels) == ["(XYZ.7) of ops/linear.py has no label in docs/equations"]
    without = [label for label in labels if label.id != "31.b"]
    assert len(new(code, without)) == 2  # missed by the code's side and by the paper's
    uncarried = {one: files for one, files in code.items() if one != "FC.3"}
    assert new(uncarried, labels) == ["(FC.3) of linear.md links to ops/linear.py, where no line carries it"]
    marked = [label._replace(place="(property)") if label.id == "G.4" else label for label in labels]
    assert len(new(code, marked)) == 1
    moved = [label._replace(place="ops/lora.py") if label.id == "G.4" else label for label in labels]
    assert len(new(code, moved)) == 1
    assert len(new(code, [*labels, labels[0]])) == 1
    assert len(new(code, [*labels, Label("OWN.1", "lora.md", "eq-own-1", "(definition)")])) == 1
    for bad in ("see **(25)** above", '<a id="eq-25"></a>**(25)** no mark', "**(25)** (property)"):
        with pytest.raises(AssertionError):
            labels_of("page.md", bad)


# Names and formulas.


def test_every_test_named_on_a_page_exists() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    for path in PAGES.glob("*.md"):
        named = set(re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8")))
        assert not named - defined, f"{path.name} names tests that do not exist: {sorted(named - defined)}"


def lost_in_markdown(tex: str) -> str | None:
    """What Markdown would take out of a formula. Rows of a matrix end with \\cr (\\\\ would lose a backslash), and its
    columns are divided by & between spaces, which is no HTML entity."""
    bare = re.sub(r"\\begin\{(pmatrix|cases)\}.*?\\end\{\1\}", lambda found: found[0].replace(" & ", " "), tex)
    lost = re.search(r"\\[^A-Za-z]|[<>*#&~`]|\]\(|(?<![A-Za-z0-9])_|\\operatorname", bare)
    return lost[0] if lost else None


@pytest.mark.parametrize(
    "page",
    sorted(path.relative_to(ROOT).as_posix() for folder in (PAGES, DOCS / "paper") for path in folder.glob("*.md")),
)
def test_markdown_leaves_the_formulas_alone(page: str) -> None:
    """GitHub reads Markdown first and formulas second: what is Markdown in a formula would be lost on the way."""
    text = prose(ROOT / page)
    assert text.count("$") % 2 == 0
    for formula in re.findall(r"\$\$(.+?)\$\$|\$(.+?)\$", text, re.DOTALL):
        tex = formula[0] or formula[1]
        assert not lost_in_markdown(tex), f"{lost_in_markdown(tex)!r} in ${tex}$"
        assert tex.count("{") == tex.count("}") and "\n" not in tex and tex == tex.strip()


@pytest.mark.parametrize(
    ("tex", "lost"),
    [
        (r"\begin{pmatrix}a & b\cr c & d\end{pmatrix}", None),
        (r"\begin{pmatrix}a & b\\ c & d\end{pmatrix}", "\\\\"),
        (r"\begin{pmatrix}a &b\end{pmatrix}", "&"),
        ("a & b", "&"),
        (r"\mathrm{E}_x", "_"),
    ],
)
def test_what_markdown_would_lose_is_seen(tex: str, lost: str | None) -> None:
    assert lost_in_markdown(tex) == lost
