"""Builds the RLinf side of one run: cluster, placement, worker groups, the rollout channel."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from rlinf.scheduler import Channel, Cluster, PlacementStrategy
from rlinf.utils.metric_logger import MetricLogger
from rlinf.utils.placement import ModelParallelComponentPlacement
from rlinf.utils.runner_utils import check_progress

from rstar2_megatron.cluster import cpu_slots  # noqa: F401  registers the hardware type
from rstar2_megatron.cluster.actor_worker import ActorWorker
from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.cluster.existing_ray import ClusterError, check_answers, wait_for_nodes
from rstar2_megatron.cluster.ray_head import RayHead
from rstar2_megatron.cluster.reward_worker import RewardWorker
from rstar2_megatron.cluster.rollout_group import RolloutGroup
from rstar2_megatron.cluster.rollout_worker import RolloutWorker
from rstar2_megatron.settings.placement import visible_gpus
from rstar2_megatron.settings.planning.batch import object_store_bytes
from rstar2_megatron.settings.schema import ClusterSettings, Settings

__all__ = ["TrainingCluster", "await_cluster", "check_progress", "start_loggers"]  # check_progress is RLinf's

logger = logging.getLogger(__name__)

# RLinf places the workers, not Ray. A large number of CPUs keeps Ray from refusing one of RLinf's actors.
_RAY_CPUS_PER_SLOT = 16
_OF_THIS_NODE = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")  # paths that other nodes may lack


class PlacementError(ValueError):
    """The YAML's placement does not fit the cluster."""


def start_loggers(settings: Settings, config: DictConfig) -> MetricLogger:
    """RLinf's loggers of `runner.logger`. Raises OSError; RuntimeError, with the remedy, for a service that does not start."""
    try:
        return MetricLogger(config)
    except OSError:
        raise
    except Exception as error:  # of wandb or swanlab: no login, no network
        raise RuntimeError(
            f"runner.logger.logger_backends={settings.runner.logger.logger_backends} cannot start: {error}; for wandb export "
            "WANDB_API_KEY, or WANDB_MODE=offline; for swanlab log in, or set runner.logger.swanlab_mode=offline"
        ) from error


def await_cluster(cluster: ClusterSettings) -> None:
    """Wait until the Ray cluster has its nodes, because RLinf waits without a deadline. Raises ClusterError."""
    address = os.environ["RAY_ADDRESS"]
    check_answers(address)
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error
    try:
        wait_for_nodes(address, cluster.num_nodes, cluster.node_wait_timeout_s)
    finally:
        ray.shutdown()  # RLinf connects again, in its own namespace


@contextlib.contextmanager
def _not_forwarded(*names: str) -> Iterator[None]:
    """Hide variables that are valid on this node only: RLinf copies the driver's environment to every node."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


class OnePlace(PlacementStrategy):
    """One rank's place of another strategy, for a group of one worker."""

    def __init__(self, strategy: PlacementStrategy, rank: int) -> None:
        super().__init__()
        self._of, self._rank = strategy, rank

    def get_placement(self, cluster: Cluster, isolate_accelerator: bool = True) -> list[Any]:
        place = self._of.get_placement(cluster, isolate_accelerator)[self._rank]
        return [replace(place, rank=0, placement_node_rank=0, local_rank=0, local_world_size=1)]


