"""What is refused before anything starts, and that it is refused quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rstar2_megatron.runs import preflight
from rstar2_megatron.runs.preflight import algorithm_notes, check_before_start
from rstar2_megatron.settings.load import ConfigError, load
from rstar2_megatron.settings.placement import Slots, gpu_problem
from rstar2_megatron.settings.planning.disk import checkpoint_bytes
from rstar2_megatron.settings.planning.plan import make_plan, model_of
from rstar2_megatron.settings.schema import Settings
from tests.runs.inputs.models import CONFIG, write_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1?"}], "solutions": [str(i + 1)], "query_id": f"q{i}"} for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny(model: Path, data: Path, *overrides: str) -> Settings:
    return load(
        "rstar2-tiny-cpu",
        [
            "cold_start.enabled=False",
            f"rollout.model.model_path={model}",
            f"data.train_data_paths=[{data}]",
            "data.val_data_paths=[]",
            f"runner.output_dir={model.parent / 'results'}",
            *overrides,
        ],
    ).settings


def test_an_allocator_that_moves_memory_is_refused(model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512, expandable_segments: True")
    with pytest.raises(ConfigError, match=r"PYTORCH_ALLOC_CONF=max_split.*take it out of the environment"):
        check_before_start(tiny(model, data))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert check_before_start(tiny(model, data)) == []


RULES = """
def advantage(rewards, valid): return rewards
def keep(problem, trajectory): return True
def right(rewards, valid): return True
def of_the_batch(tokens): return -tokens.advantages * tokens.ratio / tokens.ratio.mean()
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adv_type=advantages"], r"own.py has no 'advantages'; did you mean advantage\?"),
        (["adv_type=right"], r"algorithm.adv_type=own.py:right returned a bool; return a tensor \[groups, G\]"),
        (["adv_type=keep"], r"own.py:keep takes \(problem, trajectory\), .*; write def keep\(rewards, valid\)"),
        (
            ["policy_loss=of_the_batch"],
            r"policy_loss=own.py:of_the_batch: the loss of a token .* depend on its own sequence only",
        ),
        (["policy_loss=keep"], r"policy_loss=own.py:keep takes \(problem, trajectory\), .*; write def keep\(tokens\)"),
    ],
)
def test_own_rules_of_the_algorithm(model: Path, data: Path, words: list[str], message: str) -> None:
    path = model.parent / "own.py"
    path.write_text(RULES)
    with pytest.raises(ConfigError, match=message):
        check_before_start(tiny(model, data, *(f"algorithm.{word.replace('=', f'={path}:')}" for word in words)))
    path.write_text("def advantage(rewards, valid): return rewards - 0.5")
    assert check_before_start(tiny(model, data, f"algorithm.adv_type={path}:advantage")) == []


def test_good_settings_pass_without_warnings(model: Path, data: Path) -> None:
    assert check_before_start(tiny(model, data)) == []


