"""Faults planted inside what the programs of checks call, and small programs that misbehave."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rstar2_megatron.runs.check.nodes import Nodes
from rstar2_megatron.runs.check.process import Job, find
from rstar2_megatron.runs.check.result import Check

FAULTED = "tests.runs.check_faults:with_fault"


def planted_check(name: str, fault: str = "", label: str = "") -> Check:
    """The check of this name, its programs run with the fault; none: as they are."""
    from rstar2_megatron.runs.check.command import CHECKS  # here: processes of checks import this file

    (found,) = [check for check in CHECKS if check.name == name]

    def run(context: Any) -> Any:
        context.nodes.fault = fault
        try:
            return found.run(context)
        finally:
            context.nodes.fault = ""

    return replace(found, name=label or name, run=run)


def one_hangs(job: Job) -> int:
    if job.rank:
        time.sleep(60)
    return job.rank


def one_dies(job: Job) -> int:
    if job.rank:
        print("last words", flush=True)
        os._exit(7)
    return job.rank


def one_raises(job: Job) -> int:
    if job.rank:
        raise ValueError("rank 1")
    return job.rank


def naps(job: Job, seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def visible_devices(job: Job) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def process_id(job: Job) -> int:
    return os.getpid()


class FaultyNodes(Nodes):
    """Nodes whose programs run with a fault: `fault` is set before each check."""

    fault = ""

    def _run(self, program: str, jobs: Any, arguments: dict[str, Any], deadline_s: float) -> Any:
        if self.fault:
            arguments = {"fault": self.fault, "program": program, "arguments": arguments}
            program = FAULTED
        return super()._run(program, jobs, arguments, deadline_s)


def with_fault(job: Job, fault: str, program: str, arguments: dict[str, Any]) -> Any:
    """Run the real program with something inside it broken."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        globals()[f"_{fault}"](patch, job, arguments)
        return find(program)(job, **arguments)


def _wrong_sum(patch: Any, job: Job, arguments: Any) -> None:
    """An all-reduce that loses a rank's share."""
    import torch.distributed as dist

    plain = dist.all_reduce

    def lossy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = plain(tensor, *args, **kwargs)
        tensor[:3] = 0
        return work

    patch.setattr(dist, "all_reduce", lossy)


def _head_chunk(patch: Any, job: Job, arguments: Any) -> None:
    """The logits of one word are shifted in every chunk."""
    from rstar2_megatron.actor.network import logprob

    plain = logprob._logits

    def wrong(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        logits = plain(hidden, *args, **kwargs)
        logits[:, 0] += 1.0
        return logits

    patch.setattr(logprob, "_logits", wrong)


def _not_a_number(patch: Any, job: Job, arguments: Any) -> None:
    """The first word's logit is no number, nor are the gradients."""
    from rstar2_megatron.actor.network import logprob

    plain = logprob._logits
    patch.setattr(logprob, "_logits", lambda *a, **k: plain(*a, **k) * float("nan"))


def _no_survey(patch: Any, job: Job, arguments: Any) -> None:
    """A node that cannot tell about itself: a path of the survey is no text."""
    arguments["paths"] = [0]


def _wrong_attention(patch: Any, job: Job, arguments: Any) -> None:
    """The attention kernel is off by a hundredth for a sequence that is alone in its micro-batch."""
    import torch.nn.functional as functional

    plain = functional.scaled_dot_product_attention
    patch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: plain(*a, **k) * 1.01)


def _rank_weights(patch: Any, job: Job, arguments: Any) -> None:
    """A rank's share of a layer is not what the layout says: its first weight matrix is turned upside down."""
    from rstar2_megatron.actor import policy

    plain = policy.load_hf_weights

    def wrong(chunks: Any, *args: Any, **kwargs: Any) -> None:
        plain(chunks, *args, **kwargs)
        matrices = [p for chunk in chunks for n, p in chunk.named_parameters() if n.endswith("linear_proj.weight")]
        if job.rank == job.world_size - 1:
            matrices[0].data.copy_(matrices[0].data.flip(0))

    patch.setattr(policy, "load_hf_weights", wrong)


def _half_step(patch: Any, job: Job, arguments: Any) -> None:
    """The optimizer steps at half the rate that it was told."""
    from rstar2_megatron.actor import policy

    plain = policy.optimizer_step
    patch.setattr(policy, "optimizer_step", lambda optimizer, lr, optim: plain(optimizer, lr / 2, optim))


