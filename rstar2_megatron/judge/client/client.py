"""Async client of the Code Judge: ours or the public server.

Infrastructure failures are retried with jitter until `max_outage_s` has passed, under the same `sub_id`, so that our
server runs the call once. A failure of the program itself (error, timeout, memory) is a result and never retried.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import aiohttp

from rstar2_megatron.judge.client.batches import Batches, BrokenBatch, RefusedBatch
from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.settings.schema import CodeJudgeSettings

_RETRIED_STATUS = (408, 425, 429, 499)  # and all 5xx
_OVERLOAD = ("http_429", "queue_timeout", "timeout")
_PING_S = 10.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0


class JudgeUnavailable(RuntimeError):
    """The judge gave no result for `max_outage_s` (or `max_overload_s`). The program is not the cause."""


class JudgeRejected(RuntimeError):
    """The judge refused the request (HTTP 4xx): wrong URL, token or field."""


class _TryAgain(Exception):
    """An infrastructure failure of the given kind; the request is sent again."""

    def __init__(self, kind: str, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.wait_s = wait_s


def authorization(token: str | None = None) -> dict[str, str]:
    """The header with a token; by default that of JUDGE_TOKEN.

    It is the server's variable, which may hold several, and which RLinf passes to workers on all nodes.
    """
    token = token or os.environ.get("JUDGE_TOKEN", "").split(",")[0]
    return {"Authorization": f"Bearer {token}"} if token else {}


class JudgeClient:
    """One connection pool with at most `max_concurrency` calls in flight. Bound to the event loop that uses it first.

    Calls within `batch_window_s` of another are sent together, at most `batch_size` of them (1: each alone). A call waits up to
    `max_outage_s` for a judge that is away, and up to `max_overload_s` for one that is overloaded (429, queue_timeout, no
    answer within `request_timeout_s` from a judge that answers a ping). `memory_mb` defaults to the judge's limit, `token` to
    the environment variable JUDGE_TOKEN.
    """

    def __init__(
        self,
        base_url: str,
        *,
        time_limit_s: float = 4.0,
        memory_mb: int | None = None,
        request_timeout_s: float = 60.0,
        max_outage_s: float = 120.0,
        max_overload_s: float = 600.0,
        max_concurrency: int = 128,
        batch_size: int = 32,
        batch_window_s: float = 0.002,
        token: str | None = None,
        client_id: str | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {base_url!r}: give http://HOST:PORT")
        self.base_url = base_url.rstrip("/")
        self.request_timeout_s = request_timeout_s
        self.max_outage_s = max_outage_s
        self.max_overload_s = max_overload_s
        self.max_concurrency = max_concurrency
        self._limits = {"time_limit_s": str(time_limit_s)} | ({"memory_mb": str(memory_mb)} if memory_mb else {})
        self._headers = authorization(token)
        if client_id:
            self._headers["X-Client-Id"] = client_id
        self._counts: defaultdict[str, float] = defaultdict(int, calls=0, retries=0, outages=0, outage_seconds=0)
        self._taken: dict[str, float] = {}  # `counters` at the last `take_counters`
        self._down_since: float | None = None
        self._session: aiohttp.ClientSession | None = None
        self._ping: asyncio.Task[bool] | None = None
        self._gate = asyncio.Semaphore(max_concurrency)
        self._batches = Batches(self._open, self.base_url, batch_size, batch_window_s)
        self._sessions: dict[str, bool] = {}  # name -> whether the judge has opened it

    # ------------------------------------------------------------------------------------------- calls

    async def run(
        self,
        code: str,
        stdin: str = "",
        *,
        kind: str = "python",
        expected_output: str | None = None,
        options: Mapping[str, Any] | None = None,
        files: Mapping[str, str | bytes] | None = None,
        session: str | None = None,
    ) -> JudgeResult:
        """Run a program. Raises JudgeUnavailable after `max_outage_s` without an answer, JudgeRejected.

        `files` are written to its working directory. Calls with the same `session` (choose a unique name) share one live
        interpreter until `close_session`, and run in the order they are sent. When the judge has lost the interpreter, the
        next call ends as SESSION_LOST, an infrastructure outcome, and its program does not run. When a program ends its own
        interpreter (memory, os._exit), `result.session` is "lost" and the next call opens a new one.
        """
        self._counts["calls"] += 1
        try:
            (code + stdin).encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which no request can carry
            self._counts[f"outcome_{Outcome.ERROR}"] += 1
            return JudgeResult(Outcome.ERROR, "", f"UnicodeEncodeError: {error}\n", 1, 0.0)
        asked: dict[str, Any] = {**self._limits, **(options or {})}
        if files:
            asked["files"] = {
                path: content if isinstance(content, str) else {"base64": base64.b64encode(content).decode()}
                for path, content in files.items()
            }
        if session is not None:
            is_open = self._sessions.setdefault(session, False)
            asked |= {"session": session, "session_must_exist": str(is_open).lower()}
        submission = {"sub_id": uuid.uuid4().hex, "type": kind, "solution": code, "input": stdin, "options": asked}
        if expected_output is not None:
            submission["expected_output"] = expected_output
        async with self._gate:
            result = await self._persist(submission)
            if result.outcome is Outcome.INTERNAL_ERROR and not (session and self._sessions.get(session)):
                self._counts["retries"] += 1  # once more, as another job
                self._counts["internal_errors"] += 1
                result = await self._persist({**submission, "sub_id": uuid.uuid4().hex})
        self._counts[f"outcome_{result.outcome}"] += 1
        if session is not None:
            self._note_session(session, result)
        return result

    def _note_session(self, session: str, result: JudgeResult) -> None:
        if result.session in ("new", "kept"):
            self._sessions[session] = True
        elif result.session == "lost" or result.is_infrastructure:
            self._sessions[session] = False
        elif result.outcome is not Outcome.INVALID_INPUT:
            raise JudgeRejected(f"the judge at {self.base_url} keeps no sessions (the public server does not)")

    def expect_session(self, session: str) -> None:
        """The session was opened by another client: if it is gone, the next call ends as SESSION_LOST."""
        self._sessions[session] = True

    async def close_session(self, session: str) -> None:
        """End a session's interpreter. Does not raise when the judge is away: the session then expires."""
        if self._sessions.pop(session, None) is None:
            return
        try:
            async with self._open().delete(f"{self.base_url}/session/{session}") as response:
                await response.read()
        except (TimeoutError, aiohttp.ClientError):
            self._counts["sessions_left_to_expire"] += 1

    async def _persist(self, submission: dict[str, Any]) -> JudgeResult:
        """Send the submission until it is answered. Raises JudgeUnavailable after `max_outage_s` or `max_overload_s`."""
        failing_since: dict[bool, float] = {}  # key: whether the judge is overloaded (else away)
        longest_wait_s = _FIRST_WAIT_S
        while True:
            started = time.monotonic()
            try:
                return await self._attempt(submission)
            except _TryAgain as failure:
                self._counts["retries"] += 1
                self._counts[f"failed_{failure.kind}"] += 1
                overloaded = failure.kind in _OVERLOAD
                if overloaded:  # so it is not away
                    failing_since.pop(False, None)
                limit_s = self.max_overload_s if overloaded else self.max_outage_s
                if time.monotonic() - failing_since.setdefault(overloaded, started) >= limit_s:
                    raise JudgeUnavailable(
                        f"no result from the judge at {self.base_url} for {limit_s:.0f} s "
                        f"(last: {failure}): is it running, with enough workers? See {self.base_url}/status"
                    ) from failure
                wait_s = max(failure.wait_s, random.uniform(0.0, longest_wait_s))
            await asyncio.sleep(wait_s)
            longest_wait_s = min(2 * longest_wait_s, _LONGEST_WAIT_S)

    async def _attempt(self, submission: dict[str, Any]) -> JudgeResult:
        try:
            fields = await self._batches.run(submission)
        except RefusedBatch as refusal:
            if refusal.status < 500 and refusal.status not in _RETRIED_STATUS:
                raise JudgeRejected(f"{self.base_url}/run: {refusal}") from refusal
            if refusal.status >= 500:
                self._down()
            asked = refusal.headers.get("Retry-After", "")
            wait_s = min(float(asked), 10.0) if asked.replace(".", "", 1).isdigit() else 0.0
            raise _TryAgain(f"http_{refusal.status}", str(refusal), wait_s) from refusal
        except (TimeoutError, BrokenBatch, aiohttp.ClientError) as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and await self._answers_ping():
                raise _TryAgain("timeout", why) from error
            self._down()
            raise _TryAgain("connection", why) from error
        self._up()
        result = JudgeResult.from_wire(fields)
        if result.outcome is Outcome.QUEUE_TIMEOUT:
            raise _TryAgain("queue_timeout", "not started in time")
        return result

    async def _answers_ping(self) -> bool:
        """Whether the judge is there: a call that got no answer in time was then late, not lost."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self._send_ping())
        return await asyncio.shield(self._ping)

    async def _send_ping(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=min(_PING_S, self.request_timeout_s))
        try:  # in a session of its own: all connections of the other may be in use
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.base_url}/ping") as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.max_concurrency, keepalive_timeout=60.0),
                timeout=aiohttp.ClientTimeout(total=self.request_timeout_s, sock_connect=5.0),
                headers=self._headers,
                trust_env=False,
            )
        return self._session

    # ------------------------------------------------------------------------------------------ others

    def _down(self) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            self._counts["outages"] += 1

    def _up(self) -> None:
        if self._down_since is not None:
            self._counts["outage_seconds"] += time.monotonic() - self._down_since
            self._down_since = None

    @property
    def counters(self) -> dict[str, float]:
        """calls, retries, outages, outage_seconds, failed_KIND, outcome_NAME since this client was made."""
        running = 0.0 if self._down_since is None else time.monotonic() - self._down_since
        return {**self._counts, "outage_seconds": self._counts["outage_seconds"] + running}

    def take_counters(self) -> dict[str, float]:
        """What `counters` has gained since the last call of this method."""
        before, self._taken = self._taken, self.counters
        return {name: value - before.get(name, 0.0) for name, value in self._taken.items()}

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        await self._batches.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    @classmethod
    def of(cls, base_url: str, settings: CodeJudgeSettings) -> JudgeClient:
        """With the limits of a run's settings."""
        names = ("time_limit_s", "memory_mb", "request_timeout_s", "max_outage_s", "max_concurrency")
        return cls(base_url, **{name: getattr(settings, name) for name in names})

    async def __aenter__(self) -> JudgeClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
