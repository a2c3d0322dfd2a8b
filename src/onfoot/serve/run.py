"""Runs the server until it is interrupted."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from types import FrameType

import uvicorn

from onfoot.serve.protocol import Served
from onfoot.serve.scheduler import Scheduler
from onfoot.serve.server import MAX_BODY, application


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free port."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ValueError(f"cannot bind {host}, port {port}: {error.strerror}; choose another with --port") from None
    listening.listen(128)
    return listening


class Server(uvicorn.Server):
    """A server whose answers end at the first Ctrl-C, so that it need not wait for them."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self.scheduler = scheduler

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal."""
        self.scheduler.stop()
        super().handle_exit(sig, frame)


def new_server(
    served: Served, scheduler: Scheduler, listening: socket.socket, key: str | None = None, max_body: int = MAX_BODY
) -> Server:
    """The server on a bound socket."""
    app = application(served, scheduler, key, listening.getsockname()[1], max_body)
    config = uvicorn.Config(
        app, log_level="warning", server_header=False, lifespan="off", ws="none", timeout_graceful_shutdown=5
    )
    return Server(config, scheduler)


def serve(served: Served, scheduler: Scheduler, listening: socket.socket, key: str | None) -> None:
    """Serves until Ctrl-C."""
    server = new_server(served, scheduler, listening, key)
    scheduler.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again at the end
            server.run(sockets=[listening])
    finally:
        scheduler.stop()
        scheduler.join(10)
