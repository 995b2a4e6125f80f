"""The HTTP API: the public Code Judge's routes and fields, and ours."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from redis.exceptions import RedisError

from rstar2_megatron.judge.limits import LEVELS, CallLimits
from rstar2_megatron.judge.queue import JobQueue, QueueFull
from rstar2_megatron.judge.server.broker import Broker, Ticket
from rstar2_megatron.judge.server.submission import BatchSubmission, Submission, check_session_name

DEFAULT_QUEUE_TIME_LIMIT_S = 50.0  # below the 60 s after which known clients give up
_OPEN_ROUTES = ("/ping", "/health", "/ready")
_JSON = "application/json"


class _ClientGone(Exception):
    """The client closed its connection before its answer was there."""


class _Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter("judge_calls", "Calls answered", ["outcome"], registry=self.registry)
        self.requests = Histogram(
            "judge_request_seconds", "Time of a request", ["route"], registry=self.registry
        )
        self.queued = Gauge("judge_queued", "Jobs that wait", registry=self.registry)
        self.slots = Gauge("judge_slots", "Execution slots of live workers", registry=self.registry)
        self.sessions = Gauge("judge_sessions", "Open sessions of live workers", registry=self.registry)
        self.rejected = Counter("judge_rejected", "Requests refused, queue full", registry=self.registry)
        self.abandoned = Counter("judge_abandoned", "Requests whose client left", registry=self.registry)


def _client_name(request: Request) -> str:
    name = request.headers.get("x-client-id") or (request.client.host if request.client else "local")
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", name)[:64]


def _without_output(result: bytes) -> bytes:
    fields = orjson.loads(result)
    fields.pop("stdout", None)
    fields.pop("stderr", None)
    return orjson.dumps(fields)


class JudgeServer:
    """The work behind the routes."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.metrics = _Metrics()
        self._abandoning: set[asyncio.Future[None]] = set()

    async def answers(self, request: Request, submissions: list[Submission]) -> list[bytes]:
        """Result JSON of each submission, in order. Raises _ClientGone, QueueFull."""
        started = time.monotonic()
        tickets = await self.broker.submit(submissions, _client_name(request))
        leaves = asyncio.ensure_future(_until_client_leaves(request))
        everything = asyncio.ensure_future(self._wait_all(tickets, started))
        try:
            await asyncio.wait([leaves, everything], return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                raise _ClientGone
            return everything.result()
        finally:
            leaves.cancel()
            everything.cancel()
            self._abandon(tickets)

    def _abandon(self, tickets: list[Ticket]) -> None:
        """Cancel unanswered tickets, in a task of its own: the request's task may be cancelled."""
        if any(not ticket.answer.done() for ticket in tickets):
            self.metrics.abandoned.inc()
            task = asyncio.ensure_future(self.broker.abandon(tickets))
            self._abandoning.add(task)
            task.add_done_callback(self._abandoning.discard)

    async def _wait_all(self, tickets: list[Ticket], started: float) -> list[bytes]:
        return [await self.broker.wait(ticket, started) for ticket in tickets]

    async def stream(self, request: Request, tickets: list[Ticket], started: float) -> AsyncIterator[bytes]:
        """Yield JSON lines {"index", "result"} in order of completion."""

        async def one(index: int, ticket: Ticket) -> bytes:
            return b'{"index":%d,"result":%s}\n' % (index, await self.broker.wait(ticket, started))

        async def leave() -> bytes:
            await _until_client_leaves(request)
            return b""

        pending = {asyncio.ensure_future(one(index, ticket)) for index, ticket in enumerate(tickets)}
        leaves = asyncio.ensure_future(leave())
        tasks = list(pending)
        try:
            while pending and not leaves.done():
                done, rest = await asyncio.wait([*pending, leaves], return_when=asyncio.FIRST_COMPLETED)
                pending &= rest
                yield b"".join(task.result() for task in done)
        finally:
            for task in (*tasks, leaves):
                task.cancel()
            self._abandon(tickets)

    async def single(self, request: Request, submission: Submission, *, output: bool) -> Response:
        (answer,) = await self.answers(request, [submission])
        return Response(answer if output else _without_output(answer), media_type=_JSON)

    async def batch(self, request: Request, batch: BatchSubmission, *, output: bool) -> Response:
        answers = await self.answers(request, batch.submissions)
        if not output:
            answers = [_without_output(answer) for answer in answers]
        body = b'{"sub_id":%s,"results":[%s]}' % (
            orjson.dumps(batch.sub_id or uuid.uuid4().hex),
            b",".join(answers),
        )
        return Response(body, media_type=_JSON)

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
            "limits": self.broker.limits.as_dict(),
            "queue_time_limit_s": self.broker.queue_time_limit_s,
        }

    async def exposition(self) -> bytes:
        """Prometheus text."""
        for outcome, count in self.broker.outcomes.items():
            self.metrics.calls.labels(outcome).inc(count)
        self.broker.outcomes.clear()
        told = await self.broker.queue.status()
        self.metrics.queued.set(told["queue"])
        self.metrics.slots.set(sum(w["slots"] for w in told["workers"].values()))
        self.metrics.sessions.set(sum(w["sessions"] for w in told["workers"].values()))
        return generate_latest(self.metrics.registry)


