"""`rstar2_format.json` beside an exported model: the conversation format and the reward that it was trained with.

An evaluation of the model outside its run reads it, because a model in another format solves next to nothing, and another
reward scores something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rstar2_megatron.extension.user_code import all_user_code
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.settings.schema import AgentLoopSettings, RewardSettings, Settings
from rstar2_megatron.settings.sections.environment import WORDING

FILE = "rstar2_format.json"
_PLACES = {"group_name", "num_workers", "reward_type"}  # of a run's workers
_LIMITS = {"max_assistant_turns", "max_identical_calls", "max_malformed_turns"}  # of a run, not of the format


def write_format(model: Path, settings: Settings) -> None:
    """Save format and reward beside the model of a run with these settings, and the code of the user's that they name."""
    for section in (settings.agentloop, settings.reward):
        for _, code in all_user_code(section):
            code.save(model)
    agentloop = settings.agentloop.model_dump(mode="json", exclude=_LIMITS)
    reward = settings.reward.model_dump(mode="json", exclude=_PLACES)
    write_json(model / FILE, {"agentloop": agentloop, "reward": reward})


def other_wording(ours: AgentLoopSettings, theirs: AgentLoopSettings) -> str:
    """The keys, joined by commas, by which two formats write a conversation otherwise."""
    return ", ".join(f"agentloop.{name}" for name in WORDING if getattr(ours, name) != getattr(theirs, name))


def read_format(model: Path) -> dict[str, Any] | None:
    """Sections of a configuration, or None where the model has no such file. Raises ValueError for a broken one."""
    path = model / FILE
    if not path.is_file():
        return None
    try:
        sections = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}; remove it, or give --config") from None
    if not isinstance(sections, dict):
        raise ValueError(f"{path} holds no sections; remove it, or give --config")
    return sections


def wording_note(model: Path, agentloop: AgentLoopSettings, reward: RewardSettings, prompt: str, *, trained_here: bool) -> str:
    """What to do about a model that was trained in another wording, or about a prompt that asks for no answer that is read.

    trained_here: by the run's supervised start, or by a run that wrote no format. It knows what the prompt does not ask for.
    """
    if (saved := read_format(model)) is not None:
        trained = agentloop.in_own_wording().model_copy(
            update={name: value for name, value in saved.get("agentloop", {}).items() if name in WORDING}
        )
        if not (others := other_wording(agentloop, trained)):
            return ""
        return f"{others}: {model / FILE} has another; a model may solve nothing in a format that it was not trained in"
    lacking = [text for text in ("<answer>", "\\boxed") if text not in prompt]
    if trained_here or not lacking or not reward.has_math or reward.mode != "paper":
        return ""
    return (
        f"the prompt does not ask for {' and '.join(lacking)}, and reward.mode=paper reads the last \\boxed{{...}} inside the "
        "last <answer>; ask for them in agentloop.user_prefix or in the problems, or set reward.mode=released"
    )
