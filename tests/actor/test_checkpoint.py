"""A resumed run continues exactly as the uninterrupted one, also under another layout."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rstar2_megatron.actor import convert
from rstar2_megatron.actor.convert import checkpoint_weights
from rstar2_megatron.actor.optimizer import learning_rate
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.host_memory import load_bytes, save_bytes
from rstar2_megatron.settings.schema import LrSchedSettings
from tests.actor.programs import checkpoints, training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings
from tests.small_disk import small_disk

BATCHES = [sequences(6, seed=20 + i) for i in range(5)]
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
BF16 = {"precision": "bf16"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
HOST = {"optimizer_cpu_offload": True}
KEYS = ("actor/policy_loss", "actor/grad_norm", "actor/lr", "actor/optimizer_steps")


def _curve(steps: list[dict[str, float]]) -> list[tuple[float, ...]]:
    return [tuple(step[key] for key in KEYS) for step in steps]


@pytest.mark.parametrize(
    "ranks, model, optim, background",
    [
        (1, {}, {}, True),
        (1, BF16, {}, False),
        (2, TP2, {}, False),
        (2, {}, OVERLAP, True),
        (2, PP2, {}, False),
        (2, BF16, {**OVERLAP, **HOST}, True),
        (1, {}, {"use_distributed_optimizer": False}, True),
    ],
    ids=["single", "bf16", "TP2", "DP2 overlap", "PP2", "bf16 DP2 overlap, host optimizer", "plain optimizer"],
)
def test_next_three_steps_are_bit_equal(
    pool: RankPool,
    models: dict[str, Path],
    tmp_path: Path,
    ranks: int,
    model: dict[str, Any],
    optim: dict[str, Any],
    background: bool,
) -> None:
    directory = tmp_path / "actor"
    config = settings(model=model, optim=optim)
    which = models["qwen2-tied"]
    saved = pool.run(checkpoints.save_then_train, ranks, config, which, directory, BATCHES, background)
    assert all(present for _, present in saved)
    resumed = pool.run(checkpoints.resume, ranks, config, which, directory, BATCHES)
    assert _curve(resumed[0]) == _curve(saved[0][0])
    assert not directory.with_name("actor.tmp").exists()


@pytest.mark.parametrize("optim", [{}, HOST, {"use_distributed_optimizer": False}], ids=["sharded", "host", "plain"])
def test_betas_and_eps_are_those_of_the_resumed_runs_yaml(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, optim: dict[str, Any]
) -> None:
    before = settings(optim={**optim, "adam_beta2": 0.95})
    after = settings(optim={**optim, "adam_beta1": 0.8, "adam_beta2": 0.999, "adam_eps": 1e-6})
    arguments = (before, after, models["qwen2-tied"], tmp_path / "actor", BATCHES)
    (first, then) = pool.run(checkpoints.resume_with_other_moments, 1, *arguments)[0]
    assert set(first) == {((0.9, 0.95), 1e-8)}
    assert set(then) == {((0.8, 0.999), 1e-6)}


PP2_INTERLEAVED = {**PP2, "virtual_pipeline_model_parallel_size": 2}
PRODUCT = {**TP2, "sequence_parallel": True, **PP2}


@pytest.mark.parametrize(
    "saver, loaders",
    [
        ((2, TP2, {}), [(1, {}, {}), (2, PP2, {}), (2, {"context_parallel_size": 2}, {}), (2, {}, {})]),
        pytest.param((4, PP2_INTERLEAVED, OVERLAP), [(1, {}, {}), (4, PRODUCT, {}), (2, {}, OVERLAP)], marks=pytest.mark.ci),
    ],
    ids=["TP2", "PP2 interleaved DP2 overlap"],
)
def test_loads_at_another_layout(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, saver: Any, loaders: list[Any]
) -> None:
    directory = tmp_path / "actor"
    which = models["qwen2-tied"]
    ranks, model, optim = saver
    config = settings(model=model, optim=optim)
    saved = pool.run(checkpoints.save_then_train, ranks, config, which, directory, BATCHES, False)[0][0]
    for ranks, model, optim in loaders:
        config = settings(model=model, optim=optim)
        resumed = pool.run(checkpoints.resume, ranks, config, which, directory, BATCHES)[0]
        for mine, right in zip(resumed, saved):
            assert mine["actor/policy_loss"] == pytest.approx(right["actor/policy_loss"], abs=1e-5)
            assert mine["actor/grad_norm"] == pytest.approx(right["actor/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "precision, tolerance", [({}, 1e-6), pytest.param(BF16, 1e-3, marks=pytest.mark.ci)], ids=["fp32", "bf16"]
)
def test_host_and_device_optimizers_load_each_others_checkpoints(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, precision: dict[str, Any], tolerance: float
) -> None:
    """Masters, moments and step count are the same wherever they lie; other ranks too."""
    which = models["qwen2"]
    here, there = settings(model=precision), settings(model=precision, optim=HOST)
    for number, (saver, loader) in enumerate([(here, there), (there, here)]):
        directory = tmp_path / str(number) / "actor"
        directory.parent.mkdir()
        saved = pool.run(checkpoints.save_then_train, 1, saver, which, directory, BATCHES, False)[0][0]
        resumed = pool.run(checkpoints.resume, 2, loader, which, directory, BATCHES)[0]
        for mine, right in zip(resumed, saved, strict=True):
            assert mine["actor/policy_loss"] == pytest.approx(right["actor/policy_loss"], abs=tolerance)
            assert mine["actor/grad_norm"] == pytest.approx(right["actor/grad_norm"], rel=20 * tolerance)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_that_has_made_no_step_can_be_saved(pool: RankPool, models: dict[str, Path], ranks: int) -> None:
    """A run whose first groups are all rejected saves at its end: with TransformerEngine's Adam that was a KeyError."""
    masters, moment, master = pool.run(checkpoints.gather_before_a_step, ranks, settings(), models["qwen2"])[0]
    assert masters > 10 and moment == 0.0 and master > 0.0


