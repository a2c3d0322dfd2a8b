"""A connection of the page's server: one that keeps the server waiting is closed, and never stands in the way."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """HTTP with limits on what a client owes: the whole of a request, and then the taking of its answer.

    A client has `patience` seconds for a request, head and body. So long it may also leave an answer lying without
    taking any of it. Of the connections without a whole request at most `most_waiting` are kept: the oldest one makes
    room for a new one, so that no number of them keeps a browser out.
    """

    patience = 10.0  # seconds
    most_waiting = 32
    owed = ""  # "request", "reading" or nothing
    since = 0.0  # when it began to be owed
    unread = 0  # bytes of an answer that were not taken when we last looked
    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.watch()
        others = [c for c in self.connections if isinstance(c, TimedConnection) and not c.transport.is_closing()]
        waiting = [c for c in others if c.owed == "request"]
        if len(waiting) > self.most_waiting:
            min(waiting, key=lambda c: c.since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.stop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.watch()

    def watch(self) -> None:
        """Starts the clock when something begins to be owed, and stops it when it is there."""
        owed = ""
        if self.flow.write_paused:
            owed = "reading"
        elif self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            owed = "request"
        if owed != self.owed:
            self.stop()
            self.owed, self.since = owed, self.loop.time()
            self.unread = self.transport.get_write_buffer_size()
            if owed and not self.transport.is_closing():
                self.timer = self.loop.call_later(self.patience, self.give_up)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def give_up(self) -> None:
        """Closes the connection, unless some of the answer was taken meanwhile."""
        unread = self.transport.get_write_buffer_size()
        if self.owed == "reading" and unread < self.unread:
            self.unread, self.timer = unread, self.loop.call_later(self.patience, self.give_up)
        else:
            self.transport.abort()
