"""The order in which problems are trained on: shuffled per epoch under a seed, exact on resume."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.trajectory import Problem


class EpochsOver(DataError):
    """`runner.max_epochs` have been trained on: the end of a run."""

    def __init__(self, max_epochs: int) -> None:
        super().__init__(f"runner.max_epochs={max_epochs} epochs of the data are used up; raise it")


class ProblemLoader:
    """Problems, epoch after epoch.

    Each epoch is a permutation that depends on (seed, epoch) only; the rest of an epoch that does not fill a
    batch is dropped. The problems after `load_state_dict(state)` are those that came after `state_dict()`.
    """

    def __init__(self, problems: Sequence[Problem], data: DataSettings, max_epochs: int | None = None) -> None:
        """Raises DataError when the problems do not fill one batch."""
        batch_size = data.rollout_batch_size
        if len(problems) < batch_size:
            raise DataError(
                f"{len(problems)} problems do not fill a step of data.rollout_batch_size={batch_size}; lower it or add problems"
            )
        self._problems, self._data, self._max_epochs = list(problems), data, max_epochs
        self._epoch = self._place = 0

    def next_batch(self) -> list[Problem]:
        """The next batch. Raises EpochsOver after `max_epochs` epochs."""
        return self.take(self._data.rollout_batch_size)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems. Raises EpochsOver after `max_epochs` epochs."""
        size = len(self._problems)
        taken: list[Problem] = []
        while len(taken) < count:
            if self._place >= size - size % self._data.rollout_batch_size:
                self._epoch, self._place = self._epoch + 1, 0
            if self._max_epochs is not None and self._epoch >= self._max_epochs:
                raise EpochsOver(self._max_epochs)
            taken.append(self._problems[_order(size, self._data.shuffle, self._data.seed, self._epoch)[self._place]])
            self._place += 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Position for a checkpoint; meaningful only with the same problems, seed and batch size."""
        return {"epoch": self._epoch, "num_problems": len(self._problems), "place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`. Raises DataError when it belongs to another data set."""
        if state["num_problems"] != len(self._problems):
            raise DataError(
                f"the checkpoint was made with {state['num_problems']} problems, now there are "
                f"{len(self._problems)}; use the same data files and data.max_prompt_length, or runner.resume_dir=null"
            )
        self._epoch, self._place = state["epoch"], state["place"]


@functools.lru_cache(maxsize=2)
def _order(size: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    if shuffle:
        random.Random(f"{seed}-{epoch}").shuffle(order)  # from a generator that nothing else draws from
    return order
