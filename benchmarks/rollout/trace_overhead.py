"""`python -m benchmarks.rollout.trace_overhead --model DIR`: CPU time of a rollout with and without a trace, in pairs.

The same synthetic trajectories (the shape of `live`) on one real engine with real tool calls, again and again: each pair is one
rollout with `runner.trace`'s recorder open and one without, in alternating order. Counted is the CPU time of this process
(agent loop and recorder) and of all its children (engine, judge, programs). One JSON line; `ratio` is that of the sums.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from benchmarks.judge.running import running_judge
from benchmarks.records import write_result
from benchmarks.rollout.live import SHAPE
from benchmarks.rollout.live_replay import CONTEXT_TOKENS, replay
from benchmarks.rollout.traces import synthetic
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.records.trace import TRACE, engine_row, read_trace
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.scheduling.adaptive_budget import make_budget
from rstar2_megatron.settings.schema import AgentLoopSettings, RolloutModelSettings, RolloutSettings
from rstar2_megatron.tools import STANDARD_IO


def cpu_seconds() -> tuple[float, float]:
    """(of this process, of its descendants) so far; a child that has ended counts for its parent."""
    own = psutil.Process()
    times = own.cpu_times()
    children = times.children_user + times.children_system
    for child in own.children(recursive=True):
        try:
            children += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:  # its time is in its parent's now
            continue
    return times.user + times.system, children


async def measure(options: argparse.Namespace, judge_url: str) -> dict[str, Any]:
    settings = RolloutSettings(
        model=RolloutModelSettings(model_path=options.model, precision="fp32"),
        max_total_tokens=8192,
        max_running_requests=256,
        cpu_threads=1,
    )
    traces = synthetic(SHAPE, 0)[: options.groups * SHAPE.group_size]
    turns = 1 + max(len(trace.turns) for trace in traces)
    wording = AgentLoopSettings(system_prompt=STANDARD_IO, user_prefix="", max_assistant_turns=turns)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    template = ChatTemplate(tokenizer, wording)
    judge = JudgeClient(judge_url, time_limit_s=4.0, request_timeout_s=60, max_outage_s=60)
    engine = EngineClient(settings, max_context_tokens=CONTEXT_TOKENS)
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    events = 0
    try:
        await engine.start()
        budget = make_budget("kv_adaptive", engine.kv_capacity_tokens, 256)

        async def one(traced: bool) -> None:
            nonlocal events
            await engine.flush_cache()
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "step_1.json"
                before = cpu_seconds()
                if traced:
                    TRACE.open(path, time.time(), engine_row(0))
                await replay(traces, [engine], judge, template, wording, policy="kv_adaptive", budgets=[budget], slice_size=4)
                TRACE.close()
                after = cpu_seconds()
                seconds[traced].append((after[0] - before[0], after[1] - before[1]))
                events = len(read_trace(path)) if traced else events

        await one(False)
        seconds[False].clear()  # the first one warms up
        for pair in range(options.pairs):
            for traced in (pair % 2 == 0, pair % 2 == 1):
                await one(traced)
            print(f"pair {pair}: {sum(seconds[True][-1]) / sum(seconds[False][-1]):.3f}", file=sys.stderr)
    finally:
        await engine.close()
        await judge.close()
    sums = {traced: [sum(part) for part in zip(*values, strict=True)] for traced, values in seconds.items()}
    pairs = [sum(on) / sum(off) for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "case": "trace overhead",
        "trajectories": len(traces),
        "events": events,
        "loop_cpu_s": [round(sums[traced][0] / options.pairs, 3) for traced in (False, True)],
        "all_cpu_s": [round(sum(sums[traced]) / options.pairs, 3) for traced in (False, True)],
        "recorder_us_per_event": round(_event_cost_us(), 1),
        "ratio": round(sum(sums[True]) / sum(sums[False]), 4),
        "pairs": [round(ratio, 3) for ratio in pairs],
    }


def _event_cost_us(count: int = 20_000) -> float:
    """CPU microseconds of one span, written."""
    with tempfile.TemporaryDirectory() as directory:
        TRACE.open(Path(directory) / "step_1.json", time.time(), engine_row(0))
        started = time.process_time()
        for _ in range(count):
            with TRACE.span("generate") as note:
                note.update(tokens=100, cached=10)
        TRACE.close()
        return (time.process_time() - started) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory with weights and tokenizer")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--groups", type=int, default=SHAPE.problems, help="of 16 trajectories each")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    with running_judge() as service:
        result = asyncio.run(measure(options, service.url))
    print(json.dumps(result), flush=True)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
