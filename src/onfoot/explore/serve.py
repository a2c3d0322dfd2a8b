"""Runs the server until it is interrupted, and opens the page in the browser."""

from __future__ import annotations

import socket
import threading
import webbrowser
from typing import TYPE_CHECKING

import uvicorn

from onfoot.explore.access import page_address, private_link
from onfoot.explore.connections import TimedConnection
from onfoot.explore.server import application

if TYPE_CHECKING:
    from onfoot.explore.server import Explorer

LOOPBACK = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """A listening socket on loopback, which no other machine can reach; port 0 picks a free port."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
    except OSError as error:
        listening.close()
        raise ValueError(f"cannot bind port {port}: {error.strerror}; choose another with --port") from None
    listening.listen(64)  # connections that arrive before the server is ready wait in the queue
    return listening


class PageServer(uvicorn.Server):
    """A server that stops its computations when it is stopped itself, instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, explorer: Explorer) -> None:
        super().__init__(config)
        self.explorer = explorer

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for job in list(self.explorer.running):
            job.stop()
        await super().shutdown(sockets)


def new_server(
    explorer: Explorer, port: int, protocol: type[TimedConnection] = TimedConnection, token: str = ""
) -> uvicorn.Server:
    """The server of the page on that port; with a token, it answers only requests that have it."""
    config = uvicorn.Config(
        application(explorer, port, token),
        http=protocol,
        log_level="warning",
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=2 * TimedConnection.max_waiting,
        timeout_graceful_shutdown=1,
    )
    return PageServer(config, explorer)


def serve(explorer: Explorer, listening: socket.socket, open_browser: bool, token: str) -> None:
    """Serves the page on a bound socket until Ctrl-C."""
    port = listening.getsockname()[1]
    with private_link(page_address(port, token)) as link:
        if open_browser:
            threading.Timer(0.3, webbrowser.open, [link]).start()
        new_server(explorer, port, token=token).run(sockets=[listening])
