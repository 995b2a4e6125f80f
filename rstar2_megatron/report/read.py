"""Reads training curves of this project, RLinf and verl, and wandb's exports.

A log is read as far as possible: every run gives a `Log` with its curves and a message for each unreadable part.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from rstar2_megatron.report.log_formats import (
    EVENT_FILE,
    LOG_SUFFIXES,
    TABLES,
    Log,
    Series,
    csv_runs,
    read_console,
    read_csv,
    read_jsonl,
    read_table,
    read_tensorboard,
    read_wandb,
    some,
)
from rstar2_megatron.report.names import LENGTH, LENGTH_ALL, PASS_RATE, RESAMPLED, REWARD, SECONDS, TO_VERL, ours_from_verl

LogReader = Callable[[Log], None]
Source = tuple[Path, str, LogReader]
"""Place of a run, its name inside that place, its reader."""
MOST_RUNS = 32
"""Runs that one path may hold; a directory with more was named by mistake."""
_VERL_NAMES = ("critic/", "timing_s/", "response_length/", "actor/", "val-core/")
_by_name = attrgetter("name")


def read_logs(path: str | Path, *, verl: bool = False) -> list[Log]:
    """The runs of a run directory, of a directory of runs or of a log file; `verl` translates verl's names.

    Understands metrics.jsonl, TensorBoard event directories, verl's `file` jsonl, verl's console output, wandb's offline
    runs (`.wandb`) and its exports as CSV or jsonl. Never raises for the content of a file; an unreadable log has no series
    and a message with the reason. Raises ValueError for a path that does not exist or that holds more than MOST_RUNS runs.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    try:
        sources = _sources(path)
    except (OSError, ValueError) as error:
        return [Log(path, "verl" if verl else "ours", messages=[f"{path}: {error}"])]
    if len(sources) > MOST_RUNS:
        raise ValueError(
            f"{path} holds {len(sources)} runs, at most {MOST_RUNS} can be read at once; name the runs, e.g. {sources[0][0]}"
        )
    logs = [
        _finish(Log(place, "verl" if verl else "ours", run=run), reader, verl)
        for place, run, reader in sources or [(path, "", lambda log: None)]
    ]
    if len(logs) > 1:
        names = some([log.label for log in logs])
        logs[0].messages.append(f"{path}: holds {len(logs)} runs, each read by itself ({names})")
    return logs


def _finish(log: Log, reader: LogReader, verl: bool) -> Log:
    try:
        reader(log)
    except (OSError, ValueError) as error:
        log.messages.append(f"{log.path}: {error}")
    if verl or any(name.startswith(_VERL_NAMES) for name in log.series):
        log.kind = "verl"
        log.series = _renamed(log.series)
        log.not_finite = {ours_from_verl(name): steps for name, steps in log.not_finite.items()}
        _name_rewards_of_all(log)
    if log.series:
        _find_numbering(log)
    else:
        log.messages.append(f"{log.path}: no training curves found")
    if log.repeated:
        steps = some(sorted(log.repeated))
        log.messages.append(f"{log.path}: {len(log.repeated)} steps are logged more than once ({steps}); the last counts")
    if log.unread:
        log.messages.append(
            f"{log.path}: {len(log.unread)} values look like numbers and cannot be read ({some(log.unread)}); write "
            "numbers alone, a point before decimals and nothing between thousands"
        )
    log.settings = _saved_settings(log)
    return log


def _name_rewards_of_all(log: Log) -> None:
    """Without rejection or resampling verl's reward is the pass rate, and its length that of all rollouts.

    Only of a whole log, which has the time of a step: an export of a few columns does not tell.
    """
    filtered = RESAMPLED in log.series or "train/num_gen_batches" in log.series
    if SECONDS in log.series and not filtered:
        for ours, every in ((REWARD, PASS_RATE), (LENGTH, LENGTH_ALL)):
            if ours in log.series:
                log.series[every] = dict(log.series[ours])


def _saved_settings(log: Log) -> dict[str, Any] | None:
    """The configuration that a run of this project saved beside its metrics."""
    path = (log.path if log.path.is_dir() else log.path.parent) / "config.yaml"
    if log.kind == "verl" or log.run or not path.is_file():
        return None
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.messages.append(f"{path}: {error}")
        return None
    return settings if isinstance(settings, dict) else None


