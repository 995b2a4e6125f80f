"""Bandwidth of collectives between ranks: NCCL on GPUs, gloo on CPU slots."""

from __future__ import annotations

import time
from datetime import timedelta

from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.nodes import values
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.check.result import Check, CheckFailed, Finding

# Bus bandwidth that the plan's share of peak FLOP/s takes for granted: NVLink 4 gives 450 GB/s each way, NCCL reaches about
# four fifths of it; between nodes eight 400 Gb/s cards of which the slowest decides. Below `LEAST` something is misconfigured.
PLANNED_NODE, LEAST_NODE = 360e9, 150e9
PLANNED_NETWORK, LEAST_NETWORK = 40e9, 5e9
_MEGABYTES = {"cuda": 1024, "cpu": 16}
_PROGRAM = "rstar2_megatron.runs.check.subjects.collectives:all_reduce"


def all_reduce(job: Job, megabytes: int) -> dict[str, float]:
    """Bytes a second over the bus of an all-reduce, in NCCL's way of counting, and whether the sum was right."""
    import torch  # here: the driver reads this file and does no torch work
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=job.init_method,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=60),
    )
    numbers = torch.full((megabytes << 18,), float(job.rank + 1), device=job.device)
    dist.all_reduce(numbers)
    wanted = job.world_size * (job.world_size + 1) / 2
    wrong = int((numbers != wanted).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {numbers.numel()} sums are wrong")
    rounds = 10 if job.device == "cuda" else 3
    best = float("inf")
    for _ in range(3):
        _wait(job)
        started = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(numbers.fill_(1.0))
        _wait(job)
        best = min(best, (time.perf_counter() - started) / rounds)
    dist.barrier()
    dist.destroy_process_group()
    factor = 2 * (job.world_size - 1) / job.world_size
    return {"bus_bytes_per_s": factor * numbers.nbytes / best, "seconds": best}


def _wait(job: Job) -> None:
    if job.device == "cuda":
        import torch

        torch.cuda.synchronize()


def inside_nodes(context: Context) -> Finding:
    nodes = context.nodes.on_each(_PROGRAM, context.slots_per_node, 110.0, megabytes=_MEGABYTES[context.device])
    rates = [min(value["bus_bytes_per_s"] for value in values(answers)) for answers in nodes]
    return judge(rates, PLANNED_NODE, LEAST_NODE, gpu=context.device == "cuda", what="inside a node")


def between_nodes(context: Context) -> Finding:
    answers = context.nodes.across(_PROGRAM, context.slots_per_node, 110.0, megabytes=_MEGABYTES[context.device])
    rates = [min(value["bus_bytes_per_s"] for value in answers)]
    return judge(rates, PLANNED_NETWORK, LEAST_NETWORK, gpu=context.device == "cuda", what="over all nodes")


def judge(rates: list[float], planned: float, least: float, *, gpu: bool, what: str) -> Finding:
    """Bus bandwidth against the plan's figure, which is for GPUs."""
    slowest = min(rates)
    words = f"{slowest / 1e9:.1f} GB/s {what}"
    figures = {"bus_bytes_per_s": rates, "planned_bytes_per_s": planned if gpu else None}
    if not gpu:
        return Finding(f"{words} (gloo; the plan has no figure for CPUs)", figures)
    words += f"; planned {planned / 1e9:.0f}"
    if slowest < least:
        raise CheckFailed(f"{words}, below the least of {least / 1e9:.0f}: traffic takes a slow path", figures)
    return Finding(words, figures)


CHECKS = [
    Check(
        "all-reduce in a node",
        inside_nodes,
        "NCCL_DEBUG=INFO names the path taken (NVLS, P2P, SHM, NET); nvidia-smi topo -m; NCCL_P2P_DISABLE must be unset",
        after=("driver",),
        ranks=2,
    ),
    Check(
        "all-reduce over nodes",
        between_nodes,
        "set NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and NCCL_IB_HCA on every node before `ray start`; in a "
        "container /dev/infiniband and IPC_LOCK must be there (docs/multi_node.md)",
        after=("nodes", "driver"),
        nodes=2,
    ),
]
