"""The plan against figures computed by hand."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.settings.asynchronous import asynchronous_problems
from rstar2_megatron.settings.load import config_names, load
from rstar2_megatron.settings.placement import Slots, collocated, component_slots, parse_slots, slots_of
from rstar2_megatron.settings.planning.batch import object_store_bytes, object_store_problems
from rstar2_megatron.settings.planning.estimates import search_hours, sft_hours
from rstar2_megatron.settings.planning.host_memory import host_memory
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token, kv_capacity
from rstar2_megatron.settings.planning.memory import training_memory
from rstar2_megatron.settings.planning.plan import remedy
from rstar2_megatron.settings.schema import AssumedNode, ClusterSettings
from tests.settings.loaded import loaded, plan_of


@pytest.mark.parametrize(
    ("path", "billions"),
    [
        ("Qwen2.5-1.5B-Instruct", 1.54),
        ("/models/Qwen2.5-7B", 7.62),
        ("Qwen2.5-14B-Instruct", 14.77),
        ("qwen2.5-32b", 32.76),
        ("Qwen3-4B", 4.02),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B-Base", 14.77),
    ],
)
def test_parameters_of_public_models(path: str, billions: float) -> None:
    model = known_model(path)
    assert model is not None and model.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_unknown_models_are_not_guessed() -> None:
    assert known_model("/models/Llama-3-8B") is None and known_model("tiny:model") is None


@pytest.mark.parametrize(("name", "tp", "static"), [("7b", 2, 34), ("7b", 4, 23), ("14b", 2, 66), ("14b", 4, 44)])
def test_static_memory_by_the_formula(name: str, tp: int, static: float) -> None:
    """6N/(TP PP) + 12N/world GB in bf16."""
    s = loaded(f"rstar2-qwen2.5-{name}-megatron", f"actor.model.tensor_model_parallel_size={tp}").settings
    model = known_model(s.rollout.model.model_path)
    assert model is not None
    assert training_memory(s, model, 8, cpu=False).static == pytest.approx(static, abs=0.7)


def test_experts_are_divided_by_expert_parallelism() -> None:
    """30.5 B, 29.0 of them experts: 6 bytes a parameter by TP 4 or EP 8, 12 by all 8 ranks."""
    s = loaded("rstar2-qwen3-30b-a3b-megatron", "actor.optim.optimizer_cpu_offload=False").settings
    model = known_model(s.rollout.model.model_path)
    assert model is not None and model.expert_parameters / 1e9 == pytest.approx(28.99, abs=0.01)
    assert training_memory(s, model, 8, cpu=False).static == pytest.approx(6 * (1.54 / 4 + 28.99 / 8) + 12 * 30.53 / 8, abs=0.2)


def test_optimizer_on_the_host_moves_12_bytes_a_parameter() -> None:
    """32.76 B at TP 8: 6 bytes a parameter stay on 8 GPUs, 12 go to the node; 2 for the weights' copy; for a save
    the 12 of all state and 2 of the weights, and with two data-parallel ranks and one bucket 6 on their way.
    """
    settings = load("rstar2-qwen2.5-32b-megatron").settings
    model = known_model(settings.rollout.model.model_path)
    assert model is not None
    gpu, host = training_memory(settings, model, 8, cpu=False), host_memory(settings, model, 8)
    assert (gpu.static, gpu.optimizer) == (pytest.approx(6 * 32.76 / 8, abs=0.1), 0.0)
    assert host.optimizer == pytest.approx(12 * 32.76, abs=1)
    assert host.weights == pytest.approx(2 * 32.76, abs=0.2)
    with_kl = settings.model_copy(update={"algorithm": settings.algorithm.model_copy(update={"kl_beta": 0.001})})
    assert host_memory(with_kl, model, 8).weights == pytest.approx(
        3 * host.weights
    )  # the reference, and the policy while it scores
    assert host.checkpoint == pytest.approx(14 * 32.76, abs=1)
    settings.actor.optim.overlap_grad_reduce = False  # one bucket
    assert host_memory(settings, model, 8).checkpoint == pytest.approx(14 * 32.76, abs=1)
    two = settings.model_copy(deep=True)
    two.cluster.num_nodes = 2  # 8 ranks of a node gather; the others are on the second node
    assert host_memory(two, model, 16).checkpoint == pytest.approx(18 * 32.76, abs=1)
    settings.actor.optim.optimizer_cpu_offload = False
    assert training_memory(settings, model, 8, cpu=False).optimizer == pytest.approx(12 * 32.76 / 8, abs=0.1)


def test_32b_on_one_node_is_told_to_use_the_host_and_a_small_host_is_refused() -> None:
    on_gpus = "actor.optim.optimizer_cpu_offload=False"
    (problem,) = plan_of("rstar2-qwen2.5-32b-megatron", on_gpus).problems
    assert "needs 74 GB per GPU for weights, gradients and optimizer beside 10 GB of CUDA and sleeping" in problem
    advice = problem.split("; set ")[1]
    assert advice == "actor.optim.optimizer_cpu_offload=True"
    assert plan_of("rstar2-qwen2.5-32b-megatron", on_gpus, advice).fits
    (problem,) = plan_of("rstar2-qwen2.5-32b-megatron", slots=Slots(8, 80.0, host_gb=1024.0)).problems
    assert problem.startswith("a node's host needs 1045 GB (393 optimizer, 66 weights, 459 while a checkpoint")
    assert problem.endswith("has 1024; use more nodes or hosts with more memory")


@pytest.mark.parametrize(
    ("name", "fraction", "kib", "million_tokens"),
    [("Qwen2.5-7B", 0.8, 56, 1.97), ("Qwen2.5-7B", 0.5, 56, 1.13), ("Qwen3-14B", 0.8, 160, 0.60)],
)
def test_kv_capacity_by_the_formula(name, fraction, kib, million_tokens) -> None:
    overrides = [
        f"rollout.model.model_path={name}",
        "rollout.tensor_parallel_size=2",
        f"rollout.gpu_memory_utilization={fraction}",
    ]
    s = loaded("rstar2-qwen2.5-7b-megatron", *overrides).settings
    model = known_model(name)
    assert model is not None
    assert kv_bytes_per_token(model, "bf16") == kib * 1024
    assert kv_capacity(s, model, 80.0) / 1e6 == pytest.approx(million_tokens, abs=0.01)


def test_14b_at_tp_1_is_refused_with_the_operands() -> None:
    plan = plan_of(
        "rstar2-qwen2.5-14b-megatron", "actor.model.tensor_model_parallel_size=1", "actor.model.sequence_parallel=False"
    )
    assert plan.problems == [
        "Qwen2.5-14B-Instruct at TP 1 needs 111 GB per GPU for weights, gradients and optimizer, has 80; "
        "set actor.model.tensor_model_parallel_size=4 actor.model.sequence_parallel=True"
    ]
    assert not plan.fits and "DOES NOT FIT" in plan.render()


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["actor.model.recompute_granularity=null", "runner.max_tokens_per_mbs=65536"], "recompute_granularity=full"),
        (["runner.max_tokens_per_mbs=1000000", "actor.model.tensor_model_parallel_size=4"], "max_tokens_per_mbs="),
    ],
)
def test_remedies_help(overrides: list[str], remedy: str) -> None:
    """What the message says to set makes the plan fit."""
    plan = plan_of("rstar2-qwen2.5-7b-megatron", *overrides)
    assert len(plan.problems) == 1 and remedy in plan.problems[0]
    advice = plan.problems[0].split("; set ")[1].split()
    assert plan_of("rstar2-qwen2.5-7b-megatron", *overrides, *advice).fits


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("rstar2-qwen2.5-14b-megatron", Slots(2, 80.0, host_gb=512.0)),  # tensor, recompute, optimizer
        ("rstar2-qwen3-4b-megatron", Slots(1, 80.0, host_gb=256.0)),
        ("rstar2-qwen2.5-1.5b-megatron", Slots(1, 24.0, host_gb=128.0)),  # and a smaller share of the engine
        ("rstar2-qwen2.5-7b-megatron", Slots(8, 24.0, host_gb=512.0)),  # and a larger engine
    ],
)
def test_what_is_told_to_set_fits_a_smaller_machine(name: str, slots: Slots) -> None:
    words = remedy(loaded(name).settings, slots).removeprefix("set ").split()
    assert plan_of(name, *words, slots=slots).fits
    assert "no layout fits" in remedy(loaded("rstar2-qwen2.5-32b-megatron").settings, slots)


SHARED = ("actor.offload_optimizer=False", "actor.model.tensor_model_parallel_size=1", "actor.model.sequence_parallel=False")


@pytest.mark.parametrize("name", [n for n in config_names() if "qwen" in n])
def test_every_size_leaves_a_margin(name: str) -> None:
    """3 GB of 80 in each phase of a step, beside what an H100 has more than 80 GB, or 1 GB of 24."""
    cluster = loaded(name).settings.cluster
    node = cluster.assumed_node
    plan = plan_of(name, slots=Slots(node.gpus * cluster.num_nodes, node.gpu_gb, host_gb=node.host_gb))
    assert plan.fits, plan.problems
    in_turns = next(value for _, label, value in plan.rows if label == "GB in turns")
    peak = max(float(gb) for gb in re.findall(r"(?:training|weight sync|rollout) ([\d.]+)", in_turns))
    assert 0.55 * node.gpu_gb < peak < node.gpu_gb - (3 if node.gpu_gb == 80 else 1)


def test_collocated_phases_must_fit_one_by_one() -> None:
    """The engine takes 0.8 of what 5 GB of CUDA context leave free, and 3.5 + 2 beside it; at the sync it holds 15.2 of
    weights and its 3.5, the actor 7.6 + 5 and two buckets of 0.54.
    """
    text = plan_of("rstar2-qwen2.5-7b-megatron").render()
    assert "rollout 70.50 (engine 65.50 + actor 5.00)" in text and "weight sync 32.42" in text
    assert "66.85 = weights 7.62" in text and "+ sleeping engine 3.5" in text
    kept = ["actor.offload_weight=False", "actor.offload_grad=False", "actor.offload_optimizer=False"]
    problem = next(p for p in plan_of("rstar2-qwen2.5-7b-megatron", *kept).problems if "collocated" in p)
    assert "the engine takes 19 GB" in problem and "actor.offload_weight=True" in problem
    plan = plan_of("rstar2-qwen2.5-7b-megatron", *SHARED, "rollout.gpu_memory_utilization=0.95")
    advice = next(p for p in plan.problems if "collocated" in p).split("; set ")[1]
    again = plan_of("rstar2-qwen2.5-7b-megatron", *SHARED, advice)
    assert not any("collocated" in p for p in again.problems)
    apart = "cluster.component_placement={actor: 0-3, rollout: 4-7, reward: 0-3}"
    assert "sharing a GPU" not in plan_of("rstar2-qwen2.5-7b-megatron", apart).render()


def test_experts_need_their_ranks() -> None:
    plan = plan_of("rstar2-qwen3-30b-a3b-megatron", "actor.model.expert_model_parallel_size=1")
    advice = plan.problems[0].split("; set ")[1]
    assert advice.startswith("actor.model.expert_model_parallel_size=")
    assert plan_of("rstar2-qwen3-30b-a3b-megatron", advice).fits


def test_an_engine_without_room_is_refused() -> None:
    plan = plan_of("rstar2-qwen2.5-14b-megatron", "rollout.tensor_parallel_size=1", "rollout.gpu_memory_utilization=0.3")
    assert "room for 0 KV tokens beside 29.5 GB of weights" in plan.problems[0]


def test_cpu_slots_need_a_stated_kv_cache() -> None:
    path = "rollout.model.model_path=Qwen2.5-0.5B"
    assert plan_of("rstar2-tiny-cpu", path, slots=Slots(2, None)).kv_capacity_tokens == 65536
    plan = plan_of("rstar2-tiny-cpu", path, "rollout.max_total_tokens=null", slots=Slots(2, None))
    assert "rollout.max_total_tokens=65536" in plan.problems[0]


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1024, 16384, 65536]))
def test_memory_falls_with_parallel_sizes_and_rises_with_tokens(tp: int, pp: int, tokens: int) -> None:
    s = loaded("rstar2-qwen2.5-7b-megatron").settings.model_copy(deep=True)
    model = known_model(s.rollout.model.model_path)
    assert model is not None
    s.actor.model.tensor_model_parallel_size, s.actor.model.pipeline_model_parallel_size = tp, pp
    s.runner.max_tokens_per_mbs = tokens
    here = training_memory(s, model, 8, cpu=False)
    s.actor.model.tensor_model_parallel_size = 2 * tp
    assert training_memory(s, model, 8, cpu=False).total < here.total
    s.actor.model.tensor_model_parallel_size = tp
    s.runner.max_tokens_per_mbs = 2 * tokens
    assert training_memory(s, model, 8, cpu=False).activations > here.activations


# -------------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize(
    ("text", "slots"),
    [("all", [0, 1, 2, 3]), ("0-2", [0, 1, 2]), (0, [0]), ("0,2-3", [0, 2, 3]), ("0-1:0-3", [0, 1]), ("all:0", [0, 1, 2, 3])],
)
def test_placement_strings(text: str | int, slots: list[int]) -> None:
    assert parse_slots("actor", text, 4) == slots


def test_a_placement_by_node_group_has_the_numbers_of_the_cluster() -> None:
    """As in RLinf's ModelParallelComponentPlacement, so actor and engines that share GPUs are known to."""
    placement = {"actor,rollout": {"node_group": "gpu", "placement": "0-1"}, "reward": {"placement": 1}}
    cluster = ClusterSettings(component_placement=placement)
    assert component_slots(cluster, 2) == {"actor": [0, 1], "rollout": [0, 1], "reward": [1]}
    assert collocated(cluster, Slots(2, 80.0))
    words = [f"cluster.component_placement={placement}", "algorithm.max_staleness=1"]
    settings = loaded("rstar2-tiny-cpu", *words).settings
    (problem,) = asynchronous_problems(settings, component_slots(settings.cluster, 2))
    assert "slots 0, 1, where one waits for the other" in problem


