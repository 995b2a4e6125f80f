"""`runner.task_type: search`: trees of the training problems, for stages of SFT and preference training.

As `python -m rstar2_megatron.search`, on data.train_data_paths and with the settings of one configuration. After a stop or a
kill the same command continues.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

from rstar2_megatron.evaluation.services import SamplingSettings
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.runs.base_run import BaseRun, Stopped
from rstar2_megatron.runs.filter_run import num_engines, short_problems
from rstar2_megatron.search.__main__ import guided, run
from rstar2_megatron.search.preference.reward_model import check_reward_model


class SearchRun(BaseRun):
    """Engines and judge on this node, without Ray. The search stops what it starts."""

    def train(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.signals.restore()  # a search stops its services itself
        try:
            self._search()
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None
        except asyncio.CancelledError:
            raise Stopped(signal.SIGTERM) from None
        self.mark_finished(0)

    def _search(self) -> None:
        settings, search = self.settings, guided(self.settings.search)
        model = settings.rollout.model.model_path
        if search.reward_model is not None:
            check_reward_model(Path(search.reward_model), Path(model), settings.runner.seq_length)
        problems = short_problems(settings, search.num_problems)
        spec = replace(RolloutSpec.training(settings), samples=1)
        sampling = SamplingSettings.of(settings, spec, model=model, num_engines=num_engines(settings))
        if run(problems, sampling, search, self.directory, compare=False):
            raise RuntimeError(
                "problems are unfinished, the lines above name them; run the same command again"
            )
