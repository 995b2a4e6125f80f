"""The conversation format of a model outside its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rstar2_megatron.evaluation.__main__ import configure, parse
from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.records.model_format import FILE, wording_note, write_format
from rstar2_megatron.settings.load import load
from rstar2_megatron.settings.schema import AgentLoopSettings, OwnToolSettings
from tests.runs.inputs.models import CONFIG


def test_a_model_outside_its_run_has_its_format_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same weights solve nothing in another wording: the format travels with the model, or a note says what is assumed."""
    model = tmp_path / "moved"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    words = ["--model", str(model), "--data", "problems.jsonl"]
    settings, _ = configure(parse(words))
    assert settings.agentloop == AgentLoopSettings()
    assert "does not say which format it was trained with" in capsys.readouterr().err
    trained = load("rstar2-tiny-cpu", ["reward.mode=released"]).settings
    write_format(model, trained)
    settings, sampling = configure(parse([*words, "agentloop.user_prefix=Now"]))
    assert f"the format is that of {model / FILE}" in capsys.readouterr().err
    assert settings.agentloop.system_prompt == trained.agentloop.system_prompt
    assert settings.reward.mode == "released"
    assert settings.agentloop.user_prefix == "Now" and settings.agentloop.max_tool_response_length == 120
    assert sampling.agentloop.max_assistant_turns == 30
    (model / FILE).write_text("{")
    with pytest.raises(ValueError, match="remove it, or give --config"):
        configure(parse(words))


def test_training_goes_on_in_the_format_that_the_model_knows_or_says_so(tmp_path: Path) -> None:
    own, tiny = AgentLoopSettings(), load("rstar2-tiny-cpu").settings

    def note(agentloop: AgentLoopSettings) -> str:
        return wording_note(tmp_path, agentloop, tiny.reward, "a prompt", trained_here=True)

    assert note(own) == ""
    write_format(tmp_path, tiny)
    assert note(tiny.agentloop) == ""
    assert note(own).startswith("agentloop.system_prompt, agentloop.user_prefix") and FILE in note(own)
    assert load("rstar2-tiny-cpu").settings.agentloop.in_own_wording().system_prompt is None


def test_a_missing_file_is_named_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        configure(parse(["--model", "model", "--data", "problems.jsonl", "reward.function=mine.py:score"]))
    places = f"{tmp_path}/model/mine.py or {tmp_path}/mine.py"
    assert str(error.value) == f"reward.function='mine.py:score': there is no file {places}"


@pytest.mark.parametrize("form", ["function", "terms"])
def test_what_scores_a_model_travels_with_it(form: str, tmp_path: Path) -> None:
    """Without it the math grader would score a model of another reward, without a word."""
    trained, model, code = tmp_path / "trained", tmp_path / "moved", tmp_path / "mine.py"
    trained.mkdir()
    (trained / "config.json").write_text(json.dumps(CONFIG))
    code.write_text("def games(problem, trajectory, scale):\n    return 0.25 * scale\n")
    own = {
        "function": [f"reward.function={code}:games"],
        "terms": [f"reward.terms=[{{name: games, function: '{code}:games', weight: 2.0}}, {{name: math, function: math}}]"],
    }[form]
    words = [*own, "reward.positive_above=0.4", "reward.arguments={scale: 3}", "reward.num_workers=7"]
    write_format(trained, load("rstar2-tiny-cpu", words).settings)
    code.unlink()
    trained.rename(model)
    evaluated = ["--model", str(model), "--data", "problems.jsonl"]
    reward = configure(parse(evaluated))[0].reward
    weights = {term.name: term.weight for term in reward.weighted}
    assert weights == ({"games": 1.0} if form == "function" else {"games": 2.0, "math": 1.0})
    first = reward.weighted[0].function
    assert isinstance(first, UserCode) and first.load()(None, None, **reward.arguments) == 0.75
    assert reward.positive_above == 0.4 and reward.num_workers != 7
    assert configure(parse([*evaluated, "reward.function=math", "reward.terms=[]"]))[0].reward.has_math


def test_own_tools_travel_with_the_model(tmp_path: Path) -> None:
    """Also when their file has changed since, or is on another machine."""
    trained, model, code = tmp_path / "trained", tmp_path / "moved", tmp_path / "mine.py"
    trained.mkdir()
    (trained / "config.json").write_text(json.dumps(CONFIG))
    doc = "'''Look up.\\n\\n    Args:\\n        x: What.\\n    '''"
    code.write_text(f"def find(x: str) -> str:\n    {doc}\n    return 'then'\n".replace("\\n", "\n"))
    write_format(trained, load("rstar2-tiny-cpu", [f"agentloop.tools=[{code}:find]"]).settings)
    code.write_text("def find(x): return 'now'\n")
    trained.rename(model)
    settings, _ = configure(parse(["--model", str(model), "--data", "problems.jsonl"]))
    (tool,) = settings.agentloop.tools
    assert isinstance(tool, OwnToolSettings) and tool.use.load()("x") == "then"
