"""How fast the Megatron actor trains, how much memory its vocabulary head takes, how evenly it packs.

    python -m benchmarks.actor_throughput                 # CPU: tiny model against transformers, TP 1 against TP 2
    python -m benchmarks.actor_throughput --head-memory   # + the head at 16,384 tokens x 151,936 words (minutes)
    python -m benchmarks.actor_throughput --device cuda --shape 1.5b --head-memory     # one GPU, random weights, bf16
    python -m benchmarks.actor_throughput --device cuda --shape 7b --layers 16 [--recompute]

Both sides get the same trajectories; figures are medians. On a CPU they take turns in one process, on a GPU each has
a process and the memory of its own. Training keeps 18 bytes a parameter on a single GPU, so a 7B shape needs
`--layers 16` there (87 GB; the FLOPs are counted for those layers). Prints one JSON object; `--output FILE` also
writes it. The GPU part has not been run yet.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from rstar2_megatron.actor.flops import peak_tflops
from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.actor.model_config import ModelConfig
from rstar2_megatron.actor.packing import balance
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.services.process import free_port
from rstar2_megatron.settings.schema import ActorSettings, AlgorithmSettings, RunnerSettings

QWEN = {"num_hidden_layers": 28, "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 640,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        **QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        **QWEN,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def rollout_lengths(count: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths as rollouts have them: log-normal, cut at four times the mean."""
    rng = random.Random(seed)
    return [min(4 * mean, max(16, int(rng.lognormvariate(0, 0.6) * mean / 1.2))) for _ in range(count)]


def make_sequences(lengths: list[int], vocab: int) -> list[TrainSequence]:
    """Random tokens; the first fifth is prompt, of the rest four fifths are trained."""
    rng = random.Random(1)
    result = []
    for n in lengths:
        mask = [int(i >= n // 5 and rng.random() < 0.8) for i in range(n)]
        mask[-1] = 1
        old = [-6.5 * m for m in mask]
        result.append(
            TrainSequence([rng.randrange(vocab) for _ in range(n)], mask, old, rng.choice([-1.0, 1.0]))
        )
    return result


def settings_for(
    budget: int, threads: int, precision: str, **model: Any
) -> tuple[ActorSettings, RunnerSettings, AlgorithmSettings]:
    actor = ActorSettings.model_validate({"model": {"precision": precision, **model}, "cpu_threads": threads})
    runner = RunnerSettings.model_validate(
        {
            "experiment_name": "benchmark",
            "logger": {"log_path": "unused", "experiment_name": "benchmark"},
            "max_steps": 1,
            "seq_length": budget,
            "max_tokens_per_mbs": budget,
        }
    )
    algorithm = AlgorithmSettings.model_validate(
        {
            "group_size": 1,
            "down_sampling": {"down_sampling_config": {"down_sample_to_n": 1}},
            "sampling_params": {"max_new_tokens": budget},
        }
    )
    return actor, runner, algorithm


def write_config(directory: Path, shape: dict[str, Any]) -> Path:
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, **shape}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def start_actor(
    rank: int, world: int, port: int, device: str, config: Any, model_path: Path
) -> MegatronActor:
    """An actor with random weights: nothing of the model's size lies on disk."""
    from rstar2_megatron.cpu.megatron import install

    install()
    from rstar2_megatron.actor import policy

    def random_weights(chunks: list[Any], *_: Any) -> None:
        torch.manual_seed(0)
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.02)

    policy.load_hf_weights = random_weights  # type: ignore[assignment]
    actor = MegatronActor(
        *config,
        model_path=str(model_path),
        rank=rank,
        world_size=world,
        init_method=f"tcp://127.0.0.1:{port}",
        device=device,  # type: ignore[arg-type]
    )
    actor.initialize()
    return actor


