"""What a command that samples from `--model DIR` works out before it starts: configuration, format, context, engines."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.evaluation.model_directory import find_run_config, hugging_face_directory
from rstar2_megatron.evaluation.samples import SamplesError
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.tokenizer_files import directory_problems
from rstar2_megatron.model.weight_files import weight_notes
from rstar2_megatron.records.disk import reason_of
from rstar2_megatron.records.model_format import FILE, read_format
from rstar2_megatron.reward.answer_text import worked_note
from rstar2_megatron.rollout.spec import RolloutSpec, request_seed_of
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.placement import visible_gpus
from rstar2_megatron.settings.schema import SamplingParams, Settings
from rstar2_megatron.settings.sections.rollout import CONTEXT_SLACK
from rstar2_megatron.trajectory import Problem

# `services` loads torch, which takes seconds; --help and bad input are answered without it.
if TYPE_CHECKING:
    from rstar2_megatron.evaluation.services import SamplingSettings

MAX_TOKENS = 30 * 1024
"""The paper's response budget (arXiv 2508.20722, section 5)."""
DATA_HELP = "files of problems: jsonl, json, parquet, csv, or hf:OWNER/NAME (docs/inputs.md)"


def sampling_parser(prog: str | None, description: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with --model, --data, --problems, --config, --engines, --out and overrides. out: the default of --out."""
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="Hugging Face directory, checkpoint or run")
    parser.add_argument("--data", required=True, nargs="+", action="extend", type=Path, metavar="FILE", help=DATA_HELP)
    parser.add_argument("--problems", type=int, help="only the first N problems of each file")
    parser.add_argument("--config", help="configuration when DIR is not in a run (base, with the format saved beside DIR)")
    parser.add_argument("--engines", type=int, help="engines (all GPUs / rollout.tensor_parallel_size; 1 without GPU)")
    parser.add_argument("--out", type=Path, help=f"output directory ({out})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for training")
    return parser


def parse_words(parser: argparse.ArgumentParser, argv: Sequence[str] | None, positive: Sequence[str]) -> argparse.Namespace:
    """Parse options, data files and overrides in any order. Ends the process by `parser.error` for bad words.

    positive: names of options that must be at least 1 when they are given.
    """
    arguments = parser.parse_intermixed_args(argv)
    # --data takes every word that follows it, overrides too
    swallowed = [path for path in arguments.data if "=" in str(path) and not path.exists()]
    arguments.overrides += map(str, swallowed)
    arguments.data = [path for path in arguments.data if path not in swallowed]
    if not arguments.data:
        parser.error("--data names no file")
    for name in positive:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.out is not None and arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out} is a file; name a directory")
    for word in arguments.overrides:
        if "=" not in word:
            parser.error(f"{word!r} is not an override; write key=value (data files follow --data)")
    return arguments


def read_graded(paths: Sequence[Path], settings: Settings, limit: int | None = None) -> list[Problem]:
    """Problems whose answers can be graded. limit: only the first so many of each file. Raises DataError."""
    problems = read_problems(paths, settings.data, limit=limit)
    if settings.reward.has_math and (note := worked_note(problems, more_than=0.5)):
        raise DataError(f"{', '.join(map(str, paths))}: {note}")
    return problems


def read_benchmarks(paths: Sequence[Path], limit: int | None, settings: Settings) -> dict[str, list[Problem]]:
    """Problems by file name without suffix. Raises DataError, also when two files share a name or a query_id."""
    if len({path.stem for path in paths}) < len(paths):
        raise DataError(f"two of {', '.join(map(str, paths))} have one name, by which their scores are told apart; rename one")
    benchmarks = {path.stem: read_graded([path], settings, limit) for path in paths}
    name_of: dict[str, str] = {}
    for name, problems in benchmarks.items():
        for problem in problems:
            if (other := name_of.setdefault(problem.query_id, name)) != name:
                raise DataError(f"{name}: query_id {problem.query_id!r} was already used in {other}; make them unique")
    return benchmarks


def default_out(model: Path, folder: str) -> Path:
    """A directory in `folder` of the run which contains the model, so that two runs never share a directory of results."""
    path = model.resolve()
    config = find_run_config(path)
    return Path("evaluations") / path.name if config is None else config.parent / folder / path.name


def configure(arguments: argparse.Namespace) -> tuple[Settings, SamplingSettings]:
    """The configuration and the sampling settings. Raises ValueError for arguments that contradict each other.

    arguments: model, config, overrides, samples, temperature, top_p, max_turns, max_tokens (None: the default), engines.
    """
    # here, because torch and SGLang's client take seconds, which wrong arguments should not cost
    from rstar2_megatron.evaluation.services import SamplingSettings

    config = find_run_config(arguments.model.resolve())
    if config is not None and arguments.config:
        raise ValueError(f"{arguments.model} is in a run, whose configuration is {config}; leave --config out")
    if config is None and not arguments.config:
        settings = _format_beside(arguments.model, arguments.overrides)
    else:
        settings = load_settings(str(config or arguments.config), arguments.overrides)
    base = settings.rollout.model.model_path
    model = hugging_face_directory(arguments.model, base if config else None)

    shape = ModelConfig.from_directory(model)
    most = shape.max_position_embeddings - CONTEXT_SLACK
    tokens = arguments.max_tokens or MAX_TOKENS
    context = tokens + settings.data.max_prompt_length
    if context > most:
        if arguments.max_tokens and tokens >= most:
            raise ValueError(f"--max-tokens {tokens} exceeds the context of {model} ({most} tokens, prompt included)")
        context = most
        tokens = min(tokens, most)
        print(f"note: prompt and response share the model's {most} tokens", file=sys.stderr)
    spec = RolloutSpec(
        samples=arguments.samples,
        sampling=SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p, max_new_tokens=tokens),
        max_assistant_turns=arguments.max_turns,
        seed=request_seed_of(settings),
        texts=settings.reward.has_own,
    )
    gpus, _ = visible_gpus()
    engines = arguments.engines or max(1, gpus // settings.rollout.tensor_parallel_size)
    if gpus and engines * settings.rollout.tensor_parallel_size > gpus:
        raise ValueError(
            f"--engines {engines} of rollout.tensor_parallel_size={settings.rollout.tensor_parallel_size} need "
            f"{engines * settings.rollout.tensor_parallel_size} GPUs, {gpus} are visible"
        )
    return settings, SamplingSettings.of(settings, spec, model=model, max_context_tokens=context, num_engines=engines)


def check_model(sampling: SamplingSettings) -> None:
    """Print what the engines leave out of the model's weights. Raises ValueError for what a training run refuses too."""
    model = Path(sampling.rollout.model.model_path)
    shape = ModelConfig.from_directory(model)
    if problems := directory_problems(model, shape, sampling.agentloop.chat_template, sampling.agentloop.tool_call_format):
        raise ValueError("\n".join(problems))
    for note in weight_notes(model, shape, sampling.rollout.model.precision):
        print(f"note: {note}", file=sys.stderr)


def exit_code(work: Callable[[], int], out: Path) -> int:
    """The exit code of `work`: its own; 2 for an `out` of other settings; 1 for other errors; 130 or 143 when stopped."""
    try:
        return work()
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        print(f"\nstopped; the same command continues from {out}", file=sys.stderr)
        return 130 if isinstance(stop, KeyboardInterrupt) else 143
    except (ValueError, RuntimeError, OSError) as error:
        print(f"\nerror: {reason_of(error, out, '--out')}", file=sys.stderr)
        return 2 if isinstance(error, SamplesError) else 1


def _format_beside(model: Path, overrides: Sequence[str]) -> Settings:
    """config/base.yaml with the format and reward that were saved beside the model; a note says when there are none."""
    saved = read_format(model)
    if saved is None:
        print(
            f"note: {model} does not say which format it was trained with ({FILE}); assuming that of config/base.yaml, "
            "this project's wording. Scores in a wrong format mean nothing: give --config NAME or agentloop.* keys",
            file=sys.stderr,
        )
    else:
        print(f"note: the format is that of {model / FILE}", file=sys.stderr)
        reward = saved.get("reward", {})
        if reward.get("terms") or reward.get("function", "math") != "math":
            print(
                "note: so is the reward, which is not the built-in grader alone; reward.terms=[] reward.function=math "
                "reward.positive_above=0 take that",
                file=sys.stderr,
            )
    required = {
        "defaults": ["base", "_self_"],
        "cluster": {"component_placement": None},
        "runner": {"experiment_name": "evaluation"},
        "rollout": {"model": {"model_path": str(model)}},
        "data": {"train_data_paths": []},
        **(saved or {}),
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "evaluation.yaml"
        path.write_text(yaml.safe_dump(required), encoding="utf-8")
        # `write_format` puts copies of own code beside the model
        return load_settings(str(path), overrides, folder=model.resolve())
