"""Checks of the machine: what is installed, what is free, what is connected. Judged from each node's survey."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.nodes import values
from rstar2_megatron.runs.check.result import Check, CheckFailed, Finding
from rstar2_megatron.runs.check.subjects.thin_model import thin_parameters
from rstar2_megatron.runs.preflight import check_before_start
from rstar2_megatron.services.process import PROJECT
from rstar2_megatron.settings.planning.host_memory import host_memory
from rstar2_megatron.settings.planning.plan import make_plan, model_of

SURVEY = "rstar2_megatron.runs.check.programs.survey:survey"
LEAST_DRIVER = 580  # CUDA 13
_REQUIREMENTS = PROJECT / "requirements"
_OURS = ("torch", "megatron-core", "sglang", "rlinf", "ray", "transformers", "tokenizers", "numpy", "protobuf", "safetensors")
_GPU_TOO = ("sglang-kernel", "flashinfer-python", "torch-memory-saver", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "triton")
_OPTIONAL = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu13")
_FREE_SHARE = 0.95  # of a GPU's memory, before anything of ours has started
_TEMPORARY_GB = 2.0
# For each parameter of the thin model in bf16, at most at a time: its weights, the gradients of one rank, a checkpoint with the
# weights that it exports.
_WRITTEN_BYTES = 2 + 2 + 14 + 2

Facts = dict[str, Any]


def read_pins(directory: Path, *, gpu: bool) -> dict[str, str]:
    """The versions that requirements/ asks for, by package, of those whose drift breaks things."""
    names = (*_OURS, *_GPU_TOO, *_OPTIONAL) if gpu else _OURS
    files = ["gpu.lock"] if gpu else ["constraints.txt", "base.txt"]
    pins: dict[str, str] = {}
    for file in [*files, "no-deps.txt", "transformer-engine.txt"]:
        path = directory / file
        for line in path.read_text().splitlines() if path.is_file() else []:
            found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)", line)
            if found and found[1].lower() in names:
                pins.setdefault(found[1].lower(), found[2].partition("+")[0])
    return pins


def configuration(context: Context) -> Finding:
    try:
        warnings = check_before_start(context.settings, dry_run=True)
    except ValueError as error:
        raise CheckFailed(str(error)) from error
    plan = make_plan(context.settings)
    if not plan.fits:
        raise CheckFailed("; ".join(plan.problems))
    words = "the plan fits" + (f"; {len(warnings)} warnings: {'; '.join(warnings)}" if warnings else "")
    return Finding(words, {"warnings": warnings})


def nodes(context: Context) -> Finding:
    """Ray reaches every node, and each tells about itself."""
    wanted = context.settings.cluster.num_nodes
    addresses = context.nodes.start_ray(wanted, context.settings.cluster.node_wait_timeout_s)
    facts = _facts(context)
    hosts = ", ".join(f"{fact['host']} at {address}" for fact, address in zip(facts, addresses))
    return Finding(f"{len(facts)} of {wanted}: {hosts}", {"addresses": addresses})


def _facts(context: Context) -> list[Facts]:
    """Each node's survey; this node's alone when Ray could not reach the others."""
    if "survey" not in context.found:
        paths = [str(context.scratch.parent), str(PROJECT)]
        pins = sorted(read_pins(_REQUIREMENTS, gpu=not context.slots.is_cpu))
        context.found["survey"] = values(context.nodes.everywhere(SURVEY, 60.0, paths=paths, pins=pins))
    survey: list[Facts] = context.found["survey"]
    return survey


def _judge(context: Context, find: Callable[[Facts], Iterable[str]], say: Callable[[Facts], str], **figures: Any) -> Finding:
    """Pass when no node has a problem; the problems of all nodes otherwise."""
    facts = _facts(context)
    problems = [f"{fact['host']}: {problem}" if len(facts) > 1 else problem for fact in facts for problem in find(fact)]
    if problems:
        raise CheckFailed("; ".join(problems))
    lines = list(dict.fromkeys(say(fact) for fact in facts))
    return Finding("; ".join(lines), figures)


def versions(context: Context) -> Finding:
    pins = read_pins(_REQUIREMENTS, gpu=not context.slots.is_cpu)

    def find(fact: Facts) -> Iterable[str]:
        for name, wanted in pins.items():
            found = fact["packages"].get(name)
            if found is None and name not in _OPTIONAL:
                yield f"{name} is not installed, requirements/ pins {wanted}"
            elif found is not None and found != wanted:
                yield f"{name} is {found}, requirements/ pins {wanted}"

    def say(fact: Facts) -> str:
        shown = [f"{name} {fact['packages'][name]}" for name in (*_OURS[:5], *_OPTIONAL[:1]) if fact["packages"].get(name)]
        engine = "" if context.slots.is_cpu or fact["packages"].get(_OPTIONAL[1]) else ", without TransformerEngine"
        return f"Python {fact['python']}, {', '.join(shown)}{engine}; {len(pins)} pins hold"

    return _judge(context, find, say)


def driver(context: Context) -> Finding:
    def find(fact: Facts) -> Iterable[str]:
        if not fact["gpus"]:
            yield "nvidia-smi is absent or names no GPU"
        elif len(fact["gpus"]) < context.slots_per_node:
            yield f"{len(fact['gpus'])} GPUs, the YAML's placement needs {context.slots_per_node}"
        for gpu in fact["gpus"]:
            series = int(gpu["driver_version"].partition(".")[0] or 0)
            if series < LEAST_DRIVER and fact["driver_cuda"] < 13000:  # cuda-compat bridges it
                yield f"GPU {gpu['index']}: driver {gpu['driver_version']} is older than {LEAST_DRIVER}, which CUDA 13 asks for"
            if gpu["compute_mode"] not in ("Default", "[N/A]"):
                yield f"GPU {gpu['index']}: compute mode {gpu['compute_mode']} lets only one process use it"

    return _judge(
        context,
        find,
        lambda fact: f"{len(fact['gpus'])} x {fact['gpus'][0]['name']}, driver {fact['gpus'][0]['driver_version']}",
    )


def toolkit(context: Context) -> Finding:
    """SGLang's and flashinfer's kernels are compiled while the engine starts: ninja, nvcc and a C++ compiler, all found."""

    def find(fact: Facts) -> Iterable[str]:
        for tool in ("nvcc", "ninja", "gcc", "g++"):
            if not fact["tools"][tool]:
                yield f"{tool} is not on PATH"
        if not fact["environment"].get("CUDA_HOME"):
            yield "CUDA_HOME is not set"

    finding = _judge(context, find, lambda fact: f"nvcc {_release(fact['nvcc'])}, ninja, g++")
    answers = context.nodes.everywhere("rstar2_megatron.runs.check.programs.survey:compile_kernel", 110.0, arch="90")
    values(answers)
    return Finding(f"{finding.words}; a kernel compiles for sm_90")


def _release(text: str) -> str:
    found = re.search(r"release ([\d.]+)", text)
    return found[1] if found else "?"


def gpu_memory(context: Context) -> Finding:
    def placed(fact: Facts) -> list[dict[str, str]]:
        return [gpu for gpu in fact["gpus"] if int(gpu["index"]) in context.nodes.slots]

    def find(fact: Facts) -> Iterable[str]:
        for gpu in placed(fact):
            total, used = float(gpu["memory.total"]), float(gpu["memory.used"])
            if used > (1 - _FREE_SHARE) * total:
                yield f"GPU {gpu['index']}: {used / 1024:.1f} of {total / 1024:.1f} GiB are in use by others"

    def say(fact: Facts) -> str:
        free = [float(gpu["memory.total"]) - float(gpu["memory.used"]) for gpu in placed(fact)]
        return f"least free {min(free, default=0.0) / 1024:.1f} GiB"

    return _judge(context, find, say)


def nvlink(context: Context) -> Finding:
    """Between any two GPUs of a node the topology must say NV (a number of links)."""

    def find(fact: Facts) -> Iterable[str]:
        without = list(pairs_without_nvlink(fact["topology"]))
        if without:
            yield f"no NVLink between {', '.join(without[:4])} ({len(without)} pairs): collectives go over PCIe"

    return _judge(context, find, lambda fact: "NVLink between all GPUs")


def pairs_without_nvlink(topology: str) -> Iterable[str]:
    """Pairs of GPUs whose entry of `nvidia-smi topo -m` is not NVLink."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]
    rows = [row for row in rows if row]
    header = next((row for row in rows if row[0] == "GPU0" and "X" not in row), [])
    names = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    for row in rows:
        if row is header or row[0] not in names:
            continue
        first = names.index(row[0]) + 1
        for other, how in zip(names[first:], row[first + 1 :]):
            if not how.startswith("NV"):
                yield f"{row[0]}-{other} ({how})"