def transformers_step(
    model: Any, adam: Any, sequences: list[TrainSequence], budget: int, device: str
) -> None:
    """What a trainer on transformers does: padded micro-batches, full logits, the same loss and optimizer."""
    trained = sum(s.num_trained_tokens for s in sequences)
    adam.zero_grad()
    waiting = list(sequences)
    while waiting:
        batch: list[TrainSequence] = []
        while waiting and (len(batch) + 1) * max(s.length for s in [*batch, waiting[0]]) <= budget:
            batch.append(waiting.pop(0))
        longest = max(s.length for s in batch)

        def padded(name: str, longest: int = longest, batch: list[TrainSequence] = batch) -> torch.Tensor:
            rows = [list(getattr(s, name)) + [0] * (longest - s.length) for s in batch]
            return torch.tensor(rows, device=device)

        ids, mask = padded("input_ids"), padded("loss_mask")[:, 1:]
        keep = torch.tensor([[1] * s.length + [0] * (longest - s.length) for s in batch], device=device)
        logits = model(input_ids=ids, attention_mask=keep, use_cache=False).logits[:, :-1].float()
        chosen = -torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        ).view(mask.shape)
        ratio = (chosen - padded("rollout_logprobs")[:, 1:]).clamp(-20, 20).exp()
        advantage = torch.tensor([s.advantage for s in batch], device=device)[:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (-(gain * mask).sum() / trained).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def make_side(side: str, args: argparse.Namespace, lengths: list[int], path: Path, port: int) -> Any:
    """One training step of "actor" or "transformers", as a function without arguments."""
    shape = shape_of(args)
    sequences = make_sequences(lengths, shape["vocab_size"])
    if side == "actor":
        precision = "fp32" if args.device == "cpu" else "bf16"
        recompute: dict[str, Any] = (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if args.recompute
            else {}
        )
        config = settings_for(args.budget, args.threads, precision, **recompute)
        actor = start_actor(0, 1, port, args.device, config, path)
        return lambda: actor.train_step(sequences)
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path),
        dtype=torch.float32 if args.device == "cpu" else torch.bfloat16,
        attn_implementation="sdpa",
    ).to(args.device)
    if args.recompute:
        hf.gradient_checkpointing_enable()
    hf.train()
    adam = torch.optim.AdamW(hf.parameters(), lr=1e-6, fused=True)
    return lambda: transformers_step(hf, adam, sequences, args.budget, args.device)


def time_sides(
    sides: list[str], args: argparse.Namespace, lengths: list[int], port: int, out: Any = None
) -> dict[str, tuple[float, float]]:
    """(median seconds of a step, peak GiB on the GPU) of each side, turn about; also put on the queue `out`."""
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
                if turn:  # the first warms up
                    seconds[side].append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    if dist.is_initialized():
        from rstar2_megatron.actor import process_groups

        process_groups.leave()
    result = {side: (statistics.median(seconds[side]), peak) for side in sides}
    if out is not None:
        out.put(result)
    return result


def against_transformers(args: argparse.Namespace, lengths: list[int], port: int) -> dict[str, float]:
    """Trained tokens a second of the actor and of a trainer on transformers."""
    if args.device == "cpu":
        timed = time_sides(["actor", "transformers"], args, lengths, port)
    else:
        timed = {}
        context = get_context("spawn")
        for side in ("actor", "transformers"):
            out = context.Queue()
            process = context.Process(target=time_sides, args=([side], args, lengths, port, out))
            process.start()
            timed.update(_answer(process, out))
            process.join(60)
    with tempfile.TemporaryDirectory() as directory:
        model = ModelConfig.from_directory(write_config(Path(directory), shape_of(args)))
    sequences = make_sequences(lengths, model.vocab_size)
    tokens = sum(s.num_trained_tokens for s in sequences)
    flops = model.train_flops(lengths, tokens)
    mine, right = timed["actor"][0], timed["transformers"][0]
    result = {
        "trained_tokens": float(tokens),
        "all_tokens": float(sum(lengths)),
        "actor_tokens_per_s": tokens / mine,
        "transformers_tokens_per_s": tokens / right,
        "ratio": right / mine,
        "actor_tflops": flops / mine / 1e12,
    }
    if args.device == "cuda":
        result["actor_peak_gib"] = timed["actor"][1]
        result["transformers_peak_gib"] = timed["transformers"][1]
        peak_rate = peak_tflops(torch.cuda.get_device_name())
        if peak_rate:
            result["mfu"] = flops / mine / 1e12 / peak_rate
            result["transformers_mfu"] = flops / right / 1e12 / peak_rate
    return result


