"""Memory and time of converting a checkpoint to a Hugging Face directory, and of loading the directory on one rank.

    python -m benchmarks.actor.conversion --directory /large/disk                    # 14B: needs 60 GB of disk
    python -m benchmarks.actor.conversion --directory /large/disk --layers 16        # the same tensors, a third of the layers

Writes a checkpoint in the format of `MegatronActor.save_checkpoint`: random bf16 weights, equal in every layer, without an
optimizer, which conversion does not read. Then runs `rstar2_megatron.actor.convert` on it and loads the result as rank 0 of
`--tensor-parallel` ranks. Each part runs in its own process. `own_peak_gb` is the peak above the memory held before, mapped
files included. Prints one JSON object, writes it to `--out`, and removes checkpoint and output.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.actor.cases import SHAPES, settings_for, write_config
from benchmarks.memory import resident_peak_gb
from benchmarks.records import write_result
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.services.process import free_port
from rstar2_megatron.weights.checksum import weights_checksum


def tensor_shapes(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes by megatron-core name: (outside the layers, of one layer)."""
    hidden, words, wide = config.hidden_size, config.vocab_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    queries_keys_values = heads + 2 * config.num_kv_heads * config.head_dim
    outer: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (words, hidden),
        "decoder.final_layernorm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        outer["output_layer.weight"] = (words, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_qkv.weight": (queries_keys_values, hidden),
        "self_attention.linear_qkv.bias": (queries_keys_values,),
        "self_attention.linear_proj.weight": (hidden, heads),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * wide, hidden),
        "mlp.linear_fc2.weight": (hidden, wide),
    }
    return outer, layer


def write_checkpoint(model: Path, checkpoint: Path) -> None:
    """A checkpoint of this model in megatron-core's torch_dist format."""
    from rstar2_megatron.cpu.megatron import install

    install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from rstar2_megatron.actor.checkpoint import _COUNTERS, _ThreadedSave
    from rstar2_megatron.actor.hf_weights import Mapping

    def sums_of(name: str, layer: int | None, weight: torch.Tensor) -> dict[str, int]:
        mapping = Mapping.of(name, layer)
        return weights_checksum(zip(mapping.names(0), mapping.split(weight, config.head_dim, config.num_kv_heads)))

    config = ModelConfig.from_directory(model)
    outer, layer = tensor_shapes(config)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    checksums: dict[str, int] = {}
    state: dict[str, Any] = {_COUNTERS: {"weights_checksum": checksums}}
    for name, shape in outer.items():
        weight = torch.randn(shape, dtype=torch.bfloat16)
        checksums |= sums_of(name, None, weight)
        state[name] = ShardedTensor.from_rank_offsets(name, weight)
    for name, shape in layer.items():
        weight = torch.randn(shape, dtype=torch.bfloat16)
        sums = sums_of(f"decoder.layers.0.{name}", 0, weight).values()  # all layers have this weight
        for number in range(config.num_layers):
            checksums.update(zip(Mapping.of(f"decoder.layers.{number}.{name}", number).names(0), sums))
            state[f"{name}.{number}"] = ShardedTensor.from_rank_offsets(
                f"decoder.layers.{name}", weight, (0, number, config.num_layers), prepend_axis_num=1
            )
    checkpoint.mkdir(parents=True)
    request = dist_checkpointing.save(state, str(checkpoint), _ThreadedSave(), async_sharded_save=True)
    assert request is not None
    request.execute_sync()
    dist.destroy_process_group()


def converted(model: Path, checkpoint: Path, output: Path) -> dict[str, float]:
    from rstar2_megatron.actor.convert import convert

    return resident_peak_gb(lambda: convert(checkpoint, model, output))


def loaded(output: Path, tensor_parallel: int) -> dict[str, float]:
    """Build rank 0's part of the model and read its weights, without starting the other ranks."""
    from rstar2_megatron.cpu.megatron import install

    install()
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rstar2_megatron.actor.hf_weights import load_hf_weights
    from rstar2_megatron.actor.network.model import build_chunks, unwrap
    from rstar2_megatron.actor.process_groups import set_seed

    config = ModelConfig.from_directory(output)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor_parallel)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel, create_gloo_process_groups=False)
    set_seed(0)
    actor, _, _ = settings_for(8192, 1, "bf16", tensor_model_parallel_size=tensor_parallel)
    _, chunks = build_chunks(config, actor.model, "local", "cpu")
    parts = [unwrap(chunk) for chunk in chunks]
    for parameter in parts[0].parameters():
        parameter.data.fill_(1.0)  # touch the pages, so that loading is not charged for them
    figures = resident_peak_gb(lambda: load_hf_weights(parts, config, output))
    held = sum(p.nbytes for p in parts[0].parameters()) / 1e9
    return {"tensor_parallel": float(tensor_parallel), "parameters_gb": held, **figures}


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run the function in a new process, by name and arguments on its command line; returns its result."""
    words = [str(a) for a in args]
    command = [sys.executable, "-m", "benchmarks.actor.conversion", "--part", function.__name__, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--part"]:
        name, *words = sys.argv[2:]
        arguments = [int(w) if w.isdigit() else Path(w) for w in words]
        print(json.dumps(globals()[name](*arguments)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="where checkpoint and model are written")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="14b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--tensor-parallel", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "conversion.json")
    args = parser.parse_args()
    shape = {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}
    root = args.directory / f"conversion-{os.getpid()}"
    model, checkpoint, output = root / "config", root / "checkpoint", root / "model"
    try:
        config = ModelConfig.from_directory(write_config(model, shape))
        started = time.perf_counter()
        in_process(write_checkpoint, model, checkpoint)
        report: dict[str, Any] = {
            "load_before": os.getloadavg()[0],
            "shape": args.shape,
            "layers": config.num_layers,
            "model_gb": config.num_parameters * 2 / 1e9,
            "write_checkpoint_seconds": time.perf_counter() - started,
            "convert": in_process(converted, model, checkpoint, output),
        }
        shutil.rmtree(checkpoint)
        report["load_rank_0"] = in_process(loaded, output, args.tensor_parallel)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(report, indent=2))
    write_result(args.out, report)


if __name__ == "__main__":
    main()
