"""The trajectory page: from graded groups through trajectories.jsonl to what a browser shows."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from rstar2_megatron.algorithm.roc import Rejection, ResampleResult, resample_on_correct
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.samples import choose_shown, group_rows
from rstar2_megatron.records.trajectory_row import FLOATS, INTS, pack, unpack
from rstar2_megatron.report.trajectories import (
    RowPlace,
    build_page,
    load_rows,
    main,
    read_index,
    render,
    select_steps,
    shaded_turns,
)
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import FinishReason, Group, Problem, ToolCall, ToolOutcome, Trajectory, generated_spans
from tests.report.chromium import document, find_chromium, needs_chromium, screenshot
from tests.rollout.tiny import make_model

ATTACK = "</script><script>document.title='pwned'</script><img src=x onerror=document.title='pwned'>"
OUTCOMES = (ToolOutcome.OK, ToolOutcome.ERROR, ToolOutcome.TIMEOUT, ToolOutcome.MALFORMED)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tokenizer"))


def attempt(tokenizer, query_id: str, index: int, right: bool) -> Trajectory:
    """Two turns around one tool call; attempt 3 has none and was cut by the length limit."""
    t = Trajectory(query_id, index, prompt_ids=[1, 2])
    cut = index == 3
    texts = ["thinking without end π≈3.14"] if cut else ["let me compute 6*7", f"so it is {ATTACK if index == 1 else 42}"]
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        t.assistant_texts.append(text)
        t.append(ids, [-1.0] * len(ids))
        if number == 0 and not cut:
            tool = tokenizer.encode("<tool_response>42</tool_response>", add_special_tokens=False)
            t.append(tool, None)
            arguments = {"code": "print(6*7)\n# line two", "input": "5"}
            t.tool_calls.append(ToolCall("python", arguments, OUTCOMES[index % 4], f"stdout: {ATTACK}", 0.25))
    t.finish_reason = FinishReason.LENGTH_LIMIT if cut else FinishReason.ANSWERED
    t.reward, t.grade_detail, t.answer = (float(right), "correct" if right else "no_box", "42" if right else None)
    return t


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with two steps of two groups; the actor's log-probs differ from the engine's by 0.05 to 2."""
    directory = tmp_path_factory.mktemp("a-run")
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = JsonlFile(directory / "trajectories.jsonl")
    config = DownSamplingConfig(down_sample_to_n=4)
    for step in (1, 2):
        groups, results = [], []
        for name, wrong in (("mixed", (0, 3, 5)), ("hopeless", range(8))):
            problem = Problem(f"{name}-{step}", [{"role": "user", "content": f"What is 6*7? {ATTACK}"}], ["42"])
            group = Group(problem, [attempt(tokenizer, problem.query_id, i, i not in wrong) for i in range(8)])
            groups.append(group)
            results += resample_on_correct([group.usable], config, [f"{step}-{problem.query_id}"])
        shown = choose_shown(groups, results, 16)
        for group in shown:
            group.actor_logprobs = [
                t.rollout_logprobs + np.where(np.arange(len(t.loss_mask)) % 2, 0.05, 2.0) * t.loss_mask
                for t in group.trajectories
            ]
        samples.append(*(row for group in shown for row in group_rows(step, group)))
    (directory / "config.yaml").write_text(f"rollout: {{model: {{model_path: '{model}'}}}}\n")
    return directory


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    assert main([str(run)]) == 0
    return run / "trajectories.html"


def read_rows(run: Path) -> list[dict]:
    entries, messages = read_index(run / "trajectories.jsonl")
    assert not messages
    return load_rows(run / "trajectories.jsonl", entries)


# ------------------------------------------------------------------------------------------- what is written


def test_rows_say_what_was_kept_and_why(run: Path) -> None:
    rows = read_rows(run)
    assert len(rows) == 32
    mixed = [row for row in rows if row["query_id"] == "mixed-1"]
    assert sum(row["kept"] for row in mixed) == 4
    assert {row["rejected"] for row in rows} == {None, "all_wrong"}
    assert mixed[1]["penalty"] == {"error": 1.0, "format": 1.0, "answers": 0}
    assert mixed[3]["penalty"]["error"] == 0.5  # no tool call


def test_groups_that_are_trained_on_are_shown_first() -> None:
    def group(name: str) -> Group:
        finished = Trajectory(name, 0, [1], finish_reason=FinishReason.ANSWERED, reward=0.0)
        return Group(Problem(name, [], ["1"]), [finished] * 4)

    groups = [group(name) for name in "abc"]
    results = [ResampleResult([], [], Rejection.NONE if name == "b" else Rejection.ALL_WRONG) for name in "abc"]
    assert [s.group.problem.query_id for s in choose_shown(groups, results, 1)] == ["b"]
    assert [s.group.problem.query_id for s in choose_shown(groups, results, 5)] == ["a", "b"]  # in the step's order
    assert choose_shown(groups, results, 0) == []


