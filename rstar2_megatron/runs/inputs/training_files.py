"""Missing files of supervised fine-tuning and of preference training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.settings.sections.recipe import BUILT_PREFIXES

_MAKERS = {"sft": "data_process/build_sft_dataset.py", "preference": "python -m rstar2_megatron.search (its mcts.jsonl)"}


def training_file_problems(settings: Settings, later: Collection[str]) -> Iterator[str]:
    """What is wrong with `{task}.train_data_paths` and `{task}.val_data_paths` of `runner.task_type` sft or preference.

    later: keys that need no file yet.
    """
    task = settings.runner.task_type
    section = settings.sft if task == "sft" else settings.preference
    if not section.train_data_paths and f"{task}.train_data_paths" not in later:
        yield f"{task}.train_data_paths is empty; {_MAKERS[task]} writes such files"
    for path in [*section.train_data_paths, *section.val_data_paths]:
        if not path.startswith(BUILT_PREFIXES) and not Path(path).is_file():
            yield f"{task} data file {path} does not exist; {_MAKERS[task]} writes such files"
