"""`python -m benchmarks.paper_step`: a step of the paper's size through the real pipeline, without a model.

Real are the driver (`Trainer.step`), Ray, RLinf's workers and channel, the agent loop with its scheduler, grading,
resample-on-correct, the batch, its transport, and the packing of micro-batches. Engine, judge and network are stand-ins
(`benchmarks/paper_step/model.py`, `workers.py`). Prints one JSON object: wall seconds of each part of the step, CPU seconds of
each kind of process in it, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.paper_step.model import SOLUTION, make_tokenizer
from benchmarks.paper_step.processes import Processes
from benchmarks.paper_step.workers import PaperActor, PaperReward, PaperRollout
from benchmarks.records import keep_rows
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.cluster.phases.coordinator import RolloutCoordinator
from rstar2_megatron.cluster.phases.server import DriverChannel
from rstar2_megatron.data.loader import ProblemLoader
from rstar2_megatron.settings.load import load_settings, to_dict_config
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training import trainer as trainer_module
from rstar2_megatron.training.metrics import step_metrics
from rstar2_megatron.training.trainer import Trainer
from rstar2_megatron.trajectory import Problem

_MAX_PROMPT = 1024
_START_S = 900


class Rehearsal(Trainer):
    """The trainer without weights: no sync, no comparison of log-probs. Counts CPU seconds at the end of each part."""

    processes: Processes

    def sync_weights(self, version: int) -> dict[str, float]:
        self._first_batch_unchecked = False
        return {}


class CountingClock(trainer_module.Clock):
    """The step's clock, which also notes every process's CPU seconds."""

    parts: ClassVar[dict[str, Counter[str]]] = {}
    processes: Processes

    def __init__(self) -> None:
        super().__init__()
        self._cpu = self.processes.cpu()

    def lap(self, name: str) -> None:
        super().lap(name)
        now = self.processes.cpu()
        self.parts[name] = now - self._cpu
        self._cpu = now


def settings_of(options: argparse.Namespace, tokenizer: Path) -> Settings:
    slots = f"{{type: CPUSlots, configs: [{{node_rank: 0, num_slots: {options.ranks}}}]}}"
    changes = [
        'cluster.component_placement={"actor,rollout": all, reward: 0}',
        f"rollout.tensor_parallel_size={options.ranks // options.engines}",
        f"cluster.node_groups=[{{label: cpu, node_ranks: 0, hardware: {slots}}}]",
        f"runner.output_dir={tokenizer.parent}",
        f"runner.max_tokens_per_mbs={_MAX_PROMPT + options.max_tokens}",
        "runner.step_timeout_s=3600",
        f"algorithm.group_size={options.group}",
        f"algorithm.down_sampling.down_sampling_config.down_sample_to_n={options.group // 2}",
        f"algorithm.sampling_params.max_new_tokens={options.max_tokens}",
        f"data.rollout_batch_size={max(options.problems)}",
        f"data.max_prompt_length={_MAX_PROMPT}",
        "actor.model.tensor_model_parallel_size=1",
        "agentloop.max_assistant_turns=10",
        "agentloop.max_tool_response_length=256",
        f"rollout.model.model_path={tokenizer}",
        "cold_start.enabled=False",
        "cold_start.builder=null",
    ]
    return load_settings("rstar2-tiny-cpu", changes)


def rehearse(options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """One step for each number of problems, in one cluster."""
    tokenizer = directory / "tokenizer"
    make_tokenizer(tokenizer)
    settings = settings_of(options, tokenizer)
    text = "how many of them are there? " * 60
    problems = [
        Problem(f"q{i}", [{"role": "user", "content": f"Problem {i}: {text}"}], [SOLUTION])
        for i in range(max(options.problems))
    ]
    cluster = TrainingCluster(settings, to_dict_config(settings))
    try:
        cluster.start()
        groups = {
            "actor": cluster.launch(PaperActor, "Actors", "actor", settings),
            "engine": cluster.launch(PaperRollout, "Rollouts", "rollout", settings, "cpu", max_concurrency=256),
            "reward": cluster.launch(PaperReward, "Rewards", "reward", settings.reward, max_concurrency=16),
        }
        known = {pid: kind for kind, g in groups.items() for pid in g.call("process_id", timeout_s=_START_S)}
        start = (str(tokenizer), options.mean_tokens, options.max_tokens)
        groups["engine"].call("start_paper_engine", *start, timeout_s=_START_S)
        coordinator = RolloutCoordinator(
            DriverChannel(cluster.channel, groups["engine"], groups["reward"], settings.runner), settings
        )
        messages = count_messages(coordinator)
        CountingClock.processes = processes = Processes(known)
        trainer_module.Clock = CountingClock  # type: ignore[misc]
        trainer = Rehearsal(settings, groups["actor"], groups["engine"], coordinator, device="cpu", colocated=False)
        trainer._first_batch_unchecked = False  # no model, whose log-probs could agree
        for step, count in enumerate(options.problems, start=1):
            data = settings.data.model_copy(update={"rollout_batch_size": count})
            processes.forget_peaks()
            messages.clear()
            result = measure(trainer, step, ProblemLoader(problems[:count], data), processes, options)
            yield {**result, "messages": dict(messages)}
        coordinator.channel.close()
    finally:
        cluster.close()


def count_messages(coordinator: RolloutCoordinator) -> Counter[str]:
    """The number of messages that the driver reads from now on, by their type; `bytes` are graded trajectories."""
    counts: Counter[str] = Counter()
    poll = coordinator.channel.inbox.poll

    def counting(timeout_s: float) -> Any:
        message = poll(timeout_s)
        counts[type(message).__name__] += message is not None
        return message

    coordinator.channel.inbox.poll = counting  # type: ignore[method-assign]
    return counts


def measure(
    trainer: Trainer, step: int, loader: ProblemLoader, processes: Processes, options: argparse.Namespace
) -> dict[str, Any]:
    """One step."""
    before, begun = processes.cpu(), time.monotonic()
    result = trainer.step(step, loader)
    metrics = step_metrics(result.groups, result.resampled, result.actor_metrics, result.rollout_stats, result.seconds)
    wall, spent = time.monotonic() - begun, processes.cpu() - before
    return {
        "problems": len(result.groups),
        "group": options.group,
        "mean_tokens": round(metrics["rollout/response_length_all"]),
        "trajectories": int(metrics["rollout/num_trajectories"]),
        "kept": int(metrics["rollout/total_num_sequence"]),
        "wall_s": {**_rounded(result.seconds), "step": round(wall, 2)},
        "cpu_s": {**_rounded(spent), "step": round(sum(spent.values()), 2)},
        "cpu_s_by_part": {name: _rounded(kinds) for name, kinds in CountingClock.parts.items() if kinds},
        "peak_mb": processes.peak_mb(),
        "rank": {k.removeprefix("actor/"): round(v, 3) for k, v in result.actor_metrics.items()},
    }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items() if value > 0.005}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, nargs="+", default=[512], help="a step for each of them")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--mean-tokens", type=int, default=5000, help="of a response, tool text included")
    parser.add_argument("--max-tokens", type=int, default=12288)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--case", nargs="*", default=[], help="words behind the rows' names in the JSON file")
    parser.add_argument("--out", type=Path, help="JSON file that the object is added to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paper-step-") as directory:
        for result in rehearse(options, Path(directory)):
            print(json.dumps(result), flush=True)
            words = [f"{result['problems']} x {options.group}", f"mean {options.mean_tokens}"]
            keep_rows(options.out, [{"case": ", ".join(words + options.case), **result}])


if __name__ == "__main__":
    main()
