"""Which trajectories of a step are trained on: the filters and the resampling rule that the YAML names."""

from __future__ import annotations

import operator
import random
import reprlib
from collections.abc import Sequence

import numpy as np

from rstar2_megatron.algorithm.filters import FILTERS
from rstar2_megatron.algorithm.roc import ResampleResult, resample_on_correct
from rstar2_megatron.algorithm.selection_rules import RULES
from rstar2_megatron.extension.choice import own_function, resolve
from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.settings.schema import AlgorithmSettings
from rstar2_megatron.trajectory import Group

_MODE = "algorithm.down_sampling.down_sampling_config.mode"
_FILTERS = "algorithm.trajectory_filters"


class Selection:
    """The rules of one configuration, loaded once. Raises UserCodeError."""

    def __init__(self, algorithm: AlgorithmSettings) -> None:
        self._sampling = algorithm.down_sampling
        self._filters = [
            (code, resolve(_FILTERS, code, FILTERS, "problem, trajectory")) for code in algorithm.trajectory_filters
        ]
        mode = self._sampling.down_sampling_config.mode
        self._rule = (
            own_function(_MODE, mode, "group, count, rng", may_yield=True) if isinstance(mode, UserCode) else RULES.get(mode)
        )

    def resample(self, groups: Sequence[Group], seeds: Sequence[str]) -> list[ResampleResult]:
        """The kept trajectories of each graded group. Indices count its usable trajectories, also those left out by a filter.

        seeds: one text a group; the same group with the same seed keeps the same trajectories.
        """
        sampling = self._sampling
        usable = [group.usable for group in groups]
        filtered: list[dict[str, int]] = [{} for _ in groups]
        wanted = [self._wanted(group, counts) for group, counts in zip(groups, filtered)]
        if sampling.do_down_sampling:
            results = resample_on_correct(usable, sampling.down_sampling_config, seeds, wanted)
            for group, seed, result in zip(groups, seeds, results):
                if self._rule and not result.rejected:
                    result.keep(self._chosen(Group(group.problem, list(result.kept)), seed))
        else:
            results = [ResampleResult(group, list(range(len(group)))) for group in usable]
            for result, stays in zip(results, wanted):
                result.keep([i for i, stay in enumerate(stays) if stay])
        for result, counts in zip(results, filtered):
            result.filtered = counts
        return results

    def _wanted(self, group: Group, counts: dict[str, int]) -> list[bool]:
        """Whether each usable trajectory stays. `counts` gets how many each filter leaves out of those that came to it."""
        wanted = [True] * len(group.usable)
        for code, keep in self._filters:
            name = code.name if isinstance(code, UserCode) else code
            before = sum(wanted)
            for index, trajectory in enumerate(group.usable):
                if wanted[index]:
                    answer = keep(group.problem, trajectory)
                    if not isinstance(answer, bool | np.bool_):
                        raise UserCodeError(f"{_FILTERS}={code} returned a {type(answer).__name__}; return True or False")
                    wanted[index] = bool(answer)
            counts[name] = counts.get(name, 0) + before - sum(wanted)
        return wanted

    def _chosen(self, group: Group, seed: str) -> list[int]:
        """What the rule keeps of `group`, which holds its candidates alone."""
        assert self._rule is not None
        config, size = self._sampling.down_sampling_config, len(group.trajectories)
        places = {id(trajectory): place for place, trajectory in enumerate(group.trajectories)}
        chosen = self._rule(group, config.down_sample_to_n, random.Random(seed))
        shown, said = f"{_MODE}={config.mode}", reprlib.repr(chosen)
        try:
            given = chosen.tolist() if hasattr(chosen, "tolist") else list(chosen)
            if any(isinstance(index, bool) for index in given):
                raise TypeError("a mask")
            indices = sorted({operator.index(index) for index in given})
        except TypeError:
            raise UserCodeError(f"{shown} returned {said}; return a list of indices of group.trajectories") from None
        if indices and (indices[0] < 0 or indices[-1] >= size):
            raise UserCodeError(f"{shown} returned {said} for a group of {size}; indices count group.trajectories from 0")
        if len(indices) > config.down_sample_to_n:
            raise UserCodeError(
                f"{shown} kept {len(indices)} trajectories, more than down_sample_to_n={config.down_sample_to_n}"
            )
        return sorted(places[id(group.trajectories[index])] for index in indices)  # a rule may have sorted the group
