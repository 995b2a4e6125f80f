"""Expected GPU hours of the stages around a search, on H100s. Pure arithmetic, with the assumptions of `engine_speed`."""

from __future__ import annotations

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.engine_speed import DECODE_SHARE, PEAK_BYTES_PER_S, PEAK_FLOPS, train_share
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token
from rstar2_megatron.settings.schema import Settings

SOLUTIONS = 2  # right solutions of a problem that SFT takes (`search/traces.py`)


def search_hours(settings: Settings, model: ModelConfig, kv_capacity_tokens: int) -> tuple[float, float]:
    """(GPU hours of `search.rollouts`, GPU hours of all `search.more_rollouts`) for `search.num_problems` problems.

    A rollout is counted as `search.candidates` solutions of half the longest length. That is what it generates when every node
    on its way is new, so trees that come back to old nodes cost less. A reward model of the policy's size reads each token.
    """
    search, length = settings.search, settings.runner.seq_length // 2
    rate = _decode_tokens_per_s(settings, model, kv_capacity_tokens, length)
    seconds = settings.rollout.tensor_parallel_size / rate
    if search.reward_model is not None:
        seconds += model.train_flops([length]) / 3 / length / (PEAK_FLOPS * train_share(model))
    per_rollout = search.num_problems * search.candidates * length * seconds / 3600
    return search.rollouts * per_rollout, search.more_rollouts * per_rollout


def sft_hours(settings: Settings, model: ModelConfig, problems: int) -> float:
    """GPU hours of SFT on two solutions, of half the longest length, of each of `problems` problems."""
    length = (settings.sft.max_length or settings.runner.seq_length) // 2
    return _training(model, length, SOLUTIONS * problems * settings.sft.epochs)


def preference_hours(settings: Settings, model: ModelConfig, problems: int) -> float:
    """GPU hours of a preference model: a comparison at every second depth of a tree, of prefixes of a quarter of the length."""
    own = settings.preference
    length = (own.max_length or settings.runner.seq_length) // 4
    prefixes = 2 * own.best * settings.search.depth / 2
    return _training(model, length, prefixes * problems * own.epochs)


def _training(model: ModelConfig, length: int, sequences: float) -> float:
    return model.train_flops([length]) * sequences / (PEAK_FLOPS * train_share(model)) / 3600


def _decode_tokens_per_s(settings: Settings, model: ModelConfig, kv_capacity_tokens: int, length: int) -> float:
    """Tokens that one engine generates in a second, with as many trajectories of `length` tokens as fit."""
    rollout = settings.rollout
    running = max(min(rollout.max_running_requests, kv_capacity_tokens // length), 1)
    read = 2 * model.num_parameters + running * length / 2 * kv_bytes_per_token(model, "bf16")
    return running * PEAK_BYTES_PER_S * rollout.tensor_parallel_size / read * DECODE_SHARE
