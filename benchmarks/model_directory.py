"""Seconds that the checks of a model directory add to a start.

    python -m benchmarks.model_directory /models/check Qwen2.5-14B

Writes config.json and shards of the model's true size and headers; of the values only the ends of each tensor take disk, the
rest are holes. Then times the checks with the files in the page cache and without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from math import prod
from pathlib import Path
from typing import Any

from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.weight_files import model_tensors, weight_notes, weight_problems
from rstar2_megatron.runs.check.subjects.thin_model import thin_config

_SHARD_BYTES = 4 * 10**9
_END = 2**16


def write_directory(directory: Path, name: str) -> None:
    directory.mkdir(parents=True)
    model = known_model(name)
    assert model is not None, name
    (directory / "config.json").write_text(json.dumps(thin_config(name, model.num_layers)))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for tensor, shape in model_tensors(model).items():
        if held + 2 * prod(shape) > _SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][tensor] = shape
        held += 2 * prod(shape)
    for number, shard in enumerate(shards, 1):
        header: dict[str, Any] = {}
        end = 0
        for tensor, shape in shard.items():
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * prod(shape)]}
            end += 2 * prod(shape)
        text = json.dumps(header).encode()
        with (directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
            for entry in header.values():
                begin, end = (8 + len(text) + offset for offset in entry["data_offsets"])
                for place in (begin, max(begin, end - _END)):
                    file.seek(place)
                    file.write(b"\x01\x3c" * (min(_END, end - begin) // 2))
            file.flush()
            os.fsync(file.fileno())
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    file_of = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def seconds(directory: Path, *, cached: bool) -> float:
    if not cached:
        for file in directory.iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    model = ModelConfig.from_directory(directory)
    assert list(weight_problems(directory, model)) == [] == list(weight_notes(directory, model, "bf16"))
    return time.perf_counter() - started


def main(directory: Path, name: str) -> None:
    if not directory.exists():
        write_directory(directory, name)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    for cached in (False, True):
        times = sorted(seconds(directory, cached=cached) for _ in range(5))
        where = "in the page cache" if cached else "on disk"
        print(f"{name}, {size / 1e9:.1f} GB {where}: {times[0]:.2f} to {times[-1]:.2f} s, median {times[2]:.2f} s")
    shutil.rmtree(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="is written, and removed at the end")
    parser.add_argument("name", help="of a known model, as Qwen2.5-14B")
    main(**vars(parser.parse_args()))
