"""`python -m benchmarks.paper_step.hot_path`: CPU time of the rollout's own code, by part, per turn and per generated token.

8 engines x 256 trajectories of the paper's shape at once, in one process (`one_process.py`), with engines and judge that answer
at once and whose own time is left out. One JSON line. `--trees OLD NEW` compares the package of two checkouts: a process each,
which make steps in turns, one before that to warm up. The benchmark itself is this checkout's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.paper_step.parts import Parts
from benchmarks.records import write_result
from benchmarks.step_cpu import ratio_of

STAND_IN = "stand-ins"


def stand_ins() -> Parts:
    """Counts what is not the project's own code, and all the rest together."""
    from benchmarks.paper_step import one_process as own
    from benchmarks.paper_step.model import PaperJudge

    parts = Parts()
    parts.measure(STAND_IN, own.PaperSGLang, "async_generate")
    parts.measure(STAND_IN, PaperJudge, "run")
    return parts


def measure_parts(parts: Parts) -> None:
    """Count every part apart. Each step of a coroutine costs some microseconds then."""
    from benchmarks.paper_step import one_process as own
    from rstar2_megatron.cluster import reward_worker, rollout_worker
    from rstar2_megatron.cluster.phases import server
    from rstar2_megatron.rollout import agent_loop, chat, dialogue, token_store, tool_runner, trajectory_runner
    from rstar2_megatron.rollout.engine import child, client, process
    from rstar2_megatron.trajectory import Trajectory

    parts.measure("engine process", process._EngineServer, "run", "_answer")
    parts.measure("engine client", client.EngineClient, "generate")
    parts.measure("engine client", child.EngineChild, "_read")
    parts.measure("agent loop", agent_loop.AgentLoop, "run")
    parts.measure("tokens to text", chat.ChatTemplate, "decode")
    parts.measure("call parsing", chat.ChatTemplate, "parse_calls")
    parts.measure("tool text to tokens", chat.ChatTemplate, "tool_response_ids")
    parts.measure("prompt", chat.ChatTemplate, "prompt_ids")
    parts.measure("tool calls", tool_runner.ToolRunner, "run", "_run_one")
    parts.measure("tokens appended", Trajectory, "append")
    parts.measure("conversation", dialogue.Dialogue, "__init__", "_open_next_turn")
    parts.measure("admission", trajectory_runner.TrajectoryRunner, "run", "observe", "_get_work", "_ended", "_run_one")
    parts.measure("token store", token_store.TokenStore, "keep")
    parts.measure("token store", rollout_worker.RolloutWorker, "generate")
    for module, names in ((rollout_worker, ("pack",)), (reward_worker, ("pack", "unpack")), (server, ("unpack",))):
        parts.measure("hand-over", module, *names)
    parts.measure("grading", own.Rewards, "grade", "_math")
    parts.measure("grading", own.LocalReward, "serve")
    parts.measure("driver's groups", own.PhaseServer, "handle")
    parts.measure("resampling", own.Selection, "resample")
    parts.measure("batch", token_store.TokenStore, "block", "tokens")
    parts.measure("metrics", own, "step_metrics")
    parts.measure("rows", own.RunFiles, "append")


async def measure(options: argparse.Namespace, directory: Path) -> None:
    """Print the figures of a step, or of each that `--ask` is asked for."""
    from benchmarks.paper_step.__main__ import settings_of
    from benchmarks.paper_step.model import SOLUTION, make_tokenizer
    from benchmarks.paper_step.one_process import Phase
    from rstar2_megatron.records.trace import TRACE
    from rstar2_megatron.trajectory import Problem

    parts = stand_ins()
    if options.parts:
        measure_parts(parts)
    make_tokenizer(directory / "tokenizer")
    settings = settings_of(options, directory / "tokenizer")
    rollout = settings.rollout.model_copy(update={"max_running_requests": 256})
    settings = settings.model_copy(update={"rollout": rollout})
    text = "how many of them are there? " * 60
    problems = [
        Problem(f"q{i}", [{"role": "user", "content": f"Problem {i}: {text}"}], [SOLUTION]) for i in range(options.problems[0])
    ]
    phase = Phase(settings, problems, directory)
    await phase.start(options.engines, options.mean_tokens, options.max_tokens)
    if options.trace:
        TRACE.open(directory / "step_1.json", time.time())
    for _ in range(1 if options.commands is None else options.rounds + 1):
        if options.commands is not None:
            options.commands.readline()
        result = {"case": "hot path", **await one_step(phase, parts)}
        print(json.dumps(result), flush=True)
        write_result(options.out, result)
    TRACE.close()
    await phase.close()