def test_slots_of_a_cluster() -> None:
    cluster = ClusterSettings(num_nodes=2, component_placement={})
    assert slots_of(cluster, (4, 141.0)) == Slots(8, 141.0)
    assert slots_of(cluster, (4, 141.0), 512.0) == Slots(8, 141.0, host_gb=512.0)
    assert slots_of(cluster, (0, 0.0)) == Slots(16, 80.0, assumed=True)
    cluster.node_groups = [{"label": "cpu", "hardware": {"type": "CPUSlots", "configs": [{"num_slots": 2}, {"num_slots": 3}]}}]
    assert slots_of(cluster, (4, 141.0)) == Slots(5, None)
    cluster.node_groups = None
    cluster.assumed_node = AssumedNode(gpus=1, gpu_gb=24.0, host_gb=64.0)
    assert slots_of(cluster, (0, 0.0), 512.0) == Slots(2, 24.0, assumed=True, host_gb=64.0)
    assert slots_of(cluster, (4, 141.0), 512.0) == Slots(8, 141.0, host_gb=512.0)


def test_the_plan_shows_what_a_steps_trajectories_take() -> None:
    name = "rstar2-tiny-cpu"
    assert object_store_bytes(loaded(name).settings) == 512 << 20
    paper = ["data.rollout_batch_size=512", "algorithm.group_size=32", "runner.seq_length=14336"]
    paper += ["algorithm.down_sampling.down_sampling_config.down_sample_to_n=16"]
    settings = loaded(name, *paper).settings
    batch = 9 * 512 * 16 * 14336
    assert object_store_bytes(settings) == int(1.25 * batch)
    gigabyte = 10**9
    assert not list(object_store_problems(settings, 24 * gigabyte, 24 * gigabyte))
    (memory,) = object_store_problems(settings, 3 * gigabyte, 24 * gigabyte)
    assert "1.3 GB" in memory and "third of this host's 3.0 GB" in memory and "data.rollout_batch_size=512" in memory
    (shared,) = object_store_problems(settings, 24 * gigabyte, 64 << 20)
    assert "/dev/shm has 0.1 GB free" in shared and "--shm-size" in shared
    assert not list(object_store_problems(loaded(name).settings, 24 * gigabyte, 64 << 20))  # Ray uses a file then
    (buffers,) = object_store_problems(loaded(name).settings, 24 * gigabyte, 64 << 20, gpus=True)
    assert "NCCL" in buffers and "--shm-size" in buffers