def _keeps_gradients(patch: Any, job: Job, arguments: Any) -> None:
    """Gradients stay where they are."""
    from rstar2_megatron.actor.offload import DeviceMemory

    plain = DeviceMemory.offload

    def partly(self: DeviceMemory, chunks: Any, optimizer: Any, parts: set[str]) -> None:
        plain(self, chunks, optimizer, parts - {"grads"})

    patch.setattr(DeviceMemory, "offload", partly)


def _flipped_byte(patch: Any, job: Job, arguments: Any) -> None:
    """A byte of the largest file of the checkpoint is another when it is loaded."""
    directory = Path(arguments["directory"])
    if directory.is_dir():
        largest = max(directory.rglob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 0x40
        largest.write_bytes(content)


def _other_model(patch: Any, job: Job, arguments: Any) -> None:
    """The actor scores with weights that are not the engine's."""
    if "batch" in arguments:
        _rank_weights(patch, job, arguments)


def _no_engine(patch: Any, job: Job, arguments: Any) -> None:
    """SGLang refuses an argument."""
    from rstar2_megatron.rollout.engine import client

    plain = client.engine_arguments
    patch.setattr(client, "engine_arguments", lambda *a, **k: {**plain(*a, **k), "attention_backend": "no such"})


def _nobody_listens(patch: Any, job: Job, arguments: Any) -> None:
    """From this node the judge's port is closed."""
    if "url" in arguments:
        arguments["url"] = "http://127.0.0.1:1"


def _no_room(patch: Any, job: Job, arguments: Any) -> None:
    """The thin model's directory cannot be written."""
    arguments["directory"] = "/proc/nowhere"


SITE = """
import importlib.abc, importlib.util, sys

def _corrupt_first_syncs(module):
    # of each of the first four syncs, one a route, the first tensor leaves as another
    plain = module.WeightSender.send
    def send(self, named_tensors, route, engines):
        def wrong():
            for number, (name, tensor) in enumerate(named_tensors):
                yield name, tensor * 2 + 1 if number == 0 and route.attempt <= 4 else tensor
        return plain(self, wrong(), route, engines)
    module.WeightSender.send = send

def _device_route_on_cpu(module):
    # CUDA IPC with buffers in host memory: engine n reads actor rank n
    possible, make = module.possible_routes, module.make_route
    def placed(places):
        return [module.Place(place.node, (rank,), place.address) for rank, place in enumerate(places)]
    module.possible_routes = lambda wanted, actor, rollout, device: possible(
        wanted, placed(actor), placed(rollout), "cuda")
    module.make_route = lambda kind, actor_group, actor, rollout, **rest: make(
        kind, actor_group, placed(actor), placed(rollout), **rest)

def _no_actor(module):
    def initialize(self):
        raise RuntimeError("planted: no weights")
    module.MegatronActor.initialize = initialize

def _flip_before_load(module):
    import pathlib
    plain = module.MegatronActor.load_checkpoint
    def load(self, directory):
        if self.rank == 0:
            largest = max(pathlib.Path(directory).rglob("*.distcp"), key=lambda path: path.stat().st_size)
            content = bytearray(largest.read_bytes())
            content[len(content) // 2] ^= 0x40
            largest.write_bytes(content)
        import torch.distributed as dist
        dist.barrier()
        plain(self, directory)
    module.MegatronActor.load_checkpoint = load

def _shift_log_probs(module):
    plain = module.MegatronActor.compute_logprobs
    module.MegatronActor.compute_logprobs = lambda self, batch: [[v + 0.5 for v in row] for row in plain(self, batch)]

FAULTS = {faults}

class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in FAULTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        plain = spec.loader.exec_module
        def exec_module(module):
            plain(module)
            globals()[FAULTS[name]](module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, _Finder())
"""
"""A sitecustomize.py: the fault is in every process that a run starts, engines and workers of Ray too."""


def plant(directory: Path, **faults: str) -> None:
    """Write it: module (with __ for a dot) = name of a function above."""
    named = {name.replace("__", "."): fault for name, fault in faults.items()}
    (directory / "sitecustomize.py").write_text(SITE.replace("{faults}", repr(named)))
