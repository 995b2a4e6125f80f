"""Whether the trajectories that a group still waits for would change what resample-on-correct keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rstar2_megatron.algorithm.roc import paper_quotas, released_quotas
from rstar2_megatron.settings.schema import DownSamplingSettings
from rstar2_megatron.trajectory import Trajectory


def cut_rule(config: DownSamplingSettings, share: float) -> Callable[[Sequence[Trajectory], int], bool]:
    """A rule (graded trajectories, how many are missing) -> whether the missing ones may be cut.

    The group must have both kinds of reward and as many trajectories as are kept. Whatever the missing ones would
    have got, the counts of kept positives and negatives may differ by at most `share` of G from those without them.
    Never without down-sampling: then every trajectory is trained on.
    """
    sampling = config.down_sampling_config
    target = sampling.down_sample_to_n

    def may_cut(ended: Sequence[Trajectory], missing: int) -> bool:
        positives = sum((t.reward or 0.0) > 0 for t in ended)
        negatives = len(ended) - positives
        if not config.do_down_sampling or not positives or not negatives:
            return False
        if len(ended) < target:
            return False
        # Positives and negatives as they are, with all missing ones right, with all of them wrong.
        all_positives = torch.tensor([positives, positives + missing, positives])
        all_negatives = torch.tensor([negatives, negatives, negatives + missing])
        quotas = paper_quotas if sampling.mode == "paper" else released_quotas
        whole = all_positives + all_negatives <= target
        kept = torch.where(whole, all_positives, quotas(all_positives, all_negatives, sampling)[0])
        return bool((kept - kept[0]).abs().max() <= share * target)

    return may_cut
