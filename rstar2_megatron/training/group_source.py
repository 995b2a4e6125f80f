"""Where a step gets its groups: it rolls them out itself, or takes them from what the engines roll out all the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rstar2_megatron.cluster.phases.asynchronous import AsynchronousSource
from rstar2_megatron.cluster.phases.coordinator import Refill, RolloutCoordinator
from rstar2_megatron.data.loader import EpochsOver, ProblemLoader
from rstar2_megatron.records.trajectory_files import read_groups, rollouts_path
from rstar2_megatron.rollout.dropped import check_dropped
from rstar2_megatron.rollout.phase import problems_to_refill
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import Group, Problem

# whether resampling rejects a group
IsRejected = Callable[[Group], bool]


class GroupSource(Protocol):
    """The graded groups of the steps, in order. Between two steps it may hold what was rolled out and not trained on.

    A source that inherits from it need not define the methods that only return here.
    """

    def next(self, step: int, loader: ProblemLoader) -> list[Group]:
        """The groups of training step `step`, rejected ones included. Raises TooManyDropped, and what ends a rollout."""

    def no_engine_left(self) -> None:
        """`next` has raised NoEngineLeft, and is called again when engines run. Nothing of the step is lost."""
        return

    def stats(self, seconds: dict[str, float]) -> dict[str, float]:
        """Counters of the rollout of this step. `seconds`: the laps of its `trainer.Clock`."""

    def before_sync(self) -> None:
        """The actor's weights are about to go to the engines."""
        return

    def new_weights(self, version: int) -> None:
        """Every engine generates with weights `version` now."""
        return

    def pause(self) -> None:
        """Let the engines end what they do, before anything but a step uses them."""
        return

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint that holds what was rolled out and not trained on."""

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Go on from `state` of a checkpoint of weights `version`. Raises ValueError."""

    def close(self) -> None:
        """End what the source itself has started. The engines are left as they are."""
        return


def make_source(settings: Settings, coordinator: RolloutCoordinator, rejected: IsRejected) -> GroupSource:
    """By `algorithm.max_staleness`."""
    if settings.algorithm.max_staleness:
        return AsynchronousSource(coordinator.channel, coordinator.tokens, settings, rejected)
    return SynchronousSource(settings, coordinator, rejected)


class SynchronousSource(GroupSource):
    """Step and rollout take turns: a step rolls out its own problems, with the weights that it trains."""

    def __init__(self, settings: Settings, coordinator: RolloutCoordinator, rejected: IsRejected) -> None:
        self._settings, self._coordinator, self._rejected = settings, coordinator, rejected
        self._stats: dict[str, float] = {}
        self._problems: list[Problem] = []  # of a step whose engines were lost, which begins again

    def next(self, step: int, loader: ProblemLoader) -> list[Group]:
        """Rolls out the loader's next problems, or reads what another run saved for this step."""
        if replay := self._settings.runner.replay_rollouts:
            loader.next_batch()
            return read_groups(rollouts_path(replay, step))
        self._problems = self._problems or loader.next_batch()
        spec = RolloutSpec.training(self._settings, step)
        phase = self._coordinator.run(self._problems, spec, f"step {step} rollout", self._refill(loader))
        self._problems, self._stats = [], phase.stats
        check_dropped(phase.groups, self._settings.rollout.max_dropped_share)
        return phase.groups

    def _refill(self, loader: ProblemLoader) -> Refill | None:
        """A function that asks for more problems when too many groups are rejected; None without algorithm.refill."""
        settings, target = self._settings.algorithm.refill, self._settings.data.rollout_batch_size
        if not settings.enabled:
            return None
        left = math.ceil(settings.max_extra * target)
        survivors = seen = 0

        def refill(complete: Sequence[Group], num_open: int) -> Sequence[Problem]:
            nonlocal left, survivors, seen
            survivors += sum(not self._rejected(group) for group in complete[seen:])
            seen = len(complete)
            wanted = problems_to_refill(survivors, num_open, target, settings.min_share, left)
            left -= wanted
            try:
                more = loader.take(wanted)
            except EpochsOver:  # the step goes on with the groups that it has, and is the last one
                left, more = 0, []
            self._problems = [*self._problems, *more]
            return more

        return refill

    def stats(self, seconds: dict[str, float]) -> dict[str, float]:
        return self._stats

    def state(self) -> dict[str, Any]:
        return {"carried": self._coordinator.carried}

    def restore(self, state: dict[str, Any], version: int) -> None:
        unfinished = state.get("unfinished")
        if unfinished is not None:
            raise ValueError(
                f"the checkpoint of step {version} holds {len(unfinished.complete)} groups that wait to be trained on and "
                f"{len(unfinished.open)} unfinished ones, which algorithm.max_staleness=0 would lose; resume with "
                "algorithm.max_staleness=1 or more, or from a checkpoint of a run without it"
            )
        self._coordinator.restore(state["carried"])
