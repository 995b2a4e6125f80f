"""`runner.task_type: search`: trees of the training problems, for stages of SFT and preference training.

As `python -m rstar2_megatron.search`, on data.train_data_paths and with the settings of one configuration. After a stop or a
kill the same command continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rstar2_megatron.data.difficulty import PassCount, dropped_problems
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.runs.filter_run import SamplingRun, write_problems
from rstar2_megatron.search.__main__ import guided, run
from rstar2_megatron.search.preference.reward_model import check_reward_model
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import Problem


class SearchRun(SamplingRun):
    def work(self) -> None:
        settings, search = self.settings, guided(self.settings.search)
        if search.reward_model is not None:
            policy = Path(settings.rollout.model.model_path)
            check_reward_model(Path(search.reward_model), policy, settings.runner.seq_length)
        problems = self.problems(search.num_problems)
        if run(problems, self.sampling(1), search, self.directory, compare=False):
            raise RuntimeError("problems are unfinished, the lines above name them; run the same command again")
        path = self.directory / f"{search.mode}.pass_counts.jsonl"
        print(write_harder(settings, problems, path, self.directory / "train.jsonl"), flush=True)


def write_harder(settings: Settings, problems: Sequence[Problem], counts: Path, out: Path) -> str:
    """Write the problems that a reasoning stage may train on, by the pass counts of their trees; returns a line about them.

    The difficulty filter's settings say which are dropped. One finished solution is enough to know a problem's pass rate; a
    problem without any stays.
    """
    found = [PassCount(**row) for _, row in JsonlFile(counts).numbered_rows() if row is not None]
    dropped = dropped_problems(found, settings.difficulty_filter, wanted=1)
    kept = [problem for problem in problems if problem.query_id not in dropped]
    write_problems(out, kept, settings.data)
    why = ", ".join(f"{count} {reason}" for reason, count in Counter(dropped.values()).items())
    return f"{len(kept)} of {len(problems)} problems for reasoning stages in {out}" + (f" ({why})" if why else "")