BF16 = "actor.model.precision=bf16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward.terms=[{name: a, function: math},{name: b, function: math}]"], "reward.terms adds several rewards"),
        (["reward.terms=[{name: a, function: math},{name: b, function: math, weight: -1}]"], ""),
        (["algorithm.max_staleness=2", "algorithm.recompute_logprobs=True"], "nothing corrects the age of tokens under"),
        (["algorithm.policy_loss=gspo", BF16], "algorithm.policy_loss=gspo clips ratios of whole sequences near 1"),
        (["algorithm.policy_loss=gspo", BF16, "algorithm.recompute_logprobs=True"], ""),
        (["algorithm.policy_loss=gspo"], ""),
        (["algorithm.max_staleness=2", "algorithm.recompute_logprobs=True", "algorithm.icepop=[0.5,5]"], ""),
        (["algorithm.max_staleness=2"], ""),
        (["algorithm.max_staleness=2", "algorithm.recompute_logprobs=True", "algorithm.decoupled_loss=True"], ""),
    ],
)
def test_what_is_allowed_and_probably_not_meant(model: Path, data: Path, words: list[str], said: str) -> None:
    notes = list(algorithm_notes(tiny(model, data, *words)))
    assert len(notes) == bool(said) and all(said in note for note in notes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.max_prompt_length=600", "runner.seq_length=640"], r"=600 \+ .*=256 exceed .*=640; set runner.seq_length=856"),
        (["runner.max_steps=9", "runner.trace=[3,10]"], r"runner.trace=\[3, 10\] names step 10, but .*=9"),
        (["runner.max_steps=9", "runner.profiler.steps=10"], r"runner.profiler.steps=\[10\] names step 10"),
        (["algorithm.group_size=4"], r"down_sample_to_n=8 exceeds algorithm.group_size=4"),
        (
            ["algorithm.down_sampling.down_sampling_config.min_zero_reward_trace_num=8"],
            r"min_zero_reward_trace_num=8 .* exceed down_sample_to_n=8",
        ),
        (
            ["algorithm.refill.enabled=True", "algorithm.down_sampling.do_down_sampling=False"],
            r"=False or reject_equal_reward=False there are none; set both keys .*down_sample_to_n=16 and mode=uniform",
        ),
        (
            ["algorithm.kl_beta=0.1", "algorithm.kl_penalty_type=kl"],
            r"kl_penalty_type=kl with algorithm.kl_beta=0.1 is not a KL loss .* choose one of low_var_kl",
        ),
        (["actor.model.transformer_impl=transformer_engine"], r"TransformerEngine is not installed"),
        (["actor.model.expert_model_parallel_size=2"], r"Qwen2ForCausalLM has no experts; set it to 1"),
        (["algorithm.importance_sampling_fix=True"], r"set algorithm.recompute_logprobs=True"),
        (
            ["algorithm.decoupled_weight_cap=5"],
            r"decoupled_weight_cap=5 is a part of algorithm.decoupled_loss; set that to True",
        ),
        (["algorithm.decoupled_loss=True"], r"decoupled_loss=True clips .* set algorithm.recompute_logprobs=True"),
        (
            [f"algorithm.{key}=True" for key in ("decoupled_loss", "importance_sampling_fix", "recompute_logprobs")],
            r"weigh every token twice by the same ratio; set one of them to False",
        ),
        (
            ["algorithm.overlong.buffer_tokens=257"],
            r"algorithm.overlong.buffer_tokens=257 is longer .* algorithm.sampling_params.max_new_tokens=256; lower it",
        ),
        (
            ["algorithm.entropy_bonus=0.01", "algorithm.entropy_bonus_tokens=8", "agentloop.max_assistant_turns=1"],
            r"algorithm.entropy_bonus_tokens=8 is for turns .* agentloop.max_assistant_turns=1 has none",
        ),
        (
            ["algorithm.policy_loss=gspo", "algorithm.turn_returns.discount=0.9"],
            r"policy_loss=gspo has one advantage a sequence and algorithm.turn_returns.discount=0.9 one a turn",
        ),
        (["algorithm.icepop=[1.5,5]"], r"\[1.5, 5\] is no band of ratios around 1: .* 0 < low <= 1 <= high"),
        (["algorithm.sampling_params.top_p=0.9"], r"top_p=0.9 in training: .* biased; set it to 1.0"),
        (["algorithm.sampling_params.top_k=50"], r"top_k=50 in training: .* biased; set it to -1"),
        (["algorithm.sampling_params.temperature=0"], r"temperature=0 in training: greedy .*; set it to 1.0"),
        (
            ["rollout.sglang.server_args={preferred_sampling_params: '{\"min_p\": 0.1}'}"],
            r"preferred_sampling_params=.* in training: .*; remove min_p",
        ),
        (["rollout.sglang.server_args={speculative_algorithm: NGRAM}"], r"speculative_algorithm=NGRAM on CPU slots: .* argmax"),
        (["cluster.num_nodes=2"], r"num_nodes=2 needs a Ray cluster .*RAY_ADDRESS is not set"),
        (["rollout.max_total_tokens=100"], r"rollout.max_total_tokens=100 cannot hold one trajectory"),
        (["algorithm.n_minibatches=1000"], r"n_minibatches=1000 exceeds the 128 trajectories"),
        (
            ["cluster.component_placement={actor: 0-5, rollout: 0, reward: 0}"],
            r"actor=0-5 names slot 5, but there are 2 slots \(0-1\)",
        ),
        (["cluster.component_placement={actor: gpu, rollout: 0, reward: 0}"], r"actor=gpu is not `all`"),
        (["cluster.component_placement={actor: 0, rollout: 0}"], r"does not place reward"),
        (["cluster.component_placement={'actor,rollout,reward': 0, actor: 1}"], r"names actor twice"),
        (["cluster.component_placement=all"], r"must name actor, rollout and reward"),
        (["actor.model.tensor_model_parallel_size=3"], r"tensor_model_parallel_size=3 does not divide .*\(4\)"),
        (["actor.model.pipeline_model_parallel_size=3"], r"4 layers do not divide into 3 pipeline stages"),
        (["actor.model.tensor_model_parallel_size=1", "actor.model.context_parallel_size=4"], r"2 actor ranks"),
        (["rollout.tensor_parallel_size=4"], r"rollout.tensor_parallel_size=4 does not divide the 2 slots"),
        (["cluster.component_placement.actor=0"], r"names actor twice"),
        (["algorithm.sampling_params.max_new_tokens=4000"], r"exceeds the model's max_position_embeddings=2048"),
        (["data.rollout_batch_size=21"], r"has 20 problems, a step needs data.rollout_batch_size=21"),
        (["data.train_data_paths=[/nowhere/x.jsonl]"], r"data file /nowhere/x.jsonl does not exist"),
        (["rollout.model.model_path=/nowhere"], r"model_path=/nowhere is not a directory; give a Hugging Face"),
        (["rollout.model.model_path=tiny:model"], r"is made by the cold start"),
        (["data.train_data_paths=['tiny:train']"], r"is made by the cold start"),
        (
            ["runner.task_type=sft", "sft.train_data_paths=['tiny:copy']", "cold_start.builder=null"],
            r"sft data file tiny:copy is made by the cold start; set cold_start.builder=tiny or give files",
        ),
        (
            ["runner.replay_rollouts=/nowhere", "runner.max_steps=3"],
            r"/nowhere has no step_000001.jsonl.gz; .* or set runner.max_steps=0",
        ),
        (["runner.val_check_interval=5"], r"val_check_interval=5 needs data.val_data_paths"),
        (
            ["runner.save_interval=20", "runner.val_check_interval=8"],
            r"save_interval=20 is no multiple of runner.val_check_interval=8: .*; set it to 16, or to -1",
        ),
        (["runner.init_checkpoint=/nowhere"], r"init_checkpoint=/nowhere holds no actor/metadata.json: give"),
        (
            ["runner.init_checkpoint=/nowhere", "cold_start.enabled=True"],
            r"cold_start.enabled=True fine-tunes one first; set cold_start.enabled=False",
        ),
    ],
)
def test_mistakes_name_value_and_remedy(model: Path, data: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_before_start(tiny(model, data, *overrides))


def test_a_model_without_tokenizer(model: Path, data: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer.json"):
        check_before_start(tiny(model, data))


def test_an_architecture_that_is_not_supported(model: Path, data: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GemmaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"GemmaForCausalLM is not supported; supported: Qwen2"):
        check_before_start(tiny(model, data))


def test_a_row_without_solutions_is_named_by_file_and_line(model: Path, data: Path) -> None:
    lines = data.read_text().splitlines()
    lines[6] = json.dumps({"prompt": "x"})
    data.write_text("\n".join(lines))
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match=r"train.jsonl:7: row without 'solutions'; it has prompt"):
            check_before_start(tiny(model, data), dry_run=dry_run)


def test_own_rows_are_for_held_out_files_too(model: Path, data: Path, tmp_path: Path) -> None:
    code, held_out = tmp_path / "mine.py", tmp_path / "held_out.jsonl"
    code.write_text("def row(row):\n    return {'prompt': row.get('story') or row['prompt'], 'solutions': row['solutions']}\n")
    held_out.write_text(json.dumps({"problem": "x", "solutions": "1"}) + "\n")
    words = (f"data.rows={code}:row", f"data.val_data_paths=[{held_out}]")
    with pytest.raises(
        ConfigError, match=r"in row: KeyError: 'prompt'; data.rows and .* are for held-out files too: give some"
    ):
        check_before_start(tiny(model, data, *words))


def test_a_dry_run_reads_the_rows_of_sft(model: Path, data: Path, tmp_path: Path) -> None:
    path, said = tmp_path / "sft.jsonl", {"role": "user", "content": "hi"}
    settings = tiny(model, data, "runner.task_type=sft", f"sft.train_data_paths=[{path}]")
    path.write_text(json.dumps({"messages": [said, {"role": "assistant", "content": "yes"}]}) + "\n")
    assert check_before_start(settings, dry_run=True) == []
    with path.open("a") as file:
        file.write(json.dumps({"messages": [said, {"role": "assistant", "content": "<|im_end|>"}]}) + "\n")
    with pytest.raises(ConfigError, match=r"sft.jsonl:2: message 2 of 2 holds <\|im_end\|>"):
        check_before_start(settings, dry_run=True)
    path.write_text(json.dumps({"messages": [said]}) + "\n")
    with pytest.raises(ConfigError, match=r"sft.jsonl:1: no token of this row is trained; give it"):
        check_before_start(settings, dry_run=True)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"sft.jsonl: no rows to train on; give files"):
        check_before_start(settings, dry_run=True)
    path.write_text(json.dumps({"messages": [said, {"role": "assistant", "content": "a</s>"}]}) + "\n")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 603, "content": "</s>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"sft.jsonl:1: message 2 of 2 holds </s>, which would be trained as a control"):
        check_before_start(settings, dry_run=True)


