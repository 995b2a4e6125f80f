"""Problems from jsonl, and the order they are trained in: shuffled per epoch under a seed, exact on resume.

A row is `{"prompt": [{"role": ..., "content": ...}, ...], "solutions": [...], "query_id": ..., "task": ...}`.
`prompt` may also be a string (one user message); `query_id` and `task` may be absent.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.trajectory import Problem


def read_problems(
    paths: Iterable[str | Path], prompt_key: str = "prompt", answer_key: str = "solutions"
) -> list[Problem]:
    """All problems of the jsonl files, in order. Raises DataError with file and line number.

    A row without `query_id` gets `{file stem}-{line}`; a `query_id` that occurs twice is an error, because
    groups are told apart by it.
    """
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    paths = list(paths)
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"data file {path} does not exist")
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                problem = parse_row(line, where, prompt_key, answer_key, f"{path.stem}-{number}")
                if problem.query_id in seen:
                    raise DataError(
                        f"{where}: query_id {problem.query_id!r} was already used at {seen[problem.query_id]}; "
                        "make them unique"
                    )
                seen[problem.query_id] = where
                problems.append(problem)
    if not problems:
        raise DataError(
            f"no problems in {', '.join(map(str, paths)) or '(no files)'}; give jsonl files with one problem a line"
        )
    return problems


def parse_row(line: str, where: str, prompt_key: str, answer_key: str, default_id: str) -> Problem:
    """One jsonl row. Raises DataError that begins with `where`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for key in (prompt_key, answer_key):
        if key not in row:
            raise DataError(f"{where}: row without {key!r}; it has {', '.join(sorted(row)) or 'nothing'}")
    solutions = row[answer_key]
    if isinstance(solutions, str | int | float):
        solutions = [solutions]
    if not isinstance(solutions, list) or not solutions or any(isinstance(s, list | dict) for s in solutions):
        raise DataError(f"{where}: {answer_key!r} must be a non-empty list of answers, got {solutions!r}")
    known = {prompt_key, answer_key, "query_id", "task"}
    return Problem(
        query_id=str(row.get("query_id", default_id)),
        prompt=_messages(row[prompt_key], where, prompt_key),
        solutions=[str(s) for s in solutions],
        task=str(row.get("task", "math")),
        extra={key: value for key, value in row.items() if key not in known},
    )


def _messages(prompt: Any, where: str, key: str) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: {key!r} must be a string or a non-empty list of messages")
    messages = []
    for message in prompt:
        fits = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not fits:
            raise DataError(f"{where}: a message needs 'role' and 'content' as text, got {message!r}")
        messages.append({"role": message["role"], "content": message["content"]})
    if all(message["role"] != "user" for message in messages):
        raise DataError(f"{where}: {key!r} has no user message")
    return messages


def drop_long_prompts(
    problems: Sequence[Problem], prompt_length: Callable[[Problem], int], max_prompt_length: int
) -> tuple[list[Problem], int]:
    """(problems whose rendered prompt has at most `max_prompt_length` tokens, how many were dropped).

    Raises DataError when none is left.
    """
    lengths = [prompt_length(problem) for problem in problems]
    kept = [p for p, length in zip(problems, lengths, strict=True) if length <= max_prompt_length]
    if problems and not kept:
        raise DataError(
            f"every prompt is longer than data.max_prompt_length={max_prompt_length} tokens (shortest "
            f"{min(lengths)}); raise it"
        )
    return kept, len(problems) - len(kept)


class ProblemLoader:
    """Batches of problems, epoch after epoch, on torchdata's StatefulDataLoader.

    Each epoch is a permutation that depends on (seed, epoch) only; the rest of an epoch that does not fill a
    batch is dropped. After `load_state_dict(state)` the same problems follow as followed `state_dict()`.
    """

    def __init__(
        self, problems: Sequence[Problem], data: DataSettings, max_epochs: int | None = None
    ) -> None:
        """Raises DataError when the problems do not fill one batch."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        batch_size = data.rollout_batch_size
        if len(problems) < batch_size:
            raise DataError(
                f"{len(problems)} problems do not fill a step of data.rollout_batch_size={batch_size}; lower it "
                "or add problems"
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
        self._ahead: list[Problem] = []  # drawn for a refill and not used: they come first in the next batch

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        return len(self._loader)

    def next_batch(self) -> list[Problem]:
        """The next batch. Raises DataError after `max_epochs` epochs."""
        return self.take(self._batch_size)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems, however many. Raises DataError after `max_epochs` epochs."""
        while len(self._ahead) < count:
            self._ahead += self._draw()
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
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
        raise DataError(f"runner.max_epochs={self._max_epochs} epochs of the data are over; raise it")

    def state_dict(self) -> dict[str, Any]:
        """Position for a checkpoint; small, and meaningful only with the same problems, seed and batch
        size.
        """
        return {
            "epoch": self._epoch,
            "num_problems": len(self._problems),
            "loader": None if self._batches is None else self._loader.state_dict(),
            "ahead": [problem.query_id for problem in self._ahead],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Raises DataError when it belongs to another data set."""
        if state["num_problems"] != len(self._problems):
            raise DataError(
                f"the checkpoint was made with {state['num_problems']} problems, now there are "
                f"{len(self._problems)}; use the same data files and data.max_prompt_length, or runner.resume_dir=null"
            )
        self._epoch = int(state["epoch"])
        self._sampler.epoch = self._epoch
        self._batches = None
        by_id = {problem.query_id: problem for problem in self._problems}
        self._ahead = [by_id[query_id] for query_id in state.get("ahead", [])]
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
            self._batches = iter(self._loader)


class _EpochSampler:
    """A permutation per epoch, from a generator of its own so that nothing else can disturb it."""

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
