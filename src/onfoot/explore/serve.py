"""Runs the server until it is stopped, and opens the page in the browser."""

from __future__ import annotations

import socket
import threading
import webbrowser
from typing import TYPE_CHECKING

import uvicorn

from onfoot.explore.connections import TimedConnection
from onfoot.explore.server import application

if TYPE_CHECKING:
    from onfoot.explore.server import Explorer

LOOPBACK = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """A socket on this machine's loopback, which no other machine can reach; port 0 takes a free one."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
    except OSError as error:
        listening.close()
        raise ValueError(f"port {port} cannot be had ({error.strerror}); choose another with --port") from None
    listening.listen(64)  # who comes before the server is ready waits for it
    return listening


def new_server(explorer: Explorer, port: int, protocol: type[TimedConnection] = TimedConnection) -> uvicorn.Server:
    """A server for the page at that port."""
    config = uvicorn.Config(
        application(explorer, port),
        http=protocol,
        log_level="warning",
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=2 * TimedConnection.most_waiting,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def serve(explorer: Explorer, listening: socket.socket, open_browser: bool) -> None:
    """Serves the page on a bound socket; Ctrl-C ends it."""
    port = listening.getsockname()[1]
    if open_browser:
        threading.Timer(0.3, webbrowser.open, [f"http://{LOOPBACK}:{port}/"]).start()
    new_server(explorer, port).run(sockets=[listening])
