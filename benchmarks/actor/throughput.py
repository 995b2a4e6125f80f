"""Speed of the Megatron actor, memory of its vocabulary head, balance of its packing.

    python -m benchmarks.actor.throughput                 # CPU: tiny model against transformers, TP 1 against TP 2
    python -m benchmarks.actor.throughput --head-memory   # + the head at 16,384 tokens x 151,936 words x 1536 (minutes)
    python -m benchmarks.actor.throughput --device cuda --sweep --head-memory      # one GPU, random weights, bf16:
        # 1.5B and 16 layers of 7B, with and without full recompute, 16,384-token micro-batches
    python -m benchmarks.actor.throughput --device cuda --shape 7b --layers 16 [--recompute]        # one case of it
    python -m benchmarks.actor.throughput --dry --sweep   # the GPU's code path on a CPU, tiny shapes

Actor and transformers train the same trajectories; times are medians. On a CPU they alternate in one process. On a GPU each
has its own process, and a side that runs out of memory is reported as null. Training needs 18 bytes a parameter on one GPU.
A 7B shape therefore needs `--layers 16` (87 GB; FLOPs are counted for these layers). When the GPU has too little memory, the
actor's optimizer is on the host (`actor_optimizer_on_host`), and its update is part of the time. Prints one JSON object and
writes it to `--out`, by default benchmarks/results/actor_throughput_{cpu,cuda}.json; a dry run writes nothing. The GPU part
has not been run.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.actor.cases import (
    SHAPES,
    make_sequences,
    rollout_lengths,
    settings_for,
    start_actor,
    transformers_step,
    write_config,
)
from benchmarks.records import write_result
from rstar2_megatron.actor.packing import balance
from rstar2_megatron.model.flops import peak_tflops
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.services.process import free_port

RESULTS = Path(__file__).parents[1] / "results"
SWEEP: tuple[tuple[str, int | None], ...] = (("1.5b", None), ("7b", 16))


def make_side(side: str, args: argparse.Namespace, lengths: list[int], path: Path, port: int) -> Any:
    """One training step of "actor" or "transformers", as a function without arguments."""
    shape = shape_of(args)
    sequences = make_sequences(lengths, shape["vocab_size"])
    if side == "actor":
        precision = "bf16" if args.apart else "fp32"
        recompute: dict[str, Any] = (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if args.recompute
            else {}
        )
        on_host = optimizer_on_host(args, path)
        config = settings_for(args.budget, args.threads, precision, host_optimizer=on_host, **recompute)
        actor = start_actor(0, 1, port, args.device, config, path)
        return lambda: actor.train_step(sequences)
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path), dtype=torch.bfloat16 if args.apart else torch.float32, attn_implementation="sdpa"
    ).to(args.device)
    if args.recompute:
        hf.gradient_checkpointing_enable()
    hf.train()
    adam = torch.optim.AdamW(hf.parameters(), lr=1e-6, fused=True)
    return lambda: transformers_step(hf, adam, sequences, args.budget, args.device)


def optimizer_on_host(args: argparse.Namespace, path: Path) -> bool:
    """Whether 18 bytes a parameter and activations do not fit on the GPU, so that the CPU updates the weights."""
    if args.device != "cuda":
        return False
    memory = torch.cuda.get_device_properties(0).total_memory
    return 18 * ModelConfig.from_directory(path).num_parameters > 0.6 * memory


def time_sides(sides: list[str], args: argparse.Namespace, lengths: list[int], port: int) -> dict[str, tuple[float, float]]:
    """(median seconds of a step, peak GiB on the GPU) of each side; the sides alternate."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory), shape_of(args))
        steps = {side: make_side(side, args, lengths, path, port) for side in sides}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(args.turns + 1):
            for side, step in steps.items():
                started = time.perf_counter()
                step()
                if args.device == "cuda":
                    torch.cuda.synchronize()
                if turn:  # turn 0 is the warm-up
                    seconds[side].append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    if dist.is_initialized():
        from rstar2_megatron.actor import process_groups

        process_groups.leave()
    return {side: (statistics.median(seconds[side]), peak) for side in sides}


