"""Jobs that a worker leases before it can begin them. Pure.

A worker that leases a job only when a slot is free for it needs a round trip to Redis for each call. With a few jobs
prefetched the next call begins at once, and one round trip serves several calls. No more jobs are prefetched than
begin within `ROUND_TRIP_S`, so that no job waits here for long calls while another worker is idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rstar2_megatron.judge.coalescing import Rate

if TYPE_CHECKING:
    from rstar2_megatron.judge.queue import LeasedJob

# Time between two exchanges with Redis while prefetched jobs wait: the longest delay of an answer.
ROUND_TRIP_S = 0.02


class PrefetchedJobs:
    """Jobs that are leased and not begun, in the order of their arrival."""

    def __init__(self, now: float) -> None:
        """`now` and all times are monotonic seconds."""
        self._jobs: dict[str, LeasedJob] = {}
        self._rate = Rate(now)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def answered(self, count: int, now: float) -> None:
        """Record that `count` calls have ended."""
        self._rate.add(count, now)

    def num_to_lease(self, slots: int, permits: int) -> int:
        """How many more jobs to lease, with this many free slots and permits: those that can begin, and a few more.

        Never more than free slots: the calls in occupied slots may sleep for a long time.
        """
        now = min(slots, permits)
        ahead = min(int(self._rate.per_s * ROUND_TRIP_S), slots - now)
        return max(0, now + ahead - len(self._jobs))

    def add(self, job: LeasedJob) -> None:
        self._jobs[job.key] = job

    def next(self) -> LeasedJob:
        """Remove and return the job that was leased first. Raises StopIteration when there is none."""
        return self._jobs.pop(next(iter(self._jobs)))

    def drop(self, key: str) -> bool:
        """Remove a cancelled job. False when it is not here."""
        return self._jobs.pop(key, None) is not None
