"""What a search stage leaves for reasoning stages."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from rstar2_megatron.data.difficulty import pass_counts
from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.records.whole_file import write_jsonl
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


def test_a_reasoning_stage_takes_the_problems_of_a_search(tmp_path: Path) -> None:
    stages = [{"name": "search", "task": "search"}, {"name": "rl", "problems_from": "search"}]
    recipe = Recipe.model_validate({"name": "r", "config": "rstar2-qwen2.5-7b-megatron", "stages": stages})
    plan = StagePlan(recipe, [f"runner.output_dir={tmp_path}"])
    assert plan.settings(recipe.stages[1]).data.train_data_paths == [str(tmp_path / "r/search/train.jsonl")]
