"""Connects HTTP requests with jobs of the queue: submits them, waits with deadlines, survives a lost Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
from redis.exceptions import RedisError

from rstar2_megatron.judge.limits import MEGABYTE, CallLimits, Submission, check_files, check_session, check_text
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.judge.queue import HEARTBEAT_TTL_S, LOST, POISON, JobQueue, Sender, cancel_and_wait, until_redis_answers
from rstar2_megatron.judge.scheduling import Rate, reply_pause_s
from rstar2_megatron.reward.pool import GRADER_TIMEOUT, GraderLost, GraderPool

log = logging.getLogger(__name__)
_GRACE_S = 15.0 + 2 * HEARTBEAT_TTL_S  # beyond the time limits of a call that runs twice
_PREPARED_AT_ONCE = 64  # submissions of a batch between two turns of the event loop
LONG_QUEUE_TIME_LIMIT_S = 3600.0  # of the long-batch routes, as the public server's
_OUTCOME_MARK = b'"outcome":'  # cannot occur inside a JSON string, where quotes are escaped


@dataclass(slots=True, eq=False)
class Ticket:
    """A submitted call. `answer` becomes its result JSON."""

    sub_id: str
    answer: asyncio.Future[bytes]
    key: str = ""  # of its job
    payload: bytes = b""  # of its job; empty when no job is needed
    is_sent: bool = False
    longest_s: float = 0.0  # wall time of one run
    queue_time_limit_s: float = 0.0
    submitted_at: float = field(default_factory=time.monotonic)


class Broker:
    """Submits jobs and waits for their answers."""

    def __init__(self, queue: JobQueue, limits: CallLimits, *, queue_time_limit_s: float, check_s: float = 5.0) -> None:
        """Every `check_s` the broker looks whether Redis knows the pending jobs."""
        self.queue = queue
        self.limits = limits
        self._ceiling = limits._replace(output_chars=MEGABYTE)
        self.queue_time_limit_s = queue_time_limit_s
        self.check_s = check_s
        self.name = uuid.uuid4().hex
        self.waiting: dict[str, list[Ticket]] = {}  # unanswered calls by their job's key
        self._all_read_at = 0.0  # a monotonic time at which Redis held no answer that is not read by now
        self.outcomes: Counter[str] = Counter()
        self._sender = Sender(queue, self.name)
        self._withdrawing: tuple[list[str], asyncio.Task[set[str]]] | None = None  # keys of the next request
        self._graders = GraderPool(num_workers=2, timeout_s=5.0)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._tasks |= {asyncio.create_task(self._read_replies()), asyncio.create_task(self._check_pending())}

    async def stop(self) -> None:
        await cancel_and_wait(*self._tasks)
        await self._sender.stop()
        await asyncio.to_thread(self._graders.close)
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
            if jobs := [(t.key, t.payload) for t in tickets if t.payload and not t.answer.done()]:
                await self._sender.send(jobs)
        except BaseException:
            self._forget(tickets)
            raise
        for ticket in tickets:
            ticket.is_sent = True
        return tickets

    def _ticket(self, submission: Submission, client: str) -> Ticket:
        sub_id = submission.sub_id or uuid.uuid4().hex
        ticket = Ticket(sub_id, asyncio.get_running_loop().create_future())
        options = submission.options or {}
        try:
            limits = self.limits.with_options(options, ceiling=self._ceiling)
            session = check_session(options, submission.type)
            files = check_files(options, submission.type)
            check_text(submission)
            if submission.type == "math" and submission.expected_output is None:
                raise ValueError("a submission of type math needs expected_output")
        except ValueError as error:
            ticket.sub_id = encodable(sub_id)
            ticket.answer.set_result(_failure(ticket.sub_id, Outcome.INVALID_INPUT, encodable(str(error))))
            return ticket
        if submission.type == "math":
            ticket.key = f"math {uuid.uuid4().hex}"
            task = asyncio.create_task(self._grade(ticket, submission.solution, submission.expected_output or ""))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            request = {**submission._asdict(), "sub_id": sub_id, "limits": limits._asdict(), **session, **files}
            del request["options"]
            request["shows"] = submission.expected_output is None and str(options.get("show_value")).lower() != "false"
            ticket.key = f"{client}/{self._job_name(request, submission.sub_id)}"
            ticket.payload = orjson.dumps({**request, "queued_at": time.time()})
            ticket.longest_s = limits.longest_s(submission.type)
        self.waiting.setdefault(ticket.key, []).append(ticket)
        return ticket

    def _job_name(self, request: dict[str, Any], given_id: str | None) -> str:
        """Calls with the same name are the same job while its answer is kept (see scripts.py)."""
        place = ""
        if "session" in request:
            place = f"{'=' if request['session_must_exist'] else '@'}{request['session']}"
        if given_id is None:
            return f"u{request['sub_id']}{place}"
        return f"k{hashlib.blake2b(orjson.dumps(request), digest_size=16).hexdigest()}{place}"

    async def _grade(self, ticket: Ticket, solution: str, expected: str) -> None:
        """Settle a submission of type math: `success` is the verdict, `stdout` its reason (correct, wrong, ungradable, ...).

        `solution` is a whole response with its box inside `<answer>`, or the bare answer.
        """
        boxed = solution if "<answer>" in solution else f"<answer>\\boxed{{{solution}}}</answer>"
        started = time.monotonic()
        try:
            verdict = await self._graders.grade(boxed, [expected])
        except GraderLost as error:
            self._fail(ticket.key, Outcome.INTERNAL_ERROR, str(error))
            return
        outcome = Outcome.TIMEOUT if verdict.detail == GRADER_TIMEOUT else Outcome.OK
        cost, success = time.monotonic() - started, verdict.reward == 1.0
        result = make_result(ticket.sub_id, outcome, cost=cost, stdout=f"{verdict.detail}\n", success=success)
        self._settle(ticket.key, orjson.dumps(result))

    async def wait(self, ticket: Ticket) -> bytes:
        """The result JSON of a ticket. Bounded by its limits."""
        left = ticket.submitted_at + ticket.queue_time_limit_s - time.monotonic()
        await asyncio.wait([ticket.answer], timeout=max(0.0, left))
        if not ticket.answer.done():
            if not ticket.payload or await self._withdraw(ticket.key):
                self._fail(ticket.key, Outcome.QUEUE_TIMEOUT, f"not started within {ticket.queue_time_limit_s:.0f} s")
            else:
                await asyncio.wait([ticket.answer], timeout=2 * ticket.longest_s + _GRACE_S)
        if not ticket.answer.done():
            self._fail(ticket.key, Outcome.INTERNAL_ERROR, "no answer from any worker within the call's limits")
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
        if gone := self._forget(tickets):
            try:
                await self.queue.cancel(gone)
            except (RedisError, OSError) as error:
                log.warning("cancelling %d abandoned jobs failed: %s", len(gone), error)

    def _forget(self, tickets: list[Ticket]) -> list[str]:
        """Drop unanswered tickets. Returns the keys of jobs that nobody waits for any more."""
        gone = []
        for ticket in tickets:
            waiting = self.waiting.get(ticket.key, [])
            if ticket in waiting:
                waiting.remove(ticket)
                if not waiting:
                    del self.waiting[ticket.key]
                    gone.append(ticket.key)
        return gone

    # ----------------------------------------------------------------------------------------- answers

    def _fail(self, key: str, outcome: Outcome, why: str) -> None:
        if tickets := self.waiting.get(key):
            self._settle(key, _failure(tickets[0].sub_id, outcome, why))

    def _settle(self, key: str, answer: bytes) -> None:
        for ticket in self.waiting.pop(key, []):
            if not ticket.answer.done():
                ticket.answer.set_result(answer)
                self.outcomes[outcome_of(answer)] += 1

    async def _read_replies(self) -> None:
        rate = Rate(time.monotonic())
        while True:
            asked_at = time.monotonic()
            try:
                answers, are_all = await self.queue.replies(self.name, many=len(self.waiting) > 1)
                rate.add(len(answers), time.monotonic())
            except Exception as error:  # of any kind: all requests depend on this loop
                log.warning("reading answers failed (%s), waiting for Redis", error)
                await asyncio.sleep(0.05)
                with contextlib.suppress(Exception):
                    await until_redis_answers("answers", self.queue.redis.ping)
                    await self._submit_again(self.waiting)
                continue
            for key, answer in answers:
                if answer == POISON:
                    self._fail(key, Outcome.INTERNAL_ERROR, "the worker of this job died twice")
                elif answer == LOST:
                    why = "the session is open on no worker: its time to live is over, or its worker ended"
                    self._fail(key, Outcome.SESSION_LOST, why)
                else:
                    self._settle(key, answer)
            if are_all:
                self._all_read_at = asked_at
            if pause_s := reply_pause_s(len(self.waiting), rate):
                await asyncio.sleep(pause_s)

    async def _submit_again(self, keys: Iterable[str]) -> None:
        jobs = [(key, self.waiting[key][0].payload) for key in keys if self.waiting[key][0].payload]
        try:
            await self.queue.enqueue_again(self.name, jobs)
        except Exception as error:
            log.warning("submitting %d pending jobs again failed: %s", len(jobs), error)

    async def _check_pending(self) -> None:
        """A pending job that Redis does not know has lost its answer when all of that time are read: send it again."""
        unknown: set[str] = set()
        seen_at = 0.0
        while True:
            await asyncio.sleep(self.check_s)
            if unknown and self._all_read_at < seen_at:
                continue  # their answers may be among those that wait to be read
            try:
                sent = [key for key, tickets in self.waiting.items() if any(t.payload and t.is_sent for t in tickets)]
                now = set(await self.queue.unknown(sent))
                if lost := unknown & now & self.waiting.keys():
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
    rest = answer.partition(_OUTCOME_MARK)[2]
    return rest.split(b'"', 2)[1].decode() if rest else "unknown"


def _failure(sub_id: str, outcome: Outcome, why: str) -> bytes:
    return orjson.dumps(make_result(sub_id, outcome, stderr=why, session="lost" if outcome is Outcome.SESSION_LOST else None))