def disk(context: Context) -> Finding:
    """The run's directory is there and writable on every node, with room for what the checks write.

    The run's own size is the plan's (`configuration`).
    """
    place = str(context.scratch.parent)
    need_gb = _WRITTEN_BYTES * thin_parameters(context.settings) / 1e9

    def find(fact: Facts) -> Iterable[str]:
        if fact["writable"][place]:
            yield f"runner.output_dir cannot be written: {fact['writable'][place]}"
        elif fact["room_gb"][place] is not None and fact["room_gb"][place] < need_gb:
            yield f"{fact['room_gb'][place]:.1f} GB free in {place}, these checks write {need_gb:.1f} GB there and remove them"

    return _judge(
        context, find, lambda fact: f"{fact['room_gb'][place] or 0:.0f} GB free in {place}, the checks need {need_gb:.2g}"
    )


def host(context: Context) -> Finding:
    """Host memory against the plan, and /dev/shm for NCCL and Ray."""
    settings = context.settings
    model, _ = model_of(settings)
    need = 0.0
    if model is not None and not context.slots.is_cpu:
        need = host_memory(settings, model, context.slots.count).total

    def find(fact: Facts) -> Iterable[str]:
        if fact["host_gb"] < need:
            yield f"{fact['host_gb']:.0f} GB of host memory, the plan needs {need:.0f}"
        if not context.slots.is_cpu and (fact["shared_memory_gb"] or 0) < 1.0:
            yield f"/dev/shm has {fact['shared_memory_gb'] or 0:.2f} GB; NCCL and Ray keep buffers there"

    def say(fact: Facts) -> str:
        return (
            f"{fact['host_free_gb']:.0f} of {fact['host_gb']:.0f} GB free"
            + (f", the plan needs {need:.0f}" if need else "")
            + f"; /dev/shm {fact['shared_memory_gb'] or 0:.1f} GB"
        )

    return _judge(context, find, say)


