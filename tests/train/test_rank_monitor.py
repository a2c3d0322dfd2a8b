"""The rank monitor: who may connect, how much it reads, and that garbage does not stop it."""

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
    """A rank monitor for two ranks."""

    def __init__(self, patience: float = 20.0) -> None:
        program = (
            "import sys; path = sys.argv[1]; sys.argv = [path, '127.0.0.1', '2']; source = open(path).read(); "
            f"source = source.replace('CONNECT_TIMEOUT = 20.0', 'CONNECT_TIMEOUT = {patience}'); "
            "exec(compile(source, path, 'exec'), {'__name__': '__main__', '__file__': path})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, rank_monitor.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, rank_monitor.SECRET_ENV: TOKEN},
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
        """Its stderr, after the ranks have signed off."""
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
def test_a_client_that_does_not_send_the_secret_is_disconnected(said: bytes) -> None:
    watch = Watch()
    ranks = [watch.rank(0), watch.rank(1)]
    assert hung_up(watch.call(said))
    assert watch.ends_well(*ranks) == ""


def test_nothing_is_parsed_before_the_secret_is_received() -> None:
    stranger = caller()
    assert stranger.receive(b"{" * 31, TOKEN.encode())  # too short to tell
    assert not stranger.receive(b"{\n", TOKEN.encode()) and not stranger.authenticated
    rank = caller()
    for byte in TOKEN:
        assert not rank.authenticated and rank.receive(byte.encode(), TOKEN.encode())
    assert rank.authenticated and rank.receive(line(rank=3), TOKEN.encode()) and rank.fields == {"rank": 3}


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"{\n", id="half"),
        pytest.param(b"[]\n", id="a list", marks=pytest.mark.slow),
        pytest.param(DEEP + b"\n", id="deep", marks=pytest.mark.slow),
        pytest.param(b"\xff\xfe\n", id="no text", marks=pytest.mark.slow),
        pytest.param(b"1" * (rank_monitor.MAX_LINE + 1), id="long"),
    ],
)
def test_a_rank_that_sends_invalid_data_is_reported_as_dead(said: bytes) -> None:
    watch = Watch()
    other, mad = watch.rank(0), watch.rank(1)
    with suppress(OSError):
        mad.sendall(said)
    assert other.recv(1) == b"x"  # the other rank is told to end
    assert "rank 1 on host-1 (process 101) died" in watch.process.communicate(timeout=20)[1].decode()
    assert watch.process.returncode == 0


def test_lines_without_end_are_not_buffered() -> None:
    rank = caller()
    assert rank.receive(TOKEN.encode(), TOKEN.encode())
    while rank.receive(b"x" * 1000, TOKEN.encode()):
        assert len(rank.rest) <= rank_monitor.MAX_LINE
    assert len(rank.rest) <= rank_monitor.MAX_LINE + 1000


def test_silent_unauthenticated_clients_are_limited_and_time_out() -> None:
    watch = Watch(patience=1.0)
    ranks = [watch.rank(0)]
    strangers = [watch.call() for _ in range(rank_monitor.MAX_UNAUTHENTICATED + 40)]
    ranks.append(watch.rank(1))  # there is room for a rank
    assert all(hung_up(stranger) for stranger in strangers)  # the oldest at once, the others when their time is up
    assert watch.ends_well(*ranks) == ""


def test_garbage_from_many_clients_does_not_stop_the_monitor() -> None:
    watch, rng = Watch(), random.Random(5)
    rank = watch.rank(0)
    for _ in range(200):
        said = rng.choice([rng.randbytes(rng.randrange(100)), TOKEN[: rng.randrange(32)].encode(), b"\n", b""])
        watch.call(said).close()
    assert watch.ends_well(rank) == ""


def test_printed_text_has_no_terminal_control_characters() -> None:
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
    where = rank_monitor.start(one_host=True, ranks=2)
    assert where is not None and where[:2] == ["127.0.0.1", 4242]
    ((command, environment),) = started
    assert where[2] not in " ".join(command) and environment[rank_monitor.SECRET_ENV] == where[2]
    assert len(where[2]) == rank_monitor.SECRET_LENGTH


def test_windows_waits_for_stdin_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(rank_monitor.sys, "platform", "win32")
    monkeypatch.setattr(rank_monitor.sys, "stdin", os.fdopen(read))
    life = rank_monitor._parent_exit()
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
    watch.watch(watch.parent.fileno())
    connection = socket.create_connection(watch.server.getsockname(), timeout=20)
    assert watch.ready() == [watch.server.fileno()]
    watch.accept()
    connection.sendall(TOKEN.encode() + line(rank=0))
    deadline = time.monotonic() + 20
    (one,) = watch.clients.values()
    while not one.fields and time.monotonic() < deadline:
        for descriptor in watch.ready():
            assert watch.read(watch.clients[descriptor])
    assert one.fields == {"rank": 0}
    os.close(write)