class TrainingCluster:
    """Ray, RLinf's cluster and placement, and the worker groups of one run.

    Starts a private Ray head on loopback unless RAY_ADDRESS names a cluster. `close()` ends every process that it started,
    and may be called at any time, also while an exception of a signal handler propagates.
    """

    def __init__(self, settings: Settings, config: DictConfig) -> None:
        self.settings = settings
        self.config = config
        self.device = "cpu"
        self._head: RayHead | None = None
        self._groups: list[Any] = []

    def start(self) -> None:
        """Bring up Ray and RLinf and resolve the placement. Raises PlacementError or RayHeadError."""
        if not os.environ.get("RAY_ADDRESS"):
            self._head = RayHead(
                num_cpus=_RAY_CPUS_PER_SLOT * max(2, os.cpu_count() or 2),
                object_store_mb=object_store_bytes(self.settings) >> 20,
            )
            self._head.start()
        else:
            await_cluster(self.settings.cluster)

        for name in ("FlexiblePlacementStrategy", "NodePlacementStrategy", "PackedPlacementStrategy"):
            # They reset their level at every use, and the run's plan already shows the placement.
            logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.WARNING)
        cluster_config = {k: v for k, v in self.config.cluster.items() if k not in ClusterSettings.OWN_KEYS}
        with _not_forwarded(*(_OF_THIS_NODE if self._head is None else ())):
            self._cluster = Cluster(cluster_cfg=OmegaConf.create(cluster_config))
        # RLinf signals the driver when a worker fails, and its handler ends the driver without clean-up.
        # cluster/calls.py raises the same failure as an exception.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self.device = self._device()
        try:
            self._placement = ModelParallelComponentPlacement(self.config, self._cluster)
        except (AssertionError, ValueError, IndexError) as e:
            placement = OmegaConf.to_container(self.config.cluster.component_placement)
            raise PlacementError(
                f"cluster.component_placement={placement} does not fit the cluster's "
                f"{self._cluster.num_accelerators} slots: {e}. Use ranks 0-{self._cluster.num_accelerators - 1}, or "
                "give actor, rollout and reward either the same slots (collocated) or disjoint ones"
            ) from e
        self.channel = Channel.create("rollout")

    def _device(self) -> str:
        """Raises PlacementError when RLinf counts GPUs here that CUDA cannot use: the run would train on the CPU instead."""
        nodes = self._cluster.num_nodes
        types = {str(self._cluster.get_node_info(rank).accelerator_type) for rank in range(nodes)}
        if all("NO_ACCEL" in accelerator for accelerator in types):
            return "cpu"
        has_gpus = nodes == 1 or visible_gpus()[0] > 0  # the driver's node may have none
        if has_gpus and not torch.cuda.is_available():
            raise PlacementError(
                f"the cluster has {self._cluster.num_accelerators} accelerators ({', '.join(sorted(types))}), and CUDA "
                "cannot use those of this machine: the driver must be of the 580 series or newer, nvidia-fabricmanager must "
                "run on machines with NVSwitch, and nothing may hide them (CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}). `.venv/bin/python -c "
                '"import torch; torch.zeros(1).cuda()"` tells the reason'
            )
        return "cuda"

    def launch_actor(self) -> Any:
        return self.launch(ActorWorker, self.settings.actor.group_name, "actor", self.settings)

    def launch_rollout(self) -> Any:
        return self.launch(
            RolloutWorker, self.settings.rollout.group_name, "rollout", self.settings, self.device, max_concurrency=256
        )

    def launch_reward(self) -> Any:
        return self.launch(RewardWorker, self.settings.reward.group_name, "reward", self.settings.reward, max_concurrency=16)

    def launch(self, worker_class: Any, name: str, component: str, *args: Any, **kwargs: Any) -> Any:
        """A group of workers in the place of `component`, by a name that no group had before; `args` are the workers' own."""
        strategy = self._placement.get_strategy(component)
        group = worker_class.create_group(*args).launch(self._cluster, name=name, placement_strategy=strategy, **kwargs)

        def relaunch(rank: int, restart: int) -> tuple[Any, str]:
            """Launch a lost worker again, as a group of one: RLinf's connections of its name lead to the dead process."""
            again = worker_class.create_group(*args, engine=rank).launch(
                self._cluster, name=f"{name}-{rank}-restart-{restart}", placement_strategy=OnePlace(strategy, rank), **kwargs
            )
            return again.worker_info_list[0].worker, f"{again.worker_group_name}:0"

        handle: WorkerGroup
        if component == "rollout":
            handle = RolloutGroup(name, group, relaunch, self.settings.rollout.max_engine_restarts)
        else:
            handle = WorkerGroup(name, group)
        self._groups.append(handle)
        return handle

    def close(self) -> None:
        """End the workers, the Ray connection and the private Ray head."""
        for group in reversed(self._groups):
            with contextlib.suppress(Exception):
                group.kill()
        self._groups.clear()
        with contextlib.suppress(Exception):
            ray.shutdown()
        if Cluster.has_initialized():  # RLinf gives a process one cluster: the next one would be this one
            delattr(Cluster, "_instance")
        if self._head is not None:
            self._head.stop()
            self._head = None
