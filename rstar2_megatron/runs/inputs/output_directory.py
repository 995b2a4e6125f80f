"""The directory of a run: that it can be written, and that one process at a time uses it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rstar2_megatron.records.checkpoint import complete_checkpoints, step_of
from rstar2_megatron.records.disk import nearest_existing
from rstar2_megatron.settings.load import ConfigError, users_path
from rstar2_megatron.settings.schema import Settings


def run_directory(settings: Settings) -> Path:
    return Path(settings.runner.output_dir) / settings.runner.experiment_name


def output_problems(settings: Settings) -> Iterator[str]:
    """A path that is or lies below a file, or has a run of another task. Nothing is made."""
    directory = run_directory(settings).absolute()
    nearest = nearest_existing(directory)
    if not nearest.is_dir():
        yield f"{nearest} is a file, and the run would write into {directory}; set runner.output_dir to a directory"
    task = settings.runner.task_type
    if (there := saved_runner(directory).get("task_type", task)) != task:
        yield (
            f"{directory} has a run of runner.task_type={there}, this one is of {task}; give each its runner.experiment_name"
        )


def saved_runner(directory: Path) -> dict[str, Any]:
    """Section `runner` of the run that the directory has; empty where it has none, or one that cannot be read."""
    try:
        return dict(yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))["runner"])
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, ValueError):  # of another hand
        return {}


def resume_dir(settings: Settings) -> str | None:
    """`runner.resume_dir`; "auto" where the run of this directory began at the same one and has a later checkpoint.

    So the same command goes on, also when that checkpoint has been pruned.
    """
    given, directory = settings.runner.resume_dir, run_directory(settings)
    if given is None or given == "auto" or saved_runner(directory).get("resume_dir") not in (given, str(users_path(given))):
        return given
    began, own = step_of(Path(given)), complete_checkpoints(directory / "checkpoints")
    return "auto" if began is not None and own and own[-1][0] > began else given


@contextlib.contextmanager
def held_directory(settings: Settings) -> Iterator[None]:
    """Make `runner.output_dir` and hold this run's name in it. Raises ConfigError when another process holds it.

    The lock lies beside the run's directory, which an archive may rename. The kernel releases it with its process.
    """
    directory = run_directory(settings)
    lock = directory.with_name(f".{directory.name}.lock")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        held = lock.open("a+", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"runner.output_dir={settings.runner.output_dir} cannot be written ({error.strerror}: {error.filename}); set it to "
            "a directory that you may write"
        ) from None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                yield  # a file system without locks
                return
            held.seek(0)
            owner = held.read(100).strip()
            raise ConfigError(
                f"{directory} is in use by a run ({owner}); wait for it, or set runner.experiment_name to another name"
            ) from None
        held.truncate(0)
        held.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        held.flush()
        yield
