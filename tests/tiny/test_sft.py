from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from transformers import AutoTokenizer

from rstar2_megatron.rollout.chat import ChatTemplate, check_tools_in_prompt
from rstar2_megatron.rollout.tool_call import parse_tool_calls
from rstar2_megatron.tiny.build import TinyPaths
from rstar2_megatron.tiny.problems import mistaken, stream
from rstar2_megatron.tiny.recipe import CopyCurriculum, Mix
from rstar2_megatron.tiny.sft import TraceWriter, copy_rows, pieces, run_trusted
from rstar2_megatron.trajectory import Problem
from tests.tiny.small import AGENTLOOP


@pytest.fixture(scope="module")
def template(built: TinyPaths) -> ChatTemplate:
    tokenizer: Any = AutoTokenizer.from_pretrained(built.model)
    return ChatTemplate(tokenizer, AGENTLOOP)


def writer(template: ChatTemplate, **weights: float) -> TraceWriter:
    """Writes one kind of conversation only."""
    mix = {"right": 0.0, "wrong": 0.0, "error": 0.0, "guess": 0.0, "untagged": 0.0, **weights}
    return TraceWriter(template, random.Random(0), Mix(**mix))


def problems(count: int = 45) -> list:
    return list(itertools.islice(stream("main", random.Random(1), set()), count))


def final_turn(row: list[tuple[str, int]]) -> str:
    return row[-1][0]


def test_right_conversations_hold_the_answer_and_calls_that_parse(template: ChatTemplate) -> None:
    for problem in problems():
        row = writer(template, right=1.0).conversation(problem)
        assert [trained for _, trained in row] == [0, 1, 0, 1]
        (call,) = parse_tool_calls(row[1][0], template.schemas)
        assert call.valid and call.arguments["code"] == problem.right_code
        assert final_turn(row).endswith(f"<answer>\n\\boxed{{{problem.answer}}}\n</answer><|im_end|>")


def test_other_kinds_fail_as_meant(template: ChatTemplate) -> None:
    for problem in problems():
        box = f"\\boxed{{{problem.answer}}}"
        assert box not in final_turn(writer(template, wrong=1.0).conversation(problem))
        guess = writer(template, guess=1.0).conversation(problem)
        assert box not in final_turn(guess) and "<tool_call>" not in final_turn(guess)
        untagged = final_turn(writer(template, untagged=1.0).conversation(problem))
        assert box in untagged and "<answer>" not in untagged
        failed = writer(template, error=1.0, retry_right=1.0).conversation(problem)
        assert "Tool call failure" in failed[2][0] and "Tool call success" in failed[4][0]
        ends = [run_trusted(code, 0.0).stderr.rstrip()[-12:] for code in problem.error_codes]
        assert any(end in failed[2][0].split("...(truncated)...")[1] for end in ends)  # what went wrong survives the cut
        assert box in final_turn(failed)


def test_a_call_that_fails_is_made_again_or_guessed(template: ChatTemplate) -> None:
    """Text, trained or not, in the order of the conversation."""
    rng = random.Random(0)
    (problem,) = itertools.islice(stream("main", rng, set(), ["chain"]), 1)
    never = dict.fromkeys("+-*%", 0.0)

    def written(failed_calls: float, retry_right: float) -> tuple[list[str], list[str]]:
        mix = Mix(chain_mistakes=never, failed_calls=failed_calls, retry_right=retry_right)
        segments = TraceWriter(template, random.Random(1), mix).conversation(problem)
        own = "".join(text for text, trained in segments if trained)
        return re.findall(r"<tool_call>\n(.*)\n</tool_call>", own), re.findall(r"boxed{(.*?)}", own)

    calls, answer = written(0.0, 0.5)
    assert len(calls) == 3 and answer == [problem.answer]
    again = written(1.0, 1.0)
    assert again == ([call for call in calls for _ in range(2)], [problem.answer])
    guessed = written(1.0, 0.0)
    assert guessed[0][0] == calls[0] and guessed[0][1] != calls[1] and len(guessed[0]) == 3
    assert guessed[1] != [problem.answer]