async def _until_client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _guard(app: FastAPI, server: JudgeServer, token: str | None) -> None:
    expected = f"Bearer {token}".encode() if token else None

    class Guard:
        """ASGI middleware that checks the token and measures request times."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await self.inner(scope, receive, send)
                return
            if expected is not None and scope["path"] not in _OPEN_ROUTES:
                given = dict(scope["headers"]).get(b"authorization", b"")
                if not hmac.compare_digest(given, expected):
                    refusal = JSONResponse({"detail": "missing or wrong bearer token"}, 401)
                    await refusal(scope, receive, send)
                    return
            started = time.monotonic()
            await self.inner(scope, receive, send)
            route = getattr(scope.get("route"), "path", "other")
            server.metrics.requests.labels(route).observe(time.monotonic() - started)

    app.add_middleware(Guard)


def create_app(
    redis_uri: str | None = None,
    limits: CallLimits | None = None,
    *,
    queue_time_limit_s: float | None = None,
    max_queued: int = 100_000,
    cache_s: float = 0.0,
    token: str | None = None,
) -> FastAPI:
    """The application. Arguments that are None come from the public server's environment variables."""
    environment = os.environ
    limits = limits or CallLimits.from_environment()
    if queue_time_limit_s is None:
        queue_time_limit_s = float(environment.get("MAX_QUEUE_WORK_LIFE_TIME", DEFAULT_QUEUE_TIME_LIMIT_S))
    queue = JobQueue(
        redis_uri or environment.get("REDIS_URI", "redis://127.0.0.1:6379/0"), max_queued=max_queued
    )
    broker = Broker(queue, limits, queue_time_limit_s=queue_time_limit_s, cache_s=cache_s)
    server = JudgeServer(broker)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await broker.start()
        yield
        await broker.stop()

    app = FastAPI(title="Code Judge", lifespan=lifespan)
    _guard(app, server, token or environment.get("JUDGE_TOKEN"))
    _add_errors(app, server)
    _add_routes(app, server)
    return app


def _add_errors(app: FastAPI, server: JudgeServer) -> None:
    @app.exception_handler(QueueFull)
    async def full(*_: Any) -> Response:
        server.metrics.rejected.inc()
        return JSONResponse({"detail": "the queue is full"}, 429, {"Retry-After": "1"})

    @app.exception_handler(RedisError)
    async def redis_away(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": f"Redis: {error}"}, 503, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        """The error and its place, without the value: it may be long, or not encodable."""
        detail = [{"type": e["type"], "loc": e["loc"], "msg": e["msg"]} for e in error.errors()]
        return JSONResponse({"detail": detail}, 422)

    @app.exception_handler(_ClientGone)
    async def gone(*_: Any) -> Response:
        return Response(status_code=499)


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
        try:
            slots = (await server.status())["num_workers"]
        except RedisError as error:
            return JSONResponse({"status": f"Redis: {error}"}, 503)
        return JSONResponse({"status": "ok" if slots else "no worker"}, 200 if slots else 503)

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return await server.status()

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await server.exposition())

    @app.post("/run")
    async def run(request: Request, submission: Submission) -> Response:
        return await server.single(request, submission, output=True)

    @app.post("/judge")
    async def judge(request: Request, submission: Submission) -> Response:
        return await server.single(request, submission, output=False)

    @app.post("/run/batch")
    @app.post("/run/long-batch")
    async def run_batch(request: Request, batch: BatchSubmission) -> Response:
        return await server.batch(request, batch, output=True)

    @app.post("/judge/batch")
    @app.post("/judge/long-batch")
    async def judge_batch(request: Request, batch: BatchSubmission) -> Response:
        return await server.batch(request, batch, output=False)

    @app.delete("/session/{name}")
    async def end_session(name: str) -> Response:
        """End a live interpreter. No error when it has ended already."""
        try:
            ended = await server.broker.queue.end_session(check_session_name(name))
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, 422)
        return JSONResponse({"session": name, "ended": ended})

    @app.post("/run/stream")
    async def run_stream(request: Request, batch: BatchSubmission) -> Response:
        """Results as JSON lines, each as it is ready, with its index in the batch."""
        started = time.monotonic()
        tickets = await server.broker.submit(batch.submissions, _client_name(request))
        return StreamingResponse(server.stream(request, tickets, started), media_type="application/x-ndjson")


def __getattr__(name: str) -> Any:
    """`uvicorn rstar2_megatron.judge.app:app` makes the application from the environment on first use."""
    if name == "app":
        return create_app()
    raise AttributeError(name)
