"""`runner.task_type: difficulty_filter`: drops the problems that a model always (or never) solves.

Every attempt goes through the agent loop, judge and grader of training (`evaluation/sampling.py`) with the sampling of
training: algorithm.sampling_params and agentloop.max_assistant_turns. After a stop or a kill the same command continues.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rstar2_megatron.data.difficulty import difficulty_report, dropped_problems, pass_counts, render_report
from rstar2_megatron.data.problems import Columns, drop_long_prompts, read_problems, row_of
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.evaluation.samples import count_late, late_note
from rstar2_megatron.evaluation.sampling import sample
from rstar2_megatron.evaluation.services import SamplingSettings
from rstar2_megatron.records.whole_file import write_json, write_jsonl, write_text
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.runs.base_run import BaseRun, Stopped
from rstar2_megatron.settings.load import print_config
from rstar2_megatron.settings.placement import component_slots, slots_of, visible_gpus
from rstar2_megatron.settings.schema import DataSettings, Settings
from rstar2_megatron.trajectory import Problem


class SamplingRun(BaseRun):
    """Engines and judge on this node, without Ray; `work` stops what it starts."""

    def train(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.directory / "config.yaml", print_config(self.settings))  # by which a run of another task is refused
        if gpus := rollout_gpus(self.settings):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))  # of the engines, which count from the first
        self.signals.restore()  # see `evaluation.services.running_services`
        try:
            self.work()
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None
        except asyncio.CancelledError:
            raise Stopped(signal.SIGTERM) from None
        self.mark_finished(0)

    def work(self) -> None:
        raise NotImplementedError

    def sampling(self, samples: int) -> SamplingSettings:
        """As in training, `samples` of each problem, on `rollout_gpus`; one engine without GPU."""
        settings = self.settings
        engines = max(1, len(rollout_gpus(settings)) // settings.rollout.tensor_parallel_size)
        spec = replace(RolloutSpec.training(settings), samples=samples)
        return SamplingSettings.of(settings, spec, model=settings.rollout.model.model_path, num_engines=engines)

    def problems(self, limit: int) -> list[Problem]:
        """The problems that training would use; of the first `limit` (-1: of all)."""
        data = self.settings.data
        problems: Sequence[Problem] = read_problems(data.train_data_paths, data)
        problems = problems[:limit] if limit >= 0 else problems
        tokenizer: Any = AutoTokenizer.from_pretrained(self.settings.rollout.model.model_path)
        template = ChatTemplate(tokenizer, self.settings.agentloop)
        kept, _ = drop_long_prompts(problems, lambda p: len(template.prompt_ids(p)), data.max_prompt_length)
        return kept


class FilterRun(SamplingRun):
    def work(self) -> None:
        """Sample, count and write pass_counts.jsonl, train.jsonl and report.json.

        Raises DataError when no problem is left, and the errors of `evaluation.sampling.sample`.
        """
        settings, out = self.settings, self.directory
        options = settings.difficulty_filter
        problems = self.problems(options.num_problems)
        samples = sample(problems, self.sampling(options.num_samples), out / "trajectories.jsonl", label="difficulty")
        counts = pass_counts(problems, ((s.query_id, s.positive) for s in samples))
        dropped = dropped_problems(counts, options, options.num_samples)
        report = difficulty_report(counts, dropped, options.num_samples)
        write_jsonl(out / "pass_counts.jsonl", (asdict(count) for count in counts))
        kept = [problem for problem in problems if problem.query_id not in dropped]
        if not kept:
            raise DataError(f"no problem is left of {len(problems)}: {report['dropped']}; see {out / 'pass_counts.jsonl'}")
        write_problems(out / "train.jsonl", kept, settings.data)
        write_json(out / "report.json", report)
        late = late_note(count_late(out / "trajectories.jsonl", {problem.query_id for problem in problems}))
        print("\n".join(filter(None, (render_report(report), late))), flush=True)
        print(f"wrote {out / 'train.jsonl'} and pass_counts.jsonl, report.json, trajectories.jsonl beside it", flush=True)


def write_problems(path: Path, problems: Sequence[Problem], data: DataSettings) -> None:
    """Write problems as a data file, which a stage with `problems_from` reads."""
    columns = Columns(data.prompt_key, data.answer_key)
    write_jsonl(path, (row_of(problem, columns) for problem in problems))


def rollout_gpus(settings: Settings) -> list[int]:
    """This node's GPUs that cluster.component_placement gives the rollout, or all; empty with CPU slots or without GPUs."""
    found = visible_gpus()
    slots = slots_of(settings.cluster, found)
    if slots.is_cpu:
        return []
    here = range(found[0])
    return [slot for slot in component_slots(settings.cluster, slots.count)["rollout"] if slot in here] or list(here)