def test_worked_solutions_are_refused(model: Path, data: Path) -> None:
    """No answer equals a whole text: the reward would be 0 throughout."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    text = "First " + "we add both of the numbers " * 4
    data.write_text("".join(json.dumps(row | {"solutions": [f"{text}\n#### 3"]}) + "\n" for row in rows))
    assert check_before_start(tiny(model, data)) == []
    data.write_text("".join(json.dumps(row | {"solutions": [text]}) + "\n" for row in rows))
    with pytest.raises(
        ConfigError, match=f"{len(rows)} of {len(rows)} problems have worked solutions or none, which no answer equals"
    ):
        check_before_start(tiny(model, data))


def test_the_data_of_a_cold_start_must_be_here_unless_the_run_resumes(model: Path, data: Path) -> None:
    phase = "cold_start.phases=[{name: format, data_path: %s, steps: 1, batch_size: 1, lr: 0.1}]"
    for path, message in (
        ("/nowhere/sft.jsonl", "the data file /nowhere/sft.jsonl of phase format does not exist; data_process/build_sft_data"),
        ("tiny:copy", "the data file tiny:copy of phase format is made by the cold start; set cold_start.builder=tiny or give"),
    ):
        settings = tiny(model, data, "cold_start.enabled=True", phase % f"'{path}'")
        with pytest.raises(ConfigError, match=message):
            check_before_start(settings)
        (warning,) = check_before_start(settings, dry_run=True)
        assert message in warning
    assert check_before_start(tiny(model, data, "cold_start.enabled=True", phase % data)) == []
    run = Path(settings.runner.output_dir) / settings.runner.experiment_name
    (run / "checkpoints" / "global_step_3").mkdir(parents=True)
    assert check_before_start(settings) == []


def test_an_empty_data_set(model: Path, data: Path) -> None:
    data.write_text("\n\n")
    with pytest.raises(ConfigError, match=r"no problems in .*train.jsonl"):
        check_before_start(tiny(model, data))


def test_too_little_disk_names_needed_and_free_bytes(model: Path, data: Path) -> None:
    settings = tiny(model, data)
    shape, _ = model_of(settings)
    assert shape is not None
    needed = 4 * checkpoint_bytes(settings, shape) + 4 * shape.num_parameters
    with pytest.raises(ConfigError, match=rf"needs {needed} bytes .* has {needed - 1} bytes"):
        check_before_start(settings, free_bytes=lambda _: needed - 1)
    check_before_start(settings, free_bytes=lambda _: needed)


def test_existing_checkpoints_count_as_room(model: Path, data: Path) -> None:
    settings = tiny(model, data)
    shape, _ = model_of(settings)
    assert shape is not None
    run = Path(settings.runner.output_dir) / settings.runner.experiment_name
    for step in (20, 40, 60):
        (run / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    needed = checkpoint_bytes(settings, shape) + 4 * shape.num_parameters
    check_before_start(settings, free_bytes=lambda _: needed)


def test_evaluation_may_sample_as_it_likes(model: Path, data: Path) -> None:
    overrides = ["evaluation.temperature=0", "runner.task_type=difficulty_filter"]
    assert check_before_start(tiny(model, data, *overrides, "algorithm.sampling_params.top_p=0.9")) == []


def test_a_judge_that_other_nodes_cannot_reach(model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny(model, data, "cluster.num_nodes=2", "tools.codejudge.host_addr=localhost")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"host_addr=localhost is loopback, which .* other 1 nodes cannot"):
        check_before_start(settings)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # both nodes are this machine
    assert check_before_start(settings) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    settings.tools.codejudge.host_addr = None  # it will listen on an address of the network
    assert check_before_start(settings) == []


def test_a_dry_run_warns_of_what_is_on_another_machine() -> None:
    settings = load("rstar2-qwen2.5-7b-megatron").settings
    warnings = check_before_start(settings, dry_run=True, find_gpus=lambda: (0, 0.0), free_bytes=lambda _: 10)
    text = "\n".join(warnings)
    for expected in ("no GPU is visible", "stands for problems of yours", "stands for a model of yours", "has 10 bytes"):
        assert text.count(expected) == 1
    with pytest.raises(ConfigError, match="no GPU is visible"):
        check_before_start(settings, find_gpus=lambda: (0, 0.0))


def test_placeholders_of_a_yaml_are_told_with_the_commands_that_make_the_files(tmp_path: Path) -> None:
    """Data and model at once, and before anything is asked of a model's directory."""
    with pytest.raises(ConfigError) as told:
        words = ["data.val_data_paths=[/path/to/val.jsonl]"]
        check_before_start(load("rstar2-qwen2.5-7b-megatron", words).settings, find_gpus=lambda: (8, 80.0))
    data, held_out, model = str(told.value).splitlines()
    assert "process_train_dataset.py --out data/train --source dapo --validation 256 writes some (--decontaminate" in data
    assert held_out.endswith("then data.val_data_paths=[data/train/validation.jsonl]")
    assert "hf download Qwen/Qwen2.5-7B-Instruct --local-dir models/Qwen2.5-7B-Instruct fetches it, then rollout." in model
    for words in (["rollout.model.model_path=/nowhere"], ["rollout.model.model_path=/nowhere", "runner.task_type=sft"]):
        with pytest.raises(ConfigError, match="stands for problems" if len(words) == 1 else "/nowhere is not a directory"):
            check_before_start(load("rstar2-qwen2.5-7b-megatron", words).settings, find_gpus=lambda: (8, 80.0))


