"""A small process beside rank 0 that notices when a rank dies, and says so.

The launcher kills the other ranks within milliseconds of a death, so that none of them could say anything, and MPICH's
mpiexec may name the wrong process. Every rank therefore holds a connection to this process, which is in a session of
its own. A connection that closes without a farewell is a rank that died; the first to close is the one. Ranks that
their launcher leaves waiting are told to end.

A connection says a secret first, of a length that is known: nothing of one that cannot is read any further.

This file is a program too, started by its path; it imports nothing of the package.
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

PATIENCE = 20.0  # seconds to connect
CLEANUP = 3.0  # seconds that the launcher has to end the other ranks
SECRET = "ONFOOT_LOOKOUT"  # where the process is told the secret: the list of processes does not show it
LENGTH = 32  # characters of the secret
LINE = 1 << 16  # bytes of a line at most
STRANGERS = 64  # connections that have not said it yet


def last_words(run: str, resume: str) -> str:
    """The last complete checkpoint of a run, and how to go on from it."""
    try:
        names = sorted(name for name in os.listdir(os.path.join(run, "checkpoints")) if re.fullmatch(r"step-\d+", name))
    except OSError:
        names = []
    if not names:
        return f"no checkpoint was complete yet; begin again with: {resume}"
    where = os.path.join(run, "checkpoints", names[-1])
    return f"the last complete checkpoint is {where}; go on from there with: {resume}"


class MonitorConnection:
    """A rank's connection to the monitor."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection: socket.socket | None = connection
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def tell(self, **what: Any) -> None:
        if self.connection is not None:
            try:
                self.connection.sendall(json.dumps(what).encode() + b"\n")
            except OSError:
                self.connection = None

    def bye(self, failed: bool = False) -> None:
        """This rank ends by itself. If it `failed`, it has said so, and all others are about to be ended."""
        self.tell(bye=True, failed=failed)
        if self.connection is not None:
            self.connection.shutdown(socket.SHUT_WR)
            self.connection = None

    @staticmethod
    def _listen(connection: socket.socket) -> None:
        try:
            if connection.recv(1):  # the only thing that is ever sent: another rank is dead
                os._exit(1)
        except OSError:
            pass


def start(alone: bool, ranks: int) -> list[Any] | None:
    """Starts the monitor; returns its address, or None. With all ranks on one host it listens on loopback only."""
    token = secrets.token_hex(LENGTH // 2)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "127.0.0.1" if alone else "", str(ranks)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, SECRET: token},
    )  # fmt: skip
    start.process = process  # type: ignore[attr-defined]  # its stdin stays open as long as this process lives
    assert process.stdout is not None
    port = process.stdout.readline()
    host = "127.0.0.1" if alone else socket.gethostname()
    return [host, int(port), token] if port.strip().isdigit() else None


def join(where: list[Any] | None, rank: int) -> MonitorConnection | None:
    """This rank's connection; None where the monitor cannot be reached, and the run goes on without."""
    if where is None:
        return None
    host, port, token = where
    try:
        connection = socket.create_connection((host, port), timeout=PATIENCE)
    except OSError as error:
        print(f"rank {rank}: no connection to {host}:{port} ({error}); a death may not be reported", file=sys.stderr)
        return None
    connection.settimeout(None)
    connection.sendall(token.encode())
    line = MonitorConnection(connection)
    line.tell(rank=rank, host=socket.gethostname(), pid=os.getpid())
    return line


