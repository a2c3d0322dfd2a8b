"""The page's server: on this machine only, for this machine's browser only, and nothing but its own files."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from onfoot.explore import page, texts
from onfoot.explore.study import Study, study_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from onfoot.models.model import Model

LARGEST_BODY = 64 * 1024  # bytes of a request
LARGEST_ANSWER = 8_000_000  # cells of an array that is sent whole
MOST_STEPS = 16  # whose proofs are asked for together
KEPT = 4  # studies, of a small model
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Answers only requests that this machine's own browser makes to this page; marks every answer with `HEADERS`.

    A page from elsewhere can make a browser send requests here, even under a name of its own that leads to this
    machine. So the Host must be ours, and so must the Origin where there is one.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        refusal = self.refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send_marked)
        else:
            await refusal(scope, receive, send_marked)

    def refusal(self, scope: Scope) -> Response | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = [host.decode("latin-1") for host in headers.get(b"host", [])]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return _message("this server answers to 127.0.0.1 and localhost only", 421)
        for origin in headers.get(b"origin", []):
            if origin.decode("latin-1").removeprefix("http://") not in self.hosts:
                return _message("requests from other pages are refused", 403)
        if any(site not in (b"same-origin", b"none") for site in headers.get(b"sec-fetch-site", [])):
            return _message("requests from other pages are refused", 403)
        lengths = headers.get(b"content-length", [])
        if any(not length.isdigit() or int(length) > LARGEST_BODY for length in lengths):
            return _message(f"a request may have {LARGEST_BODY:,} bytes", 413)
        return None


class TooLargeError(ValueError):
    """A request's body is longer than it may be."""


class Explorer:
    """One model, and the studies of the texts that were asked for last."""

    def __init__(self, model: Model, opening: dict[str, Any]) -> None:
        self.model, self.opening = model, opening
        self.studies: OrderedDict[str, Study] = OrderedDict()
        self.studying = threading.Lock()
        self.diagnosing = threading.Lock()
        self.proving = threading.Lock()  # probes move parameters for a moment, and PyTorch is loaded once

    def study(self, asked: dict[str, Any]) -> Study:
        """The study of {"text": …} or {"ids": …}."""
        if set(asked) == {"text"} and isinstance(asked["text"], str):
            tokens = texts.read_text(self.model, asked["text"])
        elif set(asked) == {"ids"} and isinstance(asked["ids"], str):
            tokens = texts.read_ids(self.model, asked["ids"])
        else:
            raise ValueError('ask with {"text": "…"} or {"ids": "3 1 4"}')
        with self.studying:
            key = study_key(tokens)
            study = self.studies[key] if key in self.studies else Study(self.model, tokens)
            self.studies[key] = study
            self.studies.move_to_end(key)
            while len(self.studies) > (1 if study.is_large else KEPT):
                self.studies.popitem(last=False)
            return study

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the page is told about a text."""
        study = self.study(asked)
        with self.studying:
            return {"document": study.document, "arrays": study.first_arrays()}

    def find(self, key: str) -> Study:
        if key not in self.studies:
            raise KeyError("this run is no longer kept: run the text again")
        return self.studies[key]


def application(explorer: Explorer, port: int) -> ASGIApp:
    """The server's routes behind their guard. Files are a fixed table: no request names a path."""
    files: dict[str, tuple[Callable[[], str], str]] = {
        "/app.js": (page.script, "text/javascript"),
        "/style.css": (page.style, "text/css"),
        "/icon.svg": (page.icon, "image/svg+xml"),
    }

    def file_route(path: str) -> Route:
        make, media_type = files[path]

        async def answer(request: Request) -> Response:
            return Response(make(), media_type=media_type)

        return Route(path, answer, methods=["GET"])

    def part_route(name: str, compute: Callable[[Study, Any], Any], lock: threading.Lock) -> Route:
        def work(request: Request) -> Response:
            study = explorer.find(request.path_params["key"])
            with lock:
                found = compute(study, request.query_params)
            return found if isinstance(found, Response) else _json(found)

        async def answer(request: Request) -> Response:
            return await _answered(lambda: work(request))

        return Route("/api/study/{key:str}/" + name, answer, methods=["GET"])

    async def front(request: Request) -> Response:
        def work() -> Response:
            asked = {explorer.opening["kind"]: explorer.opening["value"]}
            return Response(page.served_page(explorer.opening, explorer.answer(asked)), media_type="text/html")

        return await _answered(work)

    async def study(request: Request) -> Response:
        try:
            asked = json.loads(await _body(request))
        except TooLargeError as error:
            return _message(str(error), 413)
        except (ValueError, RecursionError, ClientDisconnect):
            return _message("the request is not JSON", 400)
        if not isinstance(asked, dict):
            return _message("the request is no JSON object", 400)
        return await _answered(lambda: _json(explorer.answer(asked)))

    routes = [
        *(file_route(path) for path in files),
        Route("/", front, methods=["GET"]),
        Route("/api/study", study, methods=["POST"]),
        part_route("tensor", _tensor, explorer.studying),
        part_route("proof", lambda study, query: _proofs(study.differences, query), explorer.proving),
        part_route("autograd", lambda study, query: _proofs(study.autograds, query), explorer.proving),
        part_route("training", lambda study, query: study.training, explorer.studying),
        part_route("optimizer", _optimizer, explorer.studying),
        part_route("lora", lambda study, query: study.lora, explorer.studying),
        part_route("mistakes", lambda study, query: study.mistakes(), explorer.studying),
        part_route("mistake", lambda study, query: study.mistake(query["key"]), explorer.diagnosing),
    ]
    handlers = {404: lambda request, error: _message("there is no such page", 404)}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port)


