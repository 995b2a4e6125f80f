"""Binds the project's calls into megatron-core, SGLang, RLinf and torch, and megatron-core's into TransformerEngine.

`python -m tests.install.bind_calls OUT.json` writes {"project": ..., "engine_arguments": ..., ...}, each with its "problems". A
program of its own: without a GPU SGLang is imported beside stand-ins for Triton, which other tests do not want.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rstar2_megatron.settings.load import config_names, load
from tests.install.calls import Call, calls_of, has_signature, problem

PROJECT = Path(__file__).resolve().parents[2] / "rstar2_megatron"
PACKAGES = ("megatron", "sglang", "torch", "rlinf", "transformer_engine")
_CORE = "megatron.core"


def project_calls() -> list[Call]:
    files = sorted(PROJECT.rglob("*.py"))
    return [call for file in files for call in calls_of(file, PACKAGES)]


def megatron_core_into_transformer_engine() -> dict[str, Any]:
    """What a TE layer of ours runs through. Its optional parts (FP8, fused MLPs) are among it."""
    (core,) = importlib.util.find_spec(_CORE).submodule_search_locations  # type: ignore[union-attr, misc]
    folders = ("extensions", "transformer", "optimizer", "models/gpt", "fusions")
    files = [file for folder in folders for file in sorted((Path(core) / folder).rglob("*.py"))]
    version = {"is_te_min_version": importlib.metadata.version("transformer-engine"), "HAVE_TE": ""}
    absent: set[str] = set()
    calls = [call for file in files for call in calls_of(file, ["transformer_engine"], version, absent)]
    return bound(calls) | {"optional_and_absent": sorted(absent)}


def bound(calls: list[Call]) -> dict[str, Any]:
    counts = collections.Counter(call.callee.partition(".")[0] for call in calls if call.arguments)
    return {
        "calls": dict(counts),
        "with_signature": sum(map(has_signature, calls)),
        "problems": sorted({text for call in calls if (text := problem(call))}),
    }


def on_cuda() -> Any:
    return mock.patch.object(torch.cuda, "is_available", lambda: True)


def engine_arguments_of_configs() -> dict[str, Any]:
    """What each YAML gives to SGLang on a GPU: known to ServerArgs, and one of its choices where it has choices."""
    from sglang.srt.server_args import ServerArgs

    from rstar2_megatron.rollout.engine.arguments import engine_arguments

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices}
    fields = set(ServerArgs.__struct_fields__)
    problems, count = [], 0
    for name in config_names():
        settings = load(name).settings.rollout
        with on_cuda():
            arguments = engine_arguments(settings, seed=1, memory_saver=True)
        count += len(arguments)
        for key, value in arguments.items():
            if key not in fields:
                problems.append(f"{name}: ServerArgs has no {key}")
            elif key in choices and value not in choices[key]:
                problems.append(f"{name}: {key}={value} is none of {sorted(choices[key])}")
    return {"configs": len(config_names()), "arguments": count, "problems": problems}


def main() -> None:
    from rstar2_megatron.cpu import sglang as shim

    shim.install()
    result = {"project": bound(project_calls()), "engine_arguments": engine_arguments_of_configs()}
    if importlib.util.find_spec("transformer_engine"):
        result["megatron_core_into_transformer_engine"] = megatron_core_into_transformer_engine()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
