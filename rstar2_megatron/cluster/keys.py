"""Keys of the rollout channel. One RLinf channel carries all streams, each under its own key."""

ENDED = "ended"  # rollout workers -> reward workers: list[RolloutResult], then one None per reward worker
# reward workers -> driver: graded list[RolloutResult]; rollout workers -> driver: WorkRequest, EngineGone
TO_DRIVER = "to driver"


def work_key(engine: int) -> str:
    """driver -> one rollout worker: WorkAnswer."""
    return f"work {engine}"
