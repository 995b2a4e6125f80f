"""`--dry-run` of every shipped YAML and recipe prints a plan that fits; RLinf's YAML too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rstar2_megatron.runs.main import main
from rstar2_megatron.runs.stages import load_recipe, recipe_names
from rstar2_megatron.settings.load import CONFIG_DIR, config_names, load, valid_keys
from rstar2_megatron.settings.planning import plan
from rstar2_megatron.settings.rlinf_keys import ONLY_VALUES
from tests.settings.loaded import loaded
from tests.settings.rlinf_yaml import RLINF_7B

SIZES = [name for name in config_names() if not name.endswith("-cpu")]
FAMILIES = {"qwen2.5": ("1.5b", "7b", "14b", "32b"), "qwen3": ("4b", "8b", "14b", "30b-a3b")}
WANTED = {
    f"rstar2-{family}-{size}-megatron{variant}"
    for family, sizes in FAMILIES.items()
    for size in sizes
    for variant in ("", "-paper")
} | {f"rstar2-{model}-megatron-2nodes" for model in ("qwen2.5-14b", "qwen3-14b", "qwen2.5-32b")}
FEW_GPUS = {  # the GPUs, GB of each and GB of the host that a YAML is made for
    "rstar2-qwen2.5-0.5b-megatron-1x24gb": (1, 24, 64),
    "rstar2-qwen2.5-1.5b-megatron-1gpu": (1, 80, 128),
    "rstar2-qwen2.5-3b-megatron-1gpu": (1, 80, 128),
    "rstar2-qwen2.5-7b-megatron-1gpu": (1, 80, 256),
    "rstar2-qwen2.5-7b-megatron-2gpus": (2, 80, 256),
    "rstar2-qwen2.5-7b-megatron-4gpus": (4, 80, 512),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan for 80 GB GPUs, whatever machine this is."""
    monkeypatch.setenv("PATH", "/nowhere")


def test_every_size_is_there() -> None:
    assert set(SIZES) == WANTED | FEW_GPUS.keys()


@pytest.mark.parametrize("name", SIZES)
def test_dry_run_of_every_yaml_fits_and_says_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert plan.endswith("fits\n")
    total = float(re.search(r"GB per rank +([\d.]+) = weights", plan)[1])  # type: ignore[index]
    assert 5 < total < 80
    for part in (
        "tensor",
        "tokens packed",
        "KV cache an engine",
        "in flight",
        "a checkpoint written or loaded",
        "seconds a step",
        "% of peak FLOP/s",
    ):
        assert part in plan, part
    assert ("max_staleness=1" in plan) is (FEW_GPUS.get(name, (8,))[0] > 1)


def test_dry_run_refuses_14b_at_tp_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["actor.model.tensor_model_parallel_size=1", "actor.model.sequence_parallel=False"]
    assert main(["rstar2-qwen2.5-14b-megatron", "--dry-run", *words]) == 2
    captured = capsys.readouterr()
    assert "DOES NOT FIT: Qwen2.5-14B-Instruct at TP 1 needs 111 GB per GPU" in captured.out
    assert "set actor.model.tensor_model_parallel_size=4" in captured.out and "does not fit" in captured.err


def test_32b_fits_one_machine_of_8_by_80_gb() -> None:
    """By the optimizer on the host; on two nodes it stays on the GPUs."""
    one, two = (loaded(f"rstar2-qwen2.5-32b-megatron{suffix}").settings for suffix in ("", "-2nodes"))
    assert (one.cluster.num_nodes, one.actor.optim.optimizer_cpu_offload) == (1, True)
    assert (two.cluster.num_nodes, two.actor.optim.optimizer_cpu_offload) == (2, False)


