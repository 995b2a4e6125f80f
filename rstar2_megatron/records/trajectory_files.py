"""Complete groups on disk, token for token, so that a step can be replayed, simulated or compared.

`trajectories.jsonl` holds a few samples for people; these files hold every trajectory. One gzip file a step, one group
a line. Nothing here imports torch, Ray or SGLang.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rstar2_megatron.records.whole_file import replacement
from rstar2_megatron.trajectory import Group

_GROUP = TypeAdapter(Group)


def rollouts_path(directory: str | Path, step: int) -> Path:
    """The file of training step `step` (1, 2, ...) in a directory of saved rollouts."""
    return Path(directory) / f"step_{step:06d}.jsonl.gz"


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write all of `groups` or no file: a kill leaves at most a `.unfinished` file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(path) as partial, gzip.open(partial, "wb", compresslevel=3) as file:
        for group in groups:
            file.write(_GROUP.dump_json(group) + b"\n")


def read_groups(path: Path) -> list[Group]:
    """All groups of a file, in order.

    Raises FileNotFoundError, or ValueError that names file and line for a row that is not a group.
    """
    groups: list[Group] = []
    with gzip.open(path, "rb") as file:
        try:
            for line in file:
                group = _GROUP.validate_json(line)
                for trajectory in group.trajectories:
                    trajectory.check()
                groups.append(group)
        except (EOFError, gzip.BadGzipFile, ValueError) as error:
            reason: object = error
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"{'.'.join(map(str, first['loc'])) or 'the row'}: {first['msg']}"
            raise ValueError(f"{path}, line {len(groups) + 1}: {reason}") from error
    return groups
