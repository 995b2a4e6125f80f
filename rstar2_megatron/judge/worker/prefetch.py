"""The jobs that a worker has leased and not begun, and how many these should be. Pure.

A worker that leases a job only when a slot is free for it asks Redis once for each call. With a few leased ahead the
next call begins at once, and one round trip serves several. Ahead are no more than are begun within `ROUND_TRIP_S`, so
that no job waits here for long calls while another worker is idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rstar2_megatron.judge.coalescing import Rate

if TYPE_CHECKING:
    from rstar2_megatron.judge.queue import LeasedJob

# From one round trip to the next, while there are jobs to begin: what an answer waits for it at most.
ROUND_TRIP_S = 0.02


class PrefetchedJobs:
    """Leased jobs by key, begun in the order they came."""

    def __init__(self, now: float) -> None:
        """`now` and all times are monotonic seconds."""
        self._jobs: dict[str, LeasedJob] = {}
        self._rate = Rate(now)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __contains__(self, key: str) -> bool:
        return key in self._jobs

    def answered(self, count: int, now: float) -> None:
        """So many calls have ended."""
        self._rate.add(count, now)

    def room(self, slots: int, permits: int) -> int:
        """How many more to lease when so many slots and permits are free: those that can begin, and some ahead.

        None ahead where all slots are taken: their calls may sleep for as long as they like.
        """
        now = min(slots, permits)
        ahead = min(int(self._rate.per_s * ROUND_TRIP_S), slots - now)
        return max(0, now + ahead - len(self._jobs))

    def add(self, job: LeasedJob) -> None:
        self._jobs[job.key] = job

    def next(self) -> LeasedJob:
        """The one that was leased first. Raises StopIteration when there is none."""
        return self._jobs.pop(next(iter(self._jobs)))

    def drop(self, key: str) -> bool:
        """Forget a job that nobody waits for. False when it is not here."""
        return self._jobs.pop(key, None) is not None
