"""`python -m rstar2_megatron.try_out`: a tool, a reward, an environment or a loop tried without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.records.trajectory_row import trajectory_row
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome, Trajectory
from rstar2_megatron.try_out import main

ROOT = Path(__file__).resolve().parents[1]
SEARCH = str(ROOT / "examples/extend/search_tool.py:search")
DOC = "    '''Wait.\n\n    Args:\n        s: Seconds.\n    '''\n"


def test_a_good_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([SEARCH, "--args", '{"query": "sum of squares", "limit": 1}', "--args", '{"query": "?"}']) == 0
    out = capsys.readouterr().out
    assert '"description": "Words to look for, e.g. \\"sum of squares\\"."' in out
    assert '["The sum of the first n squares is n(n+1)(2n+1)/6."]' in out
    assert "reason: the query has no words; write what to look for" in out
    assert '{}: search needs the argument "query".' in out
    assert '{"query": 1}: Argument "query" must be of type string, got number.' in out


def test_the_state_of_a_class_goes_from_call_to_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "class Count:\n    def __init__(self, start):\n        self.value = start\n"
        "    def __call__(self, by: int, problem) -> int:\n"
        "        '''Count.\n\n        Args:\n            by: How much.\n        '''\n"
        "        self.value += by * problem.extra['factor']\n        return self.value\n"
    )
    words = [f"{tmp_path}/own.py:Count", "--settings", '{"start": 5}', "--extra", '{"factor": 10}']
    assert main([*words, "--args", '{"by": 1}', "--args", '{"by": 2}']) == 0
    out = capsys.readouterr().out
    assert 'Count {"by": 1}\n' in out and "    15\n" in out and "    35\n" in out


def test_a_tool_that_fails_holds_up_or_is_slow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import time\nasync def hold(s: float) -> None:\n" + DOC + "    time.sleep(s)\n"
        "def slow(s: float) -> None:\n" + DOC + "    time.sleep(s)\n    return 1 / s\n"
    )
    assert main([f"{path}:hold", "--args", '{"s": 0.5}']) == 0
    assert "It held up every other trajectory" in capsys.readouterr().out
    assert main([f"{path}:slow", "--args", '{"s": 9}', "--timeout-s", "0.05"]) == 1
    assert "reason: slow took longer than 0.05 s" in capsys.readouterr().out
    assert main([f"{path}:slow", "--args", '{"s": 0}']) == 1
    assert f"own.py:slow failed: {path}:16, in slow: ZeroDivisionError" in capsys.readouterr().out


def test_rewards_of_both_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = ROOT / "examples/extend/rewards.py"
    right, wrong = '{"response": "\\\\boxed{4}", "solutions": ["4"]}', '{"response": "\\\\boxed{5}", "solutions": ["4"]}'
    assert main([f"{rewards}:compute_score", "--args", right, "--args", wrong]) == 0
    out = capsys.readouterr().out
    assert "ms: reward 1 {'answer_chars': 1.0}\n" in out and "ms: reward 0 {'answer_chars': 1.0}\n" in out
    assert main([f"{rewards}:tool_use"]) == 0
    assert "ms: reward 0 \n" in capsys.readouterr().out
    path = tmp_path / "own.py"
    path.write_text("def score(problem, trajectory, base):\n    return base / problem.extra['weight']\n")
    assert main([f"{path}:score", "--extra", '{"weight": 2}', "--settings", '{"base": 1}']) == 0
    assert "ms: reward 0.5 \n" in capsys.readouterr().out
    assert main([f"{path}:score", "--settings", '{"base": 1}']) == 1
    assert f"dropped:\n    reward own.py:score failed: {path}:2, in score: KeyError: 'weight'" in capsys.readouterr().out
    assert main([f"{path}:score"]) == 2
    assert "cannot be called with (problem, trajectory)" in capsys.readouterr().err


def test_a_reward_scores_what_a_run_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ToolCall("python_code_with_standard_io", {"code": "print(4)"}, ToolOutcome.OK, "4", 0.1)
    problem = Problem("p", [{"role": "user", "content": "2 + 2?"}], ["4"])
    attempts = [
        Trajectory(
            "p", i, assistant_texts=["a", "\\boxed{4}"], tool_calls=calls, finish_reason=FinishReason.ANSWERED, reward=1.0
        )
        for i, calls in enumerate(([call], []))
    ]
    write_jsonl(tmp_path / "trajectories.jsonl", (trajectory_row(problem, t) for t in attempts))
    words = [f"{ROOT}/examples/extend/rewards.py:tool_use", "--trajectories", str(tmp_path / "trajectories.jsonl")]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "p#0: was 1.0, now 1", "p#1: was 1.0, now 0", "2 trajectories: mean reward was 1, now 0.5; 0 failed",
    ]  # fmt: skip
    (tmp_path / "trajectories.jsonl").write_text('{"finish_reason": "answered"}\n')
    assert main(words) == 2
    assert "a row is no trajectory of a run (KeyError: 'tool_calls')" in capsys.readouterr().err


def test_one_solution_may_be_a_text_or_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text("def score(problem, trajectory):\n    return float(problem.solutions == ['42'])\n")
    for solutions in ('"42"', "42", '["42"]'):
        assert main([f"{path}:score", "--args", f'{{"response": "x", "solutions": {solutions}}}']) == 0
        assert "ms: reward 1 " in capsys.readouterr().out


def test_an_environment_is_played_with_given_turns(capsys: pytest.CaptureFixture[str]) -> None:
    game = [f"{ROOT}/examples/extend/game.py:HigherLower", "--settings", '{"guesses": 3}']
    first = ["--args", '{"response": "I say 3", "solutions": ["7"]}']
    assert main([*game, *first]) == 0
    out = capsys.readouterr().out
    assert (
        "You have 3 guesses." in out and "ms: higher\n" in out and "not over: give the next turn by --args; reward 0.0" in out
    )
    assert main([*game, *first, "--args", '{"response": "so 7"}']) == 0
    assert "\nover; reward 1.0\n" in capsys.readouterr().out
    assert main(game) == 1
    assert "dropped:\n    game.py:HigherLower failed: " in capsys.readouterr().out
    assert main([*game[:1], "--settings", '{"gusses": 3}']) == 2
    assert "cannot be called with agentloop.environment_settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("await dialogue.generate()\n    return 0.5", 0, "over; reward 0.5"),
        (
            "while await dialogue.generate() != 'b': dialogue.append('no')",
            0,
            'ms: no\n\nturn "b"\n\nover; reward None\n    With',
        ),
        ("await dialogue.generate()\n    await dialogue.generate()", 1, "own.py:f: generate was called twice"),
        ("await dialogue.generate()\n    dialogue.finish('x')", 1, "own.py:f: the loop gave the reward 'x'"),
        ("await dialogue.generate()\n    await dialogue.call_tool('t', {})", 1, "try_out runs no tools for a loop"),
        ("await dialogue.generate()\n    return problem.extra['x']", 1, "own.py:3, in f: KeyError: 'x'"),
    ],
)
def test_a_loop_gets_the_given_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, code: int, said: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"async def f(problem, dialogue):\n    {body}\n")
    assert main([f"{path}:f", "--args", '{"response": "a"}', "--args", '{"response": "b"}']) == code
    assert said in capsys.readouterr().out


def test_a_loop_by_the_place_of_its_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "async def f(problem, d):\n    return len(await d.generate())\n"
        "async def g(problem, trajectory):\n    return len('x' * trajectory.response_tokens) / trajectory.response_tokens\n"
    )
    assert main([f"{path}:f", "--args", '{"response": "abc"}']) == 0
    assert "over; reward 3.0" in capsys.readouterr().out
    assert main([f"{path}:g", "--args", '{"response": "abc"}']) == 0
    assert "ms: reward 1 " in capsys.readouterr().out


@pytest.mark.parametrize("code", [f"{ROOT}/examples/extend/rewards.py:tool_use", f"{ROOT}/examples/extend/game.py:HigherLower"])
def test_other_keys_of_args_are_refused(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([code, "--args", '{"response": "7", "solution": ["7"]}']) == 2
    assert "--args takes response and solutions here, not 'solution'" in capsys.readouterr().err


def test_what_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("{x}", "[1]"):
        with pytest.raises(SystemExit, match="2"):
            main([SEARCH, "--args", words])
        assert f"{words} is not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("search", "neither path/to/file.py:name nor"),
        (SEARCH + "es", "did you mean search?"),
        ("json:loads", "json:loads takes `**kw`, which no model can fill by name; write each parameter with its type (read as"),
    ],
)
def test_what_is_no_tool(reference: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([reference]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class f:\n    def __call__(self, problem, trajectory): return 1", "it is a class; make an instance, `name = f(...)`"),
        ("def f(problem, dialogue): return 1", "f is no async function; a loop is `async def loop(problem, dialogue)`"),
        ("async def f(problem, dialogue): yield 1", "f is no async function; a loop is `async def loop(problem, dialogue)`"),
        (
            "class Game:\n    def reset(self, problem): ...\n    def step(self, text): ...\nf = Game()",
            "f is a Game; an environment is a class with reset(problem) and step(text)",
        ),
        ("def f(problem, row): return 1", "parameter 'row' of own.py:f has no type; write e.g. `row: str`"),
        ("def f(problem, trajectory, scale): return 1", "and reward.arguments={}: missing a required argument: 'scale'"),
    ],
)
def test_what_is_nearly_one_of_them_is_told_so(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(text)
    assert main([f"{tmp_path}/own.py:f"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("parameters", ["row: Problem, rollout: 'Trajectory'", "solution_str, ground_truth"])
def test_a_reward_by_its_parameters(parameters: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "from rstar2_megatron.trajectory import Problem, Trajectory\n"
    (tmp_path / "own.py").write_text(f"{names}def score({parameters}):\n    return 0.5\n")
    assert main([f"{tmp_path}/own.py:score"]) == 0
    assert "reward 0.5" in capsys.readouterr().out
