"""Writes verl's side of a run: the same data, prompts, tool, reward, batch and loss as a configuration of this project.

    bash examples/agent/rstar2/compare_with_verl.sh NAME [key=value ...] --export DIR

DIR gets run_verl.sh, verl.yaml (verl 0.9.1), parquet files, the tool's code, the reward's, a function of yours in verl's form
included, and differences.txt: every setting without counterpart. The logs of that run go to
`python -m rstar2_megatron.report.curves RUN --verl DIR/logs`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.extension.user_code import all_user_code
from rstar2_megatron.model.tokenizer_files import OWN_TEMPLATE
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.report.names import HELD_OUT
from rstar2_megatron.reward.own import OwnReward, verl_columns
from rstar2_megatron.rollout.chat import TURN_END, TURN_START, Wording, defuse
from rstar2_megatron.settings.load import CONFIG_DIR
from rstar2_megatron.settings.rlinf_keys import put
from rstar2_megatron.settings.schema import McpSettings, Settings
from rstar2_megatron.tools import ToolSchema, tool_schemas
from rstar2_megatron.trajectory import Problem

VERSION = "0.9.1"
JUDGE_URL = "http://127.0.0.1:8088"
CODE = CONFIG_DIR.parent / "examples" / "agent" / "rstar2" / "verl"
_NO_DUAL_CLIP = 1e9  # verl always clips; a loss is never this large
_CUT_SIDE = {"left": "right", "middle": "middle", "right": "left"}  # verl names the end that is cut, we that which is kept


def verl_config(settings: Settings, directory: Path) -> dict[str, Any]:
    """verl's keys, nested, over its ppo_trainer.yaml. `directory`: where the exported files are."""
    algorithm, sampling = settings.algorithm, settings.algorithm.sampling_params
    agentloop, rollout, optim = settings.agentloop, settings.rollout, settings.actor.optim
    sched, evaluation, runner = settings.actor.lr_sched, settings.evaluation, settings.runner
    aggregation, model = algorithm.loss_agg_func, rollout.model.model_path
    values: dict[str, Any] = {
        "data.train_files": str(directory / "train.parquet"),
        "data.val_files": str(directory / "val.parquet"),
        "data.train_batch_size": settings.data.rollout_batch_size,
        "data.max_prompt_length": settings.data.max_prompt_length,
        "data.max_response_length": sampling.max_new_tokens,
        "data.shuffle": settings.data.shuffle,
        "data.seed": settings.data.seed,
        "data.filter_overlong_prompts": settings.data.filter_prompt_by_length,
        "actor_rollout_ref.model.path": str(Path(model).resolve()) if Path(model).is_dir() else model,
        "actor_rollout_ref.model.custom_chat_template": chat_template(settings),
        "actor_rollout_ref.actor.ppo_mini_batch_size": settings.data.rollout_batch_size // algorithm.n_minibatches,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": runner.max_tokens_per_mbs,
        "actor_rollout_ref.actor.clip_ratio": algorithm.clip_ratio_low,
        "actor_rollout_ref.actor.clip_ratio_low": algorithm.clip_ratio_low,
        "actor_rollout_ref.actor.clip_ratio_high": algorithm.clip_ratio_high,
        "actor_rollout_ref.actor.clip_ratio_c": algorithm.clip_ratio_c or _NO_DUAL_CLIP,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean" if "released" in aggregation else aggregation,
        "actor_rollout_ref.actor.entropy_coeff": algorithm.entropy_bonus,
        "actor_rollout_ref.actor.use_kl_loss": algorithm.kl_beta > 0,
        "actor_rollout_ref.actor.kl_loss_coef": algorithm.kl_beta,
        "actor_rollout_ref.actor.kl_loss_type": algorithm.kl_penalty_type,
        "actor_rollout_ref.actor.data_loader_seed": settings.actor.seed,
        "actor_rollout_ref.actor.optim.lr": optim.lr,
        "actor_rollout_ref.actor.optim.min_lr_ratio": optim.min_lr / optim.lr,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": -(-sched.lr_warmup_iters // algorithm.n_minibatches),  # training steps
        "actor_rollout_ref.actor.optim.lr_scheduler_type": sched.lr_decay_style,
        "actor_rollout_ref.actor.optim.zero_indexed_step": False,  # else the first update has rate 0
        "actor_rollout_ref.actor.optim.weight_decay": optim.weight_decay,
        "actor_rollout_ref.actor.optim.betas": [optim.adam_beta1, optim.adam_beta2],
        "actor_rollout_ref.actor.optim.clip_grad": optim.clip_grad,
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.n": algorithm.group_size,
        "actor_rollout_ref.rollout.temperature": sampling.temperature,
        "actor_rollout_ref.rollout.top_p": sampling.top_p,
        "actor_rollout_ref.rollout.top_k": sampling.top_k,
        "actor_rollout_ref.rollout.seed": settings.actor.seed,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout.tensor_parallel_size,
        "actor_rollout_ref.rollout.gpu_memory_utilization": rollout.gpu_memory_utilization,
        "actor_rollout_ref.rollout.max_num_seqs": rollout.max_running_requests,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.rollout.multi_turn.format": "hermes",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": agentloop.max_assistant_turns,
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": agentloop.max_parallel_calls,
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": agentloop.max_tool_response_length,
        "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": _CUT_SIDE[agentloop.tool_response_truncate_side],
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": str(directory / "tools.yaml"),
        "actor_rollout_ref.rollout.val_kwargs.n": evaluation.num_samples,
        "actor_rollout_ref.rollout.val_kwargs.temperature": evaluation.temperature,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": evaluation.temperature > 0,
        "algorithm.adv_estimator": "rloo" if algorithm.adv_type == "leave-one-out" else "grpo",
        "algorithm.norm_adv_by_std_in_grpo": algorithm.adv_type == "grpo",
        "algorithm.rollout_correction.bypass_mode": not algorithm.recompute_logprobs,
        "algorithm.rollout_correction.rollout_is": "token" if algorithm.importance_sampling_fix else None,
        "algorithm.rollout_correction.rollout_is_threshold": algorithm.importance_sampling_clip,
        "reward.num_workers": settings.reward.num_workers,
        "reward.custom_reward_function.path": str(directory / "reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.total_training_steps": runner.max_steps,
        "trainer.total_epochs": runner.max_epochs,
        "trainer.nnodes": settings.cluster.num_nodes,
        "trainer.save_freq": runner.save_interval,
        "trainer.test_freq": runner.val_check_interval,
        "trainer.val_before_train": evaluation.before_and_after and bool(settings.data.val_data_paths),
        "trainer.logger": ["console", "file", "tensorboard"],
        "trainer.project_name": runner.logger.project_name,
        "trainer.experiment_name": runner.experiment_name,
        "trainer.default_local_dir": str(directory / "checkpoints"),
    }
    config: dict[str, Any] = {"defaults": ["ppo_trainer", "_self_"], "hydra": {"searchpath": ["pkg://verl.trainer.config"]}}
    for path, value in values.items():
        put(config, path, value)
    return config


def differences(settings: Settings) -> Iterator[str]:
    """Every setting of the configuration to which verl has no counterpart, with what verl does."""
    algorithm, agentloop = settings.algorithm, settings.agentloop
    sampling = algorithm.down_sampling
    if sampling.do_down_sampling:
        config = sampling.down_sampling_config
        yield (
            f"algorithm.down_sampling (mode {config.mode}, {config.down_sample_to_n} of {algorithm.group_size}): verl trains "
            f"on all {algorithm.group_size} rollouts and rejects no group. For plain GRPO on both sides, export and train "
            "with algorithm.down_sampling.do_down_sampling=False"
        )
    for key, code in all_user_code(algorithm, "algorithm"):
        if "down_sampling" not in key:
            yield f"{key}={code}: not exported; verl has its own"
    if "released" in algorithm.loss_agg_func:
        yield f"algorithm.loss_agg_func={algorithm.loss_agg_func}: verl {VERSION} has the global token-mean"
    if algorithm.clip_ratio_c is None:
        yield f"algorithm.clip_ratio_c=null: verl always has a dual clip; it is {_NO_DUAL_CLIP:g} there"
    if algorithm.kl_beta and algorithm.kl_clamp is None:
        yield "algorithm.kl_clamp=null: verl cuts low_var_kl to +-10"
    if algorithm.policy_loss in ("gspo", "gspo-token", "cispo"):
        yield f"algorithm.policy_loss={algorithm.policy_loss}: not exported; verl trains with its clipped loss"
    if built_in := [name for name in algorithm.trajectory_filters if isinstance(name, str)]:
        yield f"algorithm.trajectory_filters={built_in}: verl leaves no trajectory out"
    if algorithm.overlong.buffer_tokens:
        yield "algorithm.overlong: not exported; verl's rewards are not punished for their length"
    if algorithm.turn_returns.discount is not None:
        yield "algorithm.turn_returns: verl has one advantage a trajectory"
    for name in ("decoupled_loss", "mis_sequence", "mis_geometric", "icepop"):
        if value := getattr(algorithm, name):
            yield f"algorithm.{name}={value}: not exported; verl's rollout_correction has masks and weights of its own"
    if algorithm.max_staleness:
        yield f"algorithm.max_staleness={algorithm.max_staleness}: verl's trainer here waits for each step's rollouts"
    if algorithm.entropy_bonus_tokens is not None:
        yield "algorithm.entropy_bonus_tokens: verl's entropy_coeff is for every token"
    if agentloop.tool_noise:
        yield f"agentloop.tool_noise={agentloop.tool_noise:g}: no call of verl's fails by intent"
    if algorithm.refill.enabled:
        yield "algorithm.refill: verl adds no problems"
    if settings.rollout.tail != "wait":
        yield f"rollout.tail={settings.rollout.tail}: verl waits for every trajectory"
    for name in ("max_identical_calls", "max_malformed_turns"):
        if getattr(agentloop, name) is not None:
            yield f"agentloop.{name}={getattr(agentloop, name)}: verl does not end such trajectories"
    if agentloop.use_data_system_prompt:
        yield "agentloop.use_data_system_prompt: the exported prompts have no system message of the data"
    if settings.actor.optim.adam_eps != 1e-8:
        yield f"actor.optim.adam_eps={settings.actor.optim.adam_eps:g}: verl's default is 1e-8"
    if settings.tools.codejudge.host_addr is None:
        yield f"tools.codejudge.host_addr=null: verl starts no judge; run_verl.sh says how to start one at {JUDGE_URL}"
    if settings.cold_start.enabled:
        yield (
            f"cold_start: verl starts from {settings.rollout.model.model_path}; for a run from the same SFT model give its "
            "directory as rollout.model.model_path on both sides, with cold_start.enabled=False"
        )
    if algorithm.n_minibatches > 1:
        yield (
            f"algorithm.n_minibatches={algorithm.n_minibatches}: verl's rate changes once a training step, here with each of "
            "its updates"
        )
    if settings.actor.lr_sched.lr_decay_iters is not None:
        yield f"actor.lr_sched.lr_decay_iters={settings.actor.lr_sched.lr_decay_iters}: verl's decay ends with the last step"
    for name in ("max_new_tokens", "max_assistant_turns"):
        if (value := getattr(settings.evaluation, name)) is not None:
            yield f"evaluation.{name}={value}: verl's held-out answers have the limit of training"
    model = settings.actor.model
    yield (
        f"actor parallelism (TP {model.tensor_model_parallel_size}, PP {model.pipeline_model_parallel_size}), offload and "
        "recomputation: verl's default engine is FSDP; set trainer.n_gpus_per_node and its own keys"
    )
    yield "rollout.scheduler, trajectory_timeout_s, step_timeout_s: verl has no admission by KV budget and no such deadlines"
    yield (
        "calls that are no JSON: verl ends the trajectory without a response and does not count it as a tool error; here the "
        "model reads what is wrong and may try again"
    )
    yield "failures of the judge: verl shows them to the model as tool errors, here they are retried and dropped"


def chat_template(settings: Settings) -> str:
    """The conversation format as a Jinja template. verl renders [{}] to find the system part, so that is always there."""
    agentloop = settings.agentloop
    if agentloop.chat_template == OWN_TEMPLATE:
        raise ValueError(
            "agentloop.chat_template=tokenizer is written nowhere that verl reads; give the template's file instead"
        )
    if agentloop.chat_template is not None:
        return agentloop.chat_template
    wording = _wording(settings)
    system = wording.system_prompt
    opening = json.dumps(wording.generation_prefix)
    head = f"{TURN_START}system\n{system}{TURN_END}\n" if system else ""
    # json.dumps writes literals that Jinja reads back
    answer = json.dumps(f"{TURN_START}user\n<tool_response>\n"), json.dumps(f"\n</tool_response>{TURN_END}\n")
    turn = json.dumps(TURN_START), json.dumps("\n"), json.dumps(f"{TURN_END}\n")
    return (
        f"{{{{- {json.dumps(head)} }}}}{{%- for m in messages %}}"
        f"{{%- if m.role == 'tool' %}}{{{{- {answer[0]} + m.content + {answer[1]} }}}}"
        "{%- elif m.role in ('user', 'assistant') %}"
        f"{{{{- {turn[0]} + m.role + {turn[1]} + m.content + {turn[2]} }}}}"
        f"{{%- endif %}}{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{- {opening} }}}}{{%- endif %}}"
    )


def _wording(settings: Settings) -> Wording:
    agentloop = settings.agentloop
    return Wording.of(agentloop, _schemas(settings))


def _schemas(settings: Settings) -> list[ToolSchema]:
    tools = settings.agentloop.tools
    if own := [tool.mcp if isinstance(tool, McpSettings) else tool.use.label for tool in tools if not isinstance(tool, str)]:
        raise ValueError(f"agentloop.tools names {own[0]}, which the export cannot give to verl; write it as verl's own tool")
    if (form := settings.agentloop.tool_call_format) not in ("hermes", "auto"):
        raise ValueError(f"agentloop.tool_call_format={form}: the export sets verl to hermes calls; set it to hermes")
    return tool_schemas([str(tool) for tool in tools], settings.agentloop.tool_descriptions)


def verl_rows(problems: Sequence[Problem], settings: Settings) -> list[dict[str, Any]]:
    """Rows of verl's parquet files; the prefix of a problem is part of the prompt, the rest of the template."""
    prefix = _wording(settings).user_prefix if settings.agentloop.chat_template is None else ""
    rows = [_row(problem, prefix) for problem in problems]
    if any(True for _ in all_user_code(settings.reward)):
        for row, problem in zip(rows, problems, strict=True):
            row["extra_info"]["row"] = json.dumps(verl_columns(problem), ensure_ascii=False)
    return rows


def _row(problem: Problem, prefix: str) -> dict[str, Any]:
    messages = [{**m, "content": defuse(m["content"])} for m in problem.prompt if m["role"] != "system"]
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    messages[last]["content"] = prefix + messages[last]["content"]
    return {
        "data_source": problem.task,
        "prompt": messages,
        "ability": problem.task,
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(problem.solutions)},
        "extra_info": {"index": problem.query_id},
    }


