"""One cluster of Ray and RLinf for all tests here, with one group of senders and one of receivers.

A test that harms workers launches its own by `launch`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rstar2_megatron.cluster import launch as cluster_launch
from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.settings.load import load_settings, to_dict_config
from rstar2_megatron.settings.schema import Settings, WeightSyncSettings
from rstar2_megatron.training.weight_sync import WeightSync
from rstar2_megatron.weights.route import RouteKind
from tests.cluster.weight_ends import Receiver, Sender
from tests.processes import command_line

CALL_S = 120.0  # of calls that take milliseconds; the first one waits for the worker's start
STORE = 96 << 20  # bytes of Ray's object store, little enough for a test to fill it

Launch = Callable[..., Any]
_numbers = itertools.count(1)


@pytest.fixture
def settings() -> Settings:
    return load_settings("rstar2-tiny-cpu", [])


@pytest.fixture(scope="package")
def cluster() -> Iterator[TrainingCluster]:
    """Its end leaves no process."""
    settings = load_settings("rstar2-tiny-cpu", [])
    cluster = TrainingCluster(settings, to_dict_config(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_launch, "object_store_bytes", lambda settings: STORE)
        cluster.start()
    try:
        yield cluster
    finally:
        family = ray_processes()
        cluster.close()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert family and not alive


@pytest.fixture
def channel(cluster: TrainingCluster) -> Iterator[Any]:
    """A rollout channel of the test's own: of a phase that ends by a failure messages are left."""
    from rlinf.scheduler import Channel  # here: rstar2_megatron.cluster sets Ray's environment first

    name = f"channel{next(_numbers)}"
    yield Channel.create(name)
    kill_channel(name)


def kill_channel(name: str) -> None:
    import ray  # here: as above

    actors = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["name"].startswith(f"{name}:")]
    for actor in actors:
        ray.kill(ray.get_actor(**actor))


def ray_processes() -> list[psutil.Process]:
    """Everything that the cluster runs: the head of RAY_ADDRESS, which this process started, and its descendants."""
    port = os.environ["RAY_ADDRESS"].rpartition(":")[2]
    (head,) = [child for child in psutil.Process().children() if f"--port={port}" in command_line(child)]
    return [head, *head.children(recursive=True)]


@pytest.fixture
def launch(cluster: TrainingCluster) -> Iterator[Launch]:
    """Launches a group by `launch(class, component, *arguments)` and kills it when the test ends."""
    groups = []

    def launched(worker_class: Any, component: str, *args: Any, **kwargs: Any) -> Any:
        group = cluster.launch(worker_class, f"{worker_class.__name__}{next(_numbers)}", component, *args, **kwargs)
        groups.append(group)
        return group

    yield launched
    for group in groups:
        group.kill()


@pytest.fixture(scope="package")
def launched_senders(cluster: TrainingCluster) -> WorkerGroup:
    group: WorkerGroup = cluster.launch(Sender, "Senders", "actor")
    return group


@pytest.fixture(scope="package")
def launched_receivers(cluster: TrainingCluster) -> WorkerGroup:
    group: WorkerGroup = cluster.launch(Receiver, "Receivers", "rollout", max_concurrency=16)
    return group


@pytest.fixture
def senders(launched_senders: WorkerGroup) -> WorkerGroup:
    """Two actor ranks that send weights, as launched."""
    launched_senders.call("reset", timeout_s=CALL_S)
    return launched_senders


@pytest.fixture
def receivers(launched_receivers: WorkerGroup) -> WorkerGroup:
    """Two rollout workers that receive weights, as launched."""
    launched_receivers.call("reset", timeout_s=CALL_S)
    return launched_receivers


def for_sync(
    settings: Settings, senders: WorkerGroup, receivers: WorkerGroup, directory: Path, route: str = "auto"
) -> Settings:
    """The settings of a sync between these groups."""
    settings.runner.step_timeout_s = 60.0
    settings.actor.weight_sync = WeightSyncSettings.model_validate(
        {"route": route, "bucket_mb": 1, "directory": str(directory)}
    )
    settings.actor.group_name, settings.rollout.group_name = senders.name, receivers.name
    return settings


def sync_in_turn(settings: Settings, senders: WorkerGroup, receivers: Any, directory: Path, *routes: RouteKind) -> WeightSync:
    """A sync by these routes, each when the one before has failed, with a bucket for each tensor.

    As on GPUs: the buffers of cuda_ipc lie in host memory here.
    """
    for_sync(settings, senders, receivers, directory).actor.weight_sync.bucket_mb = 0
    sync = WeightSync(settings, senders, receivers, "cuda")
    sync._routes = list(routes) or sync._routes
    return sync


def assert_synced(senders: WorkerGroup, receivers: WorkerGroup, version: int) -> None:
    """Every receiver holds exactly what the senders have, as this version."""
    sums = senders.call("weights_checksum", timeout_s=CALL_S)[0]
    held = receivers.call("held", timeout_s=CALL_S)
    assert held and held == [(version, sums)] * len(held)
