"""Control characters from files and models do not reach a terminal; a pipe gets the text unchanged."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.terminal import printable, shell_word

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202e\u2066\x00\x7f\tb\nc[red]d"


def at_a_terminal(*command: str, cwd: Path) -> bytes:
    """The output of a program that runs in a terminal."""
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdout=there, stderr=there, stdin=there, cwd=cwd, env=environment)
    os.close(there)
    out = b""
    while True:
        try:
            block = os.read(here, 4096)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        out += block
    process.wait(60)
    os.close(here)
    return out


def test_control_characters_are_shown_and_line_ends_stay() -> None:
    assert printable(HOSTILE) == (r"a\x1b]0;title\x07\x1b[2J\x9b31m\u202e\u2066\x00\x7f" + "\tb\nc[red]d")
    assert printable("é日 ρ \u2014 ok") == "é日 ρ \u2014 ok"


@pytest.fixture(scope="module")
def speaks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that always generates ESC."""
    folder = tmp_path_factory.mktemp("model") / "speaks"
    model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=32, n_embd=8, n_layer=1, n_head=1))
    model.tokenizer = byte_tokenizer()
    (escape,) = model.tokenizer.encode("\x1b")
    for name, value in model.params.items():
        if name.endswith(("ln_f.weight", "wte.weight")):
            value[:] = 0
    model.params["transformer.ln_f.bias"][:] = 1
    model.params["transformer.wte.weight"][escape] = 1
    model.save(folder)
    assert model.generate(np.array([[1]]), 3, temperature=0)[0, 1:].tolist() == [escape] * 3
    return folder


COMMAND = ("generate", ".", "--prompt", "x", "--max-new-tokens", "3", "--temperature", "0", "--engine", "numpy")


def test_generated_control_characters_do_not_reach_a_terminal(speaks: Path) -> None:
    out = at_a_terminal(sys.executable, "-m", "onfoot", *COMMAND, cwd=speaks)
    assert b"\x1b" not in out
    assert rb"x\x1b\x1b\x1b" in out


def test_a_pipe_gets_the_text_unchanged(speaks: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "onfoot", *COMMAND], cwd=speaks, capture_output=True, check=True)
    assert done.stdout == b"x\x1b\x1b\x1b\n"


def test_errors_and_tables_escape_control_characters_in_file_names(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[31m[red]b"
    result = CliRunner().invoke(app, ["info", str(folder)])
    assert result.exit_code == 2 and "\x1b" not in result.output and r"\x1b[31m[red]b" in result.output
    onfoot.create(onfoot.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)).save(folder)
    result = CliRunner().invoke(app, ["info", str(folder)])
    assert result.exit_code == 0 and "\x1b" not in result.output
    assert r"a\x1b[31m[red]b" in result.output.replace("\n", "")


def test_control_characters_in_training_samples_do_not_reach_a_terminal() -> None:
    import io

    from rich.console import Console

    from onfoot.train.progress import Reporter

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Terminal(), r"a\x1b]0;title\x07"), (io.StringIO(), "a\x1b]0;title")):
        Reporter(1, console=Console(file=stream, force_terminal=False)).say(HOSTILE)
        assert expected in stream.getvalue()


@pytest.mark.parametrize(
    ("path", "posix", "windows"),
    [
        ("runs/1", "runs/1", "runs/1"),
        ("C:\\runs\\1", "'C:\\runs\\1'", "C:\\runs\\1"),
        ("my runs", "'my runs'", '"my runs"'),
        ("a&b", "'a&b'", '"a&b"'),
        ("C:\\my runs\\", "'C:\\my runs\\'", '"C:\\my runs\\\\"'),  # a backslash before a quote is doubled
        ('say "a"', "'say \"a\"'", '"say \\"a\\""'),
        ("", "''", '""'),
    ],
)
def test_a_path_in_a_command_to_paste_is_quoted_as_the_system_reads_it(path: str, posix: str, windows: str) -> None:
    assert (shell_word(path, "posix"), shell_word(path, "nt")) == (posix, windows)


@pytest.mark.parametrize("path", ["a b", "C:\\my runs\\", 'say "a b"', "", 'a b\\"c'])
def test_a_word_for_windows_is_quoted_as_python_quotes_it_for_programs(path: str) -> None:
    assert shell_word(path, "nt") == subprocess.list2cmdline([path])


def test_no_command_is_quoted_for_posix_alone() -> None:
    source = Path(onfoot.__file__).parent
    files = [path for path in source.rglob("*.py") if "shlex" in path.read_text(encoding="utf-8")]
    assert [path.name for path in files] == ["terminal.py"]
