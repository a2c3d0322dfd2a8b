"""The page's server: answers only this machine's browser, and serves only its own files."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from onfoot.explore import page, texts, tour
from onfoot.explore.access import LOCAL_NAMES, PUBLIC, has_token, is_local
from onfoot.explore.jobs import Job, StoppedError, current, held
from onfoot.explore.overview import overview_of, window_of
from onfoot.explore.study import Study, study_key
from onfoot.explore.trained import exercise_answer, live_answer, trained_answer, what_if_answer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from onfoot.models.model import Model
    from onfoot.own_engine import OwnEngine

MAX_BODY = 64 * 1024  # bytes per request
MAX_CELLS = 8_000_000  # of an array that is sent in one response
MAX_STEPS = 16  # per request for proofs
MAX_STUDIES = 4  # in memory, of a small model
MAX_LARGE_STUDIES = 2  # the model that was opened, and the same after some training
MAX_JOB_NAME = 40  # characters
LOOK = 0.2  # seconds between two looks whether the page still waits for an answer
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
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
    """Middleware that accepts only requests from this page in a local browser, and adds `HEADERS` to every response.

    Another site can make the browser send requests here, even under its own host name if that resolves to this
    machine (DNS rebinding). So Host must be ours, and so must Origin if it is sent. Another user of this machine can
    send requests here too. So with a token, only requests that have it are answered; those may name another port,
    which is forwarded to this one.
    """

    def __init__(self, app: ASGIApp, port: int, token: str = "") -> None:
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}" for name in LOCAL_NAMES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        refusal = self.refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send_with_headers)
        else:
            await refusal(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> Response | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = [host.decode("latin-1") for host in headers.get(b"host", [])]
        known = bool(self.token) and has_token(self.token, headers, scope["query_string"])
        if len(hosts) != 1 or not (hosts[0] in self.hosts or (self.token and is_local(hosts[0]))):
            return _message("this server accepts requests for 127.0.0.1 and localhost only", 421)
        for origin in headers.get(b"origin", []):
            if origin.decode("latin-1").removeprefix("http://") != hosts[0]:
                return _message("requests from other pages are refused", 403)
        followed = known and scope["path"] == "/" and headers.get(b"sec-fetch-mode") == [b"navigate"]  # a link to here
        if any(site not in (b"same-origin", b"none") for site in headers.get(b"sec-fetch-site", [])) and not followed:
            return _message("requests from other pages are refused", 403)
        if self.token and not known and scope["path"] not in PUBLIC:
            text = "the token is missing or of an earlier run; open the address that onfoot explore printed"
            return PlainTextResponse(text, 403) if scope["path"] == "/" else _message(text, 403)
        lengths = headers.get(b"content-length", [])
        if any(not length.isdigit() or int(length) > MAX_BODY for length in lengths):
            return _message(f"the request body must be at most {MAX_BODY:,} bytes", 413)
        return None


class TooLargeError(ValueError):
    """The body of a request exceeds `MAX_BODY`."""


class Explorer:
    """One model, and the studies of the most recent texts."""

    def __init__(self, model: Model, opening: dict[str, Any], own_engine: OwnEngine | None = None) -> None:
        self.model, self.opening, self.own_engine = model, opening, own_engine
        self.studies: OrderedDict[str, Study] = OrderedDict()
        self.study_lock = threading.Lock()
        self.diagnosis_lock = threading.Lock()
        self.live_lock = threading.Lock()
        self.proof_lock = threading.Lock()  # a probe perturbs parameters temporarily, and PyTorch is loaded once
        self.view_lock = threading.Lock()  # a view may take long; arrays that exist are sent meanwhile
        self.jobs: dict[str, Job] = {}  # by the name that the page gave them, while they run
        self.running: set[Job] = set()  # all of them

    def study(self, body: dict[str, Any]) -> Study:
        """The study of {"text": …} or {"ids": …}."""
        if set(body) == {"text"} and isinstance(body["text"], str):
            tokens = texts.read_text(self.model, body["text"])
        elif set(body) == {"ids"} and isinstance(body["ids"], str):
            tokens = texts.read_ids(self.model, body["ids"])
        else:
            raise ValueError('expected {"text": "…"} or {"ids": "3 1 4"}')
        with held(self.study_lock):
            key = study_key(tokens)
            study = self.studies[key] if key in self.studies else Study(self.model, tokens, self.own_engine)
            self.keep(study)
            return study

    def keep(self, study: Study) -> None:
        """Keeps a study in memory; the oldest ones go."""
        self.studies[study.key] = study
        self.studies.move_to_end(study.key)
        while len(self.studies) > (MAX_LARGE_STUDIES if study.is_large else MAX_STUDIES):
            self.studies.popitem(last=False)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response to a request for a text: its document and the first arrays."""
        if "trained" in body:
            return trained_answer(self, body)
        study = self.study(body)
        with held(self.study_lock):
            return {"document": study.document, "arrays": study.first_arrays()}

    def find(self, key: str) -> Study:
        if key not in self.studies:
            raise KeyError("this run is no longer in memory; run the text again")
        return self.studies[key]


