"""An engine and a judge at protocol level: turns of the paper's shape, answered at once.

Lengths and tool calls are those of `benchmarks.rollout.traces.Shape` (the paper's section 3: responses of 4K to 8K tokens, at
most 45K tool calls in a step of 512 x 32), scaled to a mean length. Text is cut from this project's documents; a turn ends
with a tool call of a few hundred characters or with an answer. Answers are integers, right for half of the trajectories, so
that no group is rejected and the batch is the largest possible; one in fifty is a fraction, which needs the algebra grader.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rollout.traces import STAGE_12K, Shape, Turn, synthetic
from rstar2_megatron.rollout.engine.protocol import GenerateResult
from rstar2_megatron.tiny.tokenizer import train_tokenizer

SOLUTION = "42"
_FRACTIONS = 50  # one answer in so many
_VOCABULARY = 8192
_POOL = 1 << 18  # tokens of text, and log-probs
_CODE = "from sympy import *\nx = symbols('x')\nprint(sum(k**2 for k in range(%d)))\n"


def shape_of(mean_tokens: int, max_tokens: int) -> Shape:
    """The paper's last stage with another mean and limit of the response length."""
    wanted = dataclasses.replace(STAGE_12K, problems=64, max_response_tokens=max_tokens)
    low, high = 1.0, 8.0 * max_tokens
    for _ in range(30):  # truncation at the limit lowers the mean: search the median
        middle = math.sqrt(low * high)
        mean = float(np.mean([_tokens(t.turns) for t in synthetic(dataclasses.replace(wanted, median_tokens=middle), 0)]))
        low, high = (middle, high) if mean < mean_tokens else (low, middle)
    return dataclasses.replace(wanted, median_tokens=low)


def _tokens(turns: tuple[Turn, ...]) -> int:
    return sum(turn.generated_tokens + turn.tool_tokens for turn in turns)


