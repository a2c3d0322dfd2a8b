"""The HTTP side of `onfoot serve`: routes, keys, limits, streams, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as HTTPResponse
from starlette.routing import Route

from onfoot.serve.answer import Answer, Piece
from onfoot.serve.protocol import Order, RequestError, Response, Served, read_order
from onfoot.serve.scheduler import Job, QueueFullError, Scheduler, ShutdownError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY = 4 << 20  # bytes of a request
OPEN = ("/health",)  # paths that need no key


class Guard:
    """Middleware that refuses requests without the key, from other web pages, or with too large a body.

    Without a key, only programs on this machine may use the server. A web page can make a browser send requests here,
    even under its own host name if that resolves to this machine (DNS rebinding), so Host and Origin must be ours.
    """

    def __init__(self, app: ASGIApp, key: str | None, port: int, max_body: int) -> None:
        self.app, self.key, self.port, self.max_body = app, key, port, max_body
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = self.refusal(scope)
        await (self.app if error is None else error_response(error))(scope, receive, send)

    def refusal(self, scope: Scope) -> RequestError | None:
        """Why the request is refused; None if it is not."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        if self.key is None:
            hosts, origins = headers.get(b"host", []), headers.get(b"origin", [])
            own = [host.decode("latin-1") for host in (*hosts, *(x.removeprefix(b"http://") for x in origins))]
            if not hosts or not self.hosts.issuperset(own):
                where = f"without a key, only requests for 127.0.0.1:{self.port} and localhost:{self.port} are accepted"
                return RequestError(f"{where}; set ONFOOT_API_KEY to accept others", status=403)
        elif scope["path"] not in OPEN:
            given = b"".join(headers.get(b"authorization", []))
            if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
                message = "a valid key is required, as in 'Authorization: Bearer KEY'"
                return RequestError(message, status=401, code="invalid_api_key")
        lengths = headers.get(b"content-length", [])
        if any(not length.isdigit() or int(length) > self.max_body for length in lengths):
            return too_large(self.max_body)
        return None


def too_large(limit: int) -> RequestError:
    """The error for a request body that exceeds the limit."""
    return RequestError(f"the request body must be at most {limit:,} bytes", status=413)


def error_response(error: RequestError) -> JSONResponse:
    """An error in OpenAI's form."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONResponse(error.to_json(), error.status, headers)


async def read_body(request: Request, limit: int) -> Any:
    """The JSON body of a request."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError):
        raise RequestError("the request body is not valid JSON") from None


class Running:
    """The answers to one request, while they are generated; `pieces` are (index of the choice, piece)."""

    def __init__(self, order: Order, served: Served, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self.jobs = [self._job(order, served, index) for index in range(order.n * len(order.prompts))]
        try:
            scheduler.submit(self.jobs)
        except QueueFullError as error:
            raise RequestError(f"the server is busy: {error}; try again later", status=429, code="queue_full") from None
        except ShutdownError as error:
            raise RequestError(str(error), status=503, code="shutting_down") from None

    def _job(self, order: Order, served: Served, index: int) -> Job:
        loop, prompt = asyncio.get_running_loop(), index // order.n
        held: list[Piece] = []

        def put(pieces: list[Piece]) -> None:
            for piece in pieces:
                self.pieces.put_nowait((index, piece))

        def on_piece(piece: Piece) -> None:
            """Wakes the event loop, which takes time from the model: once per answer if it is not streamed."""
            held.append(piece)
            if order.stream or piece.finish_reason is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                    loop.call_soon_threadsafe(put, held.copy())
                held.clear()

        answer = Answer(served.tokenizer, order.max_tokens[prompt], order.stop_ids, order.stop, order.top_logprobs)
        rng = np.random.default_rng([order.seed, index])
        return Job(order.prompts[prompt], answer, order.sampling, rng, on_piece)

    def cancel(self) -> None:
        """Frees the slots of answers that are not finished."""
        self.scheduler.cancel(self.jobs)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """All pieces until every answer is finished; raises RequestError if one failed."""
        left = len(self.jobs)
        while left:
            index, piece = await self.pieces.get()
            if piece.finish_reason == "error":
                down = "shutting down" in piece.error
                raise RequestError(piece.error, status=503 if down else 500, code="shutting_down" if down else None)
            left -= piece.finish_reason is not None
            yield index, piece


async def collect(running: Running, response: Response) -> dict[str, Any]:
    """The whole response."""
    found: list[list[Piece]] = [[] for _ in running.jobs]
    async for index, piece in running:
        response.count(index, piece)
        found[index].append(piece)
    return response.whole(found)


async def until_disconnected(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(running: Running, response: Response) -> AsyncIterator[str]:
    """The response as server-sent events."""
    try:
        for chunk in response.first_chunks():
            yield event(chunk)
        async for index, piece in running:
            response.count(index, piece)
            for chunk in response.chunks(index, piece):
                yield event(chunk)
        if response.order.include_usage:
            yield event(response.usage_chunk())
    except RequestError as error:
        yield event(error.to_json())
    finally:
        running.cancel()
    yield "data: [DONE]\n\n"


def event(chunk: Any) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def application(
    served: Served, scheduler: Scheduler, key: str | None = None, port: int = 0, max_body: int = MAX_BODY
) -> ASGIApp:
    """The ASGI application."""

    def answering(is_chat: bool) -> Callable[[Request], Any]:
        async def answer(request: Request) -> HTTPResponse:
            body = await read_body(request, max_body)
            order = await run_in_threadpool(read_order, body, served, is_chat)
            running, response = Running(order, served, scheduler), Response(order, served)
            if order.stream:
                headers = {"Cache-Control": "no-cache"}
                return StreamingResponse(stream(running, response), media_type="text/event-stream", headers=headers)
            work = asyncio.ensure_future(collect(running, response))
            left = asyncio.ensure_future(until_disconnected(request))
            try:
                await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise ClientDisconnect
                return JSONResponse(work.result())
            finally:
                running.cancel()
                work.cancel()
                left.cancel()

        return answer

    model = {"id": served.name, "object": "model", "created": served.created, "owned_by": "onfoot"}

    async def models(request: Request) -> HTTPResponse:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> HTTPResponse:
        if request.path_params["name"] != served.name:
            message = f"the model does not exist; this server has {served.name!r}"
            raise RequestError(message, "model", 404, "model_not_found")
        return JSONResponse(model)

    async def health(request: Request) -> HTTPResponse:
        counts = {"running": scheduler.n_running, "waiting": scheduler.n_waiting, **asdict(scheduler.stats)}
        return JSONResponse({"status": "ok", **counts})

    async def refused(request: Request, error: Exception) -> HTTPResponse:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def no_route(request: Request, error: Exception) -> HTTPResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(RequestError(message, status=error.status_code))

    async def gone(request: Request, error: Exception) -> HTTPResponse:
        return HTTPResponse(status_code=499)  # nobody reads it

    routes = [
        Route("/v1/chat/completions", answering(is_chat=True), methods=["POST"]),
        Route("/v1/completions", answering(is_chat=False), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
    ]
    handlers: dict[Any, Any] = {RequestError: refused, HTTPException: no_route, ClientDisconnect: gone}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), key, port, max_body)
