"""Sends the actor's weights to every engine, by the best route that works."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from rstar2_megatron.cluster.calls import DeadlineExceeded, NoEngineLeft, PendingCall, WorkerFailed, WorkerGroup
from rstar2_megatron.cluster.rollout_group import RolloutGroup
from rstar2_megatron.cluster.weight_transfer import Sent
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.weights.route import STEP_TIMEOUT_S, Place, RouteKind, WeightRoute, make_route, possible_routes

logger = logging.getLogger(__name__)
# Of calls that move nothing: one that takes longer is stuck, and the run ends with its name.
_SHORT_CALL_S = 120.0
FIRST_STEP_TIMEOUT_S = 120.0  # of one bucket: the first sync by a route also makes its communicators, which takes longer


class WeightSync:
    """Uses the best route until it fails, then the next one for the rest of the run."""

    def __init__(self, settings: Settings, actor: WorkerGroup, rollout: RolloutGroup, device: str) -> None:
        """Raises ValueError when `actor.weight_sync.route` names one that cannot work here."""
        self._settings, self._actor, self._rollout = settings, actor, rollout
        self._timeout_s = settings.runner.step_timeout_s
        self._actor_places = actor.call("place", timeout_s=_SHORT_CALL_S)
        self._engine_places: list[Place | None] = []  # None: lost
        self._seen_changes = -1
        self._look_at_engines()
        there = [place for place in self._engine_places if place is not None]
        self._routes = possible_routes(settings.actor.weight_sync.route, self._actor_places, there, device)
        self._proved: set[RouteKind] = set()  # by which a sync has succeeded
        self._warned = False
        self.fallbacks = 0
        """Number of routes that have failed."""

    @property
    def route(self) -> RouteKind:
        """The route in use, or the first to be tried."""
        return self._routes[0]

    def run(self, version: int) -> dict[str, float]:
        """Send the weights to all engines and give them `version`; returns seconds, bytes, bytes a second, failed routes.

        A route that fails gives way to the next one, which sends everything again; the failure of the last is raised.
        An engine that is lost on the way is started again with the new weights and costs no route. One that cannot be
        started again is lost with its worker. A worker that dies on the way is left out. Raises NoEngineLeft when no worker
        is left.
        """
        while True:
            self._look_at_engines()
            if not self._rollout.alive:
                raise NoEngineLeft(f"no engine is left: {[*self._rollout.lost.values()][-1]}")
            try:
                metrics = self._transfer(self._route(), version)
            except WorkerFailed as error:
                if self._rollout.changes != self._seen_changes:  # the route is not at fault
                    continue
                if len(self._routes) == 1:
                    raise
                failed = self._routes.pop(0)
                self.fallbacks += 1
                logger.warning("weight sync by %s failed, trying %s: %s", failed, self.route, error)
                continue
            if self._rollout.alive:
                self._proved.add(self.route)
                return {**metrics, "actor/sync_fallbacks": float(self.fallbacks)}

    def _transfer(self, route: WeightRoute, version: int) -> dict[str, float]:
        """One attempt. Raises WorkerFailed after every worker has left it, so that another attempt can begin."""
        started = time.perf_counter()
        receiving = self._rollout.start("receive_weights", route, version)
        sending = self._actor.start("send_weights", route, self._rollout.workers)
        try:
            sent = sending.result(self._timeout_s, beside=receiving)
            lost = receiving.result(self._timeout_s)
        except WorkerFailed as error:
            self._rollout.call("abort_weights", route, str(error), timeout_s=route.step_timeout_s)
            for call in (sending, receiving):
                if running := call.running(2 * route.step_timeout_s):
                    ranks = ", ".join(map(str, running))
                    raise DeadlineExceeded(
                        f"{call.name} is stuck on rank {ranks}, as a call to the device that never returns: it did not end "
                        f"within {2 * route.step_timeout_s:.0f} s after a failure of the weight sync by {route.kind}. The same "
                        f"command resumes from the last checkpoint. The failure: {error}"
                    ) from error
            with contextlib.suppress(WorkerFailed):
                receiving.check()  # notes workers that died
            raise
        told = receiving
        if route.kind == "cuda_ipc":
            told = self._keep_host_copy(route, version, sent)
            # it starts lost engines again
            lost = told.result(self._settings.rollout.engine_start_timeout_s + _SHORT_CALL_S)
        self._actor.call("forget_weights", timeout_s=_SHORT_CALL_S)
        for rank, reason in zip(told.ranks, lost, strict=True):
            if reason:
                self._rollout.lose(rank, reason)
        seconds = time.perf_counter() - started
        num_bytes = max(figures.num_bytes for figures in sent)
        return {
            "actor/sync_seconds": seconds,
            "actor/sync_bytes": float(num_bytes),
            "actor/sync_bytes_per_second": num_bytes / max(seconds, 1e-9),
        }

    def _look_at_engines(self) -> None:
        """Tell the workers of each other, when one was lost or started."""
        while self._seen_changes != self._rollout.changes:
            self._seen_changes = self._rollout.changes
            call = self._rollout.start("place")
            places = dict(zip(call.ranks, call.result(_SHORT_CALL_S)))
            self._engine_places = [places.get(rank) for rank in range(len(self._rollout))]
            self._rollout.call("set_engine_workers", self._rollout.workers, timeout_s=_SHORT_CALL_S)

    def _keep_host_copy(self, route: WeightRoute, version: int, sent: list[Sent]) -> PendingCall:
        """Tell every engine where its node's host copy is. Result: why engines could not be started again, or ""."""
        copies: dict[int, dict[int, str]] = {}
        for node, figures in zip(route.actor_nodes, sent, strict=True):
            copies.setdefault(node, {}).update(figures.host_copies)
        whole = {n: [c[i] for i in sorted(c)] for n, c in copies.items() if len(c) == sent[0].num_buckets}
        if len(whole) < len(copies) and not self._warned:
            self._warned = True
            logger.warning("a node has no room for a copy of the weights: an engine lost there is gone until the next update")
        return self._rollout.start("keep_weights", whole, version)

    def _route(self) -> WeightRoute:
        sync, runner = self._settings.actor.weight_sync, self._settings.runner
        directory = sync.directory or str(Path(runner.output_dir) / runner.experiment_name / "weights")
        return make_route(
            self.route,
            self._settings.actor.group_name,
            self._actor_places,
            self._engine_places,
            bucket_bytes=sync.bucket_mb << 20,
            directory=str(Path(directory).resolve()),
            step_timeout_s=STEP_TIMEOUT_S if self.route in self._proved else FIRST_STEP_TIMEOUT_S,
        )
