"""The Prometheus endpoint of a run, and the Grafana dashboard that reads it."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rstar2_megatron.records.step_shares import SHARES
from rstar2_megatron.rollout.live_view import export_progress
from rstar2_megatron.rollout.progress import EngineLoad, Progress
from rstar2_megatron.services.metrics_server import LABELS, MetricsServer, PortUnusable
from rstar2_megatron.services.process import free_port
from tests.training.test_metrics import measured

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/grafana/rstar2.json"


def scrape(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_scrape_has_the_step_and_the_running_phase() -> None:
    port = free_port("127.0.0.1")
    server = MetricsServer("127.0.0.1", port)
    try:
        server.set_step({"step": 7.0, "rollout/pass_rate": 0.5, "eval/average": None, "time/step": float("nan")})
        loads = [EngineLoad(0, 10, [5, 6], 3, 1, 40, 100), EngineLoad(1, 10, [5], 0, 0, 20, 100)]
        export_progress(server, Progress("", 2, 8, 20, 4.0, 12.0, loads))
        values = scrape(port)
    finally:
        server.close()
    assert values["rstar2_step",] == 7 and values["rstar2_step_metric", "rollout/pass_rate"] == 0.5
    assert ("rstar2_step_metric", "eval/average") not in values
    assert values["rstar2_rollout_groups_done",] == 2 and values["rstar2_rollout_seconds_left",] == 12
    assert values["rstar2_trajectories_running", "0"] == 2 and values["rstar2_kv_used_tokens", "1"] == 20
    assert {name for name, *_ in values} == set(LABELS)
    again = MetricsServer("127.0.0.1", port)  # the port is free again
    again.close()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortUnusable, match=rf"runner\.metrics_port={taken.getsockname()[1]} .* in use"):
            MetricsServer("127.0.0.1", taken.getsockname()[1])


def test_the_dashboard_reads_metrics_that_exist() -> None:
    """Every panel has what Grafana's schema 39 asks for, and every expression names exported metrics and their labels."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] == 39 and dashboard["title"] and dashboard["uid"]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24, "panels overlap"
    written = {*measured()[1], "eval/average"} | {f"share/{name}" for name in SHARES}
    used = set()
    for panel in panels:
        assert panel["type"] in ("timeseries", "stat") and panel["targets"]
        for target in panel["targets"]:
            assert target["refId"] and panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            for name, selector in re.findall(r"(rstar2_\w+)\{([^}]*)\}", target["expr"]):
                used.add(name)
                labels = set(re.findall(r"(\w+)=~?\"", selector))
                assert labels <= {"instance", *LABELS[name]}, target["expr"]
                for metric in re.findall(r'name="([^"]+)"', selector):
                    assert metric in written, metric
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {"engine"}
    assert used == set(LABELS) - {"rstar2_rollout_tokens"}
