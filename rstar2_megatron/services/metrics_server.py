"""Metrics of a run for Prometheus (`runner.metrics_port`): an HTTP server with the run's own registry."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server

LABELS: dict[str, tuple[str, ...]] = {
    "rstar2_step": (),
    "rstar2_step_metric": ("name",),
    "rstar2_rollout_groups": (),
    "rstar2_rollout_groups_done": (),
    "rstar2_rollout_tokens": (),
    "rstar2_rollout_tokens_per_second": (),
    "rstar2_rollout_seconds_left": (),
    "rstar2_trajectories_running": ("engine",),
    "rstar2_trajectories_waiting": ("engine",),
    "rstar2_tool_calls_in_flight": ("engine",),
    "rstar2_kv_used_tokens": ("engine",),
    "rstar2_kv_capacity_tokens": ("engine",),
}
"""Every metric with its labels. `rstar2_step_metric` has the row of metrics.jsonl of the last step, by `name`."""

_HELP = {
    "rstar2_step": "Finished training steps",
    "rstar2_step_metric": "A metric of the last step, named as in metrics.jsonl",
    "rstar2_rollout_seconds_left": "Estimate of the rest of the rollout phase, in seconds",
}


class PortUnusable(RuntimeError):
    """`runner.metrics_port` cannot be listened on."""


class MetricsServer:
    """Serves until `close`. Values stay until they are set again."""

    def __init__(self, host: str, port: int) -> None:
        self._registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(name, _HELP.get(name, "Of the running rollout phase"), labels, registry=self._registry)
            for name, labels in LABELS.items()
        }
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise PortUnusable(
                f"runner.metrics_port={port} on {host} cannot be listened on: {error.strerror}; choose another, or null"
            ) from error

    def set(self, metric: str, value: float, /, **labels: str) -> None:
        gauge = self._gauges[metric]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def set_step(self, row: Mapping[str, float | None]) -> None:
        """A row of metrics.jsonl."""
        self.set("rstar2_step", row["step"] or 0.0)
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                self.set("rstar2_step_metric", value, name=name)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