def test_experts_resume_at_another_layout(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    directory = tmp_path / "actor"
    which = models["moe"]
    saved = pool.run(checkpoints.save_then_train, 2, settings(model=EP2), which, directory, BATCHES, True)[0][0]
    same = pool.run(checkpoints.resume, 2, settings(model=EP2), which, directory, BATCHES)[0]
    assert _curve(same) == _curve(saved)
    resumed = pool.run(checkpoints.resume, 1, settings(), which, directory, BATCHES)[0]
    for mine, right in zip(resumed, saved):
        assert mine["actor/policy_loss"] == pytest.approx(right["actor/policy_loss"], abs=1e-5)
        assert mine["actor/grad_norm"] == pytest.approx(right["actor/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "ranks, model", [pytest.param(1, {}, id="single", marks=pytest.mark.ci), pytest.param(2, TP2, id="TP2")]
)
def test_killed_while_saving_keeps_the_previous(
    models: dict[str, Path], tmp_path: Path, pool: RankPool, ranks: int, model: dict[str, Any]
) -> None:
    """SIGKILL with files half written: the directory still holds the checkpoint before, and resumes exactly."""
    directory, config, which = tmp_path / "actor", settings(model=model), models["qwen2"]
    expected = pool.run(training.train, ranks, config, which, BATCHES)[0][2:]
    doomed = RankPool()
    with ThreadPoolExecutor(1) as threads:
        saving = threads.submit(doomed.run, checkpoints.save_on_a_slow_disk, ranks, config, which, directory, BATCHES)
        partial = directory.with_name("actor.tmp")
        while not (directory.exists() and any(partial.glob("*.distcp"))) and not saving.done():
            time.sleep(0.05)
        time.sleep(0.2)
        doomed.kill()
        with pytest.raises(TimeoutError, match="dead"):
            saving.result(60)
    assert any(partial.glob("*.distcp"))  # the kill fell into the write
    resumed = pool.run(checkpoints.resume, ranks, config, which, directory, BATCHES)[0]
    assert _curve(resumed) == _curve(expected)


@pytest.mark.ci
@pytest.mark.parametrize("ranks, model", [(1, {}), (2, TP2)])
def test_a_full_disk_is_told_by_every_rank(
    models: dict[str, Path], tmp_path: Path, pool: RankPool, ranks: int, model: dict[str, Any]
) -> None:
    with small_disk(tmp_path, 1):
        (tmp_path / "filler").write_bytes(bytes(900_000))
        told = pool.run(checkpoints.save_on_a_full_disk, ranks, settings(model=model), models["qwen2"], tmp_path)
        lines = [line for rank in told for line in rank]
        assert len(lines) == 2
        for line in lines:
            assert line.startswith(f"could not write {tmp_path}/") and "(0 MB are free there)" in line


def test_a_kept_optimizers_schedule_survives_a_resume(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Two optimizer steps a training step: the cosine of three training steps is over after six."""
    actor, runner, algorithm = settings(n_minibatches=2, optim={"lr": 1e-3, "min_lr": 1e-5})
    cosine = LrSchedSettings(lr_warmup_iters=2, lr_decay_style="cosine")
    actor = actor.model_copy(update={"lr_sched": cosine})
    runner = runner.model_copy(update={"max_steps": 3})
    config = (actor, runner, algorithm)
    ((rates, resumed),) = pool.run(checkpoints.keep_and_resume, 1, config, models["qwen2"], tmp_path / "actor", BATCHES)
    assert rates == [learning_rate(4 + 2 * i + 1, actor.optim, cosine, 6, start=4) for i in range(3)]
    assert rates[0] > 0.9e-3 and rates[-1] < 1e-4
    assert resumed == rates[1:]


@pytest.mark.parametrize(
    "ranks, model, optim, which",
    [
        (2, BF16, {}, "qwen2"),
        (2, {**BF16, **TP2}, {}, "qwen2"),
        (2, BF16, {**OVERLAP, **HOST}, "qwen2"),
        (2, {**BF16, **EP2}, {}, "moe"),
        (2, {}, {"use_distributed_optimizer": False}, "qwen2"),
    ],
    ids=["DP2", "TP2", "DP2 overlap, host optimizer", "EP2", "plain optimizer"],
)
def test_a_save_and_a_load_take_the_bytes_of_the_plan(
    pool: RankPool,
    models: dict[str, Path],
    tmp_path: Path,
    ranks: int,
    model: dict[str, Any],
    optim: dict[str, Any],
    which: str,
) -> None:
    """Bytes of all tensors that live at once beside model and optimizer: on the first rank, which gathers, and the last.

    However many pieces the load takes, each rank reads once what the files hold: megabytes for many experts.
    """
    config = settings(model=model, optim=optim)
    piece = 400_000  # a tenth of the state, more than any parameter's
    arguments = (config, models[which], tmp_path / "actor", BATCHES[0], 20_000, piece)
    counted = pool.run(checkpoints.save_and_count, ranks, *arguments)
    shape = ModelConfig.from_directory(models[which])
    planned = save_bytes(config[0], shape, ranks, bucket=20_000)
    assert 0.95 * planned < counted[0][0] <= 1.02 * planned
    planned_load = load_bytes(config[0], shape, piece=piece)
    if config[0].optim.use_distributed_optimizer:  # the other one is read into place, but gate and up are joined
        assert planned_load < 1.45 * piece
        assert all(0.6 * planned_load < loaded <= 1.02 * planned_load for _, loaded, _ in counted), (planned_load, counted)
    assert {reads for *_, reads in counted} == {1}
    if model == BF16 and not optim:  # two data-parallel ranks: the second one sends its shard and keeps nothing
        last = save_bytes(config[0], shape, ranks, first=False, bucket=20_000)
        assert counted[1][0] <= 1.02 * last < 0.5 * planned


def test_incomplete_checkpoint_is_refused(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "global_step_3" / "actor"
    broken.mkdir(parents=True)
    with pytest.raises(RuntimeError, match="is not a complete checkpoint"):
        pool.run(checkpoints.resume, 1, settings(), models["qwen2"], broken, BATCHES)


def test_what_cannot_be_converted_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["convert", str(tmp_path), str(tmp_path / "model"), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        convert.main()
    assert f"error: {tmp_path} is not a complete checkpoint of the actor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model, which",
    [pytest.param({**TP2, **PP2}, "qwen2-tied", marks=pytest.mark.ci), (TP2, "qwen3"), (EP2, "moe")],
    ids=["TP2 PP2 tied", "TP2 Qwen3", "EP2 experts"],
)
def test_checkpoint_converts_without_ranks(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, model: dict[str, Any], which: str
) -> None:
    ranks = 4 if "pipeline_model_parallel_size" in model else 2
    arguments = (settings(model=model), models[which], tmp_path / "actor", BATCHES[:2], False)
    pool.run(checkpoints.save_then_train, ranks, *arguments)
    config = ModelConfig.from_directory(models[which])
    converted = dict(checkpoint_weights(tmp_path / "actor", config))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert converted.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(converted[name], tensor), name
    read: list[weakref.ref[torch.Tensor]] = []
    most = 0
    for _, tensor in checkpoint_weights(tmp_path / "actor", config):
        read.append(weakref.ref(tensor))
        most = max(most, sum(reference() is not None for reference in read))
    assert len(read) == len(exported) and most <= 6  # the pieces of a parameter, and of the one before it
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        next(checkpoint_weights(tmp_path / "nowhere", config))