def _check(settings: Settings) -> None:
    """Raises ValueError for code of the user's that verl's side cannot run."""
    agentloop = settings.agentloop
    if code := agentloop.environment or agentloop.loop:
        key = "environment" if agentloop.environment else "loop"
        raise ValueError(f"agentloop.{key}={code}: the export cannot give it to verl; write it as verl's own agent loop")
    if any(term.function == "environment" for term in settings.reward.weighted):
        raise ValueError("reward.function=environment: verl has no environment that gives a reward; write a compute_score")
    for key, code in all_user_code(settings.reward, "reward"):
        if not OwnReward(code, settings.reward.arguments).is_verls:
            raise ValueError(
                f"{key}={code}: a trajectory of ours is not known to verl; write it as compute_score(data_source, "
                "solution_str, ground_truth, extra_info), which runs on both sides (docs/extend.md)"
            )


def export(settings: Settings, directory: Path) -> list[str]:
    """Write all files; returns the differences. Raises ValueError for what verl cannot run or problems that cannot be read."""
    # Here: pyarrow takes a second, which the rest of the room does not need.
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check(settings)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    data = settings.data
    for name, paths in (("train", data.train_data_paths), ("val", data.val_data_paths or data.train_data_paths)):
        problems = read_problems(paths, data)
        rows = verl_rows(problems, settings)
        if name == "val" and settings.evaluation.num_problems >= 0:
            rows = rows[: settings.evaluation.num_problems]
        if name == "val":  # verl logs the mean of each data source, and none of all
            rows = [row | {"data_source": HELD_OUT} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{name}.parquet")
    for _, code in all_user_code(settings.reward):
        code.save(directory)
    for file in ("code_judge_tool.py", "reward.py"):
        shutil.copyfile(CODE / file, directory / file)
    write_json(directory / "grading.json", settings.reward.model_dump(mode="json"))
    judge = settings.tools.codejudge
    url = f"http://{judge.host_addr}:{judge.host_port}" if judge.host_addr else JUDGE_URL
    tools = [
        {"class_name": "code_judge_tool.CodeJudgeTool", "config": {"type": "native", "judge_url": url}, "tool_schema": schema}
        for schema in _schemas(settings)
    ]
    (directory / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}, sort_keys=False))
    (directory / "verl.yaml").write_text(yaml.safe_dump(verl_config(settings, directory), sort_keys=False))
    script = directory / "run_verl.sh"
    script.write_text(
        _SCRIPT.format(version=VERSION, project=CONFIG_DIR.parent, limit=judge.time_limit_s, memory=judge.memory_mb)
    )
    script.chmod(0o755)
    found = list(differences(settings))
    (directory / "differences.txt").write_text("\n".join(found) + "\n", encoding="utf-8")
    return found


_SCRIPT = """\
#!/usr/bin/env bash
# verl {version} with the files beside this script; further words are verl's overrides.
# The judge that tools.yaml names must run, e.g. in another shell from {project}:
#   .venv/bin/python -m rstar2_megatron.judge all --port 8088 --time-limit-s {limit} --memory-mb {memory}
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
export PYTHONPATH="{project}:$here${{PYTHONPATH:+:$PYTHONPATH}}" # the grader and the judge's client
export VERL_FILE_LOGGER_ROOT="$here/logs" TENSORBOARD_DIR="$here/logs/tensorboard"
exec python -m verl.trainer.main_ppo --config-path "$here" --config-name verl "$@"
"""
