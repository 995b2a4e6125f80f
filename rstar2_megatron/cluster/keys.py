"""Names on the rollout channel. One RLinf channel carries all streams, each under its own key."""

ENDED = "ended"  # rollout workers -> reward workers: list[RolloutResult], then one None per reward worker
TO_DRIVER = "to driver"  # reward workers: list[RolloutResult], graded; rollout workers: WorkRequest


def work_key(engine: int) -> str:
    """driver -> one rollout worker: list[Slice], then one None at the end of the phase."""
    return f"work {engine}"