async def one_step(phase: Any, parts: Parts) -> dict[str, Any]:
    gc.collect()
    parts.start()
    metrics = await phase.step()
    seconds = parts.stop()
    stand_in = seconds.pop(STAND_IN)
    tokens = metrics["rollout/generated_tokens"]
    turns = metrics["rollout/num_trajectories"] + sum(
        v for k, v in metrics.items() if k.startswith("rollout/engine/tool_calls/")
    )
    total = sum(seconds.values())
    by_part = sorted(seconds.items(), key=lambda item: -item[1])
    return {
        "trajectories": int(metrics["rollout/num_trajectories"]),
        "turns": int(turns),
        "generated_tokens": int(tokens),
        "us_a_token": round(1e6 * total / tokens, 4),
        "us_a_turn": round(1e6 * total / turns, 1),
        "us_a_token_by_part": {part: round(1e6 * spent / tokens, 4) for part, spent in by_part},
        "us_a_turn_by_part": {part: round(1e6 * spent / turns, 1) for part, spent in by_part},
        "stand_in_us_a_token": round(1e6 * stand_in / tokens, 4),
    }


class Arm:
    """A process with the package of the checkout `tree`, which makes a step when it is asked."""

    def __init__(self, tree: Path, arguments: list[str], place: Path) -> None:
        place.mkdir()
        (place / "rstar2_megatron").symlink_to(tree.resolve() / "rstar2_megatron")
        for name in ("benchmarks", "docs", "config"):
            (place / name).symlink_to(Path(__file__).parents[2] / name)
        command = [sys.executable, "-m", "benchmarks.paper_step.hot_path", "--ask", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(place)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=place, env=environment, stdin=pipe, stdout=pipe, text=True)

    def step(self) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith('{"case"'):
                result: dict[str, Any] = json.loads(line)
                return result
        raise SystemExit(f"a process of {self._process.args!r} ended")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    arguments = [f"--mean-tokens={options.mean_tokens}", f"--max-tokens={options.max_tokens}", f"--engines={options.engines}"]
    arguments += [f"--problems={options.problems[0]}", f"--group={options.group}", f"--rounds={options.rounds}"]
    arguments += [option for option in ("--trace", "--parts") if getattr(options, option[2:])]
    results: tuple[list[dict[str, Any]], ...] = ([], [])
    with tempfile.TemporaryDirectory(prefix="hot-path-") as place, contextlib.ExitStack() as stack:
        arms = [Arm(tree, arguments, Path(place) / str(number)) for number, tree in enumerate(options.trees)]
        for arm in arms:
            stack.callback(arm.close)
        for arm in arms:
            arm.step()  # warms up
        for turn in range(options.rounds):
            for number in (0, 1) if turn % 2 == 0 else (1, 0):
                results[number].append(arms[number].step())
                print(f"round {turn}, tree {number}: {results[number][-1]['us_a_turn']} us a turn", file=sys.stderr)
    return {
        "rounds": options.rounds,
        "us_a_token": ratio_of(*([one["us_a_token"] for one in arm] for arm in results)),
        "us_a_turn": ratio_of(*([one["us_a_turn"] for one in arm] for arm in results)),
        "ratios": [round(b["us_a_turn"] / a["us_a_turn"], 3) for a, b in zip(*results, strict=True)],
        "us_a_turn_by_part": {
            part: [round(statistics.median(one["us_a_turn_by_part"].get(part, 0.0) for one in arm), 1) for arm in results]
            for part in results[0][0]["us_a_turn_by_part"]
        },
        "runs": [[one["us_a_turn"] for one in arm] for arm in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, nargs=1, default=[64])
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--mean-tokens", type=int, default=5000, help="of a response, tool text included")
    parser.add_argument("--max-tokens", type=int, default=12288)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--trace", action="store_true", help="with runner.trace")
    parser.add_argument("--parts", action="store_true", help="count every part, which makes all of them slower")
    parser.add_argument("--trees", type=Path, nargs=2, metavar=("OLD", "NEW"))
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each tree")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ranks = options.engines
    if options.trees:
        result = {"case": "hot path", **compare(options)}
        print(json.dumps(result), flush=True)
        write_result(options.out, result)
        return
    options.commands = sys.stdin if options.ask else None
    with tempfile.TemporaryDirectory(prefix="hot-path-") as directory:
        asyncio.run(measure(options, Path(directory)))


if __name__ == "__main__":
    main()
