"""`python -m benchmarks.precision [NAME] [key=value ...]`: training steps and rollouts in fp32 and in bf16, in pairs.

Takes model, layout and threads from the configuration NAME, with one actor rank. The same trajectories of random tokens are
trained on, and the same requests generated, in both precisions in turn. Counted is the CPU time of the actor's or the engine's
processes, which other programs of the machine change less than wall time. One JSON line: tokens per CPU second of each, and
the ratio of the CPU times (bf16 over fp32) with the middle 95% of its resamples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.actor.cases import make_sequences, rollout_lengths
from benchmarks.records import write_result
from benchmarks.rollout.trace_overhead import cpu_seconds
from benchmarks.step_cpu import ratio_of
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.services.process import free_port
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.tiny.resolve import resolve_tiny

Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
_MEAN_TOKENS = 240  # of a trajectory
_PROMPT_TOKENS, _RESPONSE_TOKENS = 80, 120
_LIMIT_S = 1800.0  # of a step or a rollout


def in_precision(settings: Settings, precision: Precision) -> Settings:
    actor, rollout = (
        part.model_copy(update={"model": part.model.model_copy(update={"precision": precision})})
        for part in (settings.actor, settings.rollout)
    )
    return settings.model_copy(update={"actor": actor, "rollout": rollout})


def _actor(settings: Settings, lengths: list[int], port: int, channel: Connection) -> None:
    """An actor that takes a step for each message, and answers with the CPU seconds of its process."""
    from rstar2_megatron.cpu.megatron import install

    install()
    from rstar2_megatron.actor.megatron_actor import MegatronActor

    path = settings.rollout.model.model_path
    actor = MegatronActor(
        *(settings.actor, settings.runner, settings.algorithm),
        model_path=path,
        rank=0,
        world_size=1,
        init_method=f"tcp://127.0.0.1:{port}",
        device="cpu",
    )
    actor.initialize()
    sequences = make_sequences(lengths, ModelConfig.from_directory(Path(path)).vocab_size)
    channel.send(0.0)
    while channel.recv():
        before = time.process_time()
        actor.train_step(sequences)
        channel.send(time.process_time() - before)
    actor.close()


def _answer(channel: Connection) -> float:
    if not channel.poll(_LIMIT_S):
        raise TimeoutError(f"an actor gave no answer within {_LIMIT_S:.0f} s")
    return channel.recv()


def time_training(settings: Settings, count: int, turns: int) -> tuple[int, dict[Precision, list[float]]]:
    """(tokens of a step, CPU seconds of each step by precision)."""
    lengths = [min(length, settings.runner.seq_length) for length in rollout_lengths(count, _MEAN_TOKENS)]
    context = get_context("spawn")
    ends: dict[Precision, Connection] = {}
    processes = []
    seconds: dict[Precision, list[float]] = {precision: [] for precision in PRECISIONS}
    try:
        for precision in PRECISIONS:
            ends[precision], theirs = context.Pipe()
            words = in_precision(settings, precision), lengths, free_port(), theirs
            process = context.Process(target=_actor, args=words, daemon=True)
            process.start()
            theirs.close()  # so that a dead actor ends the wait
            processes.append(process)
        for end in ends.values():
            _answer(end)
        for turn in range(turns + 1):
            for precision in PRECISIONS if turn % 2 else PRECISIONS[::-1]:
                ends[precision].send(True)
                used = _answer(ends[precision])
                if turn:  # turn 0 warms up
                    seconds[precision].append(used)
            print(f"training step {turn} of {turns}", file=sys.stderr)
        for end in ends.values():
            end.send(False)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    return sum(lengths), seconds


async def time_rollouts(settings: Settings, count: int, turns: int) -> tuple[int, dict[Precision, list[float]]]:
    """(generated tokens of a rollout, CPU seconds of each rollout by precision)."""
    vocabulary = ModelConfig.from_directory(Path(settings.rollout.model.model_path)).vocab_size
    draw = random.Random(0)
    prompts = [[draw.randrange(vocabulary) for _ in range(_PROMPT_TOKENS)] for _ in range(count)]
    sampling = {"temperature": 1.0, "max_new_tokens": _RESPONSE_TOKENS, "ignore_eos": True}
    context = _PROMPT_TOKENS + _RESPONSE_TOKENS
    engines = {
        precision: EngineClient(in_precision(settings, precision).rollout, name=precision, max_context_tokens=context)
        for precision in PRECISIONS
    }
    seconds: dict[Precision, list[float]] = {precision: [] for precision in PRECISIONS}
    try:
        for engine in engines.values():
            await engine.start()
        for turn in range(turns + 1):
            for precision in PRECISIONS if turn % 2 else PRECISIONS[::-1]:
                engine = engines[precision]
                await engine.flush_cache()
                before = cpu_seconds()[1]
                await asyncio.gather(*(engine.generate(prompt, sampling, timeout_s=_LIMIT_S) for prompt in prompts))
                if turn:
                    seconds[precision].append(cpu_seconds()[1] - before)
            print(f"rollout {turn} of {turns}", file=sys.stderr)
    finally:
        for engine in engines.values():
            await engine.close()
    return count * _RESPONSE_TOKENS, seconds


def summary(tokens: int, seconds: dict[Precision, list[float]]) -> dict[str, Any]:
    rates = {f"{name}_tokens_per_cpu_s": round(tokens * len(used) / sum(used), 1) for name, used in seconds.items()}
    return {"tokens": tokens, **rates, "bf16_over_fp32": ratio_of(seconds["fp32"], seconds["bf16"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="rstar2-smollm2-135m-cpu")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--turns", type=int, default=4, help="pairs of each")
    parser.add_argument("--trajectories", type=int, default=16, help="of a training step and of a rollout")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_intermixed_args()
    settings = resolve_tiny(
        load_settings(options.config, [*options.overrides, "actor.model.tensor_model_parallel_size=1"]),
        progress=lambda line: print(line, file=sys.stderr),
    )
    training = time_training(settings, options.trajectories, options.turns)
    rollouts = asyncio.run(time_rollouts(settings, options.trajectories, options.turns))
    result = {"case": "precision", "config": options.config, "training": summary(*training), "rollout": summary(*rollouts)}
    write_result(options.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
