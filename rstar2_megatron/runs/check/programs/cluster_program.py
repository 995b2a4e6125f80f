"""A real run on the thin model, part by part: python -m ...check.programs.cluster_program CONFIG EVENTS PART...

It is `RLRun` with its own order of things: every weight route by itself, then one training step, then its checkpoint. What
became of each part is a line of EVENTS, so that the process that started it knows which part hangs.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rstar2_megatron.cluster.tokens import put_sequences
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.runs.base_run import StopSignals
from rstar2_megatron.runs.check.case import random_batch
from rstar2_megatron.runs.check.programs.cluster_names import CHECKPOINT, ROUTES, START, STEP
from rstar2_megatron.runs.rl_run import RLRun
from rstar2_megatron.services.close_deadline import close_deadline
from rstar2_megatron.settings.load import load
from rstar2_megatron.weights.route import possible_routes

_CLOSE_LIMIT_S = 60.0


class CheckRun(RLRun):
    """The parts of one run, each on its own; a part that fails does not end the others."""

    def __init__(self, settings: Any, signals: StopSignals, events: Path, parts: list[str]) -> None:
        super().__init__(settings, signals)
        self._events, self._parts = events, parts
        self._version = 0

    def train(self) -> None:
        self.table = {}
        if not self._part(START, self._start_all):
            return
        for kind in ROUTES:
            if kind in self._parts:
                self._part(kind, lambda kind=kind: self._sync_by(kind))  # type: ignore[misc]
        if STEP in self._parts:
            self._part(STEP, self._one_step)
        if CHECKPOINT in self._parts:
            self._part(CHECKPOINT, self._load_again)

    def _part(self, name: str, body: Callable[[], dict[str, Any]]) -> bool:
        self._tell(name, "begun")
        started = time.perf_counter()
        try:
            figures = body()
        except Exception as error:
            self._tell(name, "failed", words=f"{error}", trace=traceback.format_exc())
            return False
        self._tell(name, "passed", figures={**figures, "seconds": time.perf_counter() - started})
        return True

    def _tell(self, name: str, state: str, **more: Any) -> None:
        with self._events.open("a") as file:
            file.write(json.dumps({"part": name, "state": state, **more}, default=str) + "\n")

    def _start_all(self) -> dict[str, Any]:
        self.begin(1)
        self._start()
        places = (self.actor.call("place", timeout_s=60), self.rollout.call("place", timeout_s=60))
        return {
            "actor_ranks": len(self.actor),
            "engines": len(self.rollout),
            "device": self.cluster.device,
            "routes": list(possible_routes("auto", *places, self.cluster.device)),
        }

    def _sync_by(self, kind: Any) -> dict[str, Any]:
        """Change the actor's weights by a step, bring them to all engines by this route, compare checksums."""
        timeout = self.settings.runner.step_timeout_s
        self.trainer.choose_route(kind)
        model = self._model_config()
        batch = random_batch(model, 8, 20, 64, seed=self._version)
        before = self.actor.call("weights_checksum", timeout_s=timeout)[0]
        self.trainer.train(put_sequences(batch))
        after = self.actor.call("weights_checksum", timeout_s=timeout)[0]
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

    def _model_config(self) -> ModelConfig:
        return ModelConfig.from_directory(self.settings.rollout.model.model_path)

    def _one_step(self) -> dict[str, Any]:
        self.trainer.choose_route(self.settings.actor.weight_sync.route)
        self._cold_start()  # there is none: the first sync, the gate on the weights, a fresh optimizer
        self._train_steps(0)
        row = self.files.metrics.rows()[-1]
        if row.get("train/actor/skipped_update") or row.get("actor/skipped_update"):
            raise RuntimeError("no trajectory was left to train on: see the engines' logs and the judge")
        return {key: value for key, value in row.items() if isinstance(value, int | float)}

    def _load_again(self) -> dict[str, Any]:
        """The checkpoint that the step left, loaded by all ranks: its checksums are compared there."""
        directory = self.checkpoints / "global_step_1"
        timeout = self.settings.runner.step_timeout_s
        started = time.perf_counter()
        self.actor.call("load_checkpoint", str(directory / "actor"), timeout_s=timeout)
        seconds = time.perf_counter() - started
        num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        return {"load_seconds": seconds, "bytes": num_bytes}


def main(config: str, events: str, *parts: str) -> int:
    """Run the parts; 0 when the program came to its end, whatever became of them."""
    settings = load(config).settings
    signals = StopSignals()
    signals.install()
    run = CheckRun(settings, signals, Path(events), list(parts))
    code = 0
    try:
        run.train()
    except BaseException as error:
        if not (stopped := signals.stop_behind(error)):
            raise
        code = stopped.exit_code
    finally:
        signals.ignore()
        with close_deadline(_CLOSE_LIMIT_S, code, run.temporary.remove, run.directory / "close.log"):
            run.close()
        signals.restore()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
