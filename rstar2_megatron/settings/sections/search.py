"""Section `search`: rStar-Math's search over steps (arXiv 2501.04519). A step is one assistant turn with its tool calls."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rstar2_megatron.settings.sections.base import Section

SearchMode = Literal["mcts", "beam", "sampling"]


class SearchSettings(Section):
    mode: SearchMode = "mcts"
    """mcts; beam: the best prefixes of each depth; sampling: independent attempts, to compare with."""
    rules: Literal["paper", "released"] = "paper"
    """released: as the released code decides (docs/search.md lists the differences)."""
    rollouts: int = Field(16, ge=1)
    """Descents of mcts; attempts of sampling. Beam search makes one pass."""
    more_rollouts: int = Field(0, ge=0)
    """Further rollouts of mcts for a problem without a right answer (the paper's training data: 16); it uses the answers."""
    candidates: int = Field(8, ge=1)
    """Continuations that the policy proposes for a node, all at once."""
    depth: int = Field(16, ge=1)
    """Most steps of a solution."""
    exploration: float = Field(2.0, ge=0)
    """The constant c of UCT."""
    beam_width: int = Field(8, ge=1)
    """Prefixes that beam search keeps at each depth."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_step_tokens: int = Field(2048, ge=1)
    """Longest generated turn in tokens; a longer one ends its path without an answer."""
    errors_threshold: int | None = Field(2, ge=1)
    """Consecutive steps with a tool error that end a path; null: any number is allowed."""
    guide: Literal["answers", "scores", "answers+scores"] | None = None
    """What gives values. answers: +1 or -1 by the known answer of finished solutions (terminal-guided). scores: the scorer, at
    prefixes and solutions. answers+scores: answers for solutions, the scorer for prefixes (training data of later rounds).
    null: scores when there is a reward model or the mode is beam, else answers.
    """
    reward_model: str | None = None
    """Hugging Face directory of a process preference model (runner.task_type=preference): the scorer. null: the policy's own
    likelihood."""
    reward_memory: float = Field(0.45, gt=0, lt=1)
    """Share of rollout.gpu_memory_utilization for the reward model's engine, which shares the policy's GPUs."""
    num_problems: int = Field(-1, ge=-1)
    """Of runner.task_type=search: only the first N problems of data.train_data_paths; -1: all."""
    trees: int | None = Field(None, ge=1)
    """Problems under way on an engine at a time; null: as many as fill rollout.max_running_requests twice."""
    seed: int = Field(0, ge=0)
    """Every candidate has its own seed, made of this one, the problem and its place in the tree."""
