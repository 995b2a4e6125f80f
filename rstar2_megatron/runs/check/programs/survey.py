"""The facts of a node, as a program of checks. Packages are read by their files, not imported."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.disk import nearest_existing
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.settings.host_memory import available_memory
from rstar2_megatron.settings.placement import SMI_TIMEOUT_S, visible_host_gb

_TOOLS = ("nvidia-smi", "nvcc", "ninja", "gcc", "g++")
_ENVIRONMENT = ("CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "RAY_ADDRESS", "RLINF_", "TMPDIR", "LD_LIBRARY_PATH", "NVTE_")
_GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used", "compute_mode", "pstate")


def survey(job: Job, paths: Sequence[str], pins: Sequence[str]) -> dict[str, Any]:
    """Facts of this node, as text and numbers; `paths` are asked for room, `pins` for the installed version."""
    return {
        "host": platform.node(),
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "glibc": " ".join(platform.libc_ver()),
        "cpus": os.cpu_count(),
        "host_gb": visible_host_gb(),
        "host_free_gb": available_memory() / 1e9,
        "shared_memory_gb": _room("/dev/shm"),
        "temporary": _temporary(),
        "room_gb": {path: _room(path) for path in paths},
        "writable": {path: _writable(path) for path in paths},
        "packages": {name: version_of(name) for name in pins},
        "tools": {name: shutil.which(name) for name in _TOOLS},
        "nvcc": _said("nvcc", "--version"),
        "gpus": _gpus(),
        "driver_cuda": _driver_cuda(),
        "topology": _said("nvidia-smi", "topo", "-m"),
        "nvlink": _said("nvidia-smi", "nvlink", "-s"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)},
    }


def version_of(package: str) -> str | None:
    """The installed version without what follows "+" (torch's build); None when it is absent."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def compile_kernel(job: Job, arch: str) -> str:
    """Compile a kernel with the nvcc that SGLang's and flashinfer's own compilation will find; its last line of output."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.cu"
        source.write_text("#include <cuda_bf16.h>\n__global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n")
        done = subprocess.run(
            ["nvcc", f"-arch=sm_{arch}", "-c", str(source), "-o", str(source.with_suffix(".o"))],
            capture_output=True,
            text=True,
            timeout=100,
        )
        if done.returncode:
            raise RuntimeError(f"nvcc ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return done.stdout.strip()


def _said(*command: str) -> str:
    """The output of a program; "" when it is absent."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        return subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"({error})"


def _gpus() -> list[dict[str, str]]:
    text = _said("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def _driver_cuda() -> int:
    """The CUDA version of the libcuda that the loader finds, of the driver or cuda-compat: 13000 is 13.0, 0 is none."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _room(path: str) -> float | None:
    """GB that are free where `path` is, or will be."""
    try:
        return shutil.disk_usage(nearest_existing(path)).free / 1e9
    except OSError:
        return None


def _writable(path: str) -> str:
    """Whether a file can be made in the directory: "" or why not."""
    try:
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        return str(error)


def _temporary() -> dict[str, Any]:
    """The directory of temporary files, and the value of TMPDIR."""
    wanted = os.environ.get("TMPDIR")
    place = wanted or "/tmp"
    return {"wanted": wanted, "problem": _writable(place), "room_gb": _room(place), "path": place}
