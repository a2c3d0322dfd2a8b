"""The server's HTTP connections: one that keeps the server waiting is closed and never blocks the others."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """An HTTP connection with time limits on sending the request and on reading the response.

    A client has `timeout` seconds to send a complete request, headers and body. It may also go at most `timeout`
    seconds without reading any of the response. At most `max_waiting` connections may have an incomplete request:
    beyond that the oldest of them is closed, so that they cannot keep a browser out.
    """

    timeout = 10.0  # seconds
    max_waiting = 32
    waiting_for = ""  # what the client has to do: "request", "reading" or nothing
    waiting_since = 0.0
    unread = 0  # bytes of the response that were unread at the last check
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.update_timer()
        others = [c for c in self.connections if isinstance(c, TimedConnection) and not c.transport.is_closing()]
        waiting = [c for c in others if c.waiting_for == "request"]
        if len(waiting) > self.max_waiting:
            min(waiting, key=lambda c: c.waiting_since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.cancel_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.update_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.update_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.update_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.update_timer()

    def update_timer(self) -> None:
        """Starts the timer when the server begins to wait for the client, and cancels it when the wait ends."""
        waiting_for = ""
        if self.flow.write_paused:
            waiting_for = "reading"
        elif self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            waiting_for = "request"
        if waiting_for != self.waiting_for:
            self.cancel_timer()
            self.waiting_for, self.waiting_since = waiting_for, self.loop.time()
            self.unread = self.transport.get_write_buffer_size()
            if waiting_for and not self.transport.is_closing():
                self.timer = self.loop.call_later(self.timeout, self.on_timeout)

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def on_timeout(self) -> None:
        """Closes the connection, unless the client has read some of the response since the last check."""
        unread = self.transport.get_write_buffer_size()
        if self.waiting_for == "reading" and unread < self.unread:
            self.unread, self.timer = unread, self.loop.call_later(self.timeout, self.on_timeout)
        else:
            self.transport.abort()
