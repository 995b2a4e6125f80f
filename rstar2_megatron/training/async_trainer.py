"""The training step while the engines go on: take a batch, update, sync.

The words are those of `trainer`. Here the engines roll out all the time (`cluster.phases.continuous`), groups that are scored
and not rejected wait in a buffer, and a step trains on the next batch of them. Tokens may be `algorithm.max_staleness` weight
versions older than the weights that they train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rstar2_megatron.cluster.phases.continuous import ContinuousRollout
from rstar2_megatron.data.loader import ProblemLoader
from rstar2_megatron.rollout.phase import Unfinished
from rstar2_megatron.rollout.stats import combine, trajectory_age
from rstar2_megatron.training import gates
from rstar2_megatron.training.metrics import staleness_metrics
from rstar2_megatron.training.trainer import Clock, StepResult, Trainer, check_dropped
from rstar2_megatron.trajectory import Group, Trajectory


class AsyncTrainer(Trainer):
    """A trainer whose engines go on while the actor trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.continuous = ContinuousRollout(self.coordinator.end, self.coordinator.tokens, self.settings, self._is_rejected)

    def step(
        self,
        step: int,
        loader: ProblemLoader,
        after_rollout: Callable[[], None] = lambda: None,
        after_training: Callable[[Sequence[Group], bool], None] = lambda groups, updated: None,
    ) -> StepResult:
        """Training step `step` (1, 2, ...) on the next batch of the buffer.

        `after_rollout()` and `after_training(groups, updated)` are called as by `Trainer.step`.
        """
        clock = Clock()
        self.continuous.start(loader)
        groups = self.continuous.take()
        check_dropped(groups, self.settings.rollout.max_dropped_share)
        clock.lap("rollout")
        after_rollout()
        clock.lap("checkpoint")
        resampled, shown, batch = self._resample_and_batch(step, groups, clock)
        kept = [t for result in resampled for t in result.kept]
        gates.check_trained_tokens(kept, batch.trained_tokens)
        gates.check_staleness(kept, step - 1, self.settings.algorithm.max_staleness)
        clock.lap("batch")
        self._check_first(kept, batch, version=step - 1)
        actor_metrics = self.train(batch, shown)
        del batch  # Ray frees its blocks
        clock.lap("training")
        after_training(groups, bool(kept))
        clock.lap("save")
        actor_metrics.update(self.sync_weights(version=step))
        clock.lap("sync_weights")
        seconds = clock.laps()
        stats = {**self._engine_stats(groups, kept, step, seconds), **trajectory_age(groups, version=step - 1)}
        return StepResult(step, groups, resampled, actor_metrics, stats, seconds, shown)

    def sync_weights(self, version: int) -> dict[str, float]:
        """As `Trainer.sync_weights`. Generation is interrupted at a token, and goes on with the new weights."""
        if self.continuous.engines_gone:
            self.continuous.pause()  # the next phase begins with every engine that runs
        metrics = super().sync_weights(version)
        self.continuous.new_weights(version)
        return metrics

    def _is_rejected(self, group: Group) -> bool:
        return self.resample(0, [group])[0].rejected  # rejection does not depend on the seed

    def _done_with(self, groups: Sequence[Group]) -> list[Trajectory]:
        """The workers keep the tokens of the groups that are not in this step."""
        return [t for group in groups for t in group.trajectories]

    def _engine_stats(
        self, groups: Sequence[Group], kept: Sequence[Trajectory], step: int, seconds: dict[str, float]
    ) -> dict[str, float]:
        engines, driver = self.continuous.stats()
        counted = combine(engines, seconds["step"]) if engines else {}
        return {
            **counted,
            **driver,
            "trainer_idle_seconds": seconds["rollout"],
            "engine_idle_seconds": counted.get("idle_share", 0.0) * len(engines) * seconds["step"],
            **staleness_metrics(kept, step - 1, self.settings.algorithm.max_staleness),
        }

    # ---------------------------------------------------------------------------------- between steps

    def pause(self) -> None:
        self.continuous.pause()

    def rollout_state(self) -> dict[str, Any]:
        return {"unfinished": self.continuous.state()}

    def restore(self, state: dict[str, Any], version: int) -> None:
        self.continuous.restore(state.get("unfinished") or Unfinished(open=state.get("carried", [])), version)

    def close(self) -> None:
        self.continuous.close()
