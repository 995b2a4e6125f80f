"""Checks of the whole: Ray, RLinf, actor, engines, judge and reward come up; every weight route; one training step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.result import Check, CheckFailed, CheckSkipped, Finding
from rstar2_megatron.settings.planning.advice import changed
from rstar2_megatron.settings.planning.estimates import LINK_BYTES_PER_S, train_share
from rstar2_megatron.settings.schema import ColdStartSettings, EvaluationSettings, LrSchedSettings, Settings
from rstar2_megatron.weights.route import RouteKind

_PROGRAM = "rstar2_megatron.runs.check.programs.cluster_program:part"
_ROUTES: tuple[str, ...] = get_args(RouteKind)
_PROMPT_TOKENS, _RESPONSE_TOKENS = 512, 256


def run_settings(context: Context) -> Settings:
    """The YAML on the thin model: its placement, layout, loss and advantages, one step of few, short trajectories.

    What reads the user's problems, or leaves out what a random model generates, has no part in it: rows, reward, environment
    and loop, filters, an own rule of resampling.
    """
    settings, gpu = context.settings, context.device == "cuda"
    problems = context.scratch / "problems.jsonl"
    rows = [{"prompt": f"What is {n} + {n}?", "solutions": [str(2 * n)], "query_id": f"check-{n}"} for n in range(64)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    response = min(settings.algorithm.sampling_params.max_new_tokens, _RESPONSE_TOKENS if gpu else 64)
    prompt = min(max(settings.data.max_prompt_length, 64), 2048 if gpu else _PROMPT_TOKENS)
    group_size = 8 if gpu else 4
    sampling = "algorithm.down_sampling.down_sampling_config"
    has_own_rule = isinstance(settings.algorithm.down_sampling.down_sampling_config.mode, UserCode)
    changes: dict[str, Any] = {
        "runner.task_type": "reasoning",
        "runner.experiment_name": "run",
        "runner.output_dir": str(context.scratch),
        "runner.logger.log_path": str(context.scratch / "run"),
        "runner.logger.logger_backends": [],
        "runner.max_steps": 1,
        "runner.save_interval": -1,
        "runner.val_check_interval": -1,
        **dict.fromkeys(("runner.resume_dir", "runner.init_checkpoint", "runner.replay_rollouts")),
        **dict.fromkeys(("runner.save_rollouts", "runner.save_rollout_tokens"), False),
        "runner.stop_when": [],
        "runner.seq_length": prompt + response,
        "runner.max_tokens_per_mbs": min(settings.runner.max_tokens_per_mbs, 4 * (prompt + response)),
        "runner.step_timeout_s": 600.0 if gpu else 150.0,
        "algorithm.group_size": group_size,
        "algorithm.n_minibatches": 1,
        "algorithm.sampling_params.max_new_tokens": response,
        "algorithm.sampling_params.temperature": 1.0,
        "algorithm.refill.enabled": False,
        # A random model solves nothing: groups of equal reward are kept here, so that the step has something to train on.
        f"{sampling}.reject_equal_reward": False,
        f"{sampling}.min_zero_reward_trace_num": 0,
        f"{sampling}.min_non_zero_reward_trace_num": 0,
        f"{sampling}.down_sample_to_n": group_size // 2,
        **({f"{sampling}.mode": "paper"} if has_own_rule else {}),
        "algorithm.trajectory_filters": [],
        **dict.fromkeys(("agentloop.environment", "agentloop.loop")),
        "reward.function": "math",
        "reward.terms": [],
        "reward.arguments": {},
        "data.rows": None,
        "data.train_data_paths": [str(problems)],
        "data.val_data_paths": [],
        "data.prompt_key": "prompt",
        "data.answer_key": "solutions",
        "data.max_prompt_length": prompt,
        "data.filter_prompt_by_length": False,
        "data.rollout_batch_size": max(4, context.slots.count // settings.rollout.tensor_parallel_size),
        "rollout.model.model_path": str(context.thin),
        "rollout.tail": "wait",
        "actor.optim.lr": 1e-3,
        "actor.optim.min_lr": 0.0,
        "actor.lr_sched": LrSchedSettings(lr_warmup_iters=0),  # constant
        "actor.weight_sync.route": "auto",
        "cold_start": ColdStartSettings(),  # off
        "evaluation": EvaluationSettings(before_and_after=False, save_trajectories=False),
        **({} if gpu else {"rollout.max_total_tokens": 8192}),
    }
    return changed(settings, changes)


def part(context: Context, name: str, deadline_s: float) -> dict[str, Any]:
    """The figures of a part of the run, which one process of this node keeps. Raises CheckFailed."""
    if "run" not in context.found:
        context.nodes.close()  # memory and ports belong to the run now
        context.found["run"] = run_settings(context)
    figures: dict[str, Any] = context.nodes.engine(_PROGRAM, (), deadline_s, settings=context.found["run"], name=name)
    return figures


def start(context: Context) -> Finding:
    if not any((context.thin / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckSkipped(
            f"rollout.model.model_path={context.settings.rollout.model.model_path} has no tokenizer: the agent loop needs one"
        )
    figures = part(context, "start", 780.0 if context.device == "cuda" else 420.0)
    if figures["device"] != context.device:
        raise CheckFailed(f"actor and engines are on {figures['device']}, the YAML is for {context.device}", figures)
    context.found["routes"] = figures["routes"]
    words = (
        f"{figures['actor_ranks']} actor ranks and {figures['engines']} engines on {figures['device']}; routes "
        f"{', '.join(figures['routes'])}"
    )
    return Finding(words, figures)


def route(kind: str) -> Callable[[Context], Finding]:
    def run(context: Context) -> Finding:
        if kind not in context.found["routes"]:
            raise CheckSkipped("not possible with this placement (weights/route.py)")
        figures = part(context, kind, 660.0 if context.device == "cuda" else 180.0)
        words = (
            f"{figures['bytes'] / 1e6:.1f} MB in {figures['sync_seconds']:.2f} s, "
            f"{figures['bytes_per_second'] / 1e9:.3g} GB/s{planned_sync(context, figures['bytes'])}; "
            f"{figures['tensors']} checksums agree on every engine"
        )
        return Finding(words, figures)

    return run


def planned_sync(context: Context, num_bytes: float) -> str:
    """What the plan expects of a sync; it has no figure for CPUs."""
    if context.device == "cpu":
        return ""
    return f", planned {num_bytes / LINK_BYTES_PER_S:.2f} s at {LINK_BYTES_PER_S / 1e9:.3g} GB/s"


def step(context: Context) -> Finding:
    row = part(context, "step", 900.0 if context.device == "cuda" else 240.0)
    words = (
        f"rollout {row.get('time/rollout', 0.0):.1f} s, training {row.get('time/training', 0.0):.1f} s, sync "
        f"{row.get('time/sync_weights', 0.0):.1f} s; {row.get('rollout/tokens_per_second', 0.0):.0f} tokens/s rolled out"
    )
    mfu = row.get("train/actor/mfu")
    if mfu is not None:
        words += f"; MFU {mfu:.1%} in this short step, planned {train_share(context.thin_config):.0%} for full ones"
    return Finding(words, row)


def checkpoint(context: Context) -> Finding:
    figures = part(context, "checkpoint", 660.0 if context.device == "cuda" else 180.0)
    words = f"{figures['bytes'] / 1e6:.1f} MB, loaded by all ranks in {figures['load_seconds']:.1f} s, every bit as saved"
    return Finding(words, figures)


_NETWORK = "the report names the worker and its traceback; actor.weight_sync.route=disk works where nothing else does"
CHECKS = [
    Check(
        "run starts",
        start,
        "the report holds the run's output; rollout.engine_start_timeout_s and the checks above say what is slow or missing",
        deadline_s=840.0,
        after=("configuration", "thin model", "engine", "judge"),
    ),
    *(Check(f"weights by {kind}", route(kind), _NETWORK, deadline_s=720.0, after=("run starts",)) for kind in _ROUTES),
    Check(
        "training step",
        step,
        "the report holds the traceback of the worker that failed first",
        deadline_s=960.0,
        after=("run starts",),
    ),
    Check(
        "checkpoint of the run",
        checkpoint,
        "runner.output_dir must be one file system for all nodes",
        deadline_s=780.0,
        after=("training step",),
    ),
]