def application(explorer: Explorer, port: int, token: str = "") -> ASGIApp:
    """The server's routes behind `Guard`. The files are a fixed table: no request names a path on disk."""
    files: dict[str, tuple[Callable[[], str | bytes], str]] = {
        "/app.js": (page.script, "text/javascript"),
        "/style.css": (page.style, "text/css"),
        "/icon.svg": (page.icon, "image/svg+xml"),
        f"/{page.FONT}": (page.font, "font/woff2"),
    }

    def file_route(path: str) -> Route:
        make, media_type = files[path]

        async def answer(request: Request) -> Response:
            return Response(make(), media_type=media_type)

        return Route(path, answer, methods=["GET"])

    def part_route(name: str, compute: Callable[[Study, Any], Any], lock: threading.Lock) -> Route:
        def work(request: Request) -> Response:
            study = explorer.find(request.path_params["key"])
            with held(lock):
                found = compute(study, request.query_params)
            return found if isinstance(found, Response) else _json(found)

        async def answer(request: Request) -> Response:
            return await _respond(explorer, request, lambda: work(request))

        return Route("/api/study/{key:str}/" + name, answer, methods=["GET"])

    async def front(request: Request) -> Response:
        def work() -> Response:
            body = {explorer.opening["kind"]: explorer.opening["value"]}
            return Response(page.served_page(explorer.opening, explorer.answer(body)), media_type="text/html")

        return await _respond(explorer, request, work)

    async def study(request: Request) -> Response:
        try:
            body = json.loads(await _read_body(request))
        except TooLargeError as error:
            return _message(str(error), 413)
        except (ValueError, RecursionError, ClientDisconnect):
            return _message("the request is not valid JSON", 400)
        if not isinstance(body, dict):
            return _message("the request is not a JSON object", 400)
        return await _respond(explorer, request, lambda: _json(explorer.answer(body)))

    async def progress(request: Request) -> Response:
        job = explorer.jobs.get(request.query_params.get("job", ""))
        return _json({} if job is None else job.to_json())

    routes = [
        *(file_route(path) for path in files),
        Route("/", front, methods=["GET"]),
        Route("/api/study", study, methods=["POST"]),
        Route("/api/progress", progress, methods=["GET"]),
        part_route("tensor", _tensor, explorer.study_lock),
        part_route("proof", lambda study, query: _proofs(study.differences, query), explorer.proof_lock),
        part_route("autograd", lambda study, query: _proofs(study.autograds, query), explorer.proof_lock),
        part_route("training", lambda study, query: study.training, explorer.view_lock),
        part_route("optimizer", _optimizer, explorer.view_lock),
        part_route("lora", lambda study, query: study.lora, explorer.view_lock),
        part_route("own", lambda study, query: study.own, explorer.view_lock),
        part_route("mistakes", lambda study, query: study.mistakes(), explorer.view_lock),
        part_route("mistake", lambda study, query: study.mistake(query["key"]), explorer.diagnosis_lock),
        part_route("tour", lambda study, query: tour.filled(study, explorer.opening.get("tour")), explorer.view_lock),
        part_route("live", live_answer, explorer.live_lock),
        part_route("whatif", what_if_answer, explorer.proof_lock),
        part_route("exercise", exercise_answer, explorer.proof_lock),
        part_route("overview", overview_of, explorer.study_lock),
        part_route("window", window_of, explorer.study_lock),
    ]
    handlers = {404: lambda request, error: _message("page not found", 404)}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port, token)