class MonitorClient:
    """A connection to the monitor: a stranger until it has said the secret."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.since = time.monotonic()
        self.trusted = False
        self.said: dict[str, Any] = {}
        self.rest = b""

    def hear(self, data: bytes, token: bytes) -> bool:
        """Takes in what was said; whether the caller is to be heard any further."""
        self.rest += data
        if not self.trusted:
            if len(self.rest) < LENGTH:
                return True
            if not hmac.compare_digest(self.rest[:LENGTH], token):
                return False
            self.trusted, self.rest = True, self.rest[LENGTH:]
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                return False
            if not isinstance(said, dict):
                return False
            self.said |= said
        return len(self.rest) <= LINE

    @property
    def name(self) -> str:
        rank, host, pid = (_plain(self.said.get(key, "?")) for key in ("rank", "host", "pid"))
        return f"rank {rank} on {host} (process {pid})"


class RankMonitor:
    """The process itself: connections of ranks, and which was the first to close."""

    def __init__(self, token: str, address: str, ranks: int) -> None:
        self.token = token.encode()
        self.most = ranks + STRANGERS
        self.server = socket.create_server((address, 0), backlog=1024)
        self.server.settimeout(0)
        self.callers: dict[int, MonitorClient] = {}  # by file descriptor
        self.life = _lifeline()
        self.poll = select.epoll() if hasattr(select, "epoll") else None
        self.watched: set[int] = set()
        self.run, self.resume = "", ""
        self.quiet = False  # a rank that failed has said what there is to say
        self.ended: float | None = None  # when the first rank died

    def serve(self) -> None:
        """Until all ranks have closed their connections."""
        print(self.server.getsockname()[1], flush=True)
        sys.stdout.close()
        self.watch(self.server.fileno())
        self.watch(self.life.fileno())
        joined, end = False, math.inf
        while joined or self.life.fileno() in self.watched or (self.callers and time.monotonic() < end):
            for descriptor in self.ready():
                if descriptor == self.server.fileno():
                    self.accept()
                elif descriptor == self.life.fileno():  # rank 0 is gone
                    self.forget(descriptor)
                    end = time.monotonic() + PATIENCE
                elif descriptor in self.callers and not self.read(self.callers[descriptor]):
                    self.close(descriptor)
            for descriptor, caller in list(self.callers.items()):
                joined = joined or caller.trusted
                if not caller.trusted and time.monotonic() - caller.since > PATIENCE:
                    self.close(descriptor)
            if joined and not any(caller.trusted for caller in self.callers.values()):
                return
            if self.ended is not None and time.monotonic() - self.ended > CLEANUP:
                self.end_all()
                return

    def watch(self, descriptor: int) -> None:
        self.watched.add(descriptor)
        if self.poll is not None:
            self.poll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        self.watched.discard(descriptor)
        if self.poll is not None:
            self.poll.unregister(descriptor)

    def ready(self) -> list[int]:
        """What there is to read. epoll gives it in the order in which it came: that tells the first to die."""
        if self.poll is not None:
            return [descriptor for descriptor, _ in self.poll.poll(1.0)]
        return select.select([*self.watched], [], [], 1.0)[0]

    def end_all(self) -> None:
        """Tells the ranks that are still there to end. Who cannot be reached is not waited for."""
        for caller in self.callers.values():
            if caller.said and not caller.said.get("bye"):
                with suppress(OSError):
                    caller.connection.send(b"x")

    def accept(self) -> None:
        """A new connection. Of too many strangers, the one that has waited longest goes."""
        try:
            connection, _ = self.server.accept()
            connection.settimeout(0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):  # hosts that vanish
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError:  # it has hung up meanwhile, or there are too many open files
            return
        if len(self.callers) >= self.most:
            strangers = [d for d, caller in self.callers.items() if not caller.trusted]
            if not strangers:
                connection.close()
                return
            self.close(min(strangers, key=lambda d: self.callers[d].since))
        self.callers[connection.fileno()] = MonitorClient(connection)
        self.watch(connection.fileno())

    def read(self, caller: MonitorClient) -> bool:
        """Takes in what a caller says; False when its connection has closed, or is to be."""
        try:
            data = caller.connection.recv(LINE if caller.trusted else LENGTH - len(caller.rest))
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        heard = bool(data) and caller.hear(data, self.token)
        self.run, self.resume = caller.said.get("run", self.run), caller.said.get("resume", self.resume)
        self.quiet = self.quiet or caller.said.get("failed") is True
        return heard

    def close(self, descriptor: int) -> None:
        self.forget(descriptor)
        caller = self.callers.pop(descriptor)
        caller.connection.close()
        if not caller.said or caller.said.get("bye") or self.ended is not None:
            return
        self.ended = time.monotonic()
        if not self.quiet:
            run, resume = _plain(self.run), _plain(self.resume)
            words = last_words(run, resume) if run else "nothing was trained yet"
            sys.stderr.write(f"\nerror: {caller.name} died, and the run ends; {words}\n")
            sys.stderr.flush()


def _plain(value: Any) -> str:
    """Text for a terminal, without anything that could steer it."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:4096])


def _lifeline() -> Any:
    """What can be read once the process that started this one is gone: stdin, which Windows can only wait for."""
    if sys.platform != "win32":
        return sys.stdin
    here, there = socket.socketpair()

    def wait() -> None:
        sys.stdin.read()
        there.close()

    threading.Thread(target=wait, daemon=True).start()
    return here


if __name__ == "__main__":
    RankMonitor(os.environ.pop(SECRET), sys.argv[1], int(sys.argv[2])).serve()
