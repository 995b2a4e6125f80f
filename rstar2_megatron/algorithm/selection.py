"""Which trajectories of a step are trained on: the filters and the resampling rule that the YAML names."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from rstar2_megatron.algorithm import filters
from rstar2_megatron.algorithm.roc import ResampleResult, resample_on_correct
from rstar2_megatron.algorithm.selection_rules import RULES
from rstar2_megatron.extension.choice import own_function, resolve
from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.settings.schema import AlgorithmSettings
from rstar2_megatron.trajectory import Group, Problem, Trajectory

Filter = Callable[[Problem, Trajectory], bool]
"""Whether a graded trajectory stays. Filters come before resampling and before groups of equal reward are rejected."""

FILTERS: dict[str, Filter] = {
    "void_turns": filters.void_turns,
    "failed_calls": filters.failed_calls,
    "malformed_ending": filters.malformed_ending,
    "repeated_calls": filters.repeated_calls,
    "truncated": filters.truncated,
}
"""By their names in `algorithm.trajectory_filters`."""

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
        self._rule = own_function(_MODE, mode, "group, count, rng") if isinstance(mode, UserCode) else RULES.get(mode)

    def resample(self, groups: Sequence[Group], seeds: Sequence[str]) -> list[ResampleResult]:
        """The kept trajectories of each graded group. Indices count its usable trajectories, also those left out by a filter.

        seeds: one text a group; the same group with the same seed keeps the same trajectories.
        """
        usable = [group.usable for group in groups]
        filtered: list[dict[str, int]] = [{} for _ in groups]
        wanted = [self._wanted(group, counts) for group, counts in zip(groups, filtered)]
        if self._sampling.do_down_sampling:
            rule = functools.partial(self._choose, groups, seeds) if self._rule else None
            results = resample_on_correct(usable, self._sampling.down_sampling_config, seeds, wanted, rule)
        else:
            results = [ResampleResult.keep_all(group, stays) for group, stays in zip(usable, wanted)]
        for result, counts in zip(results, filtered):
            result.filtered = counts
        return results

    def _choose(self, groups: Sequence[Group], seeds: Sequence[str], number: int, candidates: list[int]) -> list[int]:
        """As `roc.Rule`, by the user's rule, which sees the candidates alone."""
        usable, most = groups[number].usable, self._sampling.down_sampling_config.down_sample_to_n
        group = Group(groups[number].problem, [usable[i] for i in candidates])
        assert self._rule is not None
        chosen = self._rule(group, most, random.Random(seeds[number]))
        return [candidates[i] for i in self._checked(chosen, len(candidates))]

    def _wanted(self, group: Group, counts: dict[str, int]) -> list[bool]:
        """Whether each usable trajectory stays. `counts` gets how many each filter leaves out of those that came to it."""
        wanted = [True] * len(group.usable)
        for code, keep in self._filters:
            name = code.name if isinstance(code, UserCode) else code
            before = sum(wanted)
            for index, trajectory in enumerate(group.usable):
                if wanted[index]:
                    answer = keep(group.problem, trajectory)
                    if not isinstance(answer, bool):
                        raise UserCodeError(f"{_FILTERS}={name} returned a {type(answer).__name__}; return True or False")
                    wanted[index] = answer
            counts[name] = counts.get(name, 0) + before - sum(wanted)
        return wanted

    def _checked(self, chosen: Any, size: int) -> list[int]:
        mode, most = self._sampling.down_sampling_config.mode, self._sampling.down_sampling_config.down_sample_to_n
        shown = f"{_MODE}={mode}"
        try:
            indices = sorted({int(index) for index in chosen})
        except (TypeError, ValueError):
            raise UserCodeError(f"{shown} returned {chosen!r}; return a list of indices of group.trajectories") from None
        if indices and (indices[0] < 0 or indices[-1] >= size):
            raise UserCodeError(f"{shown} returned {chosen!r} for a group of {size}; indices count group.trajectories from 0")
        if len(indices) > most:
            raise UserCodeError(f"{shown} kept {len(indices)} trajectories, more than down_sample_to_n={most}")
        return indices
