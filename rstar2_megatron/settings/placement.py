"""Slots that a YAML's placement names, without starting a cluster.

Pure, except for the query of GPUs. RLinf makes the real placement; these functions serve `--dry-run` and the checks
before a start.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rstar2_megatron.settings.host_memory import total_memory
from rstar2_megatron.settings.schema import AssumedNode, ClusterSettings, Settings

COMPONENTS = ("actor", "rollout", "reward")


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of the cluster: CPU slots of the YAML, or accelerators."""

    count: int
    memory_gb: float | None
    """Memory of one accelerator; None for CPU slots."""
    assumed: bool = False
    """True when no GPU is visible, and `cluster.assumed_node` is planned for."""
    host_gb: float = AssumedNode().host_gb
    """Host memory of a node."""

    @property
    def is_cpu(self) -> bool:
        return self.memory_gb is None


def slots_of(cluster: ClusterSettings, gpus: tuple[int, float] | None = None, host_gb: float | None = None) -> Slots:
    """The slots behind a YAML. `gpus` is (count, GB of one) of this node, from `visible_gpus`.

    host_gb: host memory of this node, from `visible_host_gb`.

    Other nodes cannot be queried from here, so each is assumed to be like this one.
    """
    cpu_slots, node = 0, cluster.assumed_node
    for group in cluster.node_groups or []:
        hardware = group.get("hardware") or {}
        if hardware.get("type") == "CPUSlots":
            cpu_slots += sum(int(c.get("num_slots", 1)) for c in hardware.get("configs") or [])
    if cpu_slots:
        return Slots(cpu_slots, None, host_gb=host_gb or node.host_gb)
    if gpus is None or gpus[0] == 0:
        return Slots(cluster.num_nodes * node.gpus, node.gpu_gb, assumed=True, host_gb=node.host_gb)
    return Slots(cluster.num_nodes * gpus[0], gpus[1], host_gb=host_gb or node.host_gb)


SMI_TIMEOUT_S = 60.0
"""Of nvidia-smi, which without persistence mode (nvidia-smi -pm 1) starts every GPU first."""


@functools.cache
def visible_gpus() -> tuple[int, float]:
    """(GPUs of this machine, GB of the smallest), (0, 0.0) without any. Queries nvidia-smi, not CUDA."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0, 0.0
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        mebibytes = [float(line) for line in text.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0, 0.0
    return len(mebibytes), min(mebibytes, default=0.0) * 2**20 / 1e9


def gpu_problem(gpus: int, visible: str | None) -> str:
    """Why a run for GPUs cannot start on a machine where nvidia-smi names `gpus` GPUs, or "".

    visible: CUDA_VISIBLE_DEVICES. RLinf counts the GPUs of the machine and sets the variable itself in every worker, by number.
    """
    if gpus == 0:
        return (
            "no GPU is visible: nvidia-smi is absent, names none, or did not answer within "
            f"{SMI_TIMEOUT_S:.0f} s (`nvidia-smi -pm 1` keeps the driver ready). On a machine without GPUs register CPU slots "
            "under cluster.node_groups as config/rstar2-tiny-cpu.yaml does"
        )
    names = [name.strip() for name in (visible or "").split(",")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    whole = numbers == list(range(gpus)) or (len(set(names)) == gpus and names[0].startswith("GPU-"))
    if visible is None or whole:
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={visible} hides some of the {gpus} GPUs of this machine, and RLinf would use all of them: unset "
        "it, and name GPUs in the YAML, e.g. 'cluster.component_placement={\"actor,rollout\": 4-7, reward: 4}', or start in a "
        "container that has only these"
    )


def visible_host_gb() -> float:
    """GB of memory of this machine, or of the container or job that this is."""
    return total_memory() / 1e9


def component_slots(cluster: ClusterSettings, total: int) -> dict[str, list[int]]:
    """Slots of actor, rollout and reward.

    Understands `all`, ranks and ranges ("0-3", "0,2-3", 0), several components in one key, and the part
    before ":" of RLinf's "slots:processes". With `node_group` the numbers are those of the whole cluster too: RLinf's
    ModelParallelComponentPlacement takes them so. Raises ValueError for a component that is missing or placed twice, and for
    slots that do not exist.
    """
    placement = cluster.component_placement
    if not isinstance(placement, Mapping):
        raise ValueError(
            f"cluster.component_placement={placement!r} must name actor, rollout and reward, for example "
            '{"actor,rollout,reward": all}'
        )
    written: dict[str, Any] = {}
    for key, value in placement.items():
        for component in (part.strip() for part in str(key).split(",")):
            if component in written:
                raise ValueError(
                    f"cluster.component_placement names {component} twice: {dict(placement)}; give the whole "
                    "mapping, e.g. 'cluster.component_placement={actor: 0-1, rollout: 0, reward: 0}'"
                )
            written[component] = value
    missing = [component for component in COMPONENTS if component not in written]
    if missing:
        raise ValueError(
            f"cluster.component_placement={dict(placement)} does not place {', '.join(missing)}; add "
            f'e.g. "{",".join(missing)}": all'
        )
    slots: dict[str, list[int]] = {}
    for component in COMPONENTS:
        value = written[component]
        place: Any = value.get("placement") if isinstance(value, Mapping) else value
        slots[component] = parse_slots(component, place, total)
    return slots


def collocated(cluster: ClusterSettings, slots: Slots) -> bool:
    """True when an engine is on a slot of the actor, so that both share its memory."""
    places = component_slots(cluster, slots.count)
    return bool(set(places["actor"]) & set(places["rollout"]))


def first_engine(settings: Settings, slots: Slots) -> tuple[int, ...]:
    """Slots of the first engine by their numbers on its node: every n-th of the actor's where its TP is n times as large."""
    first = component_slots(settings.cluster, slots.count)["rollout"][0]
    size, on_node = settings.rollout.tensor_parallel_size, slots.count // settings.cluster.num_nodes
    actor_size = settings.actor.model.tensor_model_parallel_size if collocated(settings.cluster, slots) else 1
    return tuple((first + number * max(1, actor_size // size)) % on_node for number in range(size))


def parse_slots(component: str, value: str | int, total: int) -> list[int]:
    """Slot numbers of one placement string. Raises ValueError naming the value and the slots there are."""
    text = str(value).strip()
    everything = f"there are {total} slots (0-{total - 1})"
    hint = f"cluster.component_placement.{component}={text}"
    found: set[int] = set()
    for part in text.split(","):
        ranks = part.split(":")[0].strip()
        if ranks == "all":
            found.update(range(total))
            continue
        first, dash, last = ranks.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{hint} is not `all`, a slot, or a range such as 0-3; {everything}")
        low, high = int(first), int(last) if dash else int(first)
        if low > high:
            raise ValueError(f"{hint}: the range {ranks} is empty; {everything}")
        if high >= total:
            raise ValueError(f"{hint} names slot {high}, but {everything}; use 0-{total - 1} or add slots")
        found.update(range(low, high + 1))
    return sorted(found)
