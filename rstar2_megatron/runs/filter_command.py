"""Command line of the difficulty filter (`data_process/filter_by_difficulty.py`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rstar2_megatron.evaluation.configure import DATA_HELP, parse_words
from rstar2_megatron.runs.execute import execute
from rstar2_megatron.runs.stages import override_words
from rstar2_megatron.settings.load import ConfigError, load_settings, users_path


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the run: 0, 1 when it failed, 2 for bad input, 130 or 143 when stopped."""
    parser = argparse.ArgumentParser(
        description="Drop the problems that a model always solves; write how often it solved each problem."
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument("--data", required=True, nargs="+", action="extend", type=Path, metavar="FILE", help=DATA_HELP)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("-k", "--samples", type=int, default=8, help="attempts at each problem (default 8)")
    parser.add_argument("--drop-never-solved", action="store_true", help="also drop problems that it never solves")
    parser.add_argument("--limit", type=int, default=-1, help="only the first N problems, for a trial")
    parser.add_argument("--config", required=True, metavar="NAME", help="configuration of its training")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for training")
    arguments = parse_words(parser, argv, ("samples",))
    out = users_path(arguments.out).resolve()  # `.` has no name
    given = {
        "runner.task_type": "difficulty_filter",
        "runner.output_dir": str(out.parent),
        "runner.experiment_name": out.name,
        "rollout.model.model_path": arguments.model,
        "data.train_data_paths": [str(path) for path in arguments.data],
        "difficulty_filter.num_samples": arguments.samples,
        "difficulty_filter.num_problems": arguments.limit,
        "difficulty_filter.drop_never_solved": arguments.drop_never_solved,
    }
    try:
        return execute(load_settings(arguments.config, [*override_words(given), *arguments.overrides]), dry_run=False)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
