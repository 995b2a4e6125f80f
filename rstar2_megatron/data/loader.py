"""The order in which problems are trained on: shuffled per epoch under a seed, exact on resume."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.trajectory import Problem


class ProblemLoader:
    """Batches of problems, epoch after epoch, on torchdata's StatefulDataLoader.

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
        self._batch_size = batch_size
        self._problems = list(problems)
        self._sampler = _EpochSampler(len(problems), data.shuffle, data.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchdata calls a deprecated torch function
            self._loader = StatefulDataLoader(
                self._problems,  # type: ignore[arg-type]
                batch_size=batch_size,
                sampler=self._sampler,
                drop_last=True,
                num_workers=0,
                collate_fn=list,
            )
        self._max_epochs = max_epochs
        self._epoch = 0
        self._batches: Iterator[list[Problem]] | None = None
        self._drawn: list[Problem] = []  # the rest of a batch that a refill has begun: first in the next batch

    def next_batch(self) -> list[Problem]:
        """The next batch. Raises DataError after `max_epochs` epochs."""
        return self.take(self._batch_size)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems. Raises DataError after `max_epochs` epochs."""
        while len(self._drawn) < count:
            self._drawn += self._draw()
        taken, self._drawn = self._drawn[:count], self._drawn[count:]
        return taken

    def _draw(self) -> list[Problem]:
        while self._max_epochs is None or self._epoch < self._max_epochs:
            if self._batches is None:
                self._sampler.epoch = self._epoch
                self._batches = iter(self._loader)
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._epoch += 1
            self._batches = None
        raise DataError(f"runner.max_epochs={self._max_epochs} epochs of the data are used up; raise it")

    def state_dict(self) -> dict[str, Any]:
        """Position for a checkpoint; small, and meaningful only with the same problems, seed and batch
        size.
        """
        return {
            "epoch": self._epoch,
            "num_problems": len(self._problems),
            "loader": None if self._batches is None else self._loader.state_dict(),
            "ahead": [problem.query_id for problem in self._drawn],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`. Raises DataError when it belongs to another data set."""
        if state["num_problems"] != len(self._problems):
            raise DataError(
                f"the checkpoint was made with {state['num_problems']} problems, now there are "
                f"{len(self._problems)}; use the same data files and data.max_prompt_length, or runner.resume_dir=null"
            )
        self._epoch = int(state["epoch"])
        self._sampler.epoch = self._epoch
        self._batches = None
        by_id = {problem.query_id: problem for problem in self._problems}
        self._drawn = [by_id[query_id] for query_id in state.get("ahead", [])]
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
            self._batches = iter(self._loader)


class _EpochSampler:
    """A permutation per epoch, from a generator that nothing else draws from."""

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self._size = size
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}-{self.epoch}").shuffle(order)
        return iter(order)