def against_transformers(args: argparse.Namespace, lengths: list[int], port: int) -> dict[str, float | None]:
    """Trained tokens a second of the actor and of a trainer on transformers."""
    timed: dict[str, tuple[float, float] | None] = {}
    if args.apart:
        context = get_context("spawn")
        for side in ("actor", "transformers"):
            out = context.Queue()
            process = context.Process(target=_time_side, args=(side, args, lengths, port, out))
            process.start()
            timed[side] = _answer(process, out)
            process.join(60)
    else:
        timed.update(time_sides(["actor", "transformers"], args, lengths, port))
    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory), shape_of(args))
        model, on_host = ModelConfig.from_directory(path), optimizer_on_host(args, path)
    sequences = make_sequences(lengths, model.vocab_size)
    tokens = sum(s.num_trained_tokens for s in sequences)
    flops = model.train_flops(lengths, tokens)
    peak_rate = peak_tflops(torch.cuda.get_device_name()) if args.device == "cuda" else None
    result: dict[str, float | None] = {
        "trained_tokens": float(tokens),
        "all_tokens": float(sum(lengths)),
        "actor_optimizer_on_host": float(on_host),
    }
    for side, figures in timed.items():
        seconds, peak = figures or (None, None)
        result[f"{side}_tokens_per_s"] = tokens / seconds if seconds else None
        result[f"{side}_tflops"] = flops / seconds / 1e12 if seconds else None
        if args.apart:
            result[f"{side}_peak_gib"] = peak
        if peak_rate:
            result[f"{side}_mfu"] = flops / seconds / 1e12 / peak_rate if seconds else None
    mine, right = timed["actor"], timed["transformers"]
    result["ratio"] = right[0] / mine[0] if mine and right else None
    return result


def _time_side(side: str, args: argparse.Namespace, lengths: list[int], port: int, out: Any) -> None:
    """`time_sides` of one side, in its own process; puts None on the queue when memory runs out."""
    try:
        out.put(time_sides([side], args, lengths, port)[side])
    except torch.OutOfMemoryError as error:
        print(f"{side}: {error}", file=sys.stderr)
        out.put(None)


def _answer(process: Any, out: Any, timeout_s: float = 1800.0) -> Any:
    """The result that a child put on its queue. Raises RuntimeError when the child ended without one."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            return out.get(timeout=1.0)
        except queue.Empty:
            if not process.is_alive():
                raise RuntimeError(f"a benchmark process ended with exit code {process.exitcode}") from None
    process.kill()
    raise TimeoutError(f"a benchmark process gave no answer within {timeout_s:.0f} s")


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    return {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}


def _rank(rank: int, world: int, port: int, threads: int, path: Path, lengths: list[int], turns: int, out: Any) -> None:
    config = settings_for(8192, threads, "fp32", tensor_model_parallel_size=world)
    actor = start_actor(rank, world, port, "cpu", config, path)
    sequences = make_sequences(lengths, SHAPES["tiny"]["vocab_size"])
    actor.train_step(sequences)
    seconds, before = [], time.process_time()
    for _ in range(turns):
        started = time.perf_counter()
        actor.train_step(sequences)
        seconds.append(time.perf_counter() - started)
    out.put((rank, statistics.median(seconds), (time.process_time() - before) / turns))
    actor.close()


def tensor_parallel(lengths: list[int], turns: int) -> dict[str, float]:
    """Seconds (and CPU-seconds of all ranks) of one step: one rank with two threads, two ranks with one each."""
    context = get_context("spawn")
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = write_config(Path(directory), SHAPES["tiny"])
        for world, threads in ((1, 2), (2, 1)):
            port, out = free_port(), context.Queue()
            ranks = [
                context.Process(target=_rank, args=(r, world, port, threads, path, lengths, turns, out), daemon=True)
                for r in range(world)
            ]
            for process in ranks:
                process.start()
            answers = [out.get(timeout=600) for _ in ranks]
            for process in ranks:
                process.join(30)
            result[f"tp{world}_seconds"] = max(a[1] for a in answers)
            result[f"tp{world}_cpu_seconds"] = sum(a[2] for a in answers)
    result["tp1_over_tp2"] = result["tp1_seconds"] / result["tp2_seconds"]
    return result


def pack_balance(ranks: int = 8) -> dict[str, float]:
    """Tokens of the fullest rank over the mean for 256 rollouts: `balance`, and equal counts in order of arrival."""
    lengths = rollout_lengths(256, 2000, seed=3)
    ours = [sum(lengths[i] for i in part) for part in balance(lengths, ranks)]
    size = len(lengths) // ranks
    naive = [sum(lengths[i * size : (i + 1) * size]) for i in range(ranks)]
    mean = sum(lengths) / ranks
    return {"ranks": ranks, "balanced_max_over_mean": max(ours) / mean, "in_order_max_over_mean": max(naive) / mean}


def head_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `benchmarks.actor.head` in its own process with an entropy term, which has the largest peak.

    On a GPU, where it is quick, also without the entropy term and without DDP's gradient buffer.
    """
    variants = (["--entropy"], [], ["--no-buffer"]) if args.device == "cuda" else (["--entropy"],)
    size = ["--hidden-size", str(args.head_hidden_size), "--tokens", str(args.head_tokens)]
    measured = []
    for extra in variants:
        command = [sys.executable, "-m", "benchmarks.actor.head", "--device", args.device, *size, *extra]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True)
        measured.append(json.loads(done.stdout.splitlines()[-1]))
    return measured


