"""`onfoot learn` needs no network: neither its commands nor the processes that judge."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from learners import solved_folder
from typer.testing import CliRunner

from onfoot.cli import app
from onfoot.learn import make_folder

# In this process and, as sitecustomize, in every process that it starts; a socket of the computer itself is allowed.
BLOCK = """
import socket
def connect(self, address):
    if self.family != getattr(socket, "AF_UNIX", None):
        open({marker!r}, "a").write(repr(address))
        raise OSError("no network in this test")
def lookup(host, *rest, **named):
    open({marker!r}, "a").write(repr(host))
    raise OSError("no network in this test")
socket.socket.connect = connect
socket.getaddrinfo = lookup
"""


def test_exercises_are_made_and_judged_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    marker = tmp_path / "connected"
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(marker=str(marker)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setattr(socket.socket, "connect", socket.socket.connect)  # put back afterwards
    monkeypatch.setattr(socket, "getaddrinfo", socket.getaddrinfo)
    exec(BLOCK.format(marker=str(marker)), {})
    make_folder(tmp_path / "course")
    monkeypatch.chdir(solved_folder(tmp_path / "course"))
    for command in (["check", "1"], ["map"], ["derivation", "1"]):
        result = CliRunner().invoke(app, ["learn", *command])
        assert result.exit_code == 0, result.output
    with pytest.raises(OSError, match="no network in this test"):
        socket.create_connection(("localhost", 9))
    assert marker.read_text(encoding="utf-8") == "'localhost'"  # only the line above has tried
