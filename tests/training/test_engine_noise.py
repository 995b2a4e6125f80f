"""The noise that `benchmarks.mismatch` puts on the engines' weights, and its arms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.mismatch import ARMS, EXACT, Mismatch
from benchmarks.noisy_actor import perturbed
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.settings.load import load_settings


def test_noise_is_relative_to_each_matrix_and_repeats_with_its_seed() -> None:
    torch.manual_seed(0)
    weights = [("large", 8 * torch.randn(200, 100)), ("small", torch.randn(200, 100) / 8), ("norm", torch.ones(9))]

    def draw(seed: int) -> dict[str, torch.Tensor]:
        return dict(perturbed(iter(weights), 0.05, torch.Generator().manual_seed(seed)))

    seen = draw(1)
    for name, tensor in weights[:2]:
        assert float((seen[name] - tensor).std() / tensor.std()) == pytest.approx(0.05, rel=0.05)
    assert torch.equal(seen["norm"], weights[2][1])
    assert all(torch.equal(seen[name], again) for name, again in draw(1).items())
    assert not torch.equal(seen["large"], draw(2)["large"])


@pytest.mark.parametrize("arm", ARMS)
def test_arms_are_settings_that_a_run_accepts(arm: str) -> None:
    settings = load_settings("rstar2-tiny-cpu", ["algorithm.recompute_logprobs=True", *ARMS[arm]])
    plain = load_settings("rstar2-tiny-cpu", ["algorithm.recompute_logprobs=True"])
    assert (settings.algorithm == plain.algorithm) == (arm in (EXACT, "noise"))


@pytest.mark.ci
def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    mismatch = Mismatch("rstar2-tiny-cpu", [], [EXACT], [0], tmp_path, Path("absent"))
    done = tmp_path / f"{EXACT}-0"
    done.mkdir()
    (done / "finished.json").write_text(json.dumps({"step": 1}))
    assert mismatch.train(EXACT, 0, 0.3, ["no.such.key=1"]) == done
    with pytest.raises(RuntimeError, match="noise-0 ended with exit code 2"):
        mismatch.train("noise", 0, 0.3, ["no.such.key=1"])


def test_the_drawn_log_has_the_evaluations_before_and_after_the_run(tmp_path: Path) -> None:
    mismatch = Mismatch("rstar2-tiny-cpu", [], [EXACT], [0], tmp_path, Path("absent"))
    done = tmp_path / f"{EXACT}-0"
    done.mkdir()
    rows = [{"step": 1.0, "rollout/pass_rate": 0.4}, {"step": 2.0, "rollout/pass_rate": 0.5}]
    write_jsonl(done / "metrics.jsonl", rows)
    (done / "held_out.json").write_text(json.dumps({"before_rl": 0.3, "after_rl": 0.6}))
    drawn = (mismatch.with_held_out(done) / "metrics.jsonl").read_text().splitlines()
    before = {"step": 0.0, "eval/average": 0.3}
    assert [json.loads(row) for row in drawn] == [before, rows[0], rows[1] | {"eval/average": 0.6}]
    assert (done / "metrics.jsonl").read_text().count("\n") == 2
