"""Resample-on-correct once more, written from the public code: what this project's must agree with."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rstar2_megatron.algorithm.response_text import response_text
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import Trajectory


def slow_released(trajectories: Sequence[Trajectory], cfg: DownSamplingConfig) -> list[int]:
    """The public rules: text penalties, sorted positives, first negatives; [] for a rejected group."""

    def penalty(t: Trajectory) -> float:
        text = response_text(t)
        found = re.findall(r"<tool_response>(.*?)</tool_response>", text, re.DOTALL)
        error = 0.5 if not found else sum("error" in f.lower() for f in found) / len(found)
        n_open, n_close = text.count("<answer>"), text.count("</answer>")
        turns = len(re.findall(r"<\|im_start\|>assistant.*?<\|im_end\|>", text, re.DOTALL))
        form = 1.0
        pairs = len(re.findall(r"<answer>.*?</answer>", text, re.DOTALL))
        if n_open and n_open == n_close == pairs and turns:
            form = min((n_open - 1) / turns, 1.0)
        return error * cfg.roc_error_ratio + form * cfg.roc_answer_format

    rewards = [t.reward or 0.0 for t in trajectories]
    target, total = cfg.down_sample_to_n, len(trajectories)
    if cfg.reject_equal_reward and len(set(rewards)) <= 1:
        return []
    if total < target:
        return []
    if total == target:
        return list(range(total))
    good = sorted((i for i in range(total) if rewards[i] > 0), key=lambda i: (penalty(trajectories[i]), i))
    bad = [i for i in range(total) if rewards[i] <= 0]
    want_good, want_bad = slow_released_quotas(len(good), len(bad), cfg)
    chosen = good[:want_good] + bad[:want_bad]
    if len(chosen) != target:
        chosen = sorted(good + bad, key=lambda i: penalty(trajectories[i]))[:target]
    return sorted(chosen)


def slow_released_quotas(num_positive: int, num_negative: int, cfg: DownSamplingConfig) -> tuple[int, int]:
    target, total = cfg.down_sample_to_n, num_positive + num_negative
    want_bad, want_good = round(num_negative * target / total), round(num_positive * target / total)
    floor_bad = min(cfg.min_zero_reward_trace_num, num_negative)
    floor_good = min(cfg.min_non_zero_reward_trace_num, num_positive)
    if want_bad <= floor_bad:
        want_bad, want_good = floor_bad, target - floor_bad
    if want_good <= floor_good:
        want_good, want_bad = floor_good, target - floor_good
    return want_good, want_bad


def slow_paper_quotas(num_positive: int, num_negative: int, cfg: DownSamplingConfig) -> tuple[int, int]:
    target = cfg.down_sample_to_n
    negative = math.floor(num_negative * target / (num_positive + num_negative))
    negative = max(negative, min(cfg.min_zero_reward_trace_num, num_negative))
    positive = max(target - negative, min(cfg.min_non_zero_reward_trace_num, num_positive))
    positive = min(positive, num_positive)
    return positive, min(target - positive, num_negative)
