"""The page is private on a shared machine: only who has its address, with a random token, can read it."""

from __future__ import annotations

import http.client
import json
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from waiting import until

from conftest import Watched, serving
from onfoot.explore.access import is_local, new_token, page_address, private_link
from onfoot.models.model import Model

TOKEN = "k3y-of_this.run"


@pytest.fixture(scope="module")
def guarded(model: Model) -> Iterator[int]:
    """The port of a server with a token."""
    with serving(model, token=TOKEN) as port:
        yield port


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        body = json.dumps({"text": "the name"}) if method == "POST" else None
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_without_the_token_nothing_of_a_run_is_answered(guarded: int) -> None:
    status, key = ask(guarded, "/api/study", "POST", X_Onfoot_Token=TOKEN)
    key = json.loads(key)["document"]["key"]
    assert status == 200
    for path in ("/", "/?token=", "/?token=wrong", f"/?token={TOKEN}x", f"/api/study/{key}/training", "/none-such"):
        status, text = ask(guarded, path)
        assert status == 403 and "open the address that onfoot explore printed" in text, path
    assert ask(guarded, "/api/study", "POST")[0] == 403
    assert ask(guarded, f"/api/study/{key}/tensor?id=a_1", X_Onfoot_Token="wrong")[0] == 403
    assert ask(guarded, f"/?token={TOKEN}")[0] == 200
    assert ask(guarded, f"/api/study/{key}/tensor?id=n", X_Onfoot_Token=TOKEN)[0] == 200
    assert ask(guarded, f"/api/study/{key}/tensor?id=n&token={TOKEN}")[0] == 200


def test_a_forwarded_port_is_answered_with_the_token_only(guarded: int) -> None:
    for host in ("localhost:9999", "127.0.0.1:1", "localhost"):
        assert ask(guarded, f"/?token={TOKEN}", Host=host)[0] == 200
        assert ask(guarded, "/", Host=host)[0] == 403
        assert ask(guarded, "/api/study", "POST", Host=host, Origin=f"http://{host}", X_Onfoot_Token=TOKEN)[0] == 200
        assert ask(guarded, "/app.js", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{guarded}", "localhost.evil.example:80", "localhost:80@evil.example"):
        assert ask(guarded, f"/?token={TOKEN}", Host=host)[0] == 421


def test_a_link_may_be_followed_from_elsewhere_but_nothing_else(guarded: int) -> None:
    elsewhere = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(guarded, f"/?token={TOKEN}", **elsewhere)[0] == 200
    assert ask(guarded, "/", **elsewhere)[0] == 403
    assert ask(guarded, f"/?token={TOKEN}", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert ask(guarded, f"/api/study?token={TOKEN}", "POST", **elsewhere)[0] == 403
    assert ask(guarded, "/api/study", "POST", X_Onfoot_Token=TOKEN, Origin="http://localhost:1")[0] == 403


def test_names_of_this_machine() -> None:
    assert all(map(is_local, ("localhost", "localhost:80", "127.0.0.1:8888", "[::1]:1")))
    assert not any(map(is_local, ("", "localhost:", "localhost:x", "localhosts:1", "127.0.0.11", "127.0.0.1:1:1")))
    assert len(new_token()) == 32 and new_token() != new_token()


def test_the_browser_gets_the_address_by_a_file_that_only_its_user_can_read() -> None:
    address = page_address(1234, TOKEN)
    with private_link(address) as link:
        path = Path(unquote(urlsplit(link).path))
        assert TOKEN not in link and address in path.read_text(encoding="utf-8")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


@contextmanager
def forwarded(port: int) -> Iterator[int]:
    """Another port that leads to this one, as ssh -L makes it."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while part := source.recv(65536):
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]


def test_the_page_works_with_its_token_reloaded_and_through_a_forwarded_port(context: Any, guarded: int) -> None:
    with forwarded(guarded) as other, private_link(page_address(other, TOKEN)) as link:
        one = Watched(context)
        page = one.open(link)  # leads to the forwarded port
        page.wait_for_url(f"http://127.0.0.1:{other}/?token={TOKEN}**")
        page.wait_for_selector("main[aria-busy=false]")
        page.locator("#text").fill("a name")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('.chip').length === 6")
        page.locator("#tab-training").click()
        page.wait_for_selector(".view.training [data-attribution]")
        page.wait_for_timeout(300)
        page.reload()
        page.wait_for_selector(".view.training [data-attribution]")
        assert page.locator(".chip").count() == 6
        assert one.errors == []
        page.goto(f"http://127.0.0.1:{guarded}/")
        assert "open the address that onfoot explore printed" in page.content()
        page.close()
