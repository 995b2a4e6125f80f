"""Decides whether the unfinished trajectories of a group can still change the selection of resample-on-correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rstar2_megatron.algorithm.roc import paper_quotas, released_quotas
from rstar2_megatron.settings.schema import AlgorithmSettings
from rstar2_megatron.trajectory import Trajectory


def cut_rule(algorithm: AlgorithmSettings, share: float) -> Callable[[Sequence[Trajectory], int], bool]:
    """A rule (graded trajectories, number of missing ones) -> whether the missing trajectories may be cut.

    The group must have positives, negatives and at least G trajectories. For all possible rewards of the missing
    trajectories, the counts of kept positives and negatives must stay within `share` of G of the counts without them.
    Without down-sampling the rule is always False, because every trajectory is trained on, and so is it under another
    rule than resample-on-correct and under filters, whose choice it does not know.
    """
    sampling = algorithm.down_sampling.down_sampling_config
    target = sampling.down_sample_to_n
    quotas = paper_quotas if sampling.mode == "paper" else released_quotas
    resamples = algorithm.down_sampling.do_down_sampling and sampling.mode in ("paper", "released")
    is_known = resamples and not algorithm.trajectory_filters

    def kept(positives: int, negatives: int) -> int:
        """Positives that are trained on."""
        return positives if positives + negatives <= target else quotas(positives, negatives, sampling)[0]

    def may_cut(ended: Sequence[Trajectory], missing: int) -> bool:
        positives = sum(t.is_positive for t in ended)
        negatives = len(ended) - positives
        if not is_known or not positives or not negatives or len(ended) < target:
            return False
        now = kept(positives, negatives)
        extremes = kept(positives + missing, negatives), kept(positives, negatives + missing)
        return all(abs(then - now) / target <= share for then in extremes)

    return may_cut
