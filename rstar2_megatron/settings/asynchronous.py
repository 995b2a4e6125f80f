"""What `algorithm.max_staleness` > 0 does not go together with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rstar2_megatron.settings.schema import Settings


def asynchronous_problems(settings: Settings, places: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Sentences with the keys and the remedy. places: slots by component (`component_slots`)."""
    bound = settings.algorithm.max_staleness
    if not bound or settings.runner.task_type != "reasoning":
        return
    what = f"algorithm.max_staleness={bound}"
    shared = sorted({*places["actor"]} & {*places["rollout"]})
    if shared:
        yield (
            f"{what} lets engines generate while the actor trains, but cluster.component_placement puts both on slots "
            f"{', '.join(map(str, shared))}, where one waits for the other; give them disjoint slots, e.g. "
            "'cluster.component_placement={actor: 0, rollout: 1, reward: 0}', or set it to 0"
        )
    rollout = settings.rollout
    if rollout.tail != "wait":
        yield (
            f"{what} has no end of a phase that rollout.tail={rollout.tail} could shorten: unfinished trajectories go on "
            "through every step; set rollout.tail=wait"
        )
    if rollout.scheduler == "static":
        yield (
            f"{what} adds problems one by one, but rollout.scheduler=static divides those of a whole step; set it to "
            "kv_adaptive, kv_reserve or least_requests"
        )
    if settings.algorithm.refill.enabled:
        yield (
            f"{what} replaces every rejected group, so that algorithm.refill has nothing to add; set "
            "algorithm.refill.enabled=False"
        )
    if settings.runner.replay_rollouts:
        yield (
            f"{what} rolls out while the actor trains, but runner.replay_rollouts={settings.runner.replay_rollouts} rolls "
            "out nothing; set one of them to its default"
        )