def _answer(process: Any, out: Any, timeout_s: float = 1800.0) -> Any:
    """What a child put on its queue. Raises RuntimeError when it died, for example without memory."""
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


def _rank(
    rank: int, world: int, port: int, threads: int, path: Path, lengths: list[int], turns: int, out: Any
) -> None:
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
                context.Process(
                    target=_rank, args=(r, world, port, threads, path, lengths, turns, out), daemon=True
                )
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
    """Tokens of the fullest rank over the mean, 256 rollouts: ours, and equal counts in order of arrival."""
    lengths = rollout_lengths(256, 2000, seed=3)
    ours = [sum(lengths[i] for i in part) for part in balance(lengths, ranks)]
    size = len(lengths) // ranks
    naive = [sum(lengths[i * size : (i + 1) * size]) for i in range(ranks)]
    mean = sum(lengths) / ranks
    return {
        "ranks": ranks,
        "balanced_max_over_mean": max(ours) / mean,
        "in_order_max_over_mean": max(naive) / mean,
    }


def head_memory_here(device: str, hidden_size: int) -> dict[str, float]:
    """Peak memory of the head's forward and backward beyond its inputs, in this (fresh) process."""
    import torch.distributed as dist

    from rstar2_megatron.actor.logprob import log_prob_entropy

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(16384, hidden_size, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(151936, hidden_size, device=device, dtype=dtype) * 0.02).requires_grad_()
    targets = torch.randint(151936, (16384,), device=device)
    chunk = ActorSettings.model_fields["log_prob_chunk_tokens"].default

    def used() -> float:
        if device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        # not getrusage: its maximum goes through exec, so the parent's memory would hide ours
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20

    before, started = used(), time.perf_counter()
    out = log_prob_entropy(
        hidden, weight, targets, temperature=1.0, chunk_tokens=chunk, group=dist.group.WORLD
    )
    out[0].sum().backward()
    _synchronise(device)
    seconds = time.perf_counter() - started
    dist.destroy_process_group()
    return {
        "hidden_size": hidden_size,
        "chunk_tokens": chunk,
        "peak_gib": used() - before,
        "full_fp32_logits_gib": 16384 * 151936 * 4 / 2**30,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--recompute", action="store_true", help="full activation recompute, on both sides")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of the comparison with transformers (CPU)"
    )
    parser.add_argument(
        "--budget", type=int, help="tokens of a micro-batch; default 8192 on CPU, 16384 on a GPU"
    )
    parser.add_argument("--head-memory", action="store_true")
    parser.add_argument("--head-hidden-size", type=int, help="default 64 on CPU, 1536 on a GPU")
    parser.add_argument("--only-head", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.budget = args.budget or (8192 if args.device == "cpu" else 16384)
    args.head_hidden_size = args.head_hidden_size or (64 if args.device == "cpu" else 1536)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    if args.only_head:
        print(json.dumps(head_memory_here(args.device, args.head_hidden_size)))
        return
    count, mean = (64, 240) if args.device == "cpu" else (32, 2048)
    ragged = rollout_lengths(count, mean)
    equal = [sum(ragged) // count] * count
    report: dict[str, Any] = {
        "command": "python -m benchmarks.actor_throughput " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {os.cpu_count()} cores",
        "shape": args.shape,
        "layers": shape_of(args)["num_hidden_layers"],
        "recompute": args.recompute,
        "ragged": against_transformers(args, ragged, free_port()),
        "equal": against_transformers(args, equal, free_port()),
        "pack_balance": pack_balance(),
    }
    if args.device == "cpu":
        report["tensor_parallel"] = tensor_parallel(ragged, args.turns)
    if args.head_memory:
        command = [
            sys.executable,
            "-m",
            "benchmarks.actor_throughput",
            "--only-head",
            "--device",
            args.device,
        ]
        command += ["--head-hidden-size", str(args.head_hidden_size), "--threads", str(args.threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
        report["head_memory"] = json.loads(done.stdout.splitlines()[-1])
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
