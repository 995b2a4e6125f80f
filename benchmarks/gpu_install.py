"""What an installed GPU environment is and what works in it without a GPU; the last part of scripts/try_gpu_install.sh.

python -m benchmarks.gpu_install DIR     DIR/venv is the environment; writes DIR/report.json

Versions, seconds and size of each step of the installation, TransformerEngine's build, imports (each in a process of its own,
beside the stub of the driver), kernels compiled and linked for the H100 with the toolkit of the wheels as sglang's and
flashinfer's own compilers do it, and the tests of tests/install.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.records import write_result
from rstar2_megatron.rollout.engine.arguments import gpu_environment

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = (
    "torch",
    "triton",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "transformer-engine",
    "transformer-engine-cu13",
    "transformer-engine-torch",
    "megatron-core",
    "rlinf",
    "ray",
    "transformers",
    "torch-memory-saver",
    "cuda-tile",
    "cuda-toolkit",
    "nvidia-cuda-nvcc",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
    "numpy",
    "protobuf",
    "sentencepiece",
)
IMPORTS = (
    "torch",
    "sglang",
    "sglang.srt.entrypoints.engine",
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "torch_memory_saver",
    "torch, transformer_engine.pytorch",  # torch first: it loads cuBLAS and cuDNN
    "megatron.core, megatron.core.extensions.transformer_engine",
    "rlinf.scheduler",
    "rstar2_megatron.actor.policy",
)
# One kernel through the compiler that sglang's own kernels take, one through flashinfer's, those of TransformerEngine's Triton.
KERNELS = {
    "tvm_ffi": """
import tempfile, tvm_ffi.cpp
source = '''
__global__ void add_one(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] += 1; }
void run(tvm::ffi::TensorView x) { add_one<<<1, 32>>>(static_cast<float*>(x.data_ptr()), 32); }
'''
print(tvm_ffi.cpp.build_inline("probe", cuda_sources=source, functions=["run"], build_directory=tempfile.mkdtemp()))
""",
    "flashinfer": """
from flashinfer.norm import gen_norm_module
module = gen_norm_module()
module.build(verbose=False)
print(module.get_library_path())
""",
    # TransformerEngine's Triton kernels that sort tokens by expert, as the 30B-A3B calls them
    "transformer_engine.permutation": """
import os, tempfile, types
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
import torch, triton, transformer_engine.pytorch
import transformer_engine.pytorch.triton.permutation as moe
from triton.backends.compiler import GPUTarget
# A device to compile for; it has nothing that runs a kernel.
device = dict(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
triton.runtime.driver.set_active(types.SimpleNamespace(**device, get_current_stream=lambda index: 0))
compiled = {}
def launch(kernel, grid):
    def compile_only(*args, **options):
        variants = kernel.warmup(*args, grid=grid, **options)  # all those that autotuning would try
        for x in variants if isinstance(variants, list) else [variants]:
            assert x.asm["cubin"], x.name
            compiled.setdefault(x.name, set()).add(x.hash)
    return compile_only
triton.runtime.jit.KernelInterface.__getitem__ = launch
class OnMeta(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), options=None):
        options = options or {}
        return function(*args, **options | ({"device": "meta"} if "device" in options else {}))
experts, k, hidden = 128, 8, 2048  # Qwen3-30B-A3B
make = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="meta")
with OnMeta():
    for n in (1000, 32768):  # tokens; what 16 divides gets a kernel of its own
        x, y = make(n, hidden, dtype=torch.bfloat16), make(n * k, hidden, dtype=torch.bfloat16)
        probs, sorted_probs, chunks = make(n, experts), make(n * k), make(experts, dtype=torch.int64)
        rows = moe.make_row_id_map(make(n, experts, dtype=torch.bool), n, experts)
        order = moe.make_chunk_sort_map(chunks, chunks, n * k, experts)
        for p, q in ((probs, sorted_probs), (None, None)):  # permute and its backward; those of unpermute
            moe.permute_with_mask_map(x, rows, p, None, n, experts, n * k, hidden, None)
            moe.unpermute_with_mask_map(y, rows, None, q, n, experts, hidden)
            for forward in (True, False):
                moe.sort_chunks_by_map(y, order, q, n * k, hidden, forward)
assert len(compiled) == 7, compiled
print({name: len(hashes) for name, hashes in compiled.items()})
""",
}


def run(command: list[str], timeout_s: float, **environment: str) -> dict[str, Any]:
    """{"ok", "seconds"} and, of a failure, the last lines of its output."""
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env={**os.environ, **environment}
    )
    result: dict[str, Any] = {"ok": done.returncode == 0, "seconds": round(time.monotonic() - began, 1)}
    return result if result["ok"] else result | {"output": (done.stdout + done.stderr)[-2000:]}


def preload(library: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Whether the loader finds what `library` needs before any program runs, as in an engine's scheduler.

    Without the system's cache of libraries: it may hold a CUDA runtime that other machines lack.
    """
    command = ["/lib64/ld-linux-x86-64.so.2", "--inhibit-cache", "--preload", str(library), "/bin/true"]
    return run(command, 60, **environment)


