"""A real run on the thin model, part by part: a program of checks that keeps its run from one call to the next.

It is `RLRun` with its own order of things: every weight route by itself, then one training step, then its checkpoint. The run
ends with the process, which `NodeAgent` ends after a part that failed its deadline, or after the last part.
"""

from __future__ import annotations

import atexit
import time
from typing import Any, get_args

from rstar2_megatron.cluster.tokens import put_sequences
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.runs.base_run import StopSignals
from rstar2_megatron.runs.check.case import random_batch
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.rl_run import RLRun
from rstar2_megatron.services.close_deadline import close_deadline
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.weights.route import RouteKind, possible_routes

_CLOSE_LIMIT_S = 60.0


class CheckRun(RLRun):
    """The parts of one run, each on its own; a part that fails does not end the others."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, StopSignals())
        self.table = {}
        self._version = 0

    def start(self) -> dict[str, Any]:
        self.begin(1)
        self._start()
        places = (self.actor.call("place", timeout_s=60), self.rollout.call("place", timeout_s=60))
        return {
            "actor_ranks": len(self.actor),
            "engines": len(self.rollout),
            "device": self.cluster.device,
            "routes": list(possible_routes("auto", *places, self.cluster.device)),
        }

    def sync_by(self, kind: Any) -> dict[str, Any]:
        """Change the actor's weights by a step, bring them to all engines by this route, compare checksums."""
        self.trainer.choose_route(kind)
        model = ModelConfig.from_directory(self.settings.rollout.model.model_path)
        batch = random_batch(model, 8, 20, 64, seed=self._version)
        before = self.ask_actor("weights_checksum")[0]
        self.trainer.train(put_sequences(batch))
        after = self.ask_actor("weights_checksum")[0]
        changed = sum(before[name] != value for name, value in after.items())
        if not changed:
            raise RuntimeError("the training step before the sync changed no weight: the sync would prove nothing")
        self._version += 1
        metrics = self.trainer.sync_weights(version=self._version)
        self.trainer.check_weights()
        return {
            "sync_seconds": metrics["actor/sync_seconds"],
            "bytes": metrics["actor/sync_bytes"],
            "bytes_per_second": metrics["actor/sync_bytes_per_second"],
            "handover_seconds": metrics.get("actor/handover_seconds", 0.0),
            "tensors": len(after),
            "changed": changed,
        }

    def step(self) -> dict[str, Any]:
        self.trainer.choose_route(self.settings.actor.weight_sync.route)
        self._cold_start()  # there is none: the first sync, the gate on the weights, a fresh optimizer
        self._train_steps(0)
        row = self.files.metrics.rows()[-1]
        if row.get("train/actor/skipped_update"):
            raise RuntimeError("no trajectory was left to train on: see the engines' logs and the judge")
        return {key: value for key, value in row.items() if isinstance(value, int | float)}

    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint that the step left, loaded by all ranks: its checksums are compared there."""
        directory = self.checkpoints / "global_step_1"
        started = time.perf_counter()
        self.ask_actor("load_checkpoint", str(directory / "actor"))
        seconds = time.perf_counter() - started
        num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        return {"load_seconds": seconds, "bytes": num_bytes}

    def close_in_time(self) -> None:
        self.signals.ignore()
        with close_deadline(_CLOSE_LIMIT_S, 0, self.temporary.remove, self.directory / "close.log"):
            self.close()


_runs: list[CheckRun] = []  # that of this process


def part(job: Job, settings: Settings, name: str) -> dict[str, Any]:
    """Figures of the part: `start`, a weight route, `step` or `checkpoint`. The first one of a process begins by starting."""
    figures: dict[str, Any] = {}
    started = time.perf_counter()
    if not _runs:
        run = CheckRun(settings)
        atexit.register(run.close_in_time)
        run.signals.install()
        _runs.append(run)
        figures = run.start()
    (run,) = _runs
    if name in get_args(RouteKind):
        figures = run.sync_by(name)
    elif name != "start":
        figures = run.step() if name == "step" else run.checkpoint()
    return {**figures, "seconds": time.perf_counter() - started}
