"""Decides whether the unfinished trajectories of a group can still change the selection of resample-on-correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rstar2_megatron.algorithm.roc import paper_quotas, released_quotas
from rstar2_megatron.settings.schema import DownSamplingSettings
from rstar2_megatron.trajectory import Trajectory


def cut_rule(config: DownSamplingSettings, share: float) -> Callable[[Sequence[Trajectory], int], bool]:
    """A rule (graded trajectories, number of missing ones) -> whether the missing trajectories may be cut.

    The group must have positives, negatives and at least G trajectories. For all possible rewards of the missing
    trajectories, the counts of kept positives and negatives must stay within `share` of G of the counts without them.
    Without down-sampling the rule is always False, because every trajectory is trained on, and so is it under another
    rule than resample-on-correct.
    """
    sampling = config.down_sampling_config
    target = sampling.down_sample_to_n

    def may_cut(ended: Sequence[Trajectory], missing: int) -> bool:
        positives = sum(t.is_positive for t in ended)
        negatives = len(ended) - positives
        if not config.do_down_sampling or not positives or not negatives or sampling.mode not in ("paper", "released"):
            return False
        if len(ended) < target:
            return False
        # Three cases: without the missing ones, with all of them right, with all of them wrong.
        all_positives = torch.tensor([positives, positives + missing, positives])
        all_negatives = torch.tensor([negatives, negatives, negatives + missing])
        quotas = paper_quotas if sampling.mode == "paper" else released_quotas
        whole = all_positives + all_negatives <= target
        kept = torch.where(whole, all_positives, quotas(all_positives, all_negatives, sampling)[0])
        return bool((kept - kept[0]).abs().max() <= share * target)

    return may_cut