def test_a_layout_for_more_gpus_is_told_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """7B is made for 8 GPUs; one card takes it with the optimizer on the host and layers computed twice."""
    monkeypatch.setattr(preflight, "visible_host_gb", lambda: 256.0)
    model = "rollout.model.model_path=Qwen2.5-7B-Instruct"
    settings = load("rstar2-qwen2.5-7b-megatron", [model, "data.train_data_paths=[x.jsonl]"]).settings
    with pytest.raises(ConfigError) as told:
        check_before_start(settings, dry_run=True, find_gpus=lambda: (1, 80.0))
    layout, fits = str(told.value).splitlines()
    assert layout.startswith("1 actor ranks do not divide by tensor 2")
    words = fits.removeprefix("for 1 x 80 GB with a host of 256 GB: set ").split()
    assert "actor.optim.optimizer_cpu_offload=True" in words
    one_card = load("rstar2-qwen2.5-7b-megatron", [model, *words]).settings
    check_before_start(one_card, dry_run=True, find_gpus=lambda: (1, 80.0))
    assert make_plan(one_card, slots=Slots(1, 80.0, host_gb=256.0)).fits
    with pytest.raises(ConfigError, match="for 1 x 24 GB with a host of 256 GB: no layout fits; use more GPUs, more host"):
        check_before_start(settings, dry_run=True, find_gpus=lambda: (1, 24.0))


