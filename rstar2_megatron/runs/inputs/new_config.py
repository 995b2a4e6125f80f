"""`--new NAME --model DIR --data FILE`: a short YAML that fits this machine and this model.

Everything that the YAML needs is read from the model's directory, the data and the machine; what fits is asked of the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rstar2_megatron.data.problems import Columns, proposed_keys, read_problems
from rstar2_megatron.data.rows import HUB, data_input
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.tokenizer_files import directory_problems
from rstar2_megatron.reward.answer_text import worked_note
from rstar2_megatron.settings.load import ConfigError, load, users_path
from rstar2_megatron.settings.placement import slots_of, visible_gpus, visible_host_gb
from rstar2_megatron.settings.planning.advice import RECOMPUTE
from rstar2_megatron.settings.planning.plan import make_plan, what_fits
from rstar2_megatron.settings.precision import host_precision
from rstar2_megatron.settings.rlinf_keys import put
from rstar2_megatron.trajectory import Problem

_PROMPT_STEP = 128  # prompt lengths are rounded up to it
_RESPONSE = {"cpu": 512, "gpu": 8192}  # tokens of a trajectory
_FEW = 4  # GPUs that get the batch of config/few_gpus.yaml
_SAMPLED = 2000  # problems whose prompts are measured
Values = dict[str, Any]
"""By dotted keys."""


def write_new_config(name: str, model: str, data: list[str]) -> Path:
    """Write NAME.yaml into the user's directory. Raises ConfigError for bad input, and when the file is there already."""
    path = users_path(f"{name.removesuffix('.yaml')}.yaml").absolute()
    if path.exists():
        raise ConfigError(f"{path} is there already; give another name or remove it")
    directory = users_path(model).absolute()
    files = [file if file.startswith(HUB) else str(users_path(file).absolute()) for file in data]
    try:
        shape = ModelConfig.from_directory(directory)
        first = next(data_input(files[0]).rows(), None)
        keys = proposed_keys(first.values) if first else {}
        problems = read_problems(files, Columns(keys.get("prompt_key", "prompt"), keys.get("answer_key", "solutions")))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if note := worked_note(problems):
        print(f"note: {note}", file=sys.stderr)
    if wrong := directory_problems(directory, shape, None):
        raise ConfigError("\n".join(wrong))
    prompt = _longest_prompt(directory, problems[:_SAMPLED])
    refused = ""
    for config in _candidates(path.stem, directory, files, keys, shape, len(problems), prompt):
        path.write_text(_text(config, len(problems), shape))
        try:
            settings = load(str(path), []).settings
            slots = slots_of(settings.cluster, visible_gpus(), visible_host_gb())
            plan = make_plan(settings, slots=slots, with_remedy=False)
            change = {} if plan.fits else what_fits(settings, slots)
        except ValueError as error:
            refused = str(error)
        else:
            for key, value in change.items():
                put(config, key, value)
            if plan.fits or change:
                path.write_text(_text(config, len(problems), shape))
                return path
            refused = plan.problems[0]
        path.unlink()
    raise ConfigError(f"{directory} fits this machine in no layout that was tried; the last one: {refused}")


def _longest_prompt(directory: Path, problems: list[Problem]) -> int:
    """Tokens of the longest rendered prompt, rounded up, with room for other problems."""
    # Here, because transformers takes seconds.
    from transformers import AutoTokenizer

    from rstar2_megatron.rollout.chat import ChatTemplate
    from rstar2_megatron.settings.schema import AgentLoopSettings

    try:
        template = ChatTemplate(AutoTokenizer.from_pretrained(directory), AgentLoopSettings())
    except (ValueError, OSError) as error:
        raise ConfigError(f"the tokenizer of {directory} cannot be used: {error}") from None
    longest = max(len(template.prompt_ids(problem)) for problem in problems)
    return -(-longest * 5 // 4 // _PROMPT_STEP) * _PROMPT_STEP


def _candidates(
    name: str, model: Path, files: list[str], keys: dict[str, str], shape: ModelConfig, problems: int, prompt: int
) -> Iterator[dict[str, object]]:
    """Configurations, the fastest first."""
    gpus, _ = visible_gpus()
    response = min(_RESPONSE["gpu" if gpus else "cpu"], shape.max_position_embeddings - prompt)
    if response < 64:
        raise ConfigError(
            f"prompts of {prompt} tokens leave {response} of the model's {shape.max_position_embeddings} positions for a "
            "trajectory; shorten the problems"
        )
    shared: Values = {
        "runner.experiment_name": name,
        "rollout.model.model_path": str(model),
        "data.train_data_paths": files,
        "data.val_data_paths": [],
        **{f"data.{key}": value for key, value in keys.items()},
        "data.max_prompt_length": prompt,
    }
    if gpus:
        few = ["few_gpus"] if gpus <= _FEW else []
        shared |= {
            "rollout.gpu_memory_utilization": 0.8,
            "data.rollout_batch_size": min(32 if few else 128, problems),
            "cluster": {"component_placement": {"actor,rollout,reward": "all"}},
        }
        for length in (response, response // 2, response // 4):
            yield _config(["base", "released", *few], {**shared, "algorithm.sampling_params.max_new_tokens": length})
        return
    length = prompt + response
    shared |= {
        "runner.max_tokens_per_mbs": max(1024, length),
        "runner.step_timeout_s": 3600,
        "algorithm.group_size": 8,
        "algorithm.down_sampling.down_sampling_config.down_sample_to_n": 4,
        "algorithm.sampling_params.max_new_tokens": response,
        "rollout.model.precision": host_precision(),
        "rollout.max_total_tokens": 16 * length,
        "rollout.max_running_requests": 64,
        "rollout.trajectory_timeout_s": 1800,
        "rollout.no_progress_timeout_s": 300,
        "data.rollout_batch_size": min(8, problems),
        "actor.model.precision": host_precision(),
        "actor.model.tensor_model_parallel_size": 1,
        "actor.optim.lr": 1e-5,
        "actor.optim.min_lr": 1e-6,
        "agentloop.system_prompt": None,
        "agentloop.user_prefix": None,
        "agentloop.max_tool_response_length": 256,
        "cold_start.enabled": False,
    }
    for recompute in ({}, RECOMPUTE):
        yield _config(["rstar2-tiny-cpu"], {**shared, **recompute})  # two CPU slots


def _config(bases: list[str], values: Values) -> dict[str, object]:
    config: dict[str, object] = {"defaults": [*bases, "_self_"]}
    for path, value in values.items():
        put(config, path, value)
    return config


def _text(config: dict[str, object], problems: int, shape: ModelConfig) -> str:
    head = (
        f"# {shape.architecture} with {shape.num_parameters / 1e6:.0f} M parameters, {problems} problems. Written by --new;\n"
        "# every key can be changed (docs/your_model.md), --print-config shows those that are not written here.\n"
    )
    return head + yaml.safe_dump(config, sort_keys=False, width=120)
