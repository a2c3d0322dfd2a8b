"""What the documentation shows, and one way to run it: every page is run from top to bottom, in a folder of its own.

A block of Python runs in the page's namespace; one that begins with `# name.py` is written to that file instead. The
commands of a `sh` block run one after the other; a `console` block is a command after `$` and what it prints. A block
without a language right behind a command or Python code is what that prints: line `...` stands for any lines, `...`
in a line for any text, and the number of spaces does not count. `pip install` and `make` lines are looked up (the
extra, the target), not run. An invisible comment before a block changes this:

    <!-- not run: why -->             the block; with <!-- not run (onfoot serve): why --> the lines that have this
    <!-- slow -->                     for `make test-all`
    <!-- run with: --steps 2 -->      options added to every `onfoot train` and `onfoot finetune` that starts a run
    <!-- run with A as B -->          text replaced first
    <!-- exit 1 -->                   the exit status of the last command, if it is not 0
    <!-- figures vary -->             in the output, any number stands for any other
    <!-- file: my_attention.py -->    the block is the content of a file
    <!-- edits: e01_linear.py -->     its lines `name = ...` replace those of the file
    <!-- part of: e01_linear.py -->   the file has this text
    <!-- output -->                   what the last command printed, after words in between
    <!-- output of: onfoot train -->  what this command prints, which the block does not show
    <!-- setup
    commands that the reader does not need to see
    -->
    <!-- setup python
    names that the block needs
    -->
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from onfoot.cli import app

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PIECE = re.compile(
    r"<!--(?P<comment>.*?)-->|^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE
)
MARKS = re.compile(
    r"not run(?: \((?P<lines>[^)]+)\))?: (?P<why>.+)|slow|run with: .+|run with .+ as .+|exit \d|figures vary"
    r"|file: .+|edits: .+|part of: .+|output(?: of: .+)?|setup\n.*|setup python\n.*",
    re.DOTALL,
)
OTHERS = re.compile(r"measured: |end$|table: |figures: ")  # comments of the errata and of the benchmarks' figures
NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
SHELL = re.compile(r"[|<>;&$]")


def all_pages() -> list[str]:
    """Every page with something to run, relative to the repository."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]


@dataclass
class Block:
    language: str
    text: str
    line: int
    marks: list[str]
    follows: bool  # nothing but space between it and the block before

    def mark(self, name: str) -> str | None:
        """What a mark says, "" if it says nothing, None if the block does not have it."""
        return next((m.removeprefix(name).strip(" :") for m in self.marks if m.startswith(name)), None)

    @property
    def slow(self) -> bool:
        return self.mark("slow") is not None

    @property
    def not_run(self) -> str | None:
        """Why the whole block is not run."""
        return next((m.removeprefix("not run: ") for m in self.marks if m.startswith("not run: ")), None)

    @property
    def lines_not_run(self) -> list[str]:
        return [found[1] for m in self.marks if (found := re.match(r"not run \(([^)]+)\)", m))]

    @property
    def is_code(self) -> bool:
        return self.language in ("python", "sh", "console")


def blocks_of(text: str, page: str = "page") -> list[Block]:
    """The blocks of a page with their marks; an AssertionError for a comment that is no mark."""
    blocks: list[Block] = []
    comments: list[str] = []
    end, text_between = 0, False  # of the last block or mark; whether there are words since the last block
    for piece in PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 1
        words = bool(text[end : piece.start()].strip())
        lost = [one for one in comments if words and MARKS.fullmatch(one)]
        assert not lost, f"{page}, line {line}: {lost} stands before no block"
        if words:
            comments, text_between = [], True
        end = piece.end()
        if piece["comment"] is not None:
            comments.append(piece["comment"].strip())
            continue
        for one in comments:
            assert MARKS.fullmatch(one) or OTHERS.match(one), f"{page}, line {line}: unknown mark {one!r}"
        indent = len(piece["indent"])
        body = "".join(row[indent:] if row.strip() else row for row in piece["text"].splitlines(keepends=True))
        blocks.append(Block(piece["language"].strip(), body, line, comments, bool(blocks) and not text_between))
        comments, text_between = [], False
    return blocks


def page_blocks(page: str) -> list[Block]:
    return blocks_of((ROOT / page).read_text(encoding="utf-8"), page)


