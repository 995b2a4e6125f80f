"""The cold start's cache, and what a resumed run needs of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rstar2_megatron.records import checkpoint
from rstar2_megatron.runs.base_run import StopSignals
from rstar2_megatron.runs.cold_start import _scored_by, cache_dir, find_cached, find_reference
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.schema import Settings, SFTPhaseSettings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """SFT is asked for and done: its cache is there."""
    data = tmp_path / "sft.jsonl"
    data.write_text("{}\n")
    settings = load_settings("rstar2-tiny-cpu", ["algorithm.kl_beta=0.01"])
    settings.rollout.model.model_path = str(tmp_path / "base")
    settings.cold_start.enabled, settings.cold_start.cache_dir = True, str(tmp_path / "cache")
    settings.cold_start.phases = [SFTPhaseSettings(name="format", data_path=str(data), steps=1, batch_size=1, lr=1e-3)]
    directory = cache_dir(settings)
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "config.json").write_text("{}")
    result = {"before": None, "after": 0.5, "scored_by": _scored_by(settings), "seconds": 1.0}  # older results have more
    (directory / "result.json").write_text(json.dumps(result))
    return settings


def test_a_resumed_run_finds_its_reference(settings: Settings) -> None:
    found = find_cached(settings)
    assert found is not None and found.after == 0.5
    assert find_reference(settings) == found


def test_scores_of_another_evaluation_are_not_taken_from_the_cache(settings: Settings) -> None:
    settings.evaluation.save_trajectories = not settings.evaluation.save_trajectories
    assert find_cached(settings) is not None and find_cached(settings).after == 0.5  # type: ignore[union-attr]
    settings.evaluation.num_samples += 1
    found = find_cached(settings)
    assert found is not None and (found.before, found.after) == (None, None)


@pytest.mark.parametrize("gone", ["cache", "model", "data"])
def test_a_lost_reference_is_an_error_with_its_remedies(settings: Settings, gone: str) -> None:
    """Silently it would be the model before SFT."""
    directory = cache_dir(settings)
    if gone == "data":
        Path(settings.cold_start.phases[0].data_path).unlink()
    else:
        shutil.rmtree(directory if gone == "cache" else directory / "model")
    with pytest.raises(ValueError, match=r"kl_beta=0.01 needs the cold start's model as reference") as caught:
        find_reference(settings)
    assert ("sft.jsonl" if gone == "data" else f"{directory} is gone") in str(caught.value)
    assert "set algorithm.kl_beta=0, or start a new run by runner.resume_dir=null" in str(caught.value)


@pytest.mark.parametrize("change", ["no KL term", "no cold start", "another run's checkpoint"])
def test_who_needs_no_cold_start_is_not_asked_for_it(settings: Settings, change: str) -> None:
    shutil.rmtree(cache_dir(settings))
    if change == "no KL term":
        settings.algorithm.kl_beta = 0.0
    elif change == "no cold start":
        settings.cold_start.enabled = False
    else:
        settings.runner.init_checkpoint = "/runs/before/checkpoints/global_step_3"
    assert find_reference(settings) is None


class Starts(Exception):
    """The run has found its model and starts its services."""


def test_a_run_that_resumes_does_without_the_data_of_its_sft(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rstar2_megatron.runs.rl_run import RLRun  # here, because torch, Ray and RLinf take seconds

    def begin() -> None:
        raise Starts

    settings.algorithm.kl_beta, settings.runner.output_dir = 0.0, str(tmp_path)
    checkpoints = tmp_path / settings.runner.experiment_name / "checkpoints"
    checkpoint.save(checkpoints, 3, lambda directory: Path(directory).mkdir(), {}, keep=1)
    Path(settings.cold_start.phases[0].data_path).unlink()
    run = RLRun(settings, StopSignals())
    monkeypatch.setattr(run.judge, "begin", begin)
    try:
        with pytest.raises(Starts):
            run.train()
    finally:
        run.temporary.remove()
