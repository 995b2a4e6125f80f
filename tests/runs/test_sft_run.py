"""What a run of supervised fine-tuning says and keeps of the format that its rows teach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.runs.base_run import StopSignals
from rstar2_megatron.runs.sft_run import SFTRun
from rstar2_megatron.settings.load import load, to_plain
from rstar2_megatron.settings.schema import AgentLoopSettings


def read(row: dict[str, Any], model: Path, directory: Path, *more: str) -> AgentLoopSettings:
    (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = ["runner.task_type=sft", f"sft.train_data_paths=[{directory}/rows.jsonl]", f"rollout.model.model_path={model}"]
    run = SFTRun(load("rstar2-tiny-cpu", [*words, *more]).settings, StopSignals())
    try:
        run.read()
        return run.settings.agentloop
    finally:
        run.close()


def test_messages_teach_this_projects_format_whatever_the_yaml_has(
    memorised_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = load("rstar2-tiny-cpu").settings.agentloop
    chat = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    words = ["agentloop.system_prompt=null", "agentloop.user_prefix=null", "agentloop.chat_template=tokenizer"]
    assert read({"messages": chat}, memorised_model, tmp_path, *words) == given.in_own_wording()
    assert "agentloop.chat_template: not used; rows of messages" in capsys.readouterr().out
    assert read({"messages": chat}, memorised_model, tmp_path) == given  # may be the rows' own system message
    assert "agentloop.system_prompt, agentloop.user_prefix: not used; rows of messages" in capsys.readouterr().out
    assert read({"segments": [["1 + 1", 0], ["2", 1]]}, memorised_model, tmp_path) == given
    assert "not used" not in capsys.readouterr().out


def test_a_resume_names_other_settings_and_refuses_other_rows(
    memorised_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"segments": [["1 + 1", 0], ["2", 1]]}) + "\n")
    words = [
        "runner.task_type=sft",
        f"sft.train_data_paths=[{tmp_path}/rows.jsonl]",
        f"rollout.model.model_path={memorised_model}",
    ]
    then = to_plain(load("rstar2-tiny-cpu", [*words, "sft.lr=1e-3"]).settings)
    run = SFTRun(load("rstar2-tiny-cpu", [*words, "sft.lr=1e-4"]).settings, StopSignals())
    try:
        run.read()
        run._compare({"step": 1})  # of an older version
        capsys.readouterr()
        run._compare({"step": 1, "rows": 1, "settings": then})
        assert "the checkpoint is of a run with sft.lr=0.001, now 0.0001" in capsys.readouterr().out
        with pytest.raises(DataError, match="made with 2 rows, now there are 1; use the same data files"):
            run._compare({"step": 1, "rows": 2})
    finally:
        run.close()
