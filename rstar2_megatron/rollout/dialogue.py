"""What a loop composes turns with: generate, call tools, append, finish.

The built-in loop, an environment and a loop of the user all use it, and none of them sees tokens. A trajectory that
continues (parked, preempted, resumed from a checkpoint, a step of a search) runs its loop from the beginning again: what was
generated and said before is replayed from the record, and generation goes on behind it. So a loop must answer the same turns
with the same texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

from rstar2_megatron.extension.user_code import UserCodeError, is_cancelled
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.tool_call import ParsedCall
from rstar2_megatron.trajectory import FinishReason, ToolCall, Trajectory

T = TypeVar("T")

ANSWERED_OTHERWISE = (
    "than before the trajectory was interrupted; an environment or loop must answer the same turns with the same texts (take "
    "random numbers from the problem's query_id)"
)


class Left(BaseException):
    """Ends the loop's code from inside a call of it. No `except Exception` holds it up."""


class EngineSide(Protocol):
    """The engine's side of one running trajectory (`agent_loop`)."""

    trajectory: Trajectory
    budget: int
    template: ChatTemplate
    max_turns: int
    one_turn: Any

    async def assistant_turn(self) -> str: ...

    def check_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall: ...

    async def run_tools(self, calls: list[ParsedCall]) -> tuple[list[ToolCall], list[str]]: ...

    def degenerate_ending(self, calls: list[ParsedCall]) -> FinishReason | None: ...

    def report_progress(self, more: int) -> None: ...

    def seconds_left(self) -> float: ...


