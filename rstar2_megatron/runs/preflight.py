"""Checks before a process is started: quick, and without torch.

Each problem is a sentence with the operands and the remedy; all problems of a kind are reported at once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

from rstar2_megatron.actor.layout import check_layout
from rstar2_megatron.algorithm.mismatch import has_rules
from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.data.rows import Absent, DataError
from rstar2_megatron.extension.user_code import UserCode, UserCodeError, all_user_code
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.tokenizer_files import declared_special_tokens, directory_problems
from rstar2_megatron.model.weight_files import weight_notes
from rstar2_megatron.records.checkpoint import complete_checkpoints, find_resume
from rstar2_megatron.records.disk import nearest_existing
from rstar2_megatron.records.trajectory_files import rollouts_path
from rstar2_megatron.reward.answer_text import worked_note
from rstar2_megatron.reward.own import OwnReward
from rstar2_megatron.rollout.tool_set import tools_of
from rstar2_megatron.rollout.turn_loops import TurnLoops
from rstar2_megatron.runs.base_run import finished_step
from rstar2_megatron.runs.inputs.output_directory import output_problems, resume_dir, run_directory
from rstar2_megatron.runs.stopping import condition_problems
from rstar2_megatron.search.preference.trees import read_trees
from rstar2_megatron.services.process import is_loopback
from rstar2_megatron.settings.asynchronous import asynchronous_problems
from rstar2_megatron.settings.host_memory import total_memory
from rstar2_megatron.settings.load import ConfigError
from rstar2_megatron.settings.placement import Slots, component_slots, gpu_problem, slots_of, visible_gpus, visible_host_gb
from rstar2_megatron.settings.planning.batch import object_store_problems
from rstar2_megatron.settings.planning.disk import checkpoint_bytes, disk_needed
from rstar2_megatron.settings.planning.memory import GB
from rstar2_megatron.settings.planning.plan import model_of, remedy
from rstar2_megatron.settings.schema import AlgorithmSettings, Settings
from rstar2_megatron.settings.sections.algorithm import KL_ESTIMATORS
from rstar2_megatron.settings.sections.recipe import BUILT_PREFIXES
from rstar2_megatron.sft.rows import read_segments

PLACEHOLDER = "/path/to/"
"""How a path of a shipped YAML begins that is the user's to give."""
Kind = Literal["wrong", "absent", "note"]
"""A mistake; what a plan for another machine may lack; a warning."""
_MAKERS = {"sft": "data_process/build_sft_dataset.py", "preference": "python -m rstar2_megatron.search (its mcts.jsonl)"}


