"""Connects HTTP requests with jobs of the queue: submits them, waits with deadlines, survives a lost Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson
from redis.exceptions import RedisError

from rstar2_megatron.judge.limits import MEGABYTE, CallLimits, Submission, check_files, check_session, check_text
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.judge.queue import HEARTBEAT_TTL_S, LOST, POISON, JobQueue, Jobs, Sender, until_redis_answers
from rstar2_megatron.judge.scheduling import Rate, reply_pause_s
from rstar2_megatron.judge.server.math_answers import MathJudge
from rstar2_megatron.judge.tasks import cancel_and_wait

log = logging.getLogger(__name__)
_OUTPUT_CEILING = MEGABYTE
_GRACE_S = 15.0 + 2 * HEARTBEAT_TTL_S  # beyond the time limits of a call that runs twice
_CHECK_S = 5.0
_PREPARED_AT_ONCE = 64  # submissions of a batch between two turns of the event loop
LONG_QUEUE_TIME_LIMIT_S = 3600.0  # of the long-batch routes, as the public server's
_CACHED = (str(Outcome.OK), str(Outcome.ERROR))
_OUTCOME_MARK = b'"outcome":'  # cannot occur inside a JSON string, where quotes are escaped


@dataclass(slots=True)
class Ticket:
    """A submitted call: its job's key (None when no job is needed) and its result JSON."""

    sub_id: str
    key: str | None
    answer: asyncio.Future[bytes]
    longest_s: float = 0.0  # wall time of one run
    queue_time_limit_s: float = 0.0
    submitted_at: float = field(default_factory=time.monotonic)


