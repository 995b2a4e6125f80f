"""SFT data of the tiny recipe: a copy curriculum, then conversations of mixed quality.

Both are rows {"segments": [[text, 0 or 1], ...]}; segments marked 1 are trained. Training takes the rows in file order,
because the copy curriculum grows.

A model from scratch cannot move a number from the problem into its code, so it first learns to copy. The
conversations then teach format and tool syntax the way an imperfect base model would show them: right, with
wrong code, with careless code and a second try, guessed without the tool, or without the answer tags. RL then
selects among them.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import random
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.judge.sandbox.snippet import FILE_NAME
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.tool_response import NOISE, format_tool_response, truncate
from rstar2_megatron.tiny.problems import CHAIN_NAMES, TinyProblem, chain_code, mistaken
from rstar2_megatron.tiny.recipe import CopyCurriculum, Mix
from rstar2_megatron.tools import STANDARD_IO
from rstar2_megatron.trajectory import Problem

Segments = list[tuple[str, int]]

REASON_CALL = "Use code."
REASON_RETRY = "Fix it."
REASON_ANSWER = "Done."
REASON_GUESS = "I know."


@dataclass(slots=True)
class TraceWriter:
    """Writes conversations with the template that rollouts use."""

    template: ChatTemplate
    rng: random.Random
    mix: Mix = field(default_factory=Mix)

    def conversation(self, problem: TinyProblem) -> Segments:
        """One conversation about `problem`, of a kind drawn from the mix; a chained one with the mix's mistakes."""
        if problem.chain:
            return self._chain(problem)
        kinds: dict[str, Callable[[TinyProblem], Segments]] = {
            "right": lambda p: self._calls(p, [p.right_code]),
            "wrong": lambda p: self._calls(p, [p.wrong_code]),
            "error": self._error,
            "guess": lambda p: self._segments(p, [answer_turn(REASON_GUESS, self._guess(p.answer))], []),
            "untagged": lambda p: self._calls(p, [p.right_code], tagged=False),
        }
        weights = [getattr(self.mix, kind) for kind in kinds]
        kind = self.rng.choices(list(kinds), weights)[0]
        return kinds[kind](problem)

    def _error(self, problem: TinyProblem) -> Segments:
        second = problem.right_code if self.rng.random() < self.mix.retry_right else problem.wrong_code
        return self._calls(problem, [self.rng.choice(problem.error_codes), second])

    def _chain(self, problem: TinyProblem) -> Segments:
        """A call for each step, which goes on from what the call before printed."""
        turns, responses, value = [], [], problem.chain[0]
        for place, operation in enumerate(problem.chain[1:], 1):
            if self.rng.random() < self.mix.chain_mistakes[operation[0]]:
                operation = mistaken(operation)
            code = chain_code(place, value, operation)
            turn = call_turn(f"Find {CHAIN_NAMES[place]}.", code)
            turns.append(turn)
            if self.mix.failed_calls and self.rng.random() < self.mix.failed_calls:
                responses.append(NOISE)
                if self.rng.random() >= self.mix.retry_right:
                    value = self._guess(run_trusted(code, seconds=0.0).stdout.strip())
                    continue
                turns.append(turn)
            run = run_trusted(code, seconds=self.rng.choice(RUN_SECONDS))
            responses.append(self._response(run))
            value = run.stdout.strip()
        turns.append(answer_turn(REASON_ANSWER, value))
        return self._segments(problem, turns, responses)

    def _calls(self, problem: TinyProblem, codes: list[str], *, tagged: bool = True) -> Segments:
        turns, responses, value = [], [], ""
        for i, code in enumerate(codes):
            turns.append(call_turn(REASON_RETRY if i else REASON_CALL, code))
            run = run_trusted(code, seconds=self.rng.choice(RUN_SECONDS))
            responses.append(self._response(run))
            value = run.stdout.strip()
        if tagged:
            turns.append(answer_turn(REASON_ANSWER, value))
        else:
            turns.append(f"{REASON_ANSWER}</reason>\n\\boxed{{{value}}}")
        return self._segments(problem, turns, responses)

    def _response(self, run: JudgeResult) -> str:
        if self.rng.random() < 0.5:  # judges and clients differ in whether they keep the last line end
            run = run._replace(stdout=run.stdout.rstrip("\n"), stderr=run.stderr.rstrip("\n"))
        settings = self.template.settings
        return truncate(format_tool_response(run), settings.max_tool_response_length, settings.tool_response_truncate_side)

    def _guess(self, answer: str) -> str:
        """A wrong number of about the right length."""
        digits = len(answer.lstrip("-"))
        while True:
            guess = str(self.rng.randrange(10 ** (digits - 1), 10**digits))
            if guess != answer:
                return guess

    def _segments(self, problem: TinyProblem, turns: list[str], responses: list[str]) -> Segments:
        prompt = Problem(query_id="", prompt=[{"role": "user", "content": problem.question}], solutions=[])
        parts = self.template.conversation(prompt, turns, [[r] for r in responses])
        return [(text, int(trained)) for text, trained in parts]


# Seconds that a judge reports for such small programs, quiet and loaded.
RUN_SECONDS = [0.00, 0.01, 0.01, 0.02, 0.02, 0.03, 0.03, 0.04, 0.05, 0.06, 0.08, 0.10, 0.14]


def call_turn(reason: str, code: str) -> str:
    """An assistant turn (without generation prefix and turn end) that runs `code`."""
    call = json.dumps({"name": STANDARD_IO, "arguments": {"code": code, "input": ""}}, separators=(",", ":"))
    return f"{reason}</reason>\n<tool_call>\n{call}\n</tool_call>"


def answer_turn(reason: str, value: str) -> str:
    """An assistant turn that answers `value`."""
    return f"{reason}</reason>\n<answer>\n\\boxed{{{value}}}\n</answer>"


def run_trusted(code: str, seconds: float) -> JudgeResult:
    """Run code of `problems` in this process and report as the judge would, traceback included.

    Only for code of our own generator: nothing limits or isolates it.
    """
    out = io.StringIO()
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, FILE_NAME, "exec", dont_inherit=True), {"__name__": "__main__"})
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != FILE_NAME:
            frame = frame.tb_next
        stderr = "".join(traceback.format_exception(type(error), error, frame))
        return JudgeResult(Outcome.ERROR, out.getvalue(), stderr, seconds=seconds)
    return JudgeResult(Outcome.OK, out.getvalue(), seconds=seconds, success=True)


# ------------------------------------------------------------------------------------- copy curriculum


def copy_rows(
    curriculum: CopyCurriculum, problems: Iterator[TinyProblem], filler: list[str], rng: random.Random
) -> Iterator[Segments]:
    """The copy curriculum; `filler` is the text, in pieces, that filler is cut from."""
    for i in range(curriculum.rows):
        length = rng.randint(0, curriculum.reach(i / curriculum.rows))
        start = rng.randrange(max(1, len(filler) - length))
        between = "".join(filler[start : start + length])
        problem = next(problems)
        if rng.random() < curriculum.answers:
            yield [(f"stdout: {problem.answer}\n{between}", 0), (f"\\boxed{{{problem.answer}}}\n", 1)]
        else:
            yield [(f"{problem.question}{between}", 0), (problem.right_code, 1)]


def pieces(text: str) -> list[str]:
    """`text` cut into special tokens, words, digits and signs; joined they are the text again."""
    return re.findall(r"<[/|]?\w+\|?>| ?\w+|\s+|[^\w\s]+?", text)