def check_before_start(
    settings: Settings,
    *,
    dry_run: bool = False,
    find_gpus: Callable[[], tuple[int, float]] = visible_gpus,
    free_bytes: Callable[[Path], int] = lambda directory: shutil.disk_usage(directory).free,
    later: Collection[str] = (),
) -> list[str]:
    """Raise ValueError for the first kind of mistakes found, all of a kind together; return warnings.

    The settings are those of `resolve_tiny`: a name such as tiny:train that is left in them has no builder.

    In a dry run, missing files and GPUs are warnings, so that a plan for another machine can be made; what is here must be
    right. `find_gpus` and `free_bytes` ask the machine; tests replace them. `later`: keys of files that an
    earlier stage of a recipe makes.
    """
    warnings: list[str] = []

    def raise_or_warn(problems: Iterable[str]) -> None:
        if dry_run:
            warnings.extend(problems)
        else:
            _raise(problems)

    _raise(arithmetic_problems(settings))
    _raise(output_problems(settings))
    find_resume(resume_dir(settings), run_directory(settings) / "checkpoints")
    _raise(user_code_problems(settings))
    _raise(tool_problems(settings))
    gpus = find_gpus()
    slots = slots_of(settings.cluster, gpus, visible_host_gb())
    if not slots.is_cpu and (problem := gpu_problem(gpus[0], os.environ.get("CUDA_VISIBLE_DEVICES"))):
        raise_or_warn([problem])
    places = component_slots(settings.cluster, slots.count)
    if idle := sorted(set(range(slots.count)).difference(*places.values())):
        warnings.append(
            f"cluster.component_placement leaves slots {', '.join(map(str, idle))} of {slots.count} idle: no actor, rollout or "
            "reward is there"
        )
    _raise(asynchronous_problems(settings, places))
    raise_or_warn(cluster_problems(settings))
    raise_or_warn(placeholder_problems(settings))
    directory = Path(settings.rollout.model.model_path)
    if directory.exists():  # what is there must be a model, in a dry run too
        _raise(model_problems(settings))
    raise_or_warn(model_problems(settings))
    model, _ = model_of(settings)
    if model is not None and directory.is_dir():
        _raise(directory_problems(directory, model, settings.agentloop.chat_template, settings.agentloop.tool_call_format))
        warnings += weight_notes(directory, model, settings.actor.model.precision)
    _raise(layout_problems(settings, model, slots, places))
    raise_or_warn(engine_problems(settings))
    if settings.runner.task_type == "reasoning" and not os.environ.get("RAY_ADDRESS"):
        memory, shared = total_memory(), shutil.disk_usage("/dev/shm").free
        raise_or_warn(object_store_problems(settings, memory, shared, gpus=not slots.is_cpu))
    if settings.runner.task_type == "reasoning":
        _raise(condition_problems(settings))
        warnings += algorithm_notes(settings)
    _raise(loss_problems(settings.algorithm))
    _raise(algorithm_code_problems(settings.algorithm))
    _raise(replay_problems(settings.runner.replay_rollouts, settings.runner.max_steps))  # of a run that was here
    raise_or_warn(init_checkpoint_problems(settings))
    raise_or_warn(cold_start_problems(settings))
    of_data: dict[Kind, list[str]] = {"wrong": [], "absent": [], "note": []}
    for kind, sentence in data_problems(settings, later):
        of_data[kind].append(sentence)
    warnings += of_data["note"]
    _raise(of_data["wrong"])
    raise_or_warn(of_data["absent"])
    trains_on_rows = settings.runner.task_type in _MAKERS
    if dry_run and trains_on_rows and not of_data["absent"]:  # a run reads all rows before it starts anything
        _raise(row_problems(settings))
    raise_or_warn(logger_problems(settings))
    if model is not None:
        raise_or_warn(disk_problems(settings, model, free_bytes))
    return warnings


