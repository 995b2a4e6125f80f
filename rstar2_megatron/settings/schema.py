"""The YAML's schema: strict, typed, one class per section (in `sections/`), a sentence under each field.

Keys keep RLinf's names wherever RLinf has the key. `settings/rlinf_keys.py` lists RLinf's keys without meaning here. Any
other key is an error, for which `settings/load.py` names the nearest valid key.
"""

from __future__ import annotations

from rstar2_megatron.settings.sections.actor import (
    ActorModelSettings,
    ActorSettings,
    LrSchedSettings,
    OptimSettings,
    WeightSyncSettings,
)
from rstar2_megatron.settings.sections.algorithm import AlgorithmSettings, DownSamplingConfig, SamplingParams
from rstar2_megatron.settings.sections.base import Section
from rstar2_megatron.settings.sections.environment import (
    AgentLoopSettings,
    CodeJudgeSettings,
    DataSettings,
    EvaluationSettings,
    McpSettings,
    OwnToolSettings,
    RewardSettings,
    ToolsSettings,
)
from rstar2_megatron.settings.sections.preference import PreferenceSettings
from rstar2_megatron.settings.sections.recipe import ColdStartSettings, DifficultyFilterSettings, SFTPhaseSettings, SFTSettings
from rstar2_megatron.settings.sections.rollout import RolloutModelSettings, RolloutSettings
from rstar2_megatron.settings.sections.run import AssumedNode, ClusterSettings, ProfilerSettings, RunnerSettings, StopCondition
from rstar2_megatron.settings.sections.search import SearchSettings


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
    search: SearchSettings = SearchSettings()
    preference: PreferenceSettings = PreferenceSettings()
