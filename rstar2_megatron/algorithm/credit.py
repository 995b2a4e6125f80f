"""From the rewards of the kept trajectories to their advantages, of whole trajectories or of turns.

Selection comes before and sees graded rewards: filters, which trajectories are positive, groups of equal reward and every
rule of resampling. The overlong punishment is added here, to what was kept, so a group of equal graded rewards is rejected
also when its lengths differ. The group's mean and standard deviation are those of the punished rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rstar2_megatron.algorithm.advantage import group_advantages
from rstar2_megatron.algorithm.filters import turns
from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.settings.schema import AlgorithmSettings
from rstar2_megatron.trajectory import FinishReason, ToolOutcome, Trajectory


def advantages_of(groups: Sequence[Sequence[Trajectory]], algorithm: AlgorithmSettings) -> np.ndarray:
    """Advantages of the graded trajectories of kept groups, float64, one group after another.

    [trajectories]; with `algorithm.turn_returns` [trajectories, turns], 0 behind a trajectory's last turn. Raises as
    `group_advantages`.
    """
    if algorithm.turn_returns.discount is not None:
        return turn_advantages([[turn_returns(t, algorithm) for t in group] for group in groups], algorithm.adv_type)
    rewards = [[punished_reward(t, algorithm) for t in group] for group in groups]
    return np.array([a for row in group_advantages(rewards, algorithm.adv_type) for a in row], np.float64)


# ------------------------------------------------------------------------------------------------ overlong


def punishment(response_tokens: int, algorithm: AlgorithmSettings) -> float:
    """DAPO (arXiv 2503.14476), equation 13, times `overlong.penalty`: in [-penalty, 0], in units of reward.

    L_max is `sampling_params.max_new_tokens` and L_cache `overlong.buffer_tokens`. Like L_max, the response's length in
    tokens counts tool responses: 0 up to L_max - L_cache, then linear to -penalty at L_max.
    """
    buffer = algorithm.overlong.buffer_tokens
    if not buffer:
        return 0.0
    over = response_tokens - (algorithm.sampling_params.max_new_tokens - buffer)
    return -algorithm.overlong.penalty * min(max(over / buffer, 0.0), 1.0)


def punished_reward(trajectory: Trajectory, algorithm: AlgorithmSettings) -> float:
    """The graded reward and `punishment`."""
    assert trajectory.reward is not None, "selection keeps graded trajectories"
    return trajectory.reward + punishment(trajectory.response_tokens, algorithm)


def overlong_metrics(kept: Sequence[Trajectory], algorithm: AlgorithmSettings) -> dict[str, float]:
    """The mean punishment of the kept trajectories; nothing when it is off or none is kept."""
    if not algorithm.overlong.buffer_tokens or not kept:
        return {}
    total = sum(punishment(t.response_tokens, algorithm) for t in kept)
    return {"actor/overlong_punishment": total / len(kept)}


# ------------------------------------------------------------------------------------------------ turns


def turn_returns(trajectory: Trajectory, algorithm: AlgorithmSettings) -> list[float]:
    """GTPO (arXiv 2511.14846), turn-level rewards and their discounted returns, one for each turn, in units of reward.

    The return of turn j of T is `sum_(k = j to T) discount^(k - j) r_k`. A turn with a call that could not be run has
    `r_k = -malformed_penalty`, others 0; the last has the trajectory's punished reward besides. The paper's shaping of wrong
    answers by the similarity of their code to that of right ones is left out.
    """
    settings = algorithm.turn_returns
    assert settings.discount is not None
    rewards = [0.0] * len(trajectory.spans)  # a turn is a run of generated tokens
    if not rewards:
        return []
    for number, (_, calls) in zip(range(len(rewards)), turns(trajectory)):
        if any(call.outcome is ToolOutcome.MALFORMED for call in calls):
            rewards[number] -= settings.malformed_penalty
    if trajectory.finish_reason is FinishReason.MALFORMED_CALLS:  # the calls of the last turn were not noted
        rewards[-1] -= settings.malformed_penalty
    rewards[-1] += punished_reward(trajectory, algorithm)
    for number in reversed(range(len(rewards) - 1)):
        rewards[number] += settings.discount * rewards[number + 1]
    return rewards


def turn_advantages(groups: Sequence[Sequence[Sequence[float]]], kind: str | UserCode) -> np.ndarray:
    """float64 [trajectories, turns]: the rule `kind` of `algorithm.adv_type` over the same turn of each group.

    groups: the returns of the turns of each trajectory. Turn j is compared among the trajectories that have a turn j, so one
    that alone goes on gets 0 from there.
    """
    flat = [returns for group in groups for returns in group]
    advantages = np.zeros((len(flat), max(map(len, flat), default=0)))
    rows, places, first = [], [], 0
    for group in groups:
        for turn in range(max(map(len, group), default=0)):
            members = [i for i, returns in enumerate(group) if len(returns) > turn]
            rows.append([group[i][turn] for i in members])
            places.append(([first + i for i in members], turn))
        first += len(group)
    for place, row in zip(places, group_advantages(rows, kind)):
        advantages[place] = row
    return advantages
