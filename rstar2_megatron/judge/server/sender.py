"""Puts jobs into the queue, many requests in one round trip."""

from __future__ import annotations

import asyncio

from rstar2_megatron.judge.queue import JobQueue, QueueFull, until_redis_answers

Jobs = list[tuple[str, bytes]]  # key and payload of each
Request = tuple[Jobs, "asyncio.Future[None]"]


class Sender:
    """Collects requests while a round trip is in flight, and sends them together in the next one."""

    def __init__(self, queue: JobQueue, reply: str) -> None:
        self._queue = queue
        self._reply = reply
        self._unsent: list[Request] = []
        self._is_sending = False
        self.tasks: set[asyncio.Task[None]] = set()

    async def send(self, jobs: Jobs) -> None:
        """Put jobs into the queue. Raises QueueFull, RedisError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsent.append((jobs, done))
        if not self._is_sending:
            self._is_sending = True
            task = asyncio.create_task(self._send_all())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        await done

    async def _send_all(self) -> None:
        while self._unsent:
            taken, self._unsent = self._unsent, []
            requests = [request for request in taken if not request[1].done()]  # the client may have left
            try:
                if requests:
                    await self._send_together(requests)
            except BaseException as error:
                for _, done in requests:
                    if not done.done():
                        done.set_exception(error)
        self._is_sending = False

    async def _send_together(self, requests: list[Request]) -> None:
        jobs = [job for part, _ in requests for job in part]
        try:
            await until_redis_answers("enqueue", lambda: self._queue.enqueue(self._reply, jobs))
        except QueueFull:
            if len(requests) == 1:
                raise
            for request in requests:  # some requests may fit alone
                try:
                    await self._send_together([request])
                except QueueFull as full:
                    if not request[1].done():
                        request[1].set_exception(full)
            return
        for _, done in requests:
            if not done.done():
                done.set_result(None)
