"""A small process, started by rank 0, that reports which rank died.

When a rank dies, the launcher kills the other ranks within milliseconds, before they can report it, and MPICH's mpiexec
may name the wrong process. So every rank is connected to this process, which runs in its own session. The first
connection that closes without a `bye` message belongs to the rank that died. Ranks that the launcher leaves running are
told to exit.

A client must first send a secret of known length; a client that does not is disconnected.

This file is also a program, started by its path; it imports nothing from the package.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

CONNECT_TIMEOUT = 20.0  # seconds
LAUNCHER_TIMEOUT = 3.0  # seconds in which the launcher should kill the other ranks
SECRET_ENV = "ONFOOT_MONITOR_SECRET"  # not an argument: the process list shows those
SECRET_LENGTH = 32  # characters
MAX_LINE = 1 << 16  # bytes
MAX_UNAUTHENTICATED = 64  # clients that have not sent the secret yet


def resume_hint(run: str, resume: str) -> str:
    """A message with the last complete checkpoint of a run, and the command to resume from it."""
    try:
        names = sorted(name for name in os.listdir(os.path.join(run, "checkpoints")) if re.fullmatch(r"step-\d+", name))
    except OSError:
        names = []
    if not names:
        return f"no checkpoint was saved yet; start again with: {resume}"
    where = os.path.join(run, "checkpoints", names[-1])
    return f"the last complete checkpoint is {where}; resume with: {resume}"


class MonitorConnection:
    """A rank's connection to the monitor."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection: socket.socket | None = connection
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def send(self, **fields: Any) -> None:
        if self.connection is not None:
            try:
                self.connection.sendall(json.dumps(fields).encode() + b"\n")
            except OSError:
                self.connection = None

    def close(self, failed: bool = False) -> None:
        """Announces that this rank exits. If it `failed`, it has printed its error and is about to abort the others."""
        self.send(bye=True, failed=failed)
        if self.connection is not None:
            self.connection.shutdown(socket.SHUT_WR)
            self.connection = None

    @staticmethod
    def _listen(connection: socket.socket) -> None:
        try:
            if connection.recv(1):  # the monitor only ever sends this: another rank died
                os._exit(1)
        except OSError:
            pass


def start(one_host: bool, ranks: int) -> list[Any] | None:
    """Starts the monitor; returns [host, port, secret], or None. With `one_host`, it listens on loopback only."""
    token = secrets.token_hex(SECRET_LENGTH // 2)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "127.0.0.1" if one_host else "", str(ranks)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, SECRET_ENV: token},
    )  # fmt: skip
    start.process = process  # type: ignore[attr-defined]  # its stdin stays open as long as this process lives
    assert process.stdout is not None
    port = process.stdout.readline()
    host = "127.0.0.1" if one_host else socket.gethostname()
    return [host, int(port), token] if port.strip().isdigit() else None


def join(address: list[Any] | None, rank: int) -> MonitorConnection | None:
    """This rank's connection; None if the monitor cannot be reached: the run continues without it."""
    if address is None:
        return None
    host, port, token = address
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
    except OSError as error:
        print(
            f"rank {rank}: cannot connect to the rank monitor at {host}:{port}: {error}; "
            f"if a rank dies, it may not be reported",
            file=sys.stderr,
        )
        return None
    connection.settimeout(None)
    connection.sendall(token.encode())
    monitor = MonitorConnection(connection)
    monitor.send(rank=rank, host=socket.gethostname(), pid=os.getpid())
    return monitor


