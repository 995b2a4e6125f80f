"""What a search stage leaves for reasoning stages."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from rstar2_megatron.data.difficulty import pass_counts
from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.runs import filter_run
from rstar2_megatron.runs.base_run import StopSignals
from rstar2_megatron.runs.search_run import write_harder
from rstar2_megatron.runs.stages import Recipe, StagePlan
from rstar2_megatron.settings.load import load
from rstar2_megatron.trajectory import Problem

PROBLEMS = [
    Problem(name, [{"role": "user", "content": f"Find {name}."}], ["1"], extra={"source": "here"})
    for name in ("always", "mixed", "never", "unfinished")
]
SOLUTIONS = [("always", 1.0), ("mixed", 1.0), ("mixed", 0.0), ("never", 0.0)]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], ["mixed", "never", "unfinished"]),
        (["difficulty_filter.drop_never_solved=True"], ["mixed", "unfinished"]),
        (["difficulty_filter.drop_always_solved=False"], ["always", "mixed", "never", "unfinished"]),
    ],
)
def test_problems_are_kept_by_the_pass_rates_of_their_trees(tmp_path: Path, words: list[str], kept: list[str]) -> None:
    counts = tmp_path / "mcts.pass_counts.jsonl"
    write_jsonl(counts, (asdict(count) for count in pass_counts(PROBLEMS, SOLUTIONS)))
    settings = load("rstar2-tiny-cpu", words).settings
    line = write_harder(settings, PROBLEMS, counts, tmp_path / "train.jsonl")
    assert line.startswith(f"{len(kept)} of 4 problems")
    assert ("1 always solved" in line) == ("always" not in kept)
    read = read_problems([tmp_path / "train.jsonl"], settings.data)
    assert read == [problem for problem in PROBLEMS if problem.query_id in kept], "a data file as any other"


@pytest.mark.parametrize(
    ("words", "gpus", "engines"),
    [
        (["cluster.component_placement={'actor,rollout': 4-7, reward: 4}", "rollout.tensor_parallel_size=2"], "4,5,6,7", 2),
        (["cluster.component_placement={'actor,rollout,reward': all}"], "0,1,2,3,4,5,6,7", 8),
        (["cluster.num_nodes=2", "cluster.component_placement={actor: 0-11, rollout: 6-15, reward: 0}"], "6,7", 2),
        (["cluster.num_nodes=2", "cluster.component_placement={actor: 0-7, rollout: 8-15, reward: 0}"], "0,1,2,3,4,5,6,7", 8),
    ],
)
def test_engines_take_the_gpus_of_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], gpus: str, engines: int
) -> None:
    """Other programs of the machine may use the rest; those of another node cannot be used without Ray."""
    monkeypatch.setattr(filter_run, "visible_gpus", lambda: (8, 80.0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    settings = load("rstar2-qwen2.5-1.5b-megatron", [*words, f"runner.output_dir={tmp_path}"]).settings
    seen = []

    class Run(filter_run.SamplingRun):
        def work(self) -> None:
            seen.append((os.environ["CUDA_VISIBLE_DEVICES"], self.sampling(1).num_engines))

    run = Run(settings, StopSignals())
    run.train()
    run.close()
    assert seen == [(gpus, engines)]


def test_a_reasoning_stage_takes_the_problems_of_a_search(tmp_path: Path) -> None:
    stages = [{"name": "search", "task": "search"}, {"name": "rl", "problems_from": "search"}]
    recipe = Recipe.model_validate({"name": "r", "config": "rstar2-qwen2.5-7b-megatron", "stages": stages})
    plan = StagePlan(recipe, [f"runner.output_dir={tmp_path}"])
    assert plan.settings(recipe.stages[1]).data.train_data_paths == [str(tmp_path / "r/search/train.jsonl")]
