"""Base of runs on Ray: the cluster with its worker groups."""

from __future__ import annotations

import os
from typing import Any

from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.runs.base_run import BaseRun, StopSignals
from rstar2_megatron.settings.load import to_dict_config
from rstar2_megatron.settings.schema import Settings


class ClusterRun(BaseRun):
    """A run with Ray, RLinf and worker groups."""

    actor: WorkerGroup

    def __init__(self, settings: Settings, signals: StopSignals) -> None:
        super().__init__(settings, signals)
        self.cluster = TrainingCluster(settings, to_dict_config(settings))
        self._closing.callback(self.cluster.close)  # closed last, because closing runs in reverse order

    def ask_actor(self, method: str, *arguments: Any) -> Any:
        """What the actor's ranks return, as a list, within the deadline of a step."""
        return self.actor.call(method, *arguments, timeout_s=self.settings.runner.step_timeout_s)

    def close(self) -> None:
        """End everything that the run started, then workers and Ray. Never raises."""
        # Calls that are still running fail, and nothing waits for them: Ray would print a traceback for each.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        # What Ray says of processes that have died, or that end now, would stand below the reason of the end.
        from ray._private.ray_logging import global_worker_stdstream_dispatcher  # here: `cluster` sets Ray's environment first

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
        super().close()