class MonitorClient:
    """A client of the monitor, authenticated once it has sent the secret."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.since = time.monotonic()
        self.authenticated = False
        self.fields: dict[str, Any] = {}  # all that it has sent
        self.rest = b""  # an incomplete line

    def receive(self, data: bytes, token: bytes) -> bool:
        """Parses received bytes; returns whether to keep the connection."""
        self.rest += data
        if not self.authenticated:
            if len(self.rest) < SECRET_LENGTH:
                return True
            if not hmac.compare_digest(self.rest[:SECRET_LENGTH], token):
                return False
            self.authenticated, self.rest = True, self.rest[SECRET_LENGTH:]
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                return False
            if not isinstance(fields, dict):
                return False
            self.fields |= fields
        return len(self.rest) <= MAX_LINE

    @property
    def name(self) -> str:
        rank, host, pid = (_printable(self.fields.get(key, "?")) for key in ("rank", "host", "pid"))
        return f"rank {rank} on {host} (process {pid})"


class RankMonitor:
    """The monitor process: the clients, and which of them closed first."""

    def __init__(self, token: str, address: str, ranks: int) -> None:
        self.token = token.encode()
        self.max_clients = ranks + MAX_UNAUTHENTICATED
        self.server = socket.create_server((address, 0), backlog=1024)
        self.server.settimeout(0)
        self.clients: dict[int, MonitorClient] = {}  # by file descriptor
        self.parent = _parent_exit()
        self.poll = select.epoll() if hasattr(select, "epoll") else None
        self.watched: set[int] = set()
        self.run, self.resume = "", ""
        self.error_reported = False  # a rank that failed has printed its error
        self.died_at: float | None = None  # when the first rank died

    def serve(self) -> None:
        """Runs until all ranks have closed their connections."""
        print(self.server.getsockname()[1], flush=True)
        sys.stdout.close()
        self.watch(self.server.fileno())
        self.watch(self.parent.fileno())
        joined, deadline = False, math.inf
        while joined or self.parent.fileno() in self.watched or (self.clients and time.monotonic() < deadline):
            for descriptor in self.ready():
                if descriptor == self.server.fileno():
                    self.accept()
                elif descriptor == self.parent.fileno():  # rank 0 has exited
                    self.unwatch(descriptor)
                    deadline = time.monotonic() + CONNECT_TIMEOUT
                elif descriptor in self.clients and not self.read(self.clients[descriptor]):
                    self.close(descriptor)
            for descriptor, client in list(self.clients.items()):
                joined = joined or client.authenticated
                if not client.authenticated and time.monotonic() - client.since > CONNECT_TIMEOUT:
                    self.close(descriptor)
            if joined and not any(client.authenticated for client in self.clients.values()):
                return
            if self.died_at is not None and time.monotonic() - self.died_at > LAUNCHER_TIMEOUT:
                self.stop_ranks()
                return

    def watch(self, descriptor: int) -> None:
        self.watched.add(descriptor)
        if self.poll is not None:
            self.poll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        self.watched.discard(descriptor)
        if self.poll is not None:
            self.poll.unregister(descriptor)

    def ready(self) -> list[int]:
        """The readable descriptors. epoll returns them in order of arrival: the first to close died first."""
        if self.poll is not None:
            return [descriptor for descriptor, _ in self.poll.poll(1.0)]
        return select.select([*self.watched], [], [], 1.0)[0]

    def stop_ranks(self) -> None:
        """Tells the remaining ranks to exit, without waiting for unreachable ones."""
        for client in self.clients.values():
            if client.fields and not client.fields.get("bye"):
                with suppress(OSError):
                    client.connection.send(b"x")

    def accept(self) -> None:
        """Accepts a client. If there are too many, the oldest unauthenticated one is disconnected."""
        try:
            connection, _ = self.server.accept()
            connection.settimeout(0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (
                ("TCP_KEEPIDLE", 10),
                ("TCP_KEEPINTVL", 5),
                ("TCP_KEEPCNT", 3),
            ):  # dead hosts
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError:  # the client has disconnected, or too many files are open
            return
        if len(self.clients) >= self.max_clients:
            unauthenticated = [d for d, client in self.clients.items() if not client.authenticated]
            if not unauthenticated:
                connection.close()
                return
            self.close(min(unauthenticated, key=lambda d: self.clients[d].since))
        self.clients[connection.fileno()] = MonitorClient(connection)
        self.watch(connection.fileno())

    def read(self, client: MonitorClient) -> bool:
        """Reads from a client; returns False when its connection has closed or must be closed."""
        try:
            data = client.connection.recv(MAX_LINE if client.authenticated else SECRET_LENGTH - len(client.rest))
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        keep = bool(data) and client.receive(data, self.token)
        self.run, self.resume = client.fields.get("run", self.run), client.fields.get("resume", self.resume)
        self.error_reported = self.error_reported or client.fields.get("failed") is True
        return keep

    def close(self, descriptor: int) -> None:
        self.unwatch(descriptor)
        client = self.clients.pop(descriptor)
        client.connection.close()
        if not client.fields or client.fields.get("bye") or self.died_at is not None:
            return
        self.died_at = time.monotonic()
        if not self.error_reported:
            run, resume = _printable(self.run), _printable(self.resume)
            hint = resume_hint(run, resume) if run else "training had not started"
            sys.stderr.write(f"\nerror: {client.name} died and the run was stopped; {hint}\n")
            sys.stderr.flush()


def _printable(value: Any) -> str:
    """Text without terminal control characters."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:4096])


def _parent_exit() -> Any:
    """A file that becomes readable when the parent exits: stdin, or on Windows, which cannot select it, a socket."""
    if sys.platform != "win32":
        return sys.stdin
    here, there = socket.socketpair()

    def wait() -> None:
        sys.stdin.read()
        there.close()

    threading.Thread(target=wait, daemon=True).start()
    return here


if __name__ == "__main__":
    RankMonitor(os.environ.pop(SECRET_ENV), sys.argv[1], int(sys.argv[2])).serve()
