"""What a step does beyond its layout: normalisation, mini-batches, recomputed log-probs, SFT, idle ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rstar2_megatron.actor.packing import plan_microbatches
from rstar2_megatron.settings.schema import SFTSettings
from rstar2_megatron.sft.rows import SFTRows
from rstar2_megatron.sft.training import sft_phase_of
from tests.actor import reference
from tests.actor.programs import training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings

TEMPERATURE = 0.9
TP2 = {"tensor_model_parallel_size": 2}
BY_RANKS: dict[int, dict[str, Any]] = {1: {}, 2: TP2}


@pytest.mark.parametrize("ranks, model", [(1, {}), (2, TP2), (2, {"context_parallel_size": 2})])
def test_log_probs_match_transformers(pool: RankPool, models: dict[str, Path], ranks: int, model: dict[str, Any]) -> None:
    batch = sequences(7, seed=11)
    results = pool.run(training.score, ranks, settings(model=model), models["qwen2"], batch)
    hf = reference.load(models["qwen2"])
    for other in results[1:]:
        assert other == results[0]
    for sequence, scores in zip(batch, results[0]):
        assert len(scores) == sequence.length
        assert scores[0] == 0.0
        with torch.no_grad():
            right = reference.log_probs(hf, sequence, TEMPERATURE)
        assert torch.tensor(scores[1:]) == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("ranks, model", [(1, {}), (2, {})], ids=["one rank", "DP2"])
def test_gradient_does_not_depend_on_packing_or_order(
    pool: RankPool, models: dict[str, Path], ranks: int, model: dict[str, Any]
) -> None:
    """The same trajectories give the same step whatever the token budget and the order."""
    batch = sequences(10, seed=3)
    rng = random.Random(0)
    configs, batches = [], []
    for budget in (64, 150, 4096):
        actor, runner, algorithm = settings(model=model)
        configs.append((actor, runner.model_copy(update={"max_tokens_per_mbs": budget}), algorithm))
        batches.append(rng.sample(batch, len(batch)))
    steps = [
        pool.run(training.first_step, ranks, config, models["qwen2"], shuffled)[0] for config, shuffled in zip(configs, batches)
    ]
    (expected,) = reference.train(reference.load(models["qwen2"]), [batch], settings()[0], settings()[2])
    for loss, norm, total in steps:
        assert loss == pytest.approx(expected[0], abs=1e-5)
        assert norm == pytest.approx(expected[1], rel=1e-4)
        assert total == pytest.approx(steps[0][2], abs=2e-3)


@hypothesis_settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 6),
    budget=st.integers(64, 300),
    seed=st.integers(0, 10_000),
    ranks=st.sampled_from([1, 2, 4]),
    rng=st.randoms(use_true_random=False),
)
def test_any_batch_in_any_order_on_any_number_of_ranks(
    pool: RankPool, models: dict[str, Path], count: int, budget: int, seed: int, ranks: int, rng: random.Random
) -> None:
    """The reference takes all sequences at once, in their first order."""
    batch = sequences(count, seed=seed)
    shuffled = rng.sample(batch, len(batch))
    actor, runner, algorithm = settings()
    config = (actor, runner.model_copy(update={"max_tokens_per_mbs": budget}), algorithm)
    step = pool.run(training.first_step, ranks, config, models["qwen2-tied"], shuffled)[0]
    (right,) = reference.train(reference.load(models["qwen2-tied"]), [batch], actor, algorithm)
    assert step[0] == pytest.approx(right[0], abs=1e-5)
    assert step[1] == pytest.approx(right[1], rel=1e-4)


def test_ranks_without_work_join(pool: RankPool, models: dict[str, Path]) -> None:
    """One trajectory on two data-parallel ranks: the second has nothing to train and must not hang or count."""
    batch = sequences(1, seed=5)
    (right,) = reference.train(reference.load(models["qwen2"]), [batch], settings()[0], settings()[2])
    results = pool.run(training.train, 2, settings(), models["qwen2"], [batch])
    assert results[1][0]["actor/policy_loss"] == pytest.approx(right[0], abs=1e-5)
    assert results[1][0]["actor/grad_norm"] == pytest.approx(right[1], rel=1e-4)
    assert results[0][0]["actor/trained_tokens"] == batch[0].num_trained_tokens


def test_mini_batches_take_one_optimizer_step_each(pool: RankPool, models: dict[str, Path]) -> None:
    batch = sequences(9, seed=8)
    parts = [batch[:3], batch[3:6], batch[6:]]
    actor, _, algorithm = settings()
    right = reference.train(reference.load(models["qwen2"]), parts, actor, algorithm)
    (metrics,) = pool.run(training.train, 1, settings(n_minibatches=3), models["qwen2"], [batch])[0]
    assert metrics["actor/optimizer_steps"] == 3
    assert metrics["actor/policy_loss"] == pytest.approx(sum(r[0] for r in right) / 3, abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(sum(r[1] for r in right) / 3, rel=1e-4)


def test_recomputed_log_probs_make_the_first_ratio_one(pool: RankPool, models: dict[str, Path]) -> None:
    """With recompute_logprobs the ratio is taken to the actor's own log-probs, not to the engine's."""
    batch = sequences(6, seed=9)
    one = pool.run(training.train, 2, settings(model=TP2, recompute_logprobs=True), models["qwen2"], [batch])
    assert one[0][0]["actor/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert one[0][0]["actor/clip_fraction"] == 0
    assert one[0][0]["actor/logprob_diff_mean"] > 0.1  # the engine's differ
    # Several mini-batches: old log-probs are scored before the first update, so later ratios move.
    several = pool.run(training.train, 1, settings(recompute_logprobs=True, n_minibatches=3), models["qwen2"], [batch])[0][0]
    assert several["actor/ratio"] != pytest.approx(1.0, abs=1e-5)
    assert several["actor/approx_kl"] < 0.1
    assert one[0][0]["actor/logprob_diff_max"] >= several["actor/logprob_diff_max"] > 0


def test_truncated_importance_sampling_weighs_tokens(pool: RankPool, models: dict[str, Path]) -> None:
    """Loss with TIS = -sum(min(actor / engine, clip) * A) / tokens when ratios are one."""
    batch = sequences(5, seed=10)
    clip = 1.5
    config = settings(recompute_logprobs=True, importance_sampling_fix=True, importance_sampling_clip=clip, clip_ratio_c=None)
    (metrics,) = pool.run(training.train, 1, config, models["qwen2"], [batch])[0]
    hf = reference.load(models["qwen2"])
    total, clipped, tokens = 0.0, 0, sum(s.num_trained_tokens for s in batch)
    for sequence in batch:
        with torch.no_grad():
            actor = reference.log_probs(hf, sequence, TEMPERATURE)
        ratio = (actor - torch.tensor(sequence.rollout_logprobs[1:])).exp()
        mask = torch.tensor(sequence.loss_mask[1:])
        total -= float((ratio.clamp(max=clip) * mask).sum()) * sequence.advantage
        clipped += int(((ratio > clip) & (mask > 0)).sum())
    assert metrics["actor/policy_loss"] == pytest.approx(total / tokens, abs=1e-5)
    assert metrics["actor/tis_clip_fraction"] == pytest.approx(clipped / tokens)
    assert clipped > 0


@pytest.mark.parametrize("kind", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_other_aggregations(pool: RankPool, models: dict[str, Path], kind: str) -> None:
    batch = sequences(4, seed=12)
    _actor, _, algorithm = settings(loss_agg_func=kind)
    (metrics,) = pool.run(training.train, 2, settings(loss_agg_func=kind), models["qwen2"], [batch])[0]
    hf = reference.load(models["qwen2"])
    total = 0.0
    for sequence in batch:
        one = float(reference.rl_loss(hf, [sequence], algorithm).detach())
        total += one * (sequence.num_trained_tokens if kind.endswith("sum") else 1)
    assert metrics["actor/policy_loss"] == pytest.approx(total / len(batch), abs=1e-5 * max(1.0, abs(total)))


def test_released_aggregations(pool: RankPool, models: dict[str, Path]) -> None:
    """Token mean inside each micro-batch; micro-batches weigh the same (RLinf), or by rows / full rows (verl).

    Two sequences a micro-batch on two ranks; the last micro-batch of seven sequences has one.
    """
    batch = sequences(7, seed=15, low=45, high=60)
    budget = 120  # two of them fit, three do not
    hf = reference.load(models["qwen2"])
    for kind in ("released-rlinf", "released-verl"):
        actor, runner, algorithm = settings(loss_agg_func=kind)
        config = (actor, runner.model_copy(update={"max_tokens_per_mbs": budget}), algorithm)
        metrics = pool.run(training.train, 2, config, models["qwen2"], [batch], 28)[0][0]
        plan = plan_microbatches([s.length for s in batch], 2, max_tokens=budget)
        total, microbatches = 0.0, 0
        for rank in plan.microbatches:
            for members in rank:
                microbatches += 1
                if not members:
                    continue
                mean = float(reference.rl_loss(hf, [batch[i] for i in members], algorithm).detach())
                total += mean * (len(members) / 28 if kind == "released-verl" else 1)
        expected = total if kind == "released-verl" else total / microbatches
        assert metrics["actor/policy_loss"] == pytest.approx(expected, abs=1e-5), kind


@pytest.mark.parametrize("ranks", [1, 2])
def test_supervised_steps_then_reinforcement(pool: RankPool, models: dict[str, Path], ranks: int) -> None:
    batch = sequences(6, seed=13)
    config = settings(model=BY_RANKS[ranks])
    history, after, validation = pool.run(training.supervised, ranks, config, models["qwen2"], batch, 6)[0]
    hf = reference.load(models["qwen2"])
    with torch.no_grad():
        right = -sum(float((reference.log_probs(hf, s, 1.0) * torch.tensor(s.loss_mask[1:])).sum()) for s in batch) / sum(
            s.num_trained_tokens for s in batch
        )
    assert history[0]["sft/loss"] == pytest.approx(right, abs=1e-5)
    assert validation["loss"] / validation["tokens"] == pytest.approx(right, abs=1e-5)
    assert history[-1]["sft/loss"] < history[0]["sft/loss"] - 0.5
    assert after["actor/optimizer_steps"] == 1
    assert after["actor/lr"] == pytest.approx(5e-4)  # first of two warm-up steps of 1e-3


def test_fine_tuning_resumes_exactly(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """The same batches, rates and losses after a checkpoint as without an interruption."""
    batch = sequences(9, seed=21)
    rows = SFTRows()
    for sequence in batch:
        rows.add(list(sequence.input_ids), list(sequence.loss_mask))
    phase = sft_phase_of(SFTSettings(batch_size=4, epochs=2, lr=2e-3, warmup_ratio=0.2), len(rows))
    arguments = (settings(), models["qwen2"], rows, phase, tmp_path / "checkpoint")
    ((whole, end),) = pool.run(training.fine_tune, 1, *arguments, 0)
    ((rest, same_end),) = pool.run(training.fine_tune, 1, *arguments, 2)
    assert len(whole) == 5 and rest == pytest.approx(whole[2:], abs=1e-6) and same_end == pytest.approx(end, abs=1e-6)
    assert end < whole[0] - 0.2


@pytest.mark.parametrize("kind", ["low_var_kl", "mse"])
def test_kl_and_entropy_terms(pool: RankPool, models: dict[str, Path], kind: str) -> None:
    """Loss and gradient with both terms equal transformers', whose reference is a second model."""
    batches = [sequences(5, seed=30 + i) for i in range(3)]
    config = settings(
        model=TP2,
        optim={"overlap_grad_reduce": True, "overlap_param_gather": True},
        kl_beta=0.3,
        kl_penalty_type=kind,
        entropy_bonus=0.02,
    )
    actor, _, algorithm = config
    hf, frozen = reference.load(models["qwen2"]), reference.load(models["qwen2"])
    right = reference.train(hf, batches, actor, algorithm, frozen)
    for history, untouched in pool.run(training.train_with_reference, 2, config, models["qwen2"], batches):
        assert untouched
        assert history[0]["actor/reference_kl"] == pytest.approx(0.0, abs=1e-6)
        assert history[2]["actor/reference_kl"] > 1e-4
        for mine, (loss, norm) in zip(history, right):
            assert mine["actor/policy_loss"] == pytest.approx(loss, abs=1e-5)
            assert mine["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_kl_needs_a_reference(pool: RankPool, models: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match="freeze_reference has not been called"):
        pool.run(training.train, 1, settings(kl_beta=0.1), models["qwen2"], [sequences(2)])


@pytest.mark.parametrize(("ranks", "precision", "which"), [(1, "fp32", "qwen2"), (2, "bf16", "qwen2-tied"), (2, "fp32", "moe")])
def test_memory_that_changes_hands_changes_nothing(
    pool: RankPool, models: dict[str, Path], ranks: int, precision: str, which: str
) -> None:
    batches = [sequences(5, seed=40 + i) for i in range(3)]
    model: dict[str, Any] = {"precision": precision}
    if which == "moe":
        model["expert_model_parallel_size"] = 2
    config = settings(model=model)
    plain = pool.run(training.train, ranks, config, models[which], batches)[0]
    away = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}
    turns = (config[0].model_copy(update=away), *config[1:])
    for history, gone in pool.run(training.train_with_turns, ranks, turns, models[which], batches):
        assert gone
        for mine, right in zip(history, plain):
            assert mine["actor/policy_loss"] == right["actor/policy_loss"]
            assert mine["actor/grad_norm"] == right["actor/grad_norm"]


def test_step_with_an_infinite_gradient_is_skipped_and_counted(pool: RankPool, models: dict[str, Path]) -> None:
    batch = [replace(s) for s in sequences(3, seed=14)]
    for metrics, untouched in pool.run(training.poisoned, 2, settings(model=TP2), models["qwen2"], batch):
        assert metrics["actor/skipped_steps"] == 1
        assert not math.isfinite(metrics["actor/grad_norm"])
        assert untouched