def _tensor(study: Study, query: Any) -> Response:
    """An array, or one row or column of it, as float64 numbers in little-endian order."""
    value = study.tensors[query["id"]].value
    table = value.reshape(-1, value.shape[-1]) if value.ndim else value.reshape(1, 1)
    for axis, name in enumerate(("row", "column")):
        if name in query:
            index = int(_number(query, name))
            if not 0 <= index < table.shape[axis]:
                raise ValueError(f"{name} {index} is outside 0 to {table.shape[axis] - 1}")
            table = table[index : index + 1] if axis == 0 else table[:, index : index + 1]
    if table.size > LARGEST_ANSWER:
        raise ValueError(f"{table.size:,} cells: ask for a row or a column")
    return Response(table.astype("<f8").tobytes(), media_type="application/octet-stream")


def _proofs(prove: Callable[[str], dict[str, Any]], query: Any) -> dict[str, Any]:
    """The proofs of one step or several, as in step=0.2,0.3."""
    steps = query["step"].split(",")
    if len(steps) > MOST_STEPS:
        raise ValueError(f"{len(steps)} steps: ask for {MOST_STEPS} at most")
    return {"proofs": {id: proof for step in steps for id, proof in prove(step).items()}}


def _optimizer(study: Study, query: Any) -> dict[str, Any]:
    return study.optimizer(_number(query, "lr"), int(_number(query, "steps")))


def _number(query: Any, name: str) -> float:
    try:
        number = float(query[name])
    except ValueError:
        raise ValueError(f"{name} is not a number") from None
    if number != number or abs(number) > 1e9:
        raise ValueError(f"{name}={number} is out of range")
    return number


async def _body(request: Request) -> bytes:
    """The request's body, however it announces its length."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise TooLargeError(f"a request may have {LARGEST_BODY:,} bytes")
    return body


async def _answered(work: Callable[[], Response]) -> Response:
    """The answer, or what is to be said about a question that has none."""
    try:
        return await run_in_threadpool(work)
    except KeyError as error:
        return _message(str(error.args[0]), 404)
    except ValueError as error:  # an answer like any other: the page shows it, and nothing went wrong
        return _json({"refused": str(error)})


def _json(value: Any) -> Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


def _message(text: str, status: int) -> Response:
    return JSONResponse({"message": text}, status)
