"""The HTTP API: the public Code Judge's routes and fields, ours, and SandboxFusion's `/run_code`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from redis.exceptions import RedisError

from rstar2_megatron.judge.limits import LEVELS, MEGABYTE, CallLimits, FieldError, Submission, check_session_name
from rstar2_megatron.judge.queue import JobQueue, QueueFull
from rstar2_megatron.judge.server.broker import Broker, Ticket, encodable
from rstar2_megatron.judge.server.run_code import answer_of, submission_of

_QUEUE_TIME_LIMIT_S = 50.0  # below the 60 s after which known clients give up
_OPEN_ROUTES = ("/ping", "/health", "/ready")
_JSON = "application/json"
_LARGEST_BODY = 64 * MEGABYTE
_LARGE_BODY = MEGABYTE // 4  # bytes from which a body is parsed in a thread
_BODY_S, _BODY_BYTES_PER_S = 15.0, MEGABYTE  # time to send a body: this, and its size at this speed
_GONE = "the client closed its connection"
T = TypeVar("T")


def client_name(request: Request) -> str:
    """OWNER~NAME: the owner is known by its token or address, the name is what the client calls itself."""
    owner = request.scope.get("judge.owner") or (request.client.host if request.client else "local")
    parts = (owner, request.headers.get("x-client-id", ""))
    return "~".join(re.sub(r"[^A-Za-z0-9_.:-]", "_", part)[:64] for part in parts)


async def _read(request: Request, form: Callable[[Any], T]) -> T:
    """`form` of the JSON in the body. Raises HTTPException, FieldError."""
    length_bytes = int(request.headers.get("content-length", 0))
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S + length_bytes / _BODY_BYTES_PER_S):
            while length_bytes <= _LARGEST_BODY and len(body) <= _LARGEST_BODY:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise HTTPException(499, _GONE)
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            else:
                why = f"a body may have {_LARGEST_BODY} bytes: send the submissions in several requests"
                raise HTTPException(413, why, {"Connection": "close"})
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time", {"Connection": "close"}) from None
    if len(body) < _LARGE_BODY:
        return form(_json(body))
    return await asyncio.to_thread(lambda: form(_json(body)))


def _json(body: bytearray) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if b"\\ud" in body.lower():  # lone surrogates: one submission's fault, told in its result
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(body)
        raise FieldError((), f"no JSON ({error})") from None


def _without_output(result: bytes) -> bytes:
    return orjson.dumps({name: value for name, value in orjson.loads(result).items() if name not in ("stdout", "stderr")})


class JudgeServer:
    """The work behind the routes."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.registry = CollectorRegistry()
        self.calls = Counter("judge_calls", "Calls answered", ["outcome"], registry=self.registry)
        self.requests = Histogram("judge_request_seconds", "Time of a request", ["route"], registry=self.registry)
        self.queued = Gauge("judge_queued", "Jobs that wait", registry=self.registry)
        self.slots = Gauge("judge_slots", "Execution slots of live workers", registry=self.registry)
        self.sessions = Gauge("judge_sessions", "Open sessions of live workers", registry=self.registry)
        self.rejected = Counter("judge_rejected", "Requests refused, queue full", registry=self.registry)
        self.abandoned = Counter("judge_abandoned", "Requests whose client left", registry=self.registry)
        self._abandoning: set[asyncio.Future[None]] = set()

    async def answers(self, request: Request, submissions: list[Submission]) -> list[bytes]:
        """Result JSON of each submission, in order, as the request's route wants it. Raises QueueFull, HTTPException."""
        route = request.scope["route"].path
        tickets = await self.broker.submit(submissions, client_name(request), long=route.endswith("/long-batch"))
        everything = asyncio.ensure_future(self._wait_all(tickets))
        leaves = asyncio.ensure_future(_until_client_leaves(request))
        try:
            waits: list[asyncio.Future[Any]] = [leaves, everything]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                raise HTTPException(499, _GONE)
            answers = everything.result()
            return answers if route.startswith("/run") else [_without_output(answer) for answer in answers]
        finally:
            leaves.cancel()
            everything.cancel()
            self._abandon(tickets)

    async def _wait_all(self, tickets: list[Ticket]) -> list[bytes]:
        return await asyncio.gather(*map(self.broker.wait, tickets))

    async def stream(self, tickets: list[Ticket]) -> AsyncIterator[bytes]:
        """Yield JSON lines {"index", "result"} in order of completion. Starlette cancels it when the client leaves."""

        async def one(index: int, ticket: Ticket) -> bytes:
            return b'{"index":%d,"result":%s}\n' % (index, await self.broker.wait(ticket))

        pending = {asyncio.ensure_future(one(*numbered)) for numbered in enumerate(tickets)}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                yield b"".join(task.result() for task in done)
        finally:
            for task in pending:
                task.cancel()
            self._abandon(tickets)

    def _abandon(self, tickets: list[Ticket]) -> None:
        """Cancel unanswered tickets, in a task of its own: the request's task may be cancelled."""
        if any(not ticket.answer.done() for ticket in tickets):
            self.abandoned.inc()
            task = asyncio.ensure_future(self.broker.abandon(tickets))
            self._abandoning.add(task)
            task.add_done_callback(self._abandoning.discard)

    async def status(self) -> dict[str, Any]:
        """State of the queue and the workers; `isolation` is the weakest level of all workers."""
        told = await self.broker.queue.status()
        workers = told["workers"]
        levels = [w["isolation"].get("level", "minimal") for w in workers.values()]
        return {
            "queue": told["queue"],
            "num_workers": sum(w["slots"] for w in workers.values()),
            "sessions": sum(w["sessions"] for w in workers.values()),
            "session_room": sum(w["session_room"] for w in workers.values()),
            "isolation": min(levels, key=LEVELS.index) if levels else None,
            "workers": workers,
            "limits": self.broker.limits._asdict(),
            "queue_time_limit_s": self.broker.queue_time_limit_s,
        }

    async def metrics(self) -> Response:
        for outcome, count in self.broker.outcomes.items():
            self.calls.labels(outcome).inc(count)
        self.broker.outcomes.clear()
        status = await self.status()
        self.queued.set(status["queue"])
        self.slots.set(status["num_workers"])
        self.sessions.set(status["sessions"])
        return PlainTextResponse(generate_latest(self.registry))