def _raise(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ConfigError("\n".join(found))


def algorithm_notes(settings: Settings) -> Iterator[str]:
    """What is allowed and probably not meant."""
    algorithm, reward = settings.algorithm, settings.reward
    if sum(term.weight > 0 for term in reward.terms) > 1 and reward.positive_above == 0:
        yield (
            "reward.terms adds several rewards, and reward.positive_above=0 counts every sum above 0 as right, also that of a "
            "side reward alone; set it between the largest sum of a wrong answer and the smallest of a right one"
        )
    answering = settings.agentloop.environment or settings.agentloop.loop
    if answering and not any(term.function == "environment" for term in reward.weighted):
        yield (
            f"{answering.label} answers the turns, and no reward is what it gives; reward.function=environment, or such a "
            "term, takes an environment's rewards or what a loop sets"
        )
    corrected = algorithm.decoupled_loss or algorithm.importance_sampling_fix or has_rules(algorithm)
    if algorithm.max_staleness and algorithm.recompute_logprobs and not corrected:
        yield (
            "algorithm.recompute_logprobs=True takes the policy before the update as the old one, so that nothing corrects the "
            f"age of tokens under algorithm.max_staleness={algorithm.max_staleness}; set algorithm.decoupled_loss=True, "
            "algorithm.importance_sampling_fix=True, or algorithm.recompute_logprobs=False"
        )
    rounds = settings.actor.model.precision == "bf16"
    if algorithm.policy_loss in ("gspo", "gspo-token") and rounds and not algorithm.recompute_logprobs:
        yield (
            f"algorithm.policy_loss={algorithm.policy_loss} clips ratios of whole sequences near 1, and the difference of "
            "engine and actor in bf16 may be larger; set algorithm.recompute_logprobs=True"
        )


def tool_problems(settings: Settings) -> Iterator[str]:
    """Tools that no model could call, environments and loops that cannot be used; code of the user is loaded."""
    try:
        tools_of(settings.agentloop)
    except ValueError as error:
        yield f"agentloop.tools: {str(error).removeprefix('agentloop.tools ')}"
    agentloop = settings.agentloop
    try:
        TurnLoops(agentloop)
    except ValueError as error:
        yield f"agentloop.{'environment' if agentloop.environment else 'loop'}: {error}"
    gives_reward = agentloop.environment is not None or agentloop.loop is not None
    if not gives_reward and any(term.function == "environment" for term in settings.reward.weighted):
        yield "reward.function=environment needs agentloop.environment or agentloop.loop"


def arithmetic_problems(settings: Settings) -> Iterator[str]:
    """Numbers of the YAML that contradict each other."""
    runner, algorithm, data, rollout = settings.runner, settings.algorithm, settings.data, settings.rollout
    for key, steps in (("trace", runner.trace), ("profiler.steps", runner.profiler.steps)):
        if late := [step for step in steps if step > runner.max_steps]:
            yield f"runner.{key}={steps} names step {late[0]}, but runner.max_steps={runner.max_steps}; steps count from 1"
    response = algorithm.sampling_params.max_new_tokens
    if data.max_prompt_length + response > runner.seq_length:
        yield (
            f"data.max_prompt_length={data.max_prompt_length} + algorithm.sampling_params.max_new_tokens="
            f"{response} exceed runner.seq_length={runner.seq_length}; set runner.seq_length="
            f"{data.max_prompt_length + response} or lower one of them"
        )
    if settings.evaluation.max_new_tokens and (data.max_prompt_length + settings.evaluation.max_new_tokens > runner.seq_length):
        yield (
            f"data.max_prompt_length={data.max_prompt_length} + evaluation.max_new_tokens="
            f"{settings.evaluation.max_new_tokens} exceed runner.seq_length={runner.seq_length}"
        )
    if algorithm.overlong.buffer_tokens > response:
        yield (
            f"algorithm.overlong.buffer_tokens={algorithm.overlong.buffer_tokens} is longer than the whole response, "
            f"algorithm.sampling_params.max_new_tokens={response}; lower it"
        )
    if algorithm.entropy_bonus_tokens and settings.agentloop.max_assistant_turns == 1:
        yield (
            f"algorithm.entropy_bonus_tokens={algorithm.entropy_bonus_tokens} is for turns behind a tool response, and "
            "agentloop.max_assistant_turns=1 has none; set it to null, or allow more turns"
        )
    sampling = algorithm.down_sampling
    kept = algorithm.group_size
    if sampling.do_down_sampling:
        config = sampling.down_sampling_config
        kept = config.down_sample_to_n
        if kept > algorithm.group_size:
            yield (
                f"down_sample_to_n={kept} exceeds algorithm.group_size={algorithm.group_size}; resampling keeps "
                f"some of the rollouts, set algorithm.group_size={2 * kept}"
            )
        least = config.min_zero_reward_trace_num + config.min_non_zero_reward_trace_num
        if least > kept:
            yield (
                f"min_zero_reward_trace_num={config.min_zero_reward_trace_num} + min_non_zero_reward_trace_num="
                f"{config.min_non_zero_reward_trace_num} exceed down_sample_to_n={kept}; lower them"
            )
    elif isinstance(sampling.down_sampling_config.mode, UserCode):
        yield (
            f"algorithm.down_sampling.down_sampling_config.mode={sampling.down_sampling_config.mode} is not called with "
            "do_down_sampling=False; set one of them otherwise"
        )
    if algorithm.refill.enabled and not (sampling.do_down_sampling and sampling.down_sampling_config.reject_equal_reward):
        yield (
            "algorithm.refill.enabled=True adds problems for groups that are rejected for equal rewards, and with "
            "do_down_sampling=False or reject_equal_reward=False there are none; set both keys of algorithm.down_sampling to "
            f"True, with down_sample_to_n={algorithm.group_size} and mode=uniform to keep every trajectory of the others"
        )
    if kept < 2:
        yield f"{kept} trajectory a group has no advantage over others; keep at least 2"
    if algorithm.n_minibatches > data.rollout_batch_size * kept:
        yield (
            f"algorithm.n_minibatches={algorithm.n_minibatches} exceeds the {data.rollout_batch_size * kept} "
            "trajectories a step keeps at most"
        )
    for key, use in (
        ("importance_sampling_fix", "weighs the actor's old log-probs against the engine's"),
        ("decoupled_loss", "clips against the actor's log-probs before the update"),
    ):
        if getattr(algorithm, key) and not algorithm.recompute_logprobs:
            yield f"algorithm.{key}=True {use}; set algorithm.recompute_logprobs=True"
    if algorithm.decoupled_weight_cap and not algorithm.decoupled_loss:
        cap = algorithm.decoupled_weight_cap
        yield f"algorithm.decoupled_weight_cap={cap:g} is a part of algorithm.decoupled_loss; set that to True"
    if algorithm.decoupled_loss and algorithm.importance_sampling_fix:
        yield (
            "algorithm.decoupled_loss=True and algorithm.importance_sampling_fix=True weigh every token twice by the same "
            "ratio; set one of them to False"
        )
    if algorithm.kl_beta and algorithm.kl_penalty_type not in KL_ESTIMATORS:
        yield (
            f"algorithm.kl_penalty_type={algorithm.kl_penalty_type} with algorithm.kl_beta={algorithm.kl_beta} is not a KL "
            f"loss (its expected gradient is not the KL's); choose one of {', '.join(KL_ESTIMATORS)}"
        )
    if runner.init_checkpoint and settings.cold_start.enabled:
        yield (
            f"runner.init_checkpoint={runner.init_checkpoint} continues a trained model, but cold_start.enabled=True "
            "fine-tunes one first; set cold_start.enabled=False or runner.init_checkpoint=null"
        )
    save, validate = runner.save_interval, runner.val_check_interval
    if runner.task_type not in _MAKERS and validate > 0 and save > 0 and save % validate:  # RLinf asserts it at the first step
        yield (
            f"runner.save_interval={save} is no multiple of runner.val_check_interval={validate}: a checkpoint is kept by its "
            f"held-out score; set it to {max(1, round(save / validate)) * validate}, or to -1 for one after the last step only"
        )
    if runner.task_type == "reasoning":
        yield from sampling_problems(settings)
    if rollout.max_total_tokens is not None and rollout.max_total_tokens < runner.seq_length:
        yield (
            f"rollout.max_total_tokens={rollout.max_total_tokens} cannot hold one trajectory of "
            f"runner.seq_length={runner.seq_length} tokens; raise it"
        )


def loss_problems(algorithm: AlgorithmSettings) -> Iterator[str]:
    """Switches of the policy loss that contradict each other."""
    if algorithm.policy_loss == "gspo":
        for key in ("importance_sampling_fix", "decoupled_loss"):
            if getattr(algorithm, key):
                yield (
                    f"algorithm.policy_loss=gspo weighs whole sequences and algorithm.{key}=True weighs tokens; take "
                    "policy_loss=gspo-token, or set it to False"
                )

    returns = algorithm.turn_returns
    if algorithm.policy_loss == "gspo" and returns.discount is not None:
        yield (
            f"algorithm.policy_loss=gspo has one advantage a sequence and algorithm.turn_returns.discount={returns.discount:g} "
            "one a turn; take policy_loss=gspo-token, or set it to null"
        )
    if returns.malformed_penalty and returns.discount is None:
        yield (
            f"algorithm.turn_returns.malformed_penalty={returns.malformed_penalty:g} is for rewards of turns, which "
            "algorithm.turn_returns.discount=null has none of; set discount, e.g. to 0.9, or malformed_penalty=0"
        )
    if algorithm.entropy_bonus_tokens and not algorithm.entropy_bonus:
        yield (
            f"algorithm.entropy_bonus_tokens={algorithm.entropy_bonus_tokens} restricts a bonus that "
            "algorithm.entropy_bonus=0 turns off; set entropy_bonus, e.g. to 0.01, or entropy_bonus_tokens=null"
        )


def algorithm_code_problems(algorithm: AlgorithmSettings) -> Iterator[str]:
    """Functions of the user's that cannot be loaded, or fail on a few tokens and rewards."""
    if not any(True for _ in all_user_code(algorithm)):
        return
    # here, because torch takes seconds, which most runs need not wait for
    from rstar2_megatron.algorithm.advantage import check_own_advantage
    from rstar2_megatron.algorithm.layout_check import check_layouts, load_policy_loss
    from rstar2_megatron.algorithm.penalty import load_penalty
    from rstar2_megatron.algorithm.selection import Selection

    try:
        Selection(algorithm)
        load_penalty(algorithm.down_sampling.down_sampling_config.penalty or "paper")
        if isinstance(algorithm.adv_type, UserCode):
            check_own_advantage(algorithm.adv_type)
        loss, _ = load_policy_loss(algorithm)
    except UserCodeError as error:
        yield str(error)
        return
    if isinstance(algorithm.policy_loss, UserCode):
        try:
            check_layouts(loss, algorithm)
        except UserCodeError as error:  # which names the key already
            yield str(error)
        except ValueError as error:
            yield f"algorithm.policy_loss={algorithm.policy_loss.label}: {error}"


def sampling_problems(settings: Settings) -> Iterator[str]:
    """Sampling whose log-probs are not those of the policy that is trained."""
    sampling, server = settings.algorithm.sampling_params, settings.rollout.sglang.server_args
    why = "the engine's log-probs are those before truncation, so ratios and gradients would be biased"
    if sampling.top_p < 1:
        yield f"algorithm.sampling_params.top_p={sampling.top_p:g} in training: {why}; set it to 1.0"
    if sampling.top_k != -1:  # SGLang takes no 0
        yield f"algorithm.sampling_params.top_k={sampling.top_k} in training: {why}; set it to -1"
    preferred = str(server.get("preferred_sampling_params", ""))
    if "min_p" in preferred:
        yield f"rollout.sglang.server_args.preferred_sampling_params={preferred} in training: {why}; remove min_p"
    if sampling.temperature == 0:
        yield (
            "algorithm.sampling_params.temperature=0 in training: greedy rollouts of a group are all the same, and have no "
            "log-probs under the policy; set it to 1.0"
        )


def cluster_problems(settings: Settings) -> Iterator[str]:
    """Several nodes without a Ray cluster, or with a judge that only this node reaches."""
    nodes, judge = settings.cluster.num_nodes, settings.tools.codejudge
    if nodes == 1:
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        yield (
            f"cluster.num_nodes={nodes} needs a Ray cluster of these nodes, and RAY_ADDRESS is not set: `ray start --head` "
            "here and `ray start --address=...` on the others (docs/multi_node.md), then RAY_ADDRESS=HOST:6379"
        )
    elif is_loopback(judge.host_addr or "") and not is_loopback(address.rpartition(":")[0]):
        yield (
            f"tools.codejudge.host_addr={judge.host_addr} is loopback, which the engines of the other "
            f"{nodes - 1} nodes cannot reach: name the judge's host by an address of the network, or null to start one here"
        )


def user_code_problems(settings: Settings) -> Iterator[str]:
    """Code that the settings name and that cannot be loaded, or not be called as what it is named for."""
    arguments = settings.reward.arguments
    for key, code in all_user_code(settings):
        try:
            OwnReward(code, arguments) if key.startswith("reward.") else code.load()
        except UserCodeError as error:
            yield f"{key}: {error}"
    if arguments and not any(key.startswith("reward.") for key, _ in all_user_code(settings)):
        yield f"reward.arguments={arguments} are for a function of yours; set reward.function or reward.terms"


def placeholder_problems(settings: Settings) -> Iterator[str]:
    """Paths of a shipped YAML that stand for the user's own, with the commands that make such files."""
    path, data = settings.rollout.model.model_path, settings.data
    made = {"train_data_paths": "train", "val_data_paths": "validation"}
    for key, file in made.items() if settings.runner.task_type not in ("sft", "preference") else ():
        paths = getattr(data, key)
        if any(path.startswith(PLACEHOLDER) for path in paths):
            yield (
                f"data.{key}={paths} stands for problems of yours: .venv/bin/python data_process/process_train_dataset.py "
                f"--out data/train --source dapo --validation 256 writes some (--decontaminate FILE... leaves out what an "
                f"evaluation set has), then data.{key}=[data/train/{file}.jsonl]"
            )
    if path.startswith(PLACEHOLDER):
        name = Path(path).name
        owner = "Qwen" if name.startswith("Qwen") else "OWNER"
        yield (
            f"rollout.model.model_path={path} stands for a model of yours: .venv/bin/hf download {owner}/{name} --local-dir "
            f"models/{name} fetches it, then rollout.model.model_path=models/{name}"
        )


def model_problems(settings: Settings) -> Iterator[str]:
    """A model directory that is not there."""
    path = settings.rollout.model.model_path
    if path.startswith(PLACEHOLDER):
        return
    if path.startswith(BUILT_PREFIXES):
        yield (
            f"rollout.model.model_path={path} is made by the cold start; set cold_start.enabled=True "
            "cold_start.builder=tiny, or give a model directory"
        )
    elif not Path(path).is_dir():
        yield (
            f"rollout.model.model_path={path} is not a directory; give a Hugging Face directory with config.json, "
            "*.safetensors and the tokenizer's files"
        )


def layout_problems(settings: Settings, model: ModelConfig | None, slots: Slots, places: dict[str, list[int]]) -> Iterator[str]:
    """Parallel sizes against the model and the slots."""
    speculative = settings.rollout.sglang.server_args.get("speculative_algorithm")
    if slots.is_cpu and speculative:
        yield (
            f"rollout.sglang.server_args.speculative_algorithm={speculative} on CPU slots: SGLang verifies drafts there by "
            "argmax at any temperature, so the tokens are not samples of the policy; remove it"
        )
    world, engines = len(places["actor"]), len(places["rollout"])
    if model is not None:
        try:
            check_layout(settings.actor, model, world, settings.runner)
        except ValueError as error:
            too_large = world % settings.actor.model.ranks_of_copy
            here = f"for {slots.count} x {slots.memory_gb or 0:.0f} GB with a host of {slots.host_gb:.0f} GB"
            yield str(error) + (f"\n{here}: {remedy(settings, slots)}" if too_large and not slots.is_cpu else "")
    tp = settings.rollout.tensor_parallel_size
    if engines % tp:
        yield (
            f"rollout.tensor_parallel_size={tp} does not divide the {engines} slots of "
            f"cluster.component_placement.rollout; place the rollout on a multiple of {tp} slots"
        )
    if model is None:
        return
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield (
            f"rollout.tensor_parallel_size={tp} neither divides the model's {model.num_kv_heads} key/value heads nor "
            f"is a multiple of them; set it to {max(n for n in range(1, tp) if model.num_kv_heads % n == 0)}"
        )
    if model.num_heads % tp:
        yield f"rollout.tensor_parallel_size={tp} does not divide the model's {model.num_heads} attention heads"
    if settings.runner.seq_length > model.max_position_embeddings:
        yield (
            f"runner.seq_length={settings.runner.seq_length} exceeds the model's max_position_embeddings="
            f"{model.max_position_embeddings}; lower algorithm.sampling_params.max_new_tokens"
        )


def engine_problems(settings: Settings) -> Iterator[str]:
    """TransformerEngine required but not installed; an allocator that neither engines nor CUDA IPC work with."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            yield (
                f"{name}={os.environ[name]}: expandable_segments changes the memory handles by which the actor gives its "
                "weights to engines, and the engine's memory saver refuses it; take it out of the environment"
            )
    if settings.actor.model.transformer_impl == "transformer_engine" and not importlib.util.find_spec("transformer_engine"):
        yield (
            "actor.model.transformer_impl=transformer_engine, but TransformerEngine is not installed; set it to auto "
            "or local, or bash scripts/setup_env.sh --transformer-engine"
        )


def init_checkpoint_problems(settings: Settings) -> Iterator[str]:
    """A `runner.init_checkpoint` that is not a checkpoint; a run that resumes needs it for a KL term alone."""
    path = None if _resumes(settings) and not settings.algorithm.kl_beta else settings.runner.init_checkpoint
    if path and not (Path(path) / "actor" / "metadata.json").is_file():
        yield (
            f"runner.init_checkpoint={path} holds no actor/metadata.json: give a directory checkpoints/global_step_N of "
            "another run, or null to start with a fresh optimizer"
        )


def _resumes(settings: Settings) -> bool:
    """Whether the run goes on from a checkpoint; one that has finished begins anew."""
    runner, directory = settings.runner, run_directory(settings)
    found = find_resume(resume_dir(settings), directory / "checkpoints")
    finished = runner.resume_dir == "auto" and found and finished_step(directory, runner, runner.max_steps) == found[0]
    return found is not None and not finished


def cold_start_problems(settings: Settings) -> Iterator[str]:
    """Data of the SFT before RL that are not here; a run that resumes needs none of them."""
    if settings.runner.task_type != "reasoning" or not settings.cold_start.enabled or _resumes(settings):
        return
    for phase in settings.cold_start.phases:
        what = f"cold_start.phases: the data file {phase.data_path} of phase {phase.name}"
        if phase.data_path.startswith(BUILT_PREFIXES):
            yield f"{what} is made by the cold start; set cold_start.builder=tiny or give a file"
        elif not Path(phase.data_path).exists():
            yield f"{what} does not exist; {_MAKERS['sft']} writes such files"


def data_problems(settings: Settings, later: Collection[str] = ()) -> Iterator[tuple[Kind, str]]:
    """wrong: bad rows, too few problems; absent: files that are not given, not on this machine, or made by a stage before."""
    if settings.runner.task_type in ("sft", "preference"):
        yield from (("absent", sentence) for sentence in _absent_rows(settings, later))
        return
    data, every = settings.data, settings.runner.val_check_interval
    yield from _problems_of(settings, "train_data_paths")
    if data.val_data_paths:
        yield from _problems_of(settings, "val_data_paths")
    elif every > 0:
        yield "absent", f"runner.val_check_interval={every} needs data.val_data_paths; give held-out problems or set it to -1"
    if shared := sorted(set(data.train_data_paths) & set(data.val_data_paths)):
        yield "note", f"data.val_data_paths={shared[0]} is trained on, so its scores say nothing of other problems"


def _absent_rows(settings: Settings, later: Collection[str]) -> Iterator[str]:
    """Files of `sft` and `preference`."""
    task = settings.runner.task_type
    section, maker = settings.sft if task == "sft" else settings.preference, _MAKERS[task]
    if not section.train_data_paths and f"{task}.train_data_paths" not in later:
        yield f"{task}.train_data_paths is empty; {maker} writes such files"
    for path in [*section.train_data_paths, *section.val_data_paths]:
        if path.startswith(BUILT_PREFIXES):
            yield f"{task} data file {path} is made by the cold start; set cold_start.builder=tiny or give files"
        elif not Path(path).is_file():
            yield f"{task} data file {path} does not exist; {maker} writes such files"


def _problems_of(settings: Settings, key: Literal["train_data_paths", "val_data_paths"]) -> Iterator[tuple[Kind, str]]:
    """The files of a key of `data`."""
    data, runner = settings.data, settings.runner
    paths: list[str] = getattr(data, key)
    if any(path.startswith(BUILT_PREFIXES) for path in paths):
        yield "absent", f"data.{key}={paths} is made by the cold start; set cold_start.builder=tiny or give files"
        return
    if any(path.startswith(PLACEHOLDER) for path in paths):
        return
    try:
        problems = read_problems(paths, data)
    except Absent as error:
        yield "absent", f"data.{key}: {error}"
        return
    except DataError as error:
        also = ""
        if key == "val_data_paths" and (data.rows or (data.prompt_key, data.answer_key) != ("prompt", "solutions")):
            also = "; data.rows and the names of columns are for held-out files too: give some of this form, or none by []"
        yield "wrong", f"data.{key}: {error}{also}"
        return
    if settings.reward.has_math and (note := worked_note(problems, more_than=0.5)):
        yield "wrong", f"data.{key}: {note}"
    least = data.rollout_batch_size if key == "train_data_paths" and runner.task_type == "reasoning" else 0
    if runner.max_steps and (number := len(problems)) < least:
        needs = f"a step needs data.rollout_batch_size={least}; lower it or add problems"
        yield "wrong", f"data.{key} has {number} problems, {needs}"
    systems = sum(problem.prompt[0]["role"] == "system" for problem in problems)
    if systems and not settings.agentloop.use_data_system_prompt:
        instead = "set agentloop.use_data_system_prompt=True to give it in place of agentloop.system_prompt"
        yield "note", f"data.{key}: {systems} problems begin with a system message, which the model does not read; {instead}"


def row_problems(settings: Settings) -> Iterator[str]:
    """The first row of `sft` or tree of `preference` that cannot be trained on."""
    is_sft = settings.runner.task_type == "sft"
    section = settings.sft if is_sft else settings.preference
    specials = declared_special_tokens(Path(settings.rollout.model.model_path))
    try:
        for paths in filter(None, (section.train_data_paths, section.val_data_paths)):
            for _ in read_segments(paths, specials) if is_sft else read_trees(paths):
                pass
    except ValueError as error:
        yield str(error)


def logger_problems(settings: Settings) -> Iterator[str]:
    """Backends whose package is not installed."""
    for backend in settings.runner.logger.logger_backends:
        if importlib.util.find_spec(backend) is None:
            yield (
                f"runner.logger.logger_backends names {backend}, which is not installed: "
                ".venv/bin/pip install --no-deps -r requirements/loggers.txt"
            )


def replay_problems(directory: str | None, max_steps: int) -> Iterator[str]:
    """Missing files of `runner.replay_rollouts`."""
    if not directory:
        return
    missing = [step for step in range(1, max_steps + 1) if not rollouts_path(directory, step).is_file()]
    if missing:
        yield (
            f"runner.replay_rollouts={directory} has no {rollouts_path(directory, missing[0]).name}; give the rollouts/ "
            f"directory of a run with runner.save_rollout_tokens=True, or set runner.max_steps={missing[0] - 1}"
        )


def disk_problems(settings: Settings, model: ModelConfig, free_bytes: Callable[[Path], int]) -> Iterator[str]:
    """Room for the newest checkpoints and the best, one more while it is written, and the final model."""
    runner = settings.runner
    if runner.max_steps == 0:
        return
    run = run_directory(settings)
    directory = nearest_existing(run.resolve())
    disk, one = disk_needed(settings, model), checkpoint_bytes(settings, model)
    resume = find_resume(resume_dir(settings), run / "checkpoints")
    existing = sum(step <= resume[0] for step, _ in complete_checkpoints(run / "checkpoints")) if resume else 0
    count = max(disk.num_checkpoints - existing, 1)
    needed, free = one * count + disk.export, free_bytes(directory)
    if free < needed:
        yield (
            f"{run} needs {needed} bytes ({needed / GB:.2f} GB: {count} checkpoints of {one / GB:.2f} GB and the "
            f"exported model), {directory} has {free} bytes ({free / GB:.2f} GB) free; set runner.output_dir to "
            "a larger disk, lower runner.keep_checkpoints, or set runner.keep_best=False"
        )