@pytest.mark.parametrize("visible", ["4,5,6,7", "", "GPU-1,GPU-2", "0,1,2,3,4,5,6", "-1"])
def test_hidden_gpus_are_refused_before_rlinf_uses_them(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load("rstar2-qwen2.5-7b-megatron").settings
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=rf"CUDA_VISIBLE_DEVICES={visible} hides some of the 8 GPUs.*component_placement"):
        check_before_start(settings, find_gpus=lambda: (8, 80.0))


@pytest.mark.parametrize("visible", [None, "0,1,2,3,4,5,6,7", ",".join(f"GPU-{n}" for n in range(8))])
def test_all_gpus_may_be_named(visible: str | None) -> None:
    assert gpu_problem(8, visible) == ""


def test_checks_load_no_torch() -> None:
    """Bad input is answered at once, not after torch has loaded."""
    program = (
        "import sys; from rstar2_megatron.runs import preflight; from rstar2_megatron.settings import load; "
        "from rstar2_megatron.settings.planning import plan; "
        "plan.make_plan(load.load('rstar2-qwen2.5-7b-megatron').settings); "
        "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_tools_that_no_model_could_call(model: Path, data: Path, tmp_path: Path) -> None:
    """Before anything starts, in a dry run too."""
    path = tmp_path / "own.py"
    path.write_text("def f(x): ...\ndef g(x: int):\n    '''G.\n\n    Args:\n        x: X.\n    '''\n")
    for tools, words in (
        (f"{path}:f", r"parameter 'x' of own.py:f has no type; write e.g. `x: str`"),
        (f"{path}:h", r"own.py has no 'h'"),
        (f"{path}:g,{path}:g", r"two tools of the name 'g'; rename the function"),
        ("serach", r"names \['serach'\]; known tools are .*, an own one is path/to/file.py:name"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_before_start(tiny(model, data, f"agentloop.tools=[{tools}]"), dry_run=True)
    assert check_before_start(tiny(model, data, f"agentloop.tools=[python_code_with_standard_io,{path}:g]")) == []


def test_a_template_for_another_format_of_calls(model: Path, data: Path) -> None:
    """What the hermes form needs of the tokenizer's template is not asked of the others."""
    (model / "chat_template.jinja").write_text("{{ tools }}<function=")
    with pytest.raises(
        ConfigError, match=r"shows calls of the format qwen3_coder; set agentloop\.tool_call_format=qwen3_coder"
    ):
        check_before_start(tiny(model, data, *OWN, "agentloop.tool_call_format=hermes"))
    assert check_before_start(tiny(model, data, *OWN, "agentloop.tool_call_format=auto")) == []
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match="has no tools; set it to null"):
        check_before_start(tiny(model, data, *OWN, "agentloop.tool_call_format=llama3"))


def test_a_template_of_the_settings_that_is_broken(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ tools }}\n{% if tools %}<tool_call>")
    with pytest.raises(ConfigError, match=r"^agentloop.chat_template: the chat template cannot .* \(line 2: Unexpected end"):
        check_before_start(tiny(model, data, f"agentloop.chat_template={tmp_path}/own.jinja", *OWN[1:]), dry_run=True)


OWN = ("agentloop.chat_template=tokenizer", "agentloop.system_prompt=null", "agentloop.user_prefix=null")