def _tensor(study: Study, query: Any) -> Response:
    """An array, or one row or column of it, as little-endian float64 numbers."""
    value = study.tensors[query["id"]].value
    table = value.reshape(-1, value.shape[-1]) if value.ndim else value.reshape(1, 1)
    for axis, name in enumerate(("row", "column")):
        if name in query:
            index = int(_number(query, name))
            if not 0 <= index < table.shape[axis]:
                raise ValueError(f"{name} must be between 0 and {table.shape[axis] - 1}, got {index}")
            table = table[index : index + 1] if axis == 0 else table[:, index : index + 1]
    if table.size > MAX_CELLS:
        raise ValueError(f"{table.size:,} cells exceed the limit of {MAX_CELLS:,}; request one row or column")
    return Response(table.astype("<f8").tobytes(), media_type="application/octet-stream")


def _proofs(prove: Callable[[str], dict[str, Any]], query: Any) -> dict[str, Any]:
    """The proofs of one or more steps, as in step=0.2,0.3."""
    steps = query["step"].split(",")
    if len(steps) > MAX_STEPS:
        raise ValueError(f"at most {MAX_STEPS} steps per request, got {len(steps)}")
    return {"proofs": {id: proof for step in steps for id, proof in prove(step).items()}}


def _optimizer(study: Study, query: Any) -> dict[str, Any]:
    return study.optimizer(_number(query, "lr"), int(_number(query, "steps")))


def _number(query: Any, name: str) -> float:
    try:
        number = float(query[name])
    except ValueError:
        raise ValueError(f"{name} must be a number, got {query[name]!r}") from None
    if number != number or abs(number) > 1e9:
        raise ValueError(f"{name} must be between -1e9 and 1e9, got {number}")
    return number


async def _read_body(request: Request) -> bytes:
    """The body of a request, with or without a Content-Length."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise TooLargeError(f"the request body must be at most {MAX_BODY:,} bytes")
    return body


async def _respond(explorer: Explorer, request: Request, work: Callable[[], Response]) -> Response:
    """The response of `work`, or an error message for the page. The work is stopped if the page waits no longer."""
    job, name = Job(), request.query_params.get("job", "")[:MAX_JOB_NAME]

    def run() -> Response:
        current.set(job)  # of this thread's copy of the context
        return work()

    async def watch() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(LOOK)
        job.stop()

    if name:
        explorer.jobs[name] = job
    explorer.running.add(job)
    watching = asyncio.create_task(watch())
    try:
        return await run_in_threadpool(run)
    except (StoppedError, asyncio.CancelledError):  # the latter if the server stops meanwhile
        return _message("stopped", 409)  # no one reads it
    except KeyError as error:
        return _message(str(error.args[0]), 404)
    except ValueError as error:  # invalid input, not a server error: the page shows the message
        return _json({"refused": str(error)})
    finally:
        watching.cancel()
        explorer.jobs.pop(name, None)
        explorer.running.discard(job)


def _json(value: Any) -> Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


def _message(text: str, status: int) -> Response:
    return JSONResponse({"message": text}, status)