@pytest.mark.parametrize("name", FEW_GPUS)
def test_a_yaml_for_few_gpus_is_planned_for_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus, gb, host = FEW_GPUS[name]
    assert main([name, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert f"{gpus} GPUs of {gb} GB (assumed: none visible here)" in plan and f" of {host} = optimizer" in plan
    assert "32 problems x 16 rollouts = 512 trajectories, at most 256 kept" in plan


@pytest.mark.parametrize("name", sorted(WANTED))
def test_batch_is_the_released_one_or_the_papers_by_name(name: str) -> None:
    s = loaded(name).settings
    sampling = s.algorithm.down_sampling.down_sampling_config
    paper = name.endswith("-paper")
    assert s.data.rollout_batch_size == (512 if paper else 128)
    assert (s.algorithm.group_size, sampling.down_sample_to_n, s.algorithm.sampling_params.max_new_tokens) == (32, 16, 8192)
    assert sampling.mode == ("paper" if paper else "released")
    assert s.agentloop.max_assistant_turns == (10 if paper else 5)
    lines = (CONFIG_DIR / f"{name}.yaml").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 15


@pytest.mark.parametrize("name", recipe_names())
def test_dry_run_of_every_recipe_plans_each_stage(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "visible_host_gb", lambda: 64.0)  # for a larger model than the tiny one
    words = [f"recipe={name}", "--dry-run", f"cold_start.cache_dir={tmp_path}"]
    if name == "rstar2-tiny":  # its model and data would be made first; the plan needs neither
        words.append("rollout.model.model_path=Qwen2.5-0.5B")
        words.append("cold_start.builder=null")
    assert main(words) == 0
    out, err = capsys.readouterr()
    stages = load_recipe(name).stages
    if any(stage.trees_from for stage in stages):
        assert "is empty" not in err, "the stages before make these files"
    assert [line.split(": ")[1] for line in out.splitlines() if line.startswith("== stage")] == [
        f"{stage.name} ({stage.task})" for stage in stages
    ]
    assert out.count("\nfits\n") == len(stages)
    if name == "rstar-math-7b":
        hours = [float(n.replace(",", "")) for n in re.findall(r"expected: ([\d,]+) GPU hours", out)]
        (total,) = re.findall(r"expected in all: ([\d,]+) GPU hours", out)
        assert len(hours) == len(stages)
        assert sum(hours) == pytest.approx(float(total.replace(",", "")), abs=len(stages))
        # the paper's rounds 2 and 3 took 3 days on 60 A100 each, 4,320 hours
        assert 1000 < hours[2] < 10_000


def test_dry_run_of_sft_plans_it_and_misses_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rstar2-qwen2.5-7b-megatron", "runner.task_type=sft", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "128 conversations of at most 10240 tokens" in captured.out and "KV cache" not in captured.out
    assert "3 epochs, lr 5e-06, 4.0% warm-up, then cosine" in captured.out
    assert "sft.train_data_paths is empty; data_process/build_sft_dataset.py writes such files" in captured.err
    assert main(["rstar2-qwen2.5-7b-megatron", "runner.task_type=preference", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "512 comparisons of prefixes of at most 10240 tokens" in captured.out
    assert "1 epochs, lr 7e-06, 0.0% warm-up, then linear" in captured.out
    assert "preference.train_data_paths is empty; python -m rstar2_megatron.search" in captured.err
    assert main(["rstar2-qwen2.5-7b-megatron", "runner.task_type=stf", "--dry-run"]) == 2
    assert "runner.task_type='stf'" in capsys.readouterr().err


def test_dry_run_refuses_rollouts_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rstar2-tiny-cpu", "runner.replay_rollouts=/nowhere", "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert "runner.replay_rollouts=/nowhere has no step_000001.jsonl.gz" in shown.err and "fits" not in shown.out


def test_an_rlinf_yaml_runs_through_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys with meaning are honoured, the others are listed, none is silently ignored."""
    path = tmp_path / "qwen2.5-7b-rstar2.yaml"
    path.write_text(yaml.safe_dump(RLINF_7B, sort_keys=False))
    assert main([str(path), "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("fits\n") and "128 problems x 32 rollouts = 4096 trajectories" in captured.out
    assert "tensor 2 x pipeline 1" in captured.out
    honoured = set(valid_keys())
    # Nothing to say about these: their value is the only one there is, or it is null.
    silent = {*ONLY_VALUES, "data.val_rollout_batch_size", "rollout.padding", "rollout.eos"}
    unsaid = [
        leaf
        for leaf in leaves(RLINF_7B)
        if leaf.split(".")[0] not in ("defaults", "hydra")
        and leaf not in honoured | silent
        and not any(part in captured.err for part in prefixes(leaf))
    ]
    assert not unsaid
    assert "actor.lr_sched.lr_warmup_fraction=0.1 of 200 steps read as lr_warmup_iters=20" in captured.err
    settings = load(str(path)).settings
    assert settings.tools.codejudge.max_concurrency == 64 and settings.runner.seq_length == 10240


def leaves(node: Any, prefix: str = "") -> Iterator[str]:
    if not isinstance(node, dict) or not node or prefix == "cluster.component_placement.":
        yield prefix.rstrip(".")
        return
    for key, value in node.items():
        yield from leaves(value, f"{prefix}{key}.")


def prefixes(leaf: str) -> list[str]:
    """The key itself, and the sections around it but the outermost, unless that is without meaning as a whole."""
    parts = leaf.split(".")
    whole = [parts[0]] if parts[0] in ("inference", "critic") else []
    return [".".join(parts[:n]) for n in range(2, len(parts) + 1)] + whole
