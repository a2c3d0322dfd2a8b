"""A small client of WebDriver BiDi, the protocol that Firefox speaks: pages, scripts, clicks, keys and its console."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT = 60.0  # seconds


class WebSocket:
    """A client's end of one WebSocket, for text messages (RFC 6455)."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self.connection = socket.create_connection((host, port), TIMEOUT)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", "",
        ]  # fmt: skip
        self.connection.sendall("\r\n".join(lines).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._read(1)
        if not head.startswith(b"HTTP/1.1 101"):
            raise ConnectionError(head.decode())

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        n = len(data)
        kind, size = (n, b"") if n < 126 else (126, struct.pack(">H", n)) if n < 65536 else (127, struct.pack(">Q", n))
        masked = bytes(x ^ mask[i % 4] for i, x in enumerate(data))
        self.connection.sendall(bytes([0x81, 0x80 | kind]) + size + mask + masked)

    def receive(self) -> str:
        """The next whole message; pings are not answered, because none are sent in a few minutes."""
        data = b""
        while True:
            first, size = self._read(2)
            if size == 126:
                (size,) = struct.unpack(">H", self._read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._read(8))
            part = self._read(size)
            if first & 0x0F in (0, 1):  # text, or more of it
                data += part
                if first & 0x80:
                    return data.decode()

    def _read(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            part = self.connection.recv(n - len(data))
            if not part:
                raise ConnectionError("Firefox closed the connection")
            data += part
        return data


class Firefox:
    """One page of a running Firefox; `errors` collects what its console says."""

    def __init__(self, port: int) -> None:
        self.wire = WebSocket("127.0.0.1", port, "/session")
        self.sent, self.errors = 0, list[str]()
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["log.entryAdded"])
        self.context = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command. Entries of the console that arrive meanwhile are kept."""
        self.sent += 1
        self.wire.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            message = json.loads(self.wire.receive())
            if message.get("id") == self.sent:
                if message["type"] == "error":
                    raise RuntimeError(f"{method}: {message['message']}")
                return message["result"]
            entry = message.get("params", {})
            if message.get("method") == "log.entryAdded" and entry["level"] in ("error", "warn"):
                self.errors.append(str(entry["text"]))

    def open(self, address: str, width: int, height: int) -> None:
        self.call("browsingContext.setViewport", context=self.context, viewport={"width": width, "height": height})
        self.call("browsingContext.navigate", context=self.context, url=address, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON has it."""
        result = self.call(
            "script.evaluate",
            expression=f"JSON.stringify({expression})", target={"context": self.context}, awaitPromise=True,
        )  # fmt: skip
        if result["type"] == "exception":
            raise RuntimeError(result["exceptionDetails"]["text"])
        return json.loads(result["result"]["value"]) if result["result"]["type"] == "string" else None

    def until(self, condition: str, seconds: float = TIMEOUT) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"timed out waiting for: {condition}"
            time.sleep(0.05)

    def click(self, x: float, y: float) -> None:
        """A click with the mouse at a point of the window."""
        at = {"type": "pointerMove", "x": round(x), "y": round(y)}
        press = [at, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self.call(
            "input.performActions", context=self.context, actions=[{"type": "pointer", "id": "mouse", "actions": press}]
        )

    def click_on(self, selector: str) -> None:
        """A click with the mouse in the middle of the first element, scrolled into view."""
        box = self.evaluate(
            f"(() => {{ const x = document.querySelector({json.dumps(selector)});"
            " x.scrollIntoView({ block: 'nearest' });"
            " const { left, top, width, height } = x.getBoundingClientRect();"
            " return [left + width / 2, top + height / 2]; })()"
        )
        self.click(*box)

    def key(self, value: str) -> None:
        keys = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.call(
            "input.performActions", context=self.context, actions=[{"type": "key", "id": "keys", "actions": keys}]
        )


@contextmanager
def running(program: str, folder: Path) -> Iterator[Firefox]:
    """A headless Firefox with a new profile in a folder."""
    log = folder / "firefox.log"
    command = [
        program,
        "--headless",
        "--no-remote",
        "--profile",
        str(folder),
        "--remote-debugging-port=0",
        "about:blank",
    ]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + TIMEOUT
            while not (found := re.search(r"WebDriver BiDi listening on ws://127\.0\.0\.1:(\d+)", log.read_text())):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield Firefox(int(found[1]))
        finally:
            process.terminate()
