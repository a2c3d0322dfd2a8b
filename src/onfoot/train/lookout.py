"""A small process beside rank 0 that notices when a rank dies, and says so.

The launcher kills the other ranks within milliseconds of a death, so that none of them could say anything, and MPICH's
mpiexec may name the wrong process. Every rank therefore holds a connection to this process, which is in a session of
its own. A connection that closes without a farewell is a rank that died; the first to close is the one. Ranks that
their launcher leaves waiting are told to end.

This file is a program too, started by its path; it imports nothing of the package.
"""

from __future__ import annotations

import json
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


class Line:
    """A rank's connection to the lookout."""

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


def start(alone: bool) -> list[Any] | None:
    """Starts the lookout; where it can be reached, or None. Ranks of one host need no other interface than its own."""
    token = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, token, "127.0.0.1" if alone else ""],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    start.process = process  # type: ignore[attr-defined]  # its stdin stays open as long as this process lives
    assert process.stdout is not None
    port = process.stdout.readline()
    host = "127.0.0.1" if alone else socket.gethostname()
    return [host, int(port), token] if port.strip().isdigit() else None


def join(where: list[Any] | None, rank: int) -> Line | None:
    """This rank's connection; None where the lookout cannot be reached, and the run goes on without."""
    if where is None:
        return None
    host, port, token = where
    try:
        connection = socket.create_connection((host, port), timeout=PATIENCE)
    except OSError as error:
        print(f"rank {rank}: no connection to {host}:{port} ({error}); a death may not be reported", file=sys.stderr)
        return None
    connection.settimeout(None)
    line = Line(connection)
    line.tell(token=token, rank=rank, host=socket.gethostname(), pid=os.getpid())
    return line


class Lookout:
    """The process itself: connections of ranks, and which was the first to close."""

    def __init__(self, token: str, address: str) -> None:
        self.token = token
        self.server = socket.create_server((address, 0), backlog=1024)
        self.ranks: dict[int, tuple[socket.socket, dict[str, Any], bytes]] = {}  # by file descriptor
        self.run, self.resume = "", ""
        self.quiet = False  # a rank that failed has said what there is to say
        self.ended: float | None = None  # when the first rank died

    def serve(self) -> None:
        """Until all ranks have closed their connections."""
        print(self.server.getsockname()[1], flush=True)
        sys.stdout.close()
        poll = select.epoll() if hasattr(select, "epoll") else None
        watched = {self.server.fileno(), sys.stdin.fileno()}
        joined = False
        if poll is not None:
            for descriptor in watched:
                poll.register(descriptor, select.EPOLLIN)
        while not (joined and not self.ranks) and (joined or sys.stdin.fileno() in watched):
            # epoll gives what is ready in the order in which it became so: that tells the first to die
            ready = [d for d, _ in poll.poll(1.0)] if poll else select.select([*watched], [], [], 1.0)[0]
            for descriptor in ready:
                if descriptor == self.server.fileno():
                    connection = self.accept()
                    self.ranks[connection.fileno()] = (connection, {}, b"")
                    watched.add(connection.fileno())
                    if poll:
                        poll.register(connection.fileno(), select.EPOLLIN)
                elif descriptor == sys.stdin.fileno():  # rank 0 is gone
                    watched.discard(descriptor)
                    if poll:
                        poll.unregister(descriptor)
                elif not self.read(descriptor):
                    watched.discard(descriptor)
                    if poll:
                        poll.unregister(descriptor)
                    self.close(descriptor)
                else:
                    joined = joined or bool(self.ranks[descriptor][1])
            if self.ended is not None and time.monotonic() - self.ended > CLEANUP:
                self.end_all()
                return

    def end_all(self) -> None:
        """Tells the ranks that are still there to end. Who cannot be reached is not waited for."""
        for connection, who, _ in self.ranks.values():
            if who and not who.get("bye"):
                with suppress(OSError):
                    connection.send(b"x")

    def accept(self) -> socket.socket:
        connection, _ = self.server.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):  # a host that vanishes
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return connection

    def read(self, descriptor: int) -> bool:
        """Takes in what a rank says; False when its connection has closed."""
        connection, who, rest = self.ranks[descriptor]
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if not who and said.get("token") != self.token:
                return False  # not one of ours
            who |= said
            self.run, self.resume = said.get("run", self.run), said.get("resume", self.resume)
            self.quiet = self.quiet or said.get("failed", False)
        self.ranks[descriptor] = (connection, who, rest)
        return bool(data)

    def close(self, descriptor: int) -> None:
        connection, who, _ = self.ranks.pop(descriptor)
        connection.close()
        if not who or who.get("bye") or self.ended is not None:
            return
        self.ended = time.monotonic()
        if not self.quiet:
            words = last_words(self.run, self.resume) if self.run else "nothing was trained yet"
            name = f"rank {who['rank']} on {who['host']} (process {who['pid']})"
            sys.stderr.write(f"\nerror: {name} died, and the run ends; {words}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    Lookout(sys.argv[1], sys.argv[2]).serve()
