"""The page under test: a study of the default model, a real server on loopback, and Debian's Chromium."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onfoot.explore.default_model import TEXT, default_model
from onfoot.explore.study import Study
from onfoot.explore.texts import read_text
from onfoot.models.model import Model
from onfoot.own_engine import OwnEngine

CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="session")
def model() -> Model:
    return default_model()


@pytest.fixture(scope="session")
def tokens(model: Model) -> np.ndarray:
    return read_text(model, TEXT)


@pytest.fixture(scope="session")
def study(model: Model, tokens: np.ndarray) -> Study:
    return Study(model, tokens)


@contextmanager
def serving(
    model: Model, own_engine: OwnEngine | None = None, token: str = "", text: str = TEXT, **limits: float
) -> Iterator[int]:
    """The port of a running server, with the given limits for its connections, and a user's own pairs if given."""
    from onfoot.explore.connections import TimedConnection
    from onfoot.explore.serve import listen, new_server
    from onfoot.explore.server import Explorer

    listening = listen(0)
    number = listening.getsockname()[1]
    opening: dict[str, Any] = {"kind": "text", "value": text, "ids_only": False}
    if own_engine is not None:
        opening["own"] = own_engine.name
    server = new_server(
        Explorer(model, opening, own_engine), number, type("Limited", (TimedConnection,), limits), token
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    yield number
    server.should_exit = True
    thread.join(5)


@pytest.fixture(scope="session")
def port(model: Model) -> Iterator[int]:
    """The port of a server that all tests share."""
    with serving(model) as number:
        yield number


@pytest.fixture
def impatient(model: Model) -> Iterator[int]:
    """The port of a server that waits for half a second."""
    with serving(model, timeout=0.5) as number:
        yield number


def chromium() -> str:
    """The path of Chromium. Without it the browser tests are skipped."""
    found = os.environ.get("ONFOOT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found:
        return found
    pytest.skip("Chromium not found: run `make setup-browser`, or set ONFOOT_CHROMIUM to its path")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="session")
def context(browser: Any, port: int) -> Any:
    """The context of all tabs: one tab that stays open keeps the browser process alive, which halves the test time."""
    shared = browser.new_context(viewport={"width": 1280, "height": 900})
    shared.new_page().goto(f"http://127.0.0.1:{port}/icon.svg")
    return shared


class Watched:
    """A page that records console errors and requests: there must be no errors, and no requests to other servers."""

    def __init__(self, context: Any) -> None:
        self.context, self.page = context, context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, url: str) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector("main[aria-busy=false]")
        return self.page


@pytest.fixture
def watched(context: Any, port: int) -> Iterator[Watched]:
    one = Watched(context)
    yield one
    one.page.close()
    assert one.errors == []
    elsewhere = [url for url in one.asked if not url.startswith((f"http://127.0.0.1:{port}/", "file://", "data:"))]
    assert elsewhere == []


@pytest.fixture
def page(watched: Watched, port: int) -> Any:
    """The served page, loaded."""
    return watched.open(f"http://127.0.0.1:{port}/")


@pytest.fixture
def opened_with(context: Any, model: Model) -> Callable[[OwnEngine], AbstractContextManager[Any]]:
    """Opens the page of a server with a user's own pairs; it must leave the console empty."""

    @contextmanager
    def open_page(engine: OwnEngine) -> Iterator[Any]:
        with serving(model, engine) as number:
            one = Watched(context)
            yield one.open(f"http://127.0.0.1:{number}/")
            one.page.close()
            assert one.errors == []

    return open_page


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as `onfoot explore --export` writes it."""
    from typer.testing import CliRunner

    from onfoot.cli import app

    path = tmp_path_factory.mktemp("export") / "page.html"
    result = CliRunner().invoke(app, ["explore", "--text", TEXT, "--export", str(path)])
    assert result.exit_code == 0, result.output
    return path