def test_packed_lists_come_back() -> None:
    assert unpack(pack([0, 151_935, 7], INTS), INTS) == [0, 151_935, 7]
    assert unpack(pack([0.5, -1e9, 1e-3], FLOATS), FLOATS) == [0.5, -65504.0, pytest.approx(1e-3, rel=1e-3)]
    with pytest.raises(ValueError, match="not packed"):
        unpack("AAAA", INTS)


def test_generated_spans() -> None:
    def spans(*mask: int) -> list[tuple[int, int]]:
        return generated_spans(np.array(mask, np.uint8))

    assert spans(1, 1, 0, 0, 1, 0) == [(0, 2), (4, 5)]
    assert spans(0, 1) == [(1, 2)] and spans() == []


# ------------------------------------------------------------------------------------------------- the page


def test_shading_covers_each_turn_exactly(run: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = read_rows(run)
    for row in rows:
        turns = shaded_turns(row, tokenizer)
        assert turns is not None
        assert ["".join(text for text, _, _ in pieces) for pieces in turns] == row["turns"]
        assert {level for pieces in turns for _, level, _ in pieces} <= {0, 2, 4}
    assert shaded_turns(rows[0] | {"logprob_diff": pack([0.0], FLOATS)}, tokenizer) is None


def test_page_needs_nothing_from_elsewhere(page: Path) -> None:
    class Links(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def handle_starttag(self, tag: str, attributes) -> None:
            self.found += [value for name, value in attributes if name in ("src", "href") and value]

    parser = Links()
    text = page.read_text()
    parser.feed(text)
    assert parser.found == [] and "http" not in text.split('type="application/json"')[0]


def test_calls_are_shown_behind_the_turn_that_made_them(run: Path, tmp_path: Path) -> None:
    """A turn may name the tag in prose, make several calls, or make none that was run."""
    row = read_rows(run)[0]
    call = row["tool_calls"][0]
    turns = ["I use <tool_call> and </tool_call>.", "two calls", "<tool_call> is a tag; one call", "an answer"]
    calls = [call | {"response": name} for name in "abcd"]
    path = tmp_path / "trajectories.jsonl"

    def shown(row: dict) -> str:
        path.write_text(json.dumps(row) + "\n")
        parts = build_page(path, read_index(path)[0]).groups[0]["trajectories"][0]["parts"]
        return "".join("T" if part["kind"] == "turn" else part["response"] for part in parts)

    row |= {"turns": turns, "tool_calls": calls, "calls_per_turn": [1, 2, 1]}
    assert shown(row) == "TaTbcTdT"
    assert shown(row | {"calls_per_turn": [1, 2], "tool_calls": calls[:3], "turns": turns[:3]}) == "TaTbcT"


def test_what_is_the_users_own_is_shown(run: Path, tmp_path: Path) -> None:
    """Answers of an environment, arguments of another tool, real-valued rewards, and who counts as right."""
    row = read_rows(run)[0]
    call = row["tool_calls"][0] | {"name": "search", "arguments": {"query": "x", "limit": 2}}
    row |= {
        "turns": ["3", "5", "4"],
        "tool_calls": [call],
        "calls_per_turn": [0, 1],
        "observations": ["higher"],
        "opening": "Guess.",
    }
    row |= {"reward": 0.25, "positive": False, "reward_terms": {"near": 0.5, "short": 0}}
    path = tmp_path / "trajectories.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (shown,) = build_page(path, read_index(path)[0]).groups[0]["trajectories"]
    assert [part["kind"] for part in shown["parts"]] == ["observation", "turn", "observation", "turn", "tool", "turn"]
    assert [shown["parts"][place]["response"] for place in (0, 2)] == ["Guess.", "higher"]
    assert shown["parts"][4]["code"] == '{"query": "x", "limit": 2}'
    assert (shown["right"], shown["reward"]) == (False, "; reward 0.25 (near 0.5, short 0)")
    if find_chromium():
        assert main([str(path)]) == 0
        drawn = document(path.with_name("trajectories.html"), f"#open=0-{row['rollout_index']}", tmp_path)
        assert "from the environment" in drawn and ">higher</pre>" in drawn and "; reward 0.25 (near" in drawn
        assert "0 of 1 right" in drawn
    path.write_text(json.dumps(row | {"reward": 1.0, "positive": True, "reward_terms": {"score": 1.0}}) + "\n")
    (shown,) = build_page(path, read_index(path)[0]).groups[0]["trajectories"]
    assert (shown["right"], shown["reward"]) == (True, "")


@pytest.fixture(scope="module")
def evaluation(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trajectories.jsonl of an evaluation: attempts of four problems as they ended, without steps and log-probs."""
    path = tmp_path_factory.mktemp("evaluation") / "trajectories.jsonl"
    rows = [row for row in read_rows(run) if row["query_id"] == "mixed-1"]
    for row in rows:
        row["tool_calls"] = [call | {"seconds": 0.9532861050001884} for call in row["tool_calls"]]
        for key in ("step", "kept", "rejected", "penalty", "logprob_diff", "token_ids"):
            row.pop(key, None)
    ended = [row | {"query_id": f"aime-{n}"} for row in reversed(rows) for n in (10, 2, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in ended))
    return path


def test_attempts_of_an_evaluation_are_in_order(evaluation: Path) -> None:
    groups = build_page(evaluation, read_index(evaluation)[0]).groups
    assert [group["query_id"] for group in groups] == ["aime-1", "aime-2", "aime-10"]
    assert all([t["index"] for t in group["trajectories"]] == list(range(8)) for group in groups)
    calls = [part for t in groups[0]["trajectories"] for part in t["parts"] if part["kind"] == "tool"]
    assert {call["seconds"] for call in calls} == {0.953}


@needs_chromium
def test_browser_shows_what_there_is(page: Path, evaluation: Path, tmp_path: Path) -> None:
    """An evaluation has neither steps nor dropped trajectories, nor log-probs of an actor."""

    def hidden(page: Path) -> list[str]:
        return re.findall(r'<label hidden="">(\w+)|<span id="(\w+)" hidden="">', document(page, "", tmp_path))

    assert main([str(evaluation)]) == 0
    assert hidden(page) == []
    assert hidden(evaluation.with_name("trajectories.html")) == [("step", ""), ("kept", ""), ("", "shades")]


@needs_chromium
def test_browser_shows_groups_penalties_and_endings(page: Path, tmp_path: Path) -> None:
    shown = document(page, "", tmp_path)
    assert "<title>a-run" in shown  # no text of a trajectory became a program
    assert "32 of 32 trajectories" in shown
    assert shown.count("<section") == 4
    assert shown.count("rejected: all wrong") == 2 and shown.count("4 kept") == 2
    assert shown.count(">dropped<") - 1 == 32 - 8  # one is an option of a filter
    assert "penalty: tools 0.50, format 1.00" in shown and "length limit" in shown


@needs_chromium
@pytest.mark.parametrize(
    ("address", "count"),
    [
        ("#reward=wrong", 2 * (3 + 8)),
        ("#tool=timeout", 2 * 2 * 2),
        ("#kept=kept&step=2", 4),
        ("#text=thinking+without+END&tool=no_tool&ending=length_limit", 4),
        ("#reward=right&tool=no_tool", 0),
    ],
)
def test_filters(page: Path, tmp_path: Path, address: str, count: int) -> None:
    shown = document(page, address, tmp_path)
    assert f">{count} of 32 trajectories<" in shown
    assert shown.count("<details") == count
    assert ('<div class="none">' in shown) is (count == 0)


@needs_chromium
def test_screenshot_of_an_opened_trajectory(page: Path, tmp_path: Path) -> None:
    """Turns, the tool's code and output, and the shading at its strongest are really drawn."""
    opened = document(page, "#open=0-1", tmp_path)
    assert "print(6*7)\n# line two" in opened and "shown to the model" in opened
    assert "&lt;/script&gt;" in opened and 'title="actor - engine: +2"' in opened
    picture = tmp_path / "page.png"
    screenshot(page, "#open=0-1", tmp_path, picture)
    with Image.open(picture) as image:
        assert image.size[0] == 1280
        colours = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24)}
    legend = 12 * 20  # what the legend's own patch may take
    assert colours.get((0xFF, 0x7B, 0x6B), 0) > 10 * legend  # a token at +2
    assert colours.get((0xFF, 0xD9, 0x8A), 0) > 10 * legend  # a token at +0.05
    assert colours.get((0xF1, 0xF5, 0xFB), 0) > 1000  # the tool's block


def test_large_runs_are_thinned_out_evenly(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    lines = [json.dumps(row | {"step": step}) for step in range(1, 21) for row in read_rows(run)[:8]]
    path.write_text("\n".join(lines) + "\n")
    entries, _ = read_index(path)
    page = build_page(path, entries, max_bytes=path.stat().st_size // 4)
    steps = [group["step"] for group in page.groups]
    assert steps[0] == 1 and steps[-1] == 20 and 4 <= len(steps) <= 6
    assert all(len(group["trajectories"]) == 8 for group in page.groups)
    assert f"{20 - len(steps)} of 20 groups left out" in render(page, "x")


def test_steps_and_bad_lines(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_rows(run)
    entries = [RowPlace(step, "q", 0, 0) for step in (1, 2, 2, 3, None)]
    assert [entry.step for entry in select_steps(entries, "2")] == [2, 2]
    assert len(select_steps(entries, "1-2")) == 3 and len(select_steps(entries, None)) == 5
    with pytest.raises(ValueError, match="--steps x"):
        select_steps(entries, "x")
    with pytest.raises(ValueError, match="no trajectories of these steps"):
        select_steps(entries, "7")
    broken = tmp_path / "trajectories.jsonl"
    broken.write_text(json.dumps(rows[0]) + '\n{\n{"query_id": "a"}\n[]\n')
    assert main([str(broken)]) == 0
    assert re.search(r"3 lines could not be read \(first: 2\)", capsys.readouterr().err)
    assert main([str(tmp_path / "nothing"), "--out", str(tmp_path)]) == 2 and "is a directory" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2 and "does not exist" in capsys.readouterr().err