def steps(venv: Path) -> list[dict[str, Any]]:
    """Every step of every run of set-up on this environment."""
    rows = [line.split("\t") for line in (venv / ".rstar2-steps.tsv").read_text().splitlines()]
    return [
        {"step": label, "seconds": int(seconds), "megabytes": int(size), "exit_status": int(status)}
        for label, seconds, size, status in rows
    ]


def engine_build(directory: Path) -> dict[str, Any] | None:
    """How TransformerEngine's extension was compiled; None when it was not."""
    for folder in sorted((directory / ".cache" / "wheels").glob("transformer-engine-torch-*")):
        (wheel,) = folder.glob("*.whl")
        log = (folder / "build.log").read_text(errors="replace")
        return json.loads((folder / "build.json").read_text()) | {
            "wheel": wheel.name,
            "wheel_bytes": wheel.stat().st_size,
            "built_for": folder.name,
            "objects": len(re.findall(r"^ *\[\d+/\d+\] ", log, re.MULTILINE)),
            "compiler_warnings": log.count("warning:"),
            "log_lines": log.count("\n"),
        }
    return None


def outcomes(junit: Path) -> dict[str, Any]:
    """Counts of a pytest run, and what was skipped."""
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    skipped = sorted({x.get("message", "") for x in suite.iter("skipped")})
    return counts | {"skip_reasons": skipped}


def program(module: str, out: Path) -> Any:
    """The JSON that a program of tests/install writes."""
    done = run([sys.executable, "-m", module, str(out)], 900, CUDA_DEVICE_MAX_CONNECTIONS="1")
    return json.loads(out.read_text()) if done["ok"] else done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory.resolve()
    venv = directory / "venv"

    import torch

    compiler = subprocess.run(["nvcc", "--version"], capture_output=True, text=True)
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    size = subprocess.run(["du", "-sm", str(venv)], capture_output=True, text=True).stdout.split()[0]
    result: dict[str, Any] = {
        "command": "bash scripts/try_gpu_install.sh DIR",
        "commit": _commit(),
        "gpu_lock_sha256": hashlib.sha256((ROOT / "requirements" / "gpu.lock").read_bytes()).hexdigest(),
        "system": {
            "glibc": platform.libc_ver()[1],
            "python": platform.python_version(),
            "g++": subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip(),
        },
        "versions": {name: _version(name) for name in VERSIONS},
        "packages": sum(1 for _ in importlib.metadata.distributions()),
        "environment_megabytes": int(size),
        "torch_build": {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvcc": compiler.stdout.strip().splitlines()[-1],
        },
        "steps": steps(venv),
        "transformer_engine_build": engine_build(directory),
        "imports": {name: run([sys.executable, "-c", f"import {name}"], 300) for name in IMPORTS},
        "preloads": {
            path.name: preload(path, gpu_environment(dict(os.environ)))
            for path in sorted(Path(sysconfig.get_path("purelib")).glob("torch_memory_saver_hook_mode_preload_cu13*"))
        },
        "kernels_for_sm_90": {
            name: run(
                [sys.executable, "-c", source],
                900,
                TVM_FFI_CUDA_ARCH_LIST="9.0",
                FLASHINFER_CUDA_ARCH_LIST="9.0a",
                FLASHINFER_WORKSPACE_BASE=str(directory / "flashinfer"),
                MAX_JOBS="1",
            )
            for name, source in KERNELS.items()
        },
        "bound_calls": program("tests.install.bind_calls", directory / "bound.json"),
        "models_on_meta": program("tests.install.engine_models", directory / "models.json"),
        # sglang's and rlinf's pins that set-up overrules, and nothing else
        "pip_check": check.stdout.strip().splitlines(),
    }
    junit = directory / "tests.xml"
    tests = run([sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", "tests/install"], 1800)
    result["tests_install"] = tests | (outcomes(junit) if junit.exists() else {})
    write_result(directory / "report.json", result)

    failed = [name for part in ("imports", "preloads", "kernels_for_sm_90") for name, x in result[part].items() if not x["ok"]]
    failed += [] if result["preloads"] else ["no library that releases an engine's memory"]
    failed += [] if tests["ok"] else ["tests/install"]
    print(f"try: {directory / 'report.json'} written; " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    sys.exit(1 if failed else 0)


def _commit() -> str | None:
    """Of the checkout; None outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
