"""The YAML's schema: strict, typed, one class per section, a sentence under each field (in `sections/`).

Keys keep RLinf's names wherever RLinf has the key, so that an RLinf rstar2 YAML reads the same here. Keys
that RLinf has and that mean nothing here are listed in `settings/rlinf_keys.py` and named at start; any
other key is an error (`settings/load.py` names the nearest valid one).
"""

from __future__ import annotations

from rstar2_megatron.settings.sections.actor import (
    ActorModelSettings,
    ActorSettings,
    LrSchedSettings,
    OptimSettings,
    WeightSyncSettings,
)
from rstar2_megatron.settings.sections.algorithm import (
    AlgorithmSettings,
    DownSamplingConfig,
    DownSamplingSettings,
    RefillSettings,
    SamplingParams,
)
from rstar2_megatron.settings.sections.base import (
    Section,
)
from rstar2_megatron.settings.sections.environment import (
    AgentLoopSettings,
    CodeJudgeSettings,
    DataSettings,
    EvaluationSettings,
    RewardSettings,
    ToolsSettings,
)
from rstar2_megatron.settings.sections.recipe import (
    ColdStartSettings,
    DifficultyFilterSettings,
    SFTPhaseSettings,
    SFTSettings,
)
from rstar2_megatron.settings.sections.rollout import (
    RolloutModelSettings,
    RolloutSettings,
    SGLangSettings,
)
from rstar2_megatron.settings.sections.run import (
    ClusterSettings,
    LoggerSettings,
    RunnerSettings,
    StopCondition,
)

__all__ = [
    "ActorModelSettings",
    "ActorSettings",
    "AgentLoopSettings",
    "AlgorithmSettings",
    "ClusterSettings",
    "CodeJudgeSettings",
    "ColdStartSettings",
    "DataSettings",
    "DifficultyFilterSettings",
    "DownSamplingConfig",
    "DownSamplingSettings",
    "EvaluationSettings",
    "LoggerSettings",
    "LrSchedSettings",
    "OptimSettings",
    "RefillSettings",
    "RewardSettings",
    "RolloutModelSettings",
    "RolloutSettings",
    "RunnerSettings",
    "SFTPhaseSettings",
    "SFTSettings",
    "SGLangSettings",
    "SamplingParams",
    "Section",
    "Settings",
    "StopCondition",
    "ToolsSettings",
    "WeightSyncSettings",
]


class Settings(Section):
    """A whole run."""

    cluster: ClusterSettings
    runner: RunnerSettings
    algorithm: AlgorithmSettings
    rollout: RolloutSettings
    data: DataSettings
    actor: ActorSettings = ActorSettings()
    reward: RewardSettings = RewardSettings()
    agentloop: AgentLoopSettings = AgentLoopSettings()
    tools: ToolsSettings = ToolsSettings()
    cold_start: ColdStartSettings = ColdStartSettings()
    sft: SFTSettings = SFTSettings()
    difficulty_filter: DifficultyFilterSettings = DifficultyFilterSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
