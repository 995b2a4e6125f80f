"""Problems from jsonl, and the loader whose position is part of a checkpoint.

A row is {"prompt": [{"role", "content"}, ...] or "text", "solutions": [...] or "answer", "query_id": optional,
"task": optional}, the schema of the processed DAPO data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.trajectory import Problem


def read_problems(
    paths: Sequence[str | Path], prompt_key: str = "prompt", answer_key: str = "solutions"
) -> list[Problem]:
    """Read all rows. Raises ValueError with file and line for a row that is not usable, or for no rows at all."""
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for path in map(Path, paths):
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                problem = _problem(line, where, f"{path.stem}-{number}", prompt_key, answer_key)
                if problem.query_id in seen:
                    raise ValueError(
                        f"{where}: query_id {problem.query_id!r} stands already at {seen[problem.query_id]}; it must be "
                        "unique over all files"
                    )
                seen[problem.query_id] = where
                problems.append(problem)
    if not problems:
        raise ValueError(f"no problems in {[str(p) for p in paths]}; the data set is empty")
    return problems


def _problem(line: str, where: str, default_id: str, prompt_key: str, answer_key: str) -> Problem:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise ValueError(f"{where}: not a JSON object: {e}") from e
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    prompt = row.get(prompt_key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in prompt
        )
    ):
        raise ValueError(
            f"{where}: {prompt_key!r} must be a text or a list of {{role, content}} messages "
            f"(data.prompt_key={prompt_key}; this row has {sorted(row)})"
        )
    solutions = row.get(answer_key)
    if isinstance(solutions, (str, int, float)):
        solutions = [solutions]
    if not isinstance(solutions, list) or not solutions:
        raise ValueError(
            f"{where}: {answer_key!r} is missing or empty (data.answer_key={answer_key}; this row has {sorted(row)})"
        )
    return Problem(
        query_id=str(row.get("query_id", default_id)),
        prompt=prompt,
        solutions=[str(s) for s in solutions],
        task=str(row.get("task", "math")),
        extra=row.get("extra") or {},
    )


class EpochShuffle(Sampler[int]):
    """Every index once an epoch, in an order that depends on seed and epoch only; goes on without end.

    Its state is (epoch, position), so a resumed run sees the rest of the epoch in the same order.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch = self.position = 0

    def _order(self) -> list[int]:
        order = list(range(self.size))
        if self.shuffle:
            random.Random(f"{self.seed}-{self.epoch}").shuffle(order)
        return order

    def __iter__(self) -> Iterator[int]:
        while True:
            order = self._order()
            while self.position < self.size:
                self.position += 1
                yield order[self.position - 1]
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["size"] != self.size or state["seed"] != self.seed:
            raise ValueError(
                f"the checkpoint was made with {state['size']} problems and data.seed={state['seed']}, this run has "
                f"{self.size} and {self.seed}; resume with the same data, or start anew with runner.resume_dir=null"
            )
        self.epoch, self.position = state["epoch"], state["position"]


class ProblemLoader:
    """Batches of problems without end; `state_dict` holds the position exactly."""

    def __init__(self, problems: Sequence[Problem], settings: DataSettings) -> None:
        if len(problems) < settings.rollout_batch_size:
            raise ValueError(
                f"{len(problems)} problems are fewer than data.rollout_batch_size={settings.rollout_batch_size}; give more "
                "data or a smaller batch"
            )
        self._loader = StatefulDataLoader(
            list(problems),
            batch_size=settings.rollout_batch_size,
            sampler=EpochShuffle(len(problems), settings.seed, settings.shuffle),
            collate_fn=list,
        )
        self._batches: Iterator[list[Problem]] | None = None

    def next_batch(self) -> list[Problem]:
        """The next `data.rollout_batch_size` problems; a batch never holds a problem twice at an epoch's border."""
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        while len({p.query_id for p in batch}) < len(batch):  # the border of two epochs fell into this batch
            batch = next(self._batches)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._batches = None