class Dialogue:
    """One trajectory's conversation."""

    def __init__(self, turns: EngineSide, label: str = "") -> None:
        """label: of the user's code, for its errors."""
        self.reward: float | None = None
        """What `reward.function=environment` takes. The loop sets it."""
        self.ending: FinishReason | None = None
        """Why the conversation is over; None: it goes on later (a step of a search)."""
        self.failure: BaseException | None = None
        """What ended it from below, of the engine, the tools or the scheduler."""
        self.ignored = False
        """The loop goes on behind the end, because it catches every exception."""
        self._label = label
        self._turns = turns
        self._trajectory = turns.trajectory
        self._recorded = len(self._trajectory.response_ids)
        self._spans = self._trajectory.spans
        self._at = 0  # response tokens that this run of the loop has passed
        self._turn = 0  # turns that it has got
        self._calls = 0  # tool calls that it has got
        self._generated = 0  # turns that are new
        self._next: list[int] | None = None  # tokens between the last turn and the next
        self._answered = False  # the last turn has its answer, by tools or `append`
        self._loops_calls = False  # the loop made calls of its own since the last turn
        self._counts = list(self._trajectory.calls_per_turn)
        self._over = False
        self._running: asyncio.Future[Any] | None = None  # a turn or calls are under way

    # ------------------------------------------------------------------------------------ for loops

    @property
    def text(self) -> str:
        """The last turn."""
        return self._trajectory.assistant_texts[self._turn - 1]

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return self._turn

    async def generate(self) -> str:
        """The model's next turn, as text without its end. What was appended since the last one comes before it.

        A turn that reaches the token budget or `agentloop.max_assistant_turns` ends the trajectory.
        """
        await self._begin()
        t = self._trajectory
        if self._turn:
            self._open_next_turn()
        if self._turn < len(t.assistant_texts):
            self._at = self._spans[self._turn][1]
        else:
            if self._turns.one_turn is not None and self._generated:
                self._leave(None)
            if self._turn >= self._turns.max_turns:
                self._leave(FinishReason.TURN_LIMIT)
            reason = await self._below(self._turns.assistant_turn())
            self._generated += 1
            self._at = len(t.response_ids)
            if reason == "length":
                self._turn += 1
                self._leave(FinishReason.LENGTH_LIMIT)
        self._turn += 1
        self._next, self._answered, self._loops_calls = None, False, False
        return self.text

    async def call_tools(self) -> list[ToolCall]:
        """Run the tool calls that the last turn wrote; their responses come before the next turn. Empty: it wrote none.

        Calls in the last turn that is allowed end the trajectory, and so do `agentloop.max_identical_calls` and
        `max_malformed_turns`.
        """
        await self._begin()
        if self._answered or self._loops_calls:
            raise self._misused("call_tools comes once a turn, and not behind append or call_tool")
        calls = self._turns.template.parse_calls(self.text) if self._turns.template.schemas else []
        if not calls:
            return []
        if self._turn >= self._turns.max_turns:
            self._leave(FinishReason.TURN_LIMIT)
        if (ending := self._turns.degenerate_ending(calls)) is not None:
            self._leave(ending)
        self._answered = True
        if self._replaying:
            count = self._counts[self._turn - 1]
            self._calls += count
            return self._trajectory.tool_calls[self._calls - count : self._calls]
        done, responses = await self._below(self._turns.run_tools(calls))
        self._note_calls(done)
        self._next = self._turns.template.tool_response_ids(responses)
        return done

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolCall:
        """A call that the loop makes, not the model; the model sees of it what the loop appends."""
        await self._begin()
        if not self._turn or self._answered:
            raise self._misused("call_tool comes behind a turn, and before append; call_tools runs what the model wrote")
        call = self._turns.check_call(name, arguments)
        if not call.valid:
            raise self._misused(f"call_tool cannot run this call: {call.message}")
        self._loops_calls = True
        if self._replaying:
            self._calls += 1
            return self._trajectory.tool_calls[self._calls - 1]
        done, _ = await self._below(self._turns.run_tools([call]))
        self._note_calls(done)
        return done[0]

    def append(self, text: str) -> None:
        """Answer the last turn with a user's turn of this text. Control tokens in it are broken up."""
        self._check_over()
        if not self._turn or self._answered:
            raise self._misused(
                "append answers a turn, and "
                + ("there is none yet: generate first" if not self._turn else "this one has its answer: generate, then append")
            )
        if not isinstance(text, str):
            raise self._misused(f"append takes a text, got {type(text).__name__}")
        text = str.__str__(text)  # without a class of the user's, which other processes do not know
        self._answered = True
        self._next = self._turns.template.user_turn_ids(text)
        observations = self._trajectory.observations
        observations += [""] * (self._turn - len(observations))
        observations[self._turn - 1] = text

    def finish(self, reward: float | None = None) -> None:
        """End the trajectory here, as returning from the loop does."""
        self._check_over()
        self.reward = self.reward if reward is None else reward
        self._leave(FinishReason.ANSWERED)

    # --------------------------------------------------------------------------------------- below

    @property
    def _replaying(self) -> bool:
        """Whether what follows the last turn is in the record."""
        return self._at < self._recorded

    def _open_next_turn(self) -> None:
        """Bring the tokens between the last turn and the next into the trajectory, or compare them with the record."""
        t, ids = self._trajectory, self._next
        if not self._answered:
            raise self._misused("generate was called twice; append an answer to the turn, or call its tools, in between")
        if self._replaying:
            end = self._spans[self._turn][0] if self._turn < len(self._spans) else self._recorded
            if ids is not None and ids != t.response_ids[self._at : end].tolist():
                raise self._misused(f"turn {self._turn} was answered otherwise {ANSWERED_OTHERWISE}")
            self._at = end
            return
        t.calls_per_turn += [0] * (self._turn - len(t.calls_per_turn))
        if ids is not None:
            if len(t.response_ids) + len(ids) >= self._turns.budget:  # at least one token must follow
                self._leave(FinishReason.TOOL_RESPONSE_TOO_LONG)
            t.append(ids, None)
            self._turns.report_progress(0)
            self._at = len(t.response_ids)

    def _note_calls(self, done: Sequence[ToolCall]) -> None:
        t = self._trajectory
        t.calls_per_turn += [0] * (self._turn - len(t.calls_per_turn))
        t.calls_per_turn[self._turn - 1] += len(done)
        self._calls += len(done)

    def _misused(self, what: str) -> UserCodeError:
        """It ends the dialogue too, because a loop may catch it and go on as before."""
        error = UserCodeError(f"{self._label}: {what}" if self._label else what)
        self.failure = self.failure or error
        self.close()
        return error

    def close(self) -> None:
        """Nothing more is generated or called, also by tasks of the loop that go on behind its end."""
        self._over = True
        if self._running is not None:
            self._running.cancel()  # which aborts its request

    async def _begin(self) -> None:
        if self._over:
            self.ignored = True
            await asyncio.sleep(0)  # the loop's code is left here
        self._check_over()

    def _check_over(self) -> None:
        if self._over:
            raise Left
        if self._running is not None:  # two at once would write into one another's tokens
            raise self._misused("a turn or a call is still running; await it before what comes next")

    def _leave(self, ending: FinishReason | None) -> None:
        if not self._over:
            self._over, self.ending = True, ending
        raise Left

    async def _below(self, work: Awaitable[T]) -> T:
        """Await work of the engine or the tools. Its failures end the loop, which cannot handle them."""
        running = self._running = asyncio.ensure_future(work)
        try:
            return await running
        except asyncio.CancelledError as error:
            if self._over:
                raise
            try:
                self._turns.seconds_left()
            except Exception as late:  # the deadline: not the loop's doing
                self._over, self.failure = True, late
            else:
                by_tool = "a tool has cancelled its own task; let it raise ToolError"
                by_loop = "a turn or a call was cancelled, by a timeout of the loop's own perhaps; it cannot be taken back"
                self._misused(by_loop if is_cancelled() else by_tool)
            if is_cancelled():
                raise
            raise Left from error
        except Exception as error:
            self._over, self.failure = True, error
            raise Left from error
        finally:
            running.cancel()  # of a loop that was left meanwhile
            self._running = None