async def _until_client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _guard(inner: Any, server: JudgeServer, token: str | None) -> Any:
    """ASGI middleware that checks the token and measures request times."""
    owners = {f"Bearer {one}".encode(): one.rpartition(":")[0] or "token" for one in (token or "").split(",")}

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await inner(scope, receive, send)
            return
        if token and scope["path"] not in _OPEN_ROUTES:
            given = dict(scope["headers"]).get(b"authorization", b"")
            named = [name for one, name in owners.items() if hmac.compare_digest(given, one)]
            if not named:
                await JSONResponse({"detail": "missing or wrong bearer token"}, 401)(scope, receive, send)
                return
            scope["judge.owner"] = named[0]
        started = time.monotonic()
        await inner(scope, receive, send)
        route = getattr(scope.get("route"), "path", "other")
        server.requests.labels(route).observe(time.monotonic() - started)

    return guarded


def create_app(
    redis_uri: str | None = None,
    limits: CallLimits | None = None,
    *,
    queue_time_limit_s: float | None = None,
    max_queued: int = 100_000,
) -> FastAPI:
    """The application. Arguments that are None come from the public server's environment variables."""
    if queue_time_limit_s is None:
        queue_time_limit_s = float(os.environ.get("MAX_QUEUE_WORK_LIFE_TIME", _QUEUE_TIME_LIMIT_S))
    if not (redis_uri := redis_uri or os.environ.get("REDIS_URI", "")):
        raise ValueError("the judge and its workers share a running Redis: REDIS_URI=redis://:PASSWORD@HOST:6379/0")
    queue = JobQueue(redis_uri, max_queued=max_queued)
    broker = Broker(queue, limits or CallLimits.from_environment(), queue_time_limit_s=queue_time_limit_s)
    server = JudgeServer(broker)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await broker.start()
        yield
        await broker.stop()

    app = FastAPI(title="Code Judge", lifespan=lifespan)
    app.add_middleware(_guard, server=server, token=os.environ.get("JUDGE_TOKEN"))
    _add_errors(app, server)
    _add_routes(app, server)
    return app


def _add_errors(app: FastAPI, server: JudgeServer) -> None:
    @app.exception_handler(QueueFull)
    async def full(*_: Any) -> Response:
        server.rejected.inc()
        return JSONResponse({"detail": "the queue is full"}, 429, {"Retry-After": "1"})

    @app.exception_handler(RedisError)
    async def redis_away(_: Request, error: Exception) -> Response:
        what = "Redis"
        if "MISCONF" in str(error):  # it cannot write
            with contextlib.suppress(RedisError):
                what += f" (its data lies in {await server.broker.queue.directory()}; TMPDIR sets another disk)"
        return JSONResponse({"detail": f"{what}: {error}"}, 503, {"Retry-After": "1"})

    @app.exception_handler(FieldError)
    async def not_valid(_: Request, error: FieldError) -> Response:
        """The error and its place, without the value: it may be long, or not encodable."""
        detail = {"type": "value_error", "loc": ("body", *error.place), "msg": error.why}
        return JSONResponse({"detail": [detail]}, 422)


def _add_routes(app: FastAPI, server: JudgeServer) -> None:
    @app.get("/ping")
    async def ping() -> Response:
        return Response(b'"pong"', media_type=_JSON)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process serves."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """Redis answers and at least one worker is alive."""
        slots = (await server.status())["num_workers"]
        return JSONResponse({"status": "ok" if slots else "no worker"}, 200 if slots else 503)

    app.add_api_route("/status", server.status)
    app.add_api_route("/metrics", server.metrics)

    @app.post("/run")
    @app.post("/judge")
    async def single(request: Request) -> Response:
        submission = await _read(request, Submission.from_wire)
        (answer,) = await server.answers(request, [submission])
        return Response(answer, media_type=_JSON)

    @app.post("/run_code")
    async def run_code(request: Request) -> Response:
        (answer,) = await server.answers(request, [await _read(request, submission_of)])
        return Response(orjson.dumps(answer_of(orjson.loads(answer))), media_type=_JSON)

    @app.post("/run/batch")
    @app.post("/run/long-batch")
    @app.post("/judge/batch")
    @app.post("/judge/long-batch")
    async def batch(request: Request) -> Response:
        sub_id, submissions = await _read(request, Submission.batch_from_wire)
        answers = await server.answers(request, submissions)
        body = b'{"sub_id":%s,"results":[%s]}' % (orjson.dumps(encodable(sub_id or uuid.uuid4().hex)), b",".join(answers))
        return Response(body, media_type=_JSON)

    @app.delete("/session/{name}")
    async def end_session(name: str) -> Response:
        """End a live interpreter. No error when it has ended already."""
        try:
            ended = await server.broker.queue.end_session(check_session_name(name))
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, 422)
        return JSONResponse({"session": name, "ended": ended})

    @app.post("/run/stream")
    async def run_stream(request: Request) -> Response:
        """Results as JSON lines, each as it is ready, with its index in the batch."""
        _, submissions = await _read(request, Submission.batch_from_wire)
        tickets = await server.broker.submit(submissions, client_name(request))
        return StreamingResponse(server.stream(tickets), media_type="application/x-ndjson")
