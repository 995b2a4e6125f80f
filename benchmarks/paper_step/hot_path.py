"""`python -m benchmarks.paper_step.hot_path`: CPU time of the rollout's own code, by part, per turn and per generated token.

8 engines x 256 trajectories of the paper's shape at once, in one process (`one_process.py`), with engines and judge that answer
at once and whose own time is left out. One JSON line. `--trees OLD NEW` compares the package of two checkouts, in turns, a
process each; the benchmark itself is this checkout's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
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
    from rstar2_megatron.rollout import agent_loop, chat, dialogue, token_buffer, token_store, tool_runner, trajectory_runner
    from rstar2_megatron.rollout.engine import child, client, process

    parts.measure("engine process", process._EngineServer, "run", "_answer")
    parts.measure("engine client", client.EngineClient, "generate")
    parts.measure("engine client", child.EngineChild, "_read")
    parts.measure("agent loop", agent_loop.AgentLoop, "run")
    parts.measure("tokens to text", chat.ChatTemplate, "decode")
    parts.measure("call parsing", chat.ChatTemplate, "parse_calls")
    parts.measure("tool text to tokens", chat.ChatTemplate, "tool_response_ids")
    parts.measure("prompt", chat.ChatTemplate, "prompt_ids")
    parts.measure("tool calls", tool_runner.ToolRunner, "run", "_run_one")
    parts.measure("token buffer", token_buffer.TokenBuffer, "append")
    parts.measure("conversation", dialogue.Dialogue, "__init__", "_open_next_turn")
    parts.measure("admission", trajectory_runner.TrajectoryRunner, "run", "observe", "_pulled", "_ended", "_run_one")
    parts.measure("token store", token_store.TokenStore, "keep")
    parts.measure("token store", rollout_worker.RolloutWorker, "generate")
    for module, names in ((rollout_worker, ("pack",)), (reward_worker, ("pack", "unpack")), (server, ("unpack",))):
        parts.measure("hand-over", module, *names)
    parts.measure("grading", own.Rewards, "grade", "_score")
    parts.measure("grading", own.LocalReward, "serve")
    parts.measure("driver's groups", own.PhaseServer, "handle")
    parts.measure("resampling", own.Selection, "resample")
    parts.measure("batch", token_store.TokenStore, "block", "tokens")
    parts.measure("metrics", own, "step_metrics")
    parts.measure("rows", own.RunFiles, "append")


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
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
    gc.collect()
    parts.start()
    metrics = await phase.step()
    parts.enter("")  # counts what is open
    TRACE.close()
    await phase.close()
    seconds = dict(parts.seconds)
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


def in_process_of(tree: Path, arguments: list[str]) -> dict[str, Any]:
    """One measurement with the package of the checkout `tree`."""
    with tempfile.TemporaryDirectory(prefix="hot-path-") as place:
        (Path(place) / "rstar2_megatron").symlink_to(tree.resolve() / "rstar2_megatron")
        for name in ("benchmarks", "docs", "config"):
            (Path(place) / name).symlink_to(Path(__file__).parents[2] / name)
        command = [sys.executable, "-m", "benchmarks.paper_step.hot_path", *arguments]
        done = subprocess.run(command, cwd=place, env={**os.environ, "PYTHONPATH": place}, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(options: argparse.Namespace) -> dict[str, Any]:
    arguments = [f"--mean-tokens={options.mean_tokens}", f"--max-tokens={options.max_tokens}", f"--engines={options.engines}"]
    arguments += [f"--problems={options.problems[0]}", f"--group={options.group}", *(["--trace"] if options.trace else [])]
    results: tuple[list[dict[str, Any]], ...] = ([], [])
    for turn in range(options.rounds):
        for arm in (0, 1) if turn % 2 == 0 else (1, 0):
            results[arm].append(in_process_of(options.trees[arm], arguments))
            print(f"round {turn}, tree {arm}: {results[arm][-1]['us_a_turn']} us a turn", file=sys.stderr)
    by_part = [in_process_of(tree, [*arguments, "--parts"])["us_a_turn_by_part"] for tree in options.trees]
    return {
        "rounds": options.rounds,
        "us_a_token": ratio_of(*([one["us_a_token"] for one in arm] for arm in results)),
        "us_a_turn": ratio_of(*([one["us_a_turn"] for one in arm] for arm in results)),
        "ratios": [round(b["us_a_turn"] / a["us_a_turn"], 3) for a, b in zip(*results, strict=True)],
        "us_a_turn_by_part": {part: [one.get(part, 0.0) for one in by_part] for part in by_part[0]},
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
    options = parser.parse_args()
    options.ranks = options.engines
    if options.trees:
        result = compare(options)
    else:
        with tempfile.TemporaryDirectory(prefix="hot-path-") as directory:
            result = asyncio.run(measure(options, Path(directory)))
    result = {"case": "hot path", **result}
    print(json.dumps(result), flush=True)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