def run_case(args: argparse.Namespace) -> dict[str, Any]:
    """Results of one shape and recompute setting, on ragged and on equal lengths."""
    count, mean = (32, 2048) if args.device == "cuda" else (8, 60) if args.dry else (48, 240)
    ragged = rollout_lengths(count, mean)
    return {
        "shape": args.shape,
        "layers": shape_of(args)["num_hidden_layers"],
        "recompute": args.recompute,
        "ragged": against_transformers(args, ragged, free_port()),
        "equal": against_transformers(args, [sum(ragged) // count] * count, free_port()),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--recompute", action="store_true", help="full activation recompute, on both sides")
    parser.add_argument("--sweep", action="store_true", help="1.5b and 7b, with and without --recompute")
    parser.add_argument("--dry", action="store_true", help="with --sweep: what a GPU would run, tiny, on a CPU")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of the comparison with transformers (CPU)")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch; default 8192 on CPU, 16384 on a GPU")
    parser.add_argument("--head-memory", action="store_true")
    parser.add_argument("--head-hidden-size", type=int, default=1536)
    parser.add_argument("--head-tokens", type=int, default=16384)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    if args.dry and args.device == "cuda":
        parser.error("--dry is for a machine without a GPU; leave --device out")
    args.apart = args.device == "cuda" or args.dry
    args.budget = args.budget or (256 if args.dry else 8192 if args.device == "cpu" else 16384)
    args.turns = 1 if args.dry else args.turns
    return args


def main() -> None:
    args = parse()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {os.cpu_count()} cores",
        "load_before": os.getloadavg()[0],
    }
    if args.sweep:
        report["cases"] = []
        for shape, layers in (("tiny", 2),) if args.dry else SWEEP:
            for recompute in (False, True):
                case = {"shape": shape, "layers": layers, "recompute": recompute}
                report["cases"].append(run_case(argparse.Namespace(**{**vars(args), **case})))
    else:
        report.update(run_case(args))
    report["pack_balance"] = pack_balance()
    if not args.apart:
        report["tensor_parallel"] = tensor_parallel(rollout_lengths(48, 240), args.turns)
    if args.head_memory:
        report["head_memory"] = head_memory(args)
    print(json.dumps(report, indent=2))
    if not args.dry:
        write_result(args.out or RESULTS / f"actor_throughput_{args.device}.json", report)


if __name__ == "__main__":
    main()
