"""Connections that keep the server waiting are closed, and do not keep a browser out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from onfoot.explore.server import Explorer

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1"
HANG = 20  # seconds after which a test gives up


@contextmanager
def connections(port: int, number: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """`number` connections that have sent these bytes and then stay silent."""
    with ExitStack() as stack:
        yield [stack.enter_context(connection(port, sent)) for _ in range(number)]


def connection(port: int, sent: bytes) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), timeout=HANG)
    opened.sendall(sent)
    return opened


def received(connection: socket.socket) -> bytes:
    """Everything received until the other side closes."""
    answer = b""
    try:
        while part := connection.recv(1 << 20):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def asked(port: int) -> bytes:
    """A browser's request and its answer."""
    request = f"GET /icon.svg HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
    with connection(port, request.encode()) as opened:
        return received(opened)


def post(port: int, length: int) -> bytes:
    return f"POST /api/study HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("sent", [b"", HALF, b"POST"], ids=["nothing", "half a head", "one word"])
def test_two_hundred_half_open_connections_do_not_keep_a_browser_out(port: int, sent: bytes) -> None:
    with connections(port, 200, sent):
        for _ in range(3):
            assert asked(port).startswith(b"HTTP/1.1 200 OK")


def test_two_hundred_requests_without_their_body_do_not_keep_a_browser_out(port: int) -> None:
    with connections(port, 200, post(port, 100) + b"{"):
        assert asked(port).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half a head"])
def test_a_half_open_connection_is_closed_when_its_time_is_over(impatient: int, sent: bytes) -> None:
    with connections(impatient, 5, sent) as waiting:
        assert [received(one) for one in waiting] == [b""] * 5
    assert asked(impatient).startswith(b"HTTP/1.1 200 OK")


def test_a_request_without_its_body_is_closed_when_its_time_is_over(impatient: int) -> None:
    with connection(impatient, post(impatient, 100) + b"{") as opened:
        assert b" 200 " not in received(opened)


def test_a_head_that_comes_byte_by_byte_has_no_more_time(impatient: int) -> None:
    with connection(impatient, HALF) as opened:
        deadline = time.monotonic() + HANG
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                opened.sendall(b"x")
                time.sleep(0.05)


def test_half_of_a_second_request_has_no_more_time_than_half_of_a_first(impatient: int) -> None:
    whole = f"GET /icon.svg HTTP/1.1\r\nHost: 127.0.0.1:{impatient}\r\n\r\n".encode()
    with connection(impatient, whole) as opened:
        assert opened.recv(1 << 20).startswith(b"HTTP/1.1 200 OK")
        opened.sendall(HALF)
        assert b"HTTP" not in received(opened)


def test_a_connection_that_does_not_read_its_response_is_closed(impatient: int) -> None:
    """Responses pile up in a connection that sends requests without reading."""
    page = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{impatient}\r\n\r\n".encode()
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.connect(("127.0.0.1", impatient))
        opened.settimeout(HANG)
        opened.sendall(20 * page)
        wait_until_closed(opened)


def wait_until_closed(opened: socket.socket) -> None:
    """Until the other side resets the connection, seen without reading."""
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        try:
            opened.sendall(b"\r\n")
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail(f"still open after {HANG} s")


def test_a_request_that_takes_long_to_answer_is_not_hurried(impatient: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer runs while the server waits for the client, not while the client waits for the server."""
    answer = Explorer.answer

    def slow_answer(self: Explorer, asked: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1.2)  # more than twice the timeout
        return answer(self, asked)

    monkeypatch.setattr(Explorer, "answer", slow_answer)
    with connection(impatient, f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{impatient}\r\n\r\n".encode()) as opened:
        assert opened.recv(1 << 20).startswith(b"HTTP/1.1 200 OK")
