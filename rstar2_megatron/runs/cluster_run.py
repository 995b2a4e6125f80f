"""What runs on Ray share: the cluster with its worker groups."""

from __future__ import annotations

import os

from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.runs.base_run import BaseRun, StopSignals
from rstar2_megatron.settings.load import to_dict_config
from rstar2_megatron.settings.schema import Settings


class ClusterRun(BaseRun):
    """A run with Ray, RLinf and worker groups."""

    def __init__(self, settings: Settings, signals: StopSignals) -> None:
        super().__init__(settings, signals)
        self.cluster = TrainingCluster(settings, to_dict_config(settings))
        self._closing.append(self.cluster.close)  # the last to end: what a run starts later ends before it

    def close(self) -> None:
        """End workers and Ray, and what subclasses started. Never raises."""
        # Calls that the end cuts off fail, and nobody waits for them any more: Ray would print each one's traceback.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        super().close()