def test_transport_rows() -> None:
    rows = {label: value for section, label, value in plan_of("rstar2-qwen2.5-14b-megatron").rows if section == "transport"}
    assert set(rows) == {"host memory", "object store", "seconds a step"}


def test_a_step_that_comes_near_its_deadline_is_said() -> None:
    def expected(*words: str) -> str:
        rows = plan_of("rstar2-qwen2.5-7b-megatron", *words).rows
        return next(value for section, label, value in rows if (section, label) == ("expected", "seconds a step"))

    assert "step_timeout_s" not in expected()
    assert expected("runner.step_timeout_s=600").endswith("; a longer step than runner.step_timeout_s=600 fails: raise it")


def test_hours_of_a_search_by_hand() -> None:
    """7B: 256 trajectories of 2048 tokens read 15.2 GB of weights and 256 x 1024 x 57,344 bytes of cache a token."""
    words = [
        "data.max_prompt_length=1024",
        "algorithm.sampling_params.max_new_tokens=3072",
        "search.num_problems=1000",
        "search.rollouts=16",
        "search.candidates=8",
        "search.more_rollouts=8",
    ]
    s = loaded("rstar2-qwen2.5-7b-megatron", *words).settings
    model = known_model("Qwen2.5-7B")
    assert model is not None
    read = 2 * 7.62e9 + 256 * 1024 * 57_344
    rate = 256 * 0.6 * 3.35e12 / read
    hours, more = search_hours(s, model, kv_capacity_tokens=850_000)
    assert hours == pytest.approx(1000 * 16 * 8 * 2048 / rate / 3600, rel=0.01)
    assert more == hours / 2
    scored = s.search.model_copy(update={"reward_model": "ppm"})
    with_scores, _ = search_hours(s.model_copy(update={"search": scored}), model, kv_capacity_tokens=850_000)
    forward = 1000 * 16 * 8 * 2048 * 2 * 7.1e9 / (989e12 * 0.4) / 3600  # without embeddings
    assert with_scores - hours == pytest.approx(forward, rel=0.1)
    epoch = sft_hours(s, model, 1000) / s.sft.epochs
    assert epoch == pytest.approx(2 * 1000 * 2048 * 6 * 7.1e9 / (989e12 * 0.4) / 3600, rel=0.1)
