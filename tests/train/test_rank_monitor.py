"""The process that watches over the ranks: who may speak to it, how much it reads, and that garbage does not end it."""

from __future__ import annotations

import io
import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from onfoot.train import rank_monitor

TOKEN = "0123456789abcdef" * 2
DEEP = b"[" * 100_000 + b"]" * 100_000


class Watch:
    """A rank_monitor for two ranks."""

    def __init__(self, patience: float = 20.0) -> None:
        program = (
            "import sys; path = sys.argv[1]; sys.argv = [path, '127.0.0.1', '2']; source = open(path).read(); "
            f"source = source.replace('PATIENCE = 20.0', 'PATIENCE = {patience}'); "
            "exec(compile(source, path, 'exec'), {'__name__': '__main__', '__file__': path})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, rank_monitor.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, rank_monitor.SECRET: TOKEN},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def call(self, *said: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        with suppress(OSError):  # it may have hung up already
            for part in said:
                connection.sendall(part)
        return connection

    def rank(self, number: int) -> socket.socket:
        return self.call(TOKEN.encode(), line(rank=number, host=f"host-{number}", pid=100 + number))

    def ends_well(self, *ranks: socket.socket) -> str:
        """All that it said, after the ranks have said farewell."""
        for rank in ranks:
            rank.sendall(line(bye=True, failed=False))
            rank.close()
        said = self.process.communicate(timeout=20)[1].decode()
        assert self.process.returncode == 0, said
        return said


def line(**what: Any) -> bytes:
    return json.dumps(what).encode() + b"\n"


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def caller() -> rank_monitor.MonitorClient:
    return rank_monitor.MonitorClient(SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", line(token=TOKEN, rank=7), DEEP, b"\n" * 40, b"\xff\x00" * 2048],
    ids=["http", "the secret inside JSON", "deep", "empty lines", "noise"],
)
def test_who_does_not_begin_with_the_secret_is_hung_up_on(said: bytes) -> None:
    watch = Watch()
    ranks = [watch.rank(0), watch.rank(1)]
    assert hung_up(watch.call(said))
    assert watch.ends_well(*ranks) == ""


def test_nothing_is_parsed_before_the_secret_is_said() -> None:
    stranger = caller()
    assert stranger.hear(b"{" * 31, TOKEN.encode())  # too short to tell
    assert not stranger.hear(b"{\n", TOKEN.encode()) and not stranger.trusted
    rank = caller()
    for byte in TOKEN:
        assert not rank.trusted and rank.hear(byte.encode(), TOKEN.encode())
    assert rank.trusted and rank.hear(line(rank=3), TOKEN.encode()) and rank.said == {"rank": 3}


@pytest.mark.parametrize(
    "said",
    [b"{\n", b"[]\n", DEEP + b"\n", b"\xff\xfe\n", b"1" * (rank_monitor.LINE + 1)],
    ids=["half", "a list", "deep", "no text", "long"],
)
def test_a_rank_that_talks_nonsense_counts_as_dead_and_the_lookout_says_so(said: bytes) -> None:
    watch = Watch()
    other, mad = watch.rank(0), watch.rank(1)
    with suppress(OSError):
        mad.sendall(said)
    assert other.recv(1) == b"x"  # the other rank is told to end
    assert "rank 1 on host-1 (process 101) died" in watch.process.communicate(timeout=20)[1].decode()
    assert watch.process.returncode == 0


def test_lines_without_end_are_not_kept() -> None:
    rank = caller()
    assert rank.hear(TOKEN.encode(), TOKEN.encode())
    while rank.hear(b"x" * 1000, TOKEN.encode()):
        assert len(rank.rest) <= rank_monitor.LINE
    assert len(rank.rest) <= rank_monitor.LINE + 1000


def test_strangers_who_say_nothing_are_few_and_do_not_stay() -> None:
    watch = Watch(patience=1.0)
    ranks = [watch.rank(0)]
    strangers = [watch.call() for _ in range(rank_monitor.STRANGERS + 40)]
    ranks.append(watch.rank(1))  # there is room for a rank
    assert all(hung_up(stranger) for stranger in strangers)  # the oldest at once, the others when their time is up
    assert watch.ends_well(*ranks) == ""


def test_garbage_from_many_does_not_end_it() -> None:
    watch, rng = Watch(), random.Random(5)
    rank = watch.rank(0)
    for _ in range(200):
        said = rng.choice([rng.randbytes(rng.randrange(100)), TOKEN[: rng.randrange(32)].encode(), b"\n", b""])
        watch.call(said).close()
    assert watch.ends_well(rank) == ""


def test_what_it_prints_cannot_steer_a_terminal() -> None:
    watch = Watch()
    watch.call(TOKEN.encode(), line(rank="\x1b[31m", host="a\nb", pid={}, run=7, resume=None)).close()
    said = watch.process.communicate(timeout=20)[1].decode()
    assert "rank ?[31m on a?b (process {}) died" in said and "\x1b" not in said


def test_the_secret_is_not_in_the_list_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def popen(command: list[str], **kwargs: Any) -> Any:
        started.append((command, kwargs.get("env") or {}))
        return SimpleNamespace(stdout=io.BytesIO(b"4242\n"))

    monkeypatch.setattr(rank_monitor.subprocess, "Popen", popen)
    where = rank_monitor.start(alone=True, ranks=2)
    assert where is not None and where[:2] == ["127.0.0.1", 4242]
    ((command, environment),) = started
    assert where[2] not in " ".join(command) and environment[rank_monitor.SECRET] == where[2]
    assert len(where[2]) == rank_monitor.LENGTH


def test_windows_waits_for_stdin_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(rank_monitor.sys, "platform", "win32")
    monkeypatch.setattr(rank_monitor.sys, "stdin", os.fdopen(read))
    life = rank_monitor._lifeline()
    life.settimeout(0)
    with pytest.raises(BlockingIOError):
        life.recv(1)
    os.close(write)
    life.settimeout(20)
    assert life.recv(1) == b""


def test_it_works_where_there_is_no_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(rank_monitor.select, "epoll", raising=False)
    read, write = os.pipe()
    monkeypatch.setattr(rank_monitor.sys, "stdin", os.fdopen(read))
    watch = rank_monitor.RankMonitor(TOKEN, "127.0.0.1", 1)
    watch.watch(watch.server.fileno())
    watch.watch(watch.life.fileno())
    connection = socket.create_connection(watch.server.getsockname(), timeout=20)
    assert watch.ready() == [watch.server.fileno()]
    watch.accept()
    connection.sendall(TOKEN.encode() + line(rank=0))
    deadline = time.monotonic() + 20
    (one,) = watch.callers.values()
    while not one.said and time.monotonic() < deadline:
        for descriptor in watch.ready():
            assert watch.read(watch.callers[descriptor])
    assert one.said == {"rank": 0}
    os.close(write)
