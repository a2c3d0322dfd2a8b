"""Who may read the page: only who has its address, which ends in a random token. Other users of the machine do not."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
TOKEN_HEADER = b"x-onfoot-token"
# the same for everyone: no number of a run is in them
PUBLIC = frozenset({"/app.js", "/style.css", "/icon.svg", "/onfoot-math.woff2"})


def new_token() -> str:
    """192 random bits as text that needs no quoting in an address."""
    return secrets.token_urlsafe(24)


def page_address(port: int, token: str) -> str:
    return f"http://127.0.0.1:{port}/?token={token}"


def forwarding_hint(port: int) -> str:
    """How to open the page from another machine."""
    return (
        f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then open the same address there"
    )


def is_local(host: str) -> bool:
    """Whether a Host header names this machine, on any port: a forwarded port has another number."""
    for name in LOCAL_NAMES:
        rest = host.removeprefix(name)
        if rest != host and (rest == "" or (rest[0] == ":" and rest[1:].isdecimal())):
            return True
    return False


def has_token(token: str, headers: dict[bytes, list[bytes]], query: bytes) -> bool:
    """Whether a request has the token, in its header or in its address."""
    given = [*headers.get(TOKEN_HEADER, []), *(t.encode() for t in parse_qs(query.decode("latin-1")).get("token", []))]
    return any(hmac.compare_digest(one, token.encode()) for one in given)


@contextlib.contextmanager
def private_link(address: str) -> Iterator[str]:
    """A file that only this user can read and that leads to the address: a browser's command line is public."""
    home = str(Path.home()) if Path("/snap/bin/firefox").exists() else None  # a snap reads no temporary files
    handle, name = tempfile.mkstemp(".html", "onfoot-explore-", home)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">onfoot explore')
        yield Path(name).as_uri()
    finally:
        Path(name).unlink(missing_ok=True)