def make_tokenizer(directory: Path) -> None:
    """A tokenizer of 8192 tokens trained on the project's own text, about three characters a token."""
    root = Path(__file__).parents[2]
    files = [*root.glob("docs/*.md"), root / "benchmarks" / "NOTES.md", *root.glob("rstar2_megatron/*/*.py")]
    train_tokenizer((file.read_text(encoding="utf-8") for file in files), _VOCABULARY).save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen2"}\n')


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a tool call."""

    outcome: str
    stdout: str
    stderr: str
    seconds: float


class PaperJudge:
    """Answers every call at once; one in ten fails (the paper's share of tool errors)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def run(self, code: str, stdin: str = "", *, session: str | None = None) -> Answer:
        size = self._random.randint(60, 300)
        if self._random.random() < 0.1:
            return Answer("error", "", "Traceback (most recent call last):\n" + "e" * size, 0.3)
        return Answer("ok", "1" * size, "", 0.3)

    def expect_session(self, session: str) -> None: ...

    async def close_session(self, session: str) -> None: ...

    def take_counters(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class PaperEngine:
    """Answers a request with the next turn of its trajectory. `owner` names the trajectory."""

    def __init__(self, shape: Shape, template: Any, seed: int, capacity_tokens: int) -> None:
        self.kv_capacity_tokens = capacity_tokens
        self.restarts = 0
        self.on_report: Callable[[Any], None] = lambda report: None
        self._random = random.Random(seed)
        self._shape = shape
        self._turns: dict[Any, Iterator[Turn]] = {}  # by owner
        self._traces: list[Any] = []
        self._seed = seed
        encode = lambda text: template.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        text = "\n".join(p.read_text(encoding="utf-8") for p in Path(__file__).parents[2].glob("docs/*.md"))
        self._text = np.resize(np.array(encode(text), dtype=np.int32), _POOL)
        self._logprobs = -np.random.default_rng(seed).exponential(0.3, _POOL).astype(np.float32)
        calls = [
            {"name": "python_code_with_standard_io", "arguments": {"code": _CODE % k * 4, "input": ""}} for k in range(100)
        ]
        self._calls = [
            np.array([*encode(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"), template.end_id], np.int32) for call in calls
        ]
        answers = [SOLUTION, "41"]
        answers += [f"\\frac{{{int(a) * k}}}{{{k}}}" for k in range(2, 100) for a in answers]
        self._answers = [
            np.array([*encode(f"\n</reason>\n<answer>\\boxed{{{a}}}</answer>"), template.end_id], np.int32) for a in answers
        ]

    async def generate(
        self, input_ids: Any, sampling: dict[str, Any], *, timeout_s: float, on_tokens: Any = None, owner: Any = None
    ) -> GenerateResult:
        turns = self._turns.pop(owner, None) or iter(self._next_trace())
        turn, room = next(turns), sampling["max_new_tokens"]
        last = not turn.tool_tokens
        ending = self._ending(last)
        body = max(turn.generated_tokens - len(ending), 1)
        start = self._random.randrange(_POOL - body - len(ending))
        ids = np.concatenate([self._text[start : start + body], ending])[:room]
        reason = "length" if len(ids) == room and ids[-1] != ending[-1] else "stop"
        if reason == "stop" and not last:
            self._turns[owner] = turns
        await asyncio.sleep(0)
        return GenerateResult(
            token_ids=ids,
            logprobs=self._logprobs[start : start + len(ids)],
            finish_reason=reason,
            version_spans=[(0, len(ids), 0)],
            prompt_tokens=len(input_ids),
            cached_tokens=0,
        )

    def _next_trace(self) -> tuple[Turn, ...]:
        if not self._traces:
            self._seed += 1
            self._traces = synthetic(self._shape, 1000 * self._seed)
            self._random.shuffle(self._traces)
        turns: tuple[Turn, ...] = self._traces.pop().turns
        return turns

    def _ending(self, last: bool) -> np.ndarray:
        if not last:
            return self._random.choice(self._calls)
        if self._random.randrange(_FRACTIONS):
            return self._answers[self._random.randrange(2)]
        return self._random.choice(self._answers[2:])

    async def wait_until_ready(self) -> None: ...

    async def recover(self) -> None: ...

    def abort(self, owner: object) -> None: ...

    def abort_all(self) -> None: ...

    async def close(self) -> None: ...


class PaperSGLang:
    """SGLang's Engine as our engine process reads it: `PaperEngine`'s turns in SGLang's form, answered at once.

    The request's sampling parameters name its trajectory (`trajectory`), because SGLang knows of none.
    """

    def __init__(self, engine: PaperEngine, max_context_tokens: int) -> None:
        self._engine = engine
        sizes = {"max_total_num_tokens": engine.kv_capacity_tokens, "max_req_input_len": max_context_tokens}
        self._scheduler_init_result = types.SimpleNamespace(scheduler_infos=[sizes])
        self.tokenizer_manager = self
        self.last_receive_tstamp = 0.0
        self.rid_to_state: dict[str, Any] = {}
        self._answered: Any = None

    def auto_create_handle_loop(self) -> None: ...

    async def get_loads(self) -> list[Any]:
        return []

    async def flush_cache(self) -> Any:
        return types.SimpleNamespace(success=True)

    async def freeze_gc(self) -> None: ...

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> dict[str, Any]:
        result = await self._engine.generate(
            input_ids, sampling_params, timeout_s=0.0, owner=sampling_params.get("trajectory", object())
        )
        self.last_receive_tstamp += 1
        logprobs, ids = result.logprobs.tolist(), result.token_ids.tolist()
        meta = {
            "finish_reason": {"type": result.finish_reason},
            "output_token_logprobs": [(value, token, None) for value, token in zip(logprobs, ids, strict=True)],
            "weight_versions": [{"start": 0, "end": len(ids), "version": "0"}],
            "prompt_tokens": len(input_ids),
            "cached_tokens": 0,
            "num_retractions": 0,
        }
        self._answered = ids, meta  # kept, so that the time in which this one is freed counts as the stand-in's
        return {"output_ids": ids, "meta_info": meta}