def temporary(context: Context) -> Finding:
    """Every node's own: the driver's TMPDIR is not passed to the others."""

    def find(fact: Facts) -> Iterable[str]:
        where = fact["temporary"]
        if where["problem"]:
            yield f"TMPDIR={where['wanted']}: {where['problem']}"
        elif where["room_gb"] is not None and where["room_gb"] < _TEMPORARY_GB:
            yield f"{where['path']} has {where['room_gb']:.2f} GB free; compilers and engines need {_TEMPORARY_GB:.0f}"

    return _judge(context, find, lambda fact: f"{fact['temporary']['path']}, {fact['temporary']['room_gb'] or 0:.0f} GB free")


CHECKS = [
    Check("configuration", configuration, "change the keys that the message names; --dry-run shows the plan"),
    Check("nodes", nodes, "see docs/multi_node.md; `ray status` shows who joined", deadline_s=180.0),
    Check("versions", versions, "bash scripts/setup_env.sh, and the same environment on every node"),
    Check("driver", driver, "a driver of the 580 series, or cuda-compat (docs/install.md); nvidia-smi -c 0 resets the mode",
          gpu=True),
    Check("toolkit", toolkit, "bash scripts/setup_env.sh brings nvcc and ninja; g++ is in build-essential",
          gpu=True, after=("driver",)),
    Check("GPU memory", gpu_memory, "nvidia-smi names the processes; end them", gpu=True, after=("driver",)),
    Check("NVLink", nvlink, "nvidia-smi topo -m; is the fabric manager running? (systemctl status nvidia-fabricmanager)",
          gpu=True, ranks=2, after=("driver",)),
    Check("disk", disk, "mount the file system on every node, or set runner.output_dir"),
    Check("host memory", host, "lower the layout's host share (--dry-run), or docker run --shm-size=16g for /dev/shm"),
    Check("temporary files", temporary, "set TMPDIR to a directory that every node has, or unset it"),
]  # fmt: skip