class Broker:
    """Submits jobs and waits for their answers."""

    def __init__(self, queue: JobQueue, limits: CallLimits, *, queue_time_limit_s: float, cache_s: float = 0.0) -> None:
        """A result also answers identical calls for `cache_s` seconds; 0: never."""
        self.queue = queue
        self.limits = limits
        self._ceiling = limits._replace(output_chars=_OUTPUT_CEILING)
        self.cache_s = cache_s
        self.queue_time_limit_s = queue_time_limit_s
        self.name = uuid.uuid4().hex
        self.waiting: dict[str, list[asyncio.Future[bytes]]] = {}
        self.payloads: dict[str, bytes] = {}
        self._unsent: set[str] = set()  # keys of jobs on their way into the queue
        self._all_read_at = 0.0  # a monotonic time at which Redis held no answer that is not read by now
        self.outcomes: Counter[str] = Counter()
        self._sender = Sender(queue, self.name)
        self._withdrawing: tuple[list[str], asyncio.Task[set[str]]] | None = None  # keys of the next request
        self._cached_as: dict[str, str] = {}  # job key -> name of its program in the result cache
        self._math: MathJudge | None = None
        self._grading: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._read_replies()), asyncio.create_task(self._check_pending())]

    async def stop(self) -> None:
        await cancel_and_wait(*self._tasks, *self._grading, *filter(None, [self._sender.task]))
        if self._math is not None:
            await asyncio.to_thread(self._math.close)
        await self.queue.close()

    # ---------------------------------------------------------------------------------------- requests

    async def submit(self, submissions: list[Submission], client: str, *, long: bool = False) -> list[Ticket]:
        """Put submissions into the queue. Raises QueueFull when they do not fit."""
        tickets: list[Ticket] = []
        try:
            for submission in submissions:
                tickets.append(self._ticket(submission, client))
                tickets[-1].queue_time_limit_s = LONG_QUEUE_TIME_LIMIT_S if long else self.queue_time_limit_s
                if len(tickets) % _PREPARED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # other requests go on meanwhile
            if self._cached_as:
                await self._answer_from_cache(tickets)
            jobs = [(t.key, self.payloads[t.key]) for t in tickets if t.key in self.payloads]
            if jobs:
                await self._sender.send(jobs)
        except BaseException:
            self._forget(tickets)
            raise
        finally:
            self._unsent.difference_update(ticket.key for ticket in tickets if ticket.key)
        return tickets

    def _ticket(self, submission: Submission, client: str) -> Ticket:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        sub_id = submission.sub_id or uuid.uuid4().hex
        options = submission.options or {}
        try:
            limits = self.limits.with_options(options, ceiling=self._ceiling)
            session = check_session(options, submission.type)
            files = check_files(options, submission.type)
            check_text(submission)
        except ValueError as error:
            sub_id = encodable(sub_id)
            answer.set_result(self._make(sub_id, Outcome.INVALID_INPUT, encodable(str(error))))
            return Ticket(sub_id, None, answer)
        if submission.type == "math":
            self._grade(submission, sub_id, answer)
            return Ticket(sub_id, None, answer)
        request: dict[str, Any] = {
            "sub_id": sub_id,
            "type": submission.type,
            "solution": submission.solution,
            "input": submission.input,
            "expected_output": submission.expected_output,
            "limits": limits._asdict(),
        }
        if files:
            request["files"] = files
        place = ""
        if session:
            request |= session
            must_be_open = session["session_must_exist"] and not session["session_replay"]
            place = f"{'=' if must_be_open else '@'}{session['session']}"
        if submission.sub_id is None:
            key = f"{client}/u{sub_id}{place}"
        else:  # the same id and content are the same job while its answer is kept
            digest = hashlib.blake2b(orjson.dumps(request), digest_size=16).hexdigest()
            key = f"{client}/k{digest}{place}"
        if self.cache_s and not session:
            program = orjson.dumps({**request, "sub_id": None})
            self._cached_as[key] = hashlib.blake2b(program, digest_size=16).hexdigest()
        request["queued_at"] = time.time()
        self.waiting.setdefault(key, []).append(answer)
        if key not in self.payloads:
            self.payloads[key] = orjson.dumps(request)
            self._unsent.add(key)
        return Ticket(sub_id, key, answer, limits.longest_s(submission.type))

    def _grade(self, submission: Submission, sub_id: str, answer: asyncio.Future[bytes]) -> None:
        if submission.expected_output is None:
            why = "a submission of type math needs expected_output"
            answer.set_result(self._make(sub_id, Outcome.INVALID_INPUT, why))
            return
        expected = submission.expected_output

        async def grade() -> None:
            if self._math is None:
                self._math = MathJudge()
            result = await self._math.grade(sub_id, submission.solution, expected)
            if not answer.done():
                answer.set_result(orjson.dumps(result))
            self.outcomes[result["outcome"]] += 1

        task = asyncio.create_task(grade())
        self._grading.add(task)
        task.add_done_callback(self._grading.discard)

    async def _answer_from_cache(self, tickets: list[Ticket]) -> None:
        asked = [t for t in tickets if t.key in self._cached_as]
        try:
            found = await self.queue.cached([self._cached_as[t.key] for t in asked if t.key])
        except (RedisError, OSError) as error:
            log.warning("the result cache cannot be read: %s", error)
            return
        for ticket, answer in zip(asked, found, strict=True):
            if answer is not None and ticket.key is not None:
                result = orjson.loads(answer) | {"sub_id": ticket.sub_id, "queue_seconds": 0.0}
                self._settle(ticket.key, orjson.dumps(result))

    async def _remember(self, answers: list[tuple[str, bytes]]) -> None:
        """Keep results for identical calls when the program ended by itself: no limits, no failures of the service."""
        kept = [(self._cached_as[k], a) for k, a in answers if k in self._cached_as and outcome_of(a) in _CACHED]
        if kept:
            await self.queue.remember(kept, self.cache_s)

    async def wait(self, ticket: Ticket) -> bytes:
        """The result JSON of a ticket. Bounded by its limits."""
        left = ticket.submitted_at + ticket.queue_time_limit_s - time.monotonic()
        await asyncio.wait([ticket.answer], timeout=max(0.0, left))
        if not ticket.answer.done() and ticket.key is None:
            ticket.answer.set_result(self._make(ticket.sub_id, Outcome.QUEUE_TIMEOUT, "no grader was free"))
        if not ticket.answer.done() and ticket.key is not None:
            if await self._withdraw(ticket.key):
                why = f"not started within {ticket.queue_time_limit_s:.0f} s"
                self._settle(ticket.key, self._make(ticket.sub_id, Outcome.QUEUE_TIMEOUT, why))
            else:
                await asyncio.wait([ticket.answer], timeout=2 * ticket.longest_s + _GRACE_S)
        if not ticket.answer.done() and ticket.key is not None:
            why = "no answer from any worker within the call's limits"
            self._settle(ticket.key, self._make(ticket.sub_id, Outcome.INTERNAL_ERROR, why))
        return ticket.answer.result()

    async def _withdraw(self, key: str) -> bool:
        """Take a job out of the queue, in one request with all others whose time is over now. False when it has started."""
        if self._withdrawing is None:
            keys: list[str] = []
            self._withdrawing = keys, asyncio.create_task(self._withdraw_together(keys))
        keys, request = self._withdrawing
        keys.append(key)
        return key in await asyncio.shield(request)

    async def _withdraw_together(self, keys: list[str]) -> set[str]:
        await asyncio.sleep(0.01)
        self._withdrawing = None
        try:
            async with asyncio.timeout(5.0):
                return {key for key, out in zip(keys, await self.queue.withdraw(keys), strict=True) if out}
        except (RedisError, TimeoutError, OSError):
            return set()

    async def abandon(self, tickets: list[Ticket]) -> None:
        """The client has disconnected: cancel the jobs that nobody else waits for."""
        gone = self._forget(tickets)
        if gone:
            try:
                await self.queue.cancel(gone)
            except (RedisError, OSError) as error:
                log.warning("cancelling %d abandoned jobs failed: %s", len(gone), error)

    def _forget(self, tickets: list[Ticket]) -> list[str]:
        """Drop unanswered tickets. Returns the keys of jobs that nobody waits for any more."""
        gone = []
        for ticket in tickets:
            if ticket.key is None or ticket.answer.done():
                continue
            others = [f for f in self.waiting.get(ticket.key, []) if f is not ticket.answer]
            if others:
                self.waiting[ticket.key] = others
            else:
                self.waiting.pop(ticket.key, None)
                self.payloads.pop(ticket.key, None)
                self._cached_as.pop(ticket.key, None)
                gone.append(ticket.key)
        return gone

    # ----------------------------------------------------------------------------------------- answers

    def _make(self, sub_id: str | None, outcome: Outcome, why: str) -> bytes:
        session = "lost" if outcome is Outcome.SESSION_LOST else None
        return orjson.dumps(make_result(sub_id, outcome, stderr=why, session=session))

    def _settle(self, key: str, answer: bytes) -> None:
        self.payloads.pop(key, None)
        self._cached_as.pop(key, None)
        for future in self.waiting.pop(key, []):
            if not future.done():
                future.set_result(answer)
                self.outcomes[outcome_of(answer)] += 1

    async def _read_replies(self) -> None:
        rate = Rate(time.monotonic())
        while True:
            asked_at = time.monotonic()
            try:
                answers, are_all = await self.queue.replies(self.name, many=len(self.waiting) > 1)
                rate.add(len(answers), time.monotonic())
                if self._cached_as:
                    await self._remember(answers)
            except Exception as error:  # of any kind: all requests depend on this loop
                log.warning("reading answers failed (%s), waiting for Redis", error)
                await asyncio.sleep(0.05)
                with contextlib.suppress(Exception):
                    await until_redis_answers("answers", self.queue.redis.ping)
                    await self._submit_again(list(self.payloads.items()))
                continue
            for key, answer in answers:
                if answer == POISON:
                    why = "the worker of this job died twice"
                    answer = self._make(self._sub_id(key), Outcome.INTERNAL_ERROR, why)
                elif answer == LOST:
                    why = "the session is open on no worker: its time to live is over, or its worker ended"
                    answer = self._make(self._sub_id(key), Outcome.SESSION_LOST, why)
                self._settle(key, answer)
            if are_all:
                self._all_read_at = asked_at
            if pause_s := reply_pause_s(len(self.waiting), rate):
                await asyncio.sleep(pause_s)

    def _sub_id(self, key: str) -> str | None:
        payload = self.payloads.get(key)
        return orjson.loads(payload)["sub_id"] if payload else None

    async def _submit_again(self, jobs: Jobs) -> None:
        try:
            await self.queue.enqueue_again(self.name, jobs)
        except Exception as error:
            log.warning("submitting %d pending jobs again failed: %s", len(jobs), error)

    async def _check_pending(self) -> None:
        """A pending job that Redis does not know has lost its answer when all of that time are read: send it again."""
        unknown: set[str] = set()
        seen_at = 0.0
        while True:
            await asyncio.sleep(_CHECK_S)
            if unknown and self._all_read_at < seen_at:
                continue  # their answers may be among those that wait to be read
            try:
                now = set(await self.queue.unknown([key for key in self.payloads if key not in self._unsent]))
                lost = [(key, self.payloads[key]) for key in unknown & now if key in self.payloads]
                if lost:
                    log.warning("%d jobs were lost by Redis and are queued again", len(lost))
                    await self._submit_again(lost)
                unknown, seen_at = now, time.monotonic()
            except Exception as error:  # Redis is away: `_read_replies` logs that and waits
                log.debug("checking pending jobs failed: %s", error)


def encodable(text: str) -> str:
    """The text with lone surrogates escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def outcome_of(answer: bytes) -> str:
    """The outcome named in a result's JSON, found without parsing all of it."""
    start = answer.find(_OUTCOME_MARK)
    if start < 0:
        return "unknown"
    begin = answer.index(b'"', start + len(_OUTCOME_MARK)) + 1
    return answer[begin : answer.index(b'"', begin)].decode()