def commands_of(text: str) -> list[str]:
    """The commands of a block: continued lines joined, comments and blank lines left out."""
    commands, open_ = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        open_ += line if not open_ else "\n" + line
        try:
            words = shlex.split(open_, comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            commands.append(open_.strip())
        open_ = ""
    assert not open_, open_
    return commands


def agrees(shown: str, printed: str, figures_vary: bool) -> bool:
    """Whether a command printed what a page shows."""
    pattern = ""
    for part in re.split(r"^\s*(?:\.\.\.|…)\s*$", shown, flags=re.MULTILINE):
        words = [_pattern(word, figures_vary) for word in part.split()]
        pattern += r"\s+".join(words) + ".*?"
    return re.search(pattern, printed, re.DOTALL) is not None


def _pattern(word: str, figures_vary: bool) -> str:
    pieces = NUMBER.split(word) if figures_vary else [word]
    found = NUMBER.pattern.join(re.escape(piece).replace(r"\.\.\.", ".*?") for piece in pieces)
    return re.sub("─+", "─+", found) if figures_vary else found  # a rule is as long as its table is wide


@dataclass
class PageRun:
    """The state of a page that is being run."""

    page: str
    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: list[str] = field(default_factory=list)  # of every block that ran
    count: int = 0

    def run(self, slow: bool) -> PageRun:
        before, path = Path.cwd(), list(sys.path)
        tools = self.folder / ".tools"
        tools.mkdir(parents=True)
        for name, command in (("onfoot", f"{sys.executable} -m onfoot"), ("python", sys.executable)):
            (tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)
        self.tools = tools
        work = self.folder / "work"
        work.mkdir()
        sys.path.insert(0, str(work))
        try:
            os.chdir(work)
            skipped = False
            for block in page_blocks(self.page):
                if block.slow and not slow:
                    skipped = True
                    continue
                if not block.is_code and block.follows and skipped:
                    continue
                skipped = False
                try:
                    self._block(block)
                except Exception as error:
                    raise AssertionError(f"{self.page}, line {block.line}: {error}") from error
        finally:
            os.chdir(before)
            sys.path[:] = path
        return self

    def _block(self, block: Block) -> None:
        for mark in block.marks:
            if mark.startswith("setup python\n"):
                exec(mark.removeprefix("setup python\n"), self.names)
            elif mark.startswith("setup\n"):
                self._bash(mark.removeprefix("setup\n"), 0)
        if block.not_run is not None:
            return
        text = block.text
        for old, new in (found.groups() for m in block.marks if (found := re.fullmatch(r"run with (.+) as (.+)", m))):
            assert old in text, old
            text = text.replace(old, new)
        name = re.match(r"# (\w+\.py)\n", text) if block.language == "python" else None
        if block.mark("part of") is not None:
            self._part(Path(block.mark("part of") or ""), text)
        elif block.mark("edits") is not None:
            self._edit(Path(block.mark("edits") or ""), text)
        elif block.mark("file") is not None or name:
            Path(block.mark("file") or (name[1] if name else "")).write_text(text, encoding="utf-8")
        elif block.language == "python":
            self._python(text, block)
        elif block.language == "sh":
            self.count += 1
            self.printed.append("".join(self._command(line, block) for line in commands_of(text)))
        elif block.language == "console":
            self.count += 1
            command, _, shown = text.partition("\n")
            self.printed.append(self._command(command.removeprefix("$ "), block))
            self._compare(shown, block)
        elif block.mark("output of") is not None:
            self.count += 1
            self.printed.append(self._command(block.mark("output of") or "", block))
            self._compare(text, block)
        elif block.mark("output") is not None or (block.follows and not block.language and self.printed):
            self._compare(text, block)

    def _compare(self, shown: str, block: Block) -> None:
        printed = self.printed[-1]
        assert agrees(shown, printed, block.mark("figures vary") is not None), (
            f"the page shows\n{shown}\nnot\n{printed}"
        )

    def _python(self, code: str, block: Block) -> None:
        self.count += 1
        out = io.StringIO()
        tests = {name for name in self.names if name.startswith("test_")}
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"{self.page}:{block.line}", "exec"), self.names)
            for name in [name for name in self.names if name.startswith("test_") and name not in tests]:
                self.names[name]()
        self.printed.append(out.getvalue())
        for shown in re.findall(r"^(?:print\(.*\)  )?# prints (.*)$", code, re.MULTILINE):
            assert agrees(shown, out.getvalue(), False), f"the page shows {shown}, not {out.getvalue()}"

    @staticmethod
    def _part(path: Path, text: str) -> None:
        assert text.strip() in path.read_text(encoding="utf-8"), path.name

    @staticmethod
    def _edit(path: Path, code: str) -> None:
        text = path.read_text(encoding="utf-8")
        for line in code.splitlines():
            start = re.match(r" *\w+ = ", line)
            assert start and text.count(start[0]) == 1, f"{path.name} has no line like {line}"
            text = re.sub(rf"^{start[0]}.*$", lambda _, line=line: line, text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")

    def _command(self, command: str, block: Block) -> str:
        if any(part in command for part in block.lines_not_run):
            return ""
        words = shlex.split(command, comments=True)
        expected = int(block.mark("exit") or 0)
        if words[0] == "pip":
            _check_pip(words)
            return ""
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), command
            return ""
        if words[0] == "cd":
            os.chdir(words[1])
            return ""
        if words[0] != "onfoot" or SHELL.search(
            re.sub(r"(['\"]).*?\1", "", command.partition(" # ")[0], flags=re.DOTALL)
        ):
            return self._bash(command, expected)
        more: list[str] = []
        if words[1] in ("train", "finetune") and "--resume" not in words:
            more = [word for mark in block.marks if mark.startswith("run with: ") for word in shlex.split(mark[10:])]
        result = CliRunner().invoke(app, [*words[1:], *more])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == expected, f"{command}\n{result.output}"
        return result.output

    def _bash(self, script: str, expected: int) -> str:
        path = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        lines = [line for line in script.splitlines() if line.startswith("cd ")]
        done = subprocess.run(
            ["bash", "-euc", script], capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        assert done.returncode == expected, f"{script}\n{done.stdout}{done.stderr}"
        for line in lines:  # so does the page's folder
            os.chdir(line.split()[1])
        return done.stdout + done.stderr


def _check_pip(words: list[str]) -> None:
    """The extras that a `pip install` line names exist."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for word in words:
        extra = re.fullmatch(r"(?:onfoot|\.)\[([\w,-]+)\]", word)
        for name in extra[1].split(",") if extra else []:
            assert re.search(rf"^{name} = \[", project, re.MULTILINE), f"no extra {name}"


def run_page(page: str, folder: Path, slow: bool = False) -> PageRun:
    """Runs a page and compares what it shows; with `slow`, also the blocks marked so."""
    return PageRun(page, folder).run(slow)


def anchors(path: Path) -> set[str]:
    """What `page.md#...` may name: explicit anchors, and headings as GitHub spells them."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))
    found = set(re.findall(r'<a (?:id|name)="([^"]+)">', text))
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"<[^>]*>|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def prose(path: Path) -> str:
    """The page without its code, fenced and inline."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)
