"""The training step: take graded groups, resample, update, sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rstar2_megatron.algorithm.batch import TrainBatch, TrainSequence, train_sequence
from rstar2_megatron.algorithm.credit import advantages_of, overlong_metrics
from rstar2_megatron.algorithm.roc import ResampleResult
from rstar2_megatron.algorithm.selection import Selection
from rstar2_megatron.cluster.calls import NoEngineLeft, WorkerGroup, WorkerLost
from rstar2_megatron.cluster.phases.coordinator import RolloutCoordinator
from rstar2_megatron.cluster.rollout_group import RolloutGroup
from rstar2_megatron.cluster.tokens import put_sequences
from rstar2_megatron.data.loader import ProblemLoader
from rstar2_megatron.records.samples import ShownGroup, choose_shown
from rstar2_megatron.records.trace import CHECKPOINT, SYNC, TRACE
from rstar2_megatron.rollout.dropped import check_dropped
from rstar2_megatron.rollout.phase import drop_held
from rstar2_megatron.rollout.stats import trajectory_age
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training import gates
from rstar2_megatron.training.colocation import Colocation
from rstar2_megatron.training.group_source import make_source
from rstar2_megatron.training.metrics import staleness_metrics
from rstar2_megatron.training.weight_sync import WeightSync
from rstar2_megatron.trajectory import Group, Trajectory
from rstar2_megatron.weights.route import RouteKind


@dataclass
class StepResult:
    """Everything that one step produced: the input of metrics and of the files of a run."""

    groups: list[Group]
    resampled: list[ResampleResult]
    actor_metrics: dict[str, float]
    rollout_stats: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    shown: list[ShownGroup] = field(default_factory=list)
    """Groups that are written completely to trajectories.jsonl."""


class Trainer:
    """Drives the worker groups through training steps. Step numbers count finished updates, from 1."""

    def __init__(
        self,
        settings: Settings,
        actor: WorkerGroup,
        rollout: RolloutGroup,
        coordinator: RolloutCoordinator,
        *,
        device: str,
        colocated: bool,
    ) -> None:
        """colocated: actor and engines share accelerators, and one sleeps while the other works (`colocation`)."""
        self.settings = settings
        self.actor = actor
        self.rollout = rollout
        self.coordinator = coordinator
        self.timeout_s = settings.runner.step_timeout_s
        self._selection = Selection(settings.algorithm)
        self.source = make_source(settings, coordinator, self._is_rejected)
        self._device = device
        self._weight_sync = WeightSync(settings, actor, rollout, device)
        self._version = 0
        self._colocation: Colocation | None = None
        if colocated:
            resync = lambda: self.sync_weights(self._version)  # noqa: E731
            self._colocation = Colocation(actor, rollout, resync, self.timeout_s)
        self._first_batch_unchecked = True  # until the first batch has passed the step-0 gates

    def step(
        self,
        step: int,
        loader: ProblemLoader,
        after_rollout: Callable[[], None] = lambda: None,
        after_training: Callable[[Sequence[Group], bool], None] = lambda groups, updated: None,
    ) -> StepResult:
        """Training step `step` (1, 2, ...) on the next groups of the source.

        `after_rollout()` is called before the actor trains, `after_training(groups, updated)` before its weights go to the
        engines, while it still holds the accelerator; `updated`: the step had something to train on.
        """
        clock = Clock()
        groups = self.next_groups(step, loader)
        clock.lap("rollout")
        after_rollout()
        clock.lap("checkpoint")
        resampled, shown, batch = self._resample_and_batch(step, groups, clock)
        kept = [t for result in resampled for t in result.kept]
        gates.check_trained_tokens(kept, batch.trained_tokens)
        if bound := self.settings.algorithm.max_staleness:
            gates.check_staleness(kept, step - 1, bound)
        clock.lap("batch")
        self._check_first(kept, batch, version=step - 1)
        actor_metrics = {**self.train(batch, shown), **overlong_metrics(kept, self.settings.algorithm)}
        del batch  # Ray frees its blocks
        clock.lap("training")
        after_training(groups, bool(kept))
        clock.lap("save")
        actor_metrics.update(self.sync_weights(version=step))
        clock.lap("sync_weights")
        seconds = clock.laps()
        stats = {
            **self.source.stats(seconds),
            **(staleness_metrics(kept, step - 1, bound) if bound else {}),
            **trajectory_age(groups, version=step - 1),
        }
        return StepResult(groups, resampled, actor_metrics, stats, seconds, shown)

    def next_groups(self, step: int, loader: ProblemLoader) -> list[Group]:
        """`GroupSource.next`. When no engine is left, lost workers are started again with the present weights.

        Raises NoEngineLeft when none can be (`rollout.max_engine_restarts`).
        """
        while True:
            try:
                return self.source.next(step, loader)
            except NoEngineLeft:
                if not self.rollout.restartable:
                    raise
                self.source.no_engine_left()
                self.sync_weights(self._version)

    def _resample_and_batch(
        self, step: int, groups: Sequence[Group], clock: Clock
    ) -> tuple[list[ResampleResult], list[ShownGroup], TrainBatch]:
        """Tokens that a rollout worker took along when it died are dropped, within `rollout.max_dropped_share`."""
        while True:
            resampled = self.resample(step, groups)
            shown = choose_shown(groups, resampled, self.settings.runner.save_trajectories_per_step)
            clock.lap("resample")
            try:
                self._fetch_tokens(groups, shown)
                return resampled, shown, self.build_batch(resampled, groups)
            except WorkerLost as error:
                self.rollout.lose(error.rank, str(error))
                drop_held((t for group in groups for t in group.trajectories), error.rank)
                check_dropped(groups, self.settings.rollout.max_dropped_share)

    def resample(self, step: int, groups: Sequence[Group]) -> list[ResampleResult]:
        """Filter and resample every group, under seeds of step and problem (exact on resume)."""
        seeds = [f"{self.settings.data.seed}-{step}-{group.problem.query_id}" for group in groups]
        return self._selection.resample(groups, seeds)

    def _is_rejected(self, group: Group) -> bool:
        return self.resample(0, [group])[0].rejected  # rejection does not depend on the seed

    def _fetch_tokens(self, groups: Sequence[Group], shown: Sequence[ShownGroup]) -> None:
        """Fetch the tokens that files need: of all trajectories, or of the shown groups and the first usable one."""
        if self.settings.runner.save_rollout_tokens:
            wanted = list(groups)
        else:
            wanted = [one.group for one in shown] + [group for group in groups if group.usable][:1]
        self.coordinator.tokens.fetch(t for group in wanted for t in group.trajectories)

    def build_batch(self, resampled: Sequence[ResampleResult], groups: Sequence[Group]) -> TrainBatch:
        """Advantages over each kept group, and its trajectories in training form.

        The rollout workers then forget the tokens of all `groups`.
        """
        advantages = advantages_of([result.kept for result in resampled], self.settings.algorithm)
        kept = [t for result in resampled for t in result.kept]
        return self.coordinator.tokens.put_batch(kept, advantages, [t for group in groups for t in group.trajectories])

    def train(self, batch: TrainBatch, shown: Sequence[ShownGroup] = ()) -> dict[str, float]:
        """One update of the actor, or none, which is counted, when every group was rejected.

        `shown` groups get the actor's log-probs before the update.
        """
        if not len(batch):
            return {"actor/skipped_update": 1.0}
        metrics: dict[str, float] = {"actor/skipped_update": 0.0}
        self._score(shown)
        metrics.update(self.actor.call("train_step", batch, timeout_s=self.timeout_s)[0])
        masked = metrics.get("actor/masked_tokens", 0.0)
        gates.check_actor_tokens(batch.trained_tokens, metrics["actor/trained_tokens"] + masked)
        return metrics

    def score(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """The actor's log-prob of every token of each sequence (0.0 at position 0)."""
        batch = put_sequences(sequences)
        logprobs: list[np.ndarray] = self.actor.call("compute_logprobs", batch, timeout_s=self.timeout_s)[0]
        return logprobs

    def _score(self, shown: Sequence[ShownGroup]) -> None:
        sequences = [train_sequence(t) for group in shown for t in group.trajectories]
        if not sequences:
            return
        logprobs = iter(self.score(sequences))
        for group in shown:
            group.actor_logprobs = [next(logprobs)[len(t.prompt_ids) :] for t in group.trajectories]

    def sync_weights(self, version: int) -> dict[str, float]:
        """Bring every engine to the actor's weights and stamp them `version`. Lost rollout workers are started again before.

        After a fallback to another route, or a worker's restart, the weights are compared by checksum. Raises NoEngineLeft when
        no engine is left and none can be started again (`rollout.max_engine_restarts`).
        """
        self._version = version
        self.source.before_sync()
        while True:
            try:
                metrics = self._sync_once(version)
                break
            except NoEngineLeft:
                if not self.rollout.restartable:
                    raise
                self.source.no_engine_left()
        self.source.new_weights(version)
        return metrics

    def _sync_once(self, version: int) -> dict[str, float]:
        restarted = self._restart_workers()
        fallbacks = self._weight_sync.fallbacks
        if self._colocation is not None:
            self._colocation.wake_for_sync()
        metrics = self._weight_sync.run(version)
        if self._colocation is not None:
            self._colocation.weights_synced()
            metrics["actor/handover_seconds"] = self._colocation.pop_seconds()
        if restarted or self._weight_sync.fallbacks > fallbacks:
            self.check_weights()
        return metrics

    def _restart_workers(self) -> list[int]:
        """Start lost workers again, and engines that would find the actor's weights in the sync, which loads theirs."""
        asked = self.rollout.start("engine_lost")  # notes workers that died since the last call
        told = asked.result(self.timeout_s)
        lost = [rank for rank, is_lost in zip(asked.ranks, told, strict=True) if is_lost and self._colocation is not None]
        if not (lost or self.rollout.restartable):
            return []
        self.source.pause()
        timeout_s = self.settings.rollout.engine_start_timeout_s
        if self._colocation is not None:
            self._colocation.clear()
            for rank in lost:
                if reason := self.rollout.call("restart_engine", ranks=[rank], timeout_s=timeout_s)[0]:
                    self.rollout.lose(rank, reason)
        restarted = [rank for rank in lost if rank not in self.rollout.lost] + self.rollout.restart(timeout_s)
        if self._colocation is not None and restarted:
            self._colocation.join(restarted)
        return restarted

    def choose_route(self, wanted: Literal["auto"] | RouteKind) -> None:
        """Sync by this route from now on, as `actor.weight_sync.route` would. Raises ValueError when it cannot work here."""
        sync = self.settings.actor.weight_sync.model_copy(update={"route": wanted})
        actor = self.settings.actor.model_copy(update={"weight_sync": sync})
        settings = self.settings.model_copy(update={"actor": actor})
        self._weight_sync = WeightSync(settings, self.actor, self.rollout, self._device)

    def check_weights(self) -> None:
        """Step-0 gate: the engines hold exactly the actor's weights."""
        ours = self.actor.start("weights_checksum")
        theirs = self.rollout.start("weights_checksum")
        sums_of_engines = theirs.result(self.timeout_s)
        actor_sums = ours.result(self.timeout_s)[0]
        for rank, engine_sums in zip(theirs.ranks, sums_of_engines, strict=True):
            if engine_sums is not None:
                gates.check_weights(actor_sums, engine_sums, rank)

    def _check_first(self, kept: Sequence[Trajectory], batch: TrainBatch, version: int) -> None:
        """Step-0 gate, of the first batch that has trajectories of the actor's weights, `version`, alone.

        On tokens of earlier weights actor and engine need not agree.
        """
        current = [i for i, t in enumerate(kept) if t.oldest_version == version]
        if self._first_batch_unchecked and current:
            chosen = batch.select(current)
            difference = self.actor.call("compare_logprobs", chosen, timeout_s=self.timeout_s)[0]
            gates.check_logprobs(difference, self.settings.actor.model.precision)
            self._first_batch_unchecked = False


# laps that have a row of their own in a trace; the others are the driver's
_LAP_ROWS = {"save": CHECKPOINT, "checkpoint": CHECKPOINT, "sync_weights": SYNC}


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name] = now - self._last
        TRACE.add(name, self._last, now, _LAP_ROWS.get(name))
        self._last = now

    def laps(self) -> dict[str, Any]:
        return {**self._laps, "step": time.monotonic() - self._start}