# ------------------------------------------------------------------------------------------- runs of a path


def _sources(path: Path) -> list[Source]:
    """The runs of a file, or of the first kind of logs that is below a directory. A directory of one run is its place."""
    if not path.is_dir():
        return _file_sources(path)
    found = next(filter(None, _runs_below(path)), [])
    return [(path if len(found) == 1 else place, run, reader) for place, run, reader in found]


def _runs_below(path: Path) -> Iterator[list[Source]]:
    """The runs of each kind of logs."""
    yield [(place, "", partial(read_jsonl, path=place / "metrics.jsonl")) for place in _topmost(path, "metrics.jsonl")]
    events = {place: sorted(place.rglob(f"{EVENT_FILE}*"), key=_by_name) for place in _topmost(path, f"{EVENT_FILE}*")}
    yield [(place, "", partial(read_tensorboard, files=files)) for place, files in events.items()]  # by their time
    # run-ID.wandb; a run that was resumed has a file of the same name in another directory
    offline: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(path.rglob("*.wandb")):
        offline[file.name].append(file)
    yield [(files[0], "", partial(read_wandb, files=files)) for files in offline.values()]
    logs = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in LOG_SUFFIXES and file.is_file()]
    yield [source for file in logs for source in _file_sources(file)]


def _topmost(path: Path, pattern: str) -> list[Path]:
    """Directories of such files, without those inside another one: some writers make directories for sub-curves.

    RLinf's logs of single workers are left out.
    """
    places = sorted({file.parent for file in path.rglob(pattern) if "worker_logs" not in file.relative_to(path).parts})
    return [place for place in places if not any(other in place.parents for other in places)]


def _file_sources(path: Path) -> list[Source]:
    suffix = path.suffix.lower()
    if suffix in TABLES:
        table = read_table(path)
        return [(path, run, partial(read_csv, path=path, table=table, run=run)) for run in csv_runs(table)]
    if EVENT_FILE in path.name or suffix == ".wandb":
        return [(path, "", partial(read_wandb if suffix == ".wandb" else read_tensorboard, files=[path]))]
    return [(path, "", partial(read_jsonl if suffix == ".jsonl" else read_console, path=path))]


# ------------------------------------------------------------------------------------------ names and steps


def _find_numbering(log: Log) -> None:
    """Converts step numbers to training steps.

    RLinf counts from 0 and, with several mini-batches a step, in optimizer steps: rollouts and times are logged
    at 0, n, 2n, ..., losses at every number. The losses of one step are averaged.
    """
    training = {name: series for name, series in log.series.items() if not name.startswith(("eval/", "val"))}
    counted = {REWARD: training[REWARD]} if REWARD in training else training
    steps = {step for series in counted.values() for step in series}
    log.first_step = 0 if 0 in steps else 1
    once = {n: s for n, s in training.items() if n.startswith(("rollout/", "time/"))} or training
    starts = {step for series in once.values() for step in series}
    stride = math.gcd(*starts) if log.first_step == 0 and len(starts) > 2 else 1
    if stride > 1:
        log.series = {name: _coarser(series, stride) for name, series in log.series.items()}
        log.messages.append(f"{log.path}: steps are multiples of {stride}; read as one training step each")
    if log.first_step == 1 and log.kind != "verl" and PASS_RATE not in log.series and min(steps, default=1) > 1:
        log.messages.append(
            f"{log.path}: begins at step {min(steps)}, so that it cannot be told whether it counts from 0; read as from 1"
        )


def _coarser(series: Series, stride: int) -> Series:
    parts: dict[int, list[float]] = defaultdict(list)
    for step, value in series.items():
        parts[step // stride].append(value)
    return {step: statistics.fmean(values) for step, values in parts.items()}


def _renamed(series: dict[str, Series]) -> dict[str, Series]:
    """verl's curves under our names; where two of its names mean one quantity the better one counts (`TO_VERL`)."""
    rank = {theirs: i for names in TO_VERL.values() for i, theirs in enumerate(names)}
    renamed: dict[str, Series] = defaultdict(dict)
    for name in sorted(series, key=lambda name: rank.get(name, 0)):
        ours = ours_from_verl(name)
        renamed[ours] = {**series[name], **renamed[ours]}
    return dict(renamed)