def test_a_chain_is_followed_step_by_step_with_the_mistakes_of_the_mix(template: ChatTemplate) -> None:
    rng = random.Random(2)
    chains = list(itertools.islice(stream("main", rng, set(), ["chain"]), 30))
    for share in (0.0, 1.0):
        mix = Mix(chain_mistakes=dict.fromkeys("+-*%", share))
        for problem in chains:
            row = TraceWriter(template, rng, mix).conversation(problem)
            assert [trained for _, trained in row] == [0, 1, 0, 1, 0, 1, 0, 1]
            calls = [parse_tool_calls(text, template.schemas)[0] for text, trained in row[:-1] if trained]
            codes = [call.arguments["code"] for call in calls]
            for before, code in itertools.pairwise(codes):  # a step begins with what the one before printed
                printed = run_trusted(before, 0.0).stdout.strip()
                assert code.splitlines()[0].partition("=")[2] == printed
            last = run_trusted(codes[-1], 0.0).stdout.strip()
            assert final_turn(row).endswith(f"\\boxed{{{last}}}\n</answer><|im_end|>")
            if not share:
                assert last == problem.answer
            assert [code.splitlines()[1][3:] for code in codes] == [
                mistaken(operation) if share else operation for operation in problem.chain[1:]
            ]


def test_conversations_begin_as_rollouts_do(template: ChatTemplate) -> None:
    """Same ids: what SFT trains on is what the engine will be given."""
    problem = problems(1)[0]
    row = writer(template, right=1.0).conversation(problem)
    rollout = Problem("q", [{"role": "user", "content": problem.question}], [problem.answer])
    assert template.tokenizer.encode(row[0][0], add_special_tokens=False) == template.prompt_ids(rollout)
    response = row[2][0].split("<tool_response>\n")[1].split("\n</tool_response>")[0]
    ids = template.tokenizer.encode(row[2][0], add_special_tokens=False)
    assert ids == template.tool_response_ids([response])
    check_tools_in_prompt(row[0][0], template.schemas)


def test_mix_decides_how_often_a_kind_occurs(built: TinyPaths) -> None:
    rows = [json.loads(line)["segments"] for line in built.conversations.read_text().splitlines()]
    counts: Counter[str] = Counter()
    for row in rows:
        text = "".join(text for text, _ in row)
        counts["guess"] += "<tool_call>" not in text
        counts["error"] += "Tool call failure" in text
        counts["untagged"] += "<answer>" not in text
    mix = Mix()
    for kind, count in counts.items():
        assert count / len(rows) == pytest.approx(getattr(mix, kind), abs=0.08), kind


def test_trusted_run_reports_as_an_interpreter_does() -> None:
    run = run_trusted("import math\nprint(math.nope)", 0.02)
    assert not run.success and run.stdout == ""
    assert run.stderr.startswith('Traceback (most recent call last):\n  File "source.py", line 2')
    assert run.stderr.rstrip().endswith("AttributeError: module 'math' has no attribute 'nope'")
    assert run_trusted("print((1", 0.0).stderr.rstrip().endswith("SyntaxError: '(' was never closed")


def test_pieces_join_to_the_text() -> None:
    text = '<|im_start|>user\nAdd 12 to x_1.<|im_end|>\n<tool_call>\n{"a": "b\\n"}\n</tool_call>'
    assert "".join(pieces(text)) == text
    assert pieces("<|im_end|>\n<answer>12") == ["<|im_end|>", "\n", "<answer>", "12"]


def test_curriculum_grows_and_its_targets_stand_in_their_source() -> None:
    curriculum = CopyCurriculum(rows=600)
    filler = [f" w{i}" for i in range(300)]
    rows = list(copy_rows(curriculum, stream("main", random.Random(0), set()), filler, random.Random(0)))
    lengths = [row[0][0].count(" w") for row in rows]
    assert set(lengths[:180]) == {0}
    assert 0 < max(lengths[180:300]) < max(lengths[510:]) <= curriculum.longest
    for (source, untrained), (target, trained) in rows:
        assert (untrained, trained) == (0, 1)
        numbers = [n for n in target.replace("'1'", "").replace("+1)", ")").split("\\n")[-1].split() if n]
        digits = "".join(c if c.isdigit() else " " for c in " ".join(numbers)).split()
        assert digits and all(number in source for number in digits)
