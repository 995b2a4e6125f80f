"""Many trajectories on one engine: work that is requested, preempted, handed back, and put together into groups."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout.group_runner import run_groups
from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost, EngineReport
from rstar2_megatron.rollout.scheduling.adaptive_budget import POLICIES, make_budget
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget, KVReservation
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory, VersionSpan
from tests.rollout.written import ANSWER, PROBLEM, ParkableEngine, call, make_loop, written


async def test_a_gone_engine_gives_back_what_it_had_and_takes_no_more(tokenizer) -> None:
    """Slices that wait, trajectories in their second turn, and work that is on its way; another engine ends them all."""
    loop = make_loop(tokenizer, [call(), EngineLost("gone")])
    written(loop).recover_error = EngineLost("restarted 2 times")
    answer: asyncio.Future[list[Slice] | None] = asyncio.get_running_loop().create_future()
    given = iter([[Slice(0, PROBLEM, [0, 1, 2])], answer])
    back: list[tuple[int, Trajectory]] = []
    reasons: list[str] = []

    async def next_work(room: int) -> list[Slice] | None:
        work = next(given)  # a third request raises
        return await work if isinstance(work, asyncio.Future) else work

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append((work.group, trajectory))

    async def gone(reason: str) -> None:
        reasons.append(reason)
        answer.set_result([Slice(1, PROBLEM, [0, 1])])

    budget = make_budget("least_requests", 20_000, 4)
    runner = TrajectoryRunner(loop, AdmissionQueue(budget), next_work, ended, gone)
    await asyncio.wait_for(runner.run(), 20)
    assert reasons == ["restarted 2 times"] and budget.running == 0
    assert sorted((group, t.rollout_index) for group, t in back) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert {t.finish_reason for _, t in back} == {None} and not loop.stats.endings
    assert any(t.tool_calls for _, t in back)  # with the turns they had

    other = make_loop(tokenizer, [ANSWER])
    for _, trajectory in back:
        calls = len(trajectory.tool_calls)
        done = await other.run(PROBLEM, trajectory.rollout_index, resume=trajectory)
        assert done.finish_reason is FinishReason.ANSWERED and len(done.tool_calls) == calls
        done.check()


async def test_a_restarted_engines_capacity_counts(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    budget = make_budget("kv_adaptive", 20_000, 4)

    async def never(*_: Any) -> None:
        raise AssertionError

    runner = TrajectoryRunner(loop, AdmissionQueue(budget), never, never)
    runner.observe(EngineReport(progress=0.0, max_total_tokens=20_000))
    runner.observe(EngineReport(progress=0.0, max_total_tokens=12_000))
    assert budget.capacity_tokens == 12_000


class PreemptingBudget(KVBudget):
    """Names every running trajectory but the first, once; with `full` there is no room for them afterwards."""

    full = False
    done = False

    def preempt(self) -> list[Hashable]:
        chosen = [] if self.done else list(self._reservations)[1:]
        self.done = True
        return chosen

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        return not (self.full and self.done)


@pytest.mark.parametrize("ending", ["continues", "parked", "cut"])
async def test_the_runner_requeues_what_it_preempts(tokenizer, ending: str) -> None:
    """Preempted and carried trajectories continue, or come back as they are when the phase ends before they run."""
    loop = make_loop(tokenizer, [call(), ANSWER])
    engine = ParkableEngine(tokenizer, [ANSWER])
    engine.go.clear()
    loop.engine = engine
    budget = PreemptingBudget(20_000, 4)
    budget.full = ending != "continues"
    back: list[Trajectory] = []
    carried = Trajectory(PROBLEM.query_id, 5, loop.template.prompt_ids(PROBLEM), [8, 9], [1, 1], [-0.1, -0.2])
    carried.version_spans, carried.open_turn = [VersionSpan(0, 2, 2)], 0
    given = iter([[Slice(0, PROBLEM, list(range(6)), {5: carried})], None])

    async def next_work(room: int) -> list[Slice] | None:
        return next(given)

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append(trajectory)

    runner = TrajectoryRunner(loop, AdmissionQueue(budget), next_work, ended)
    running = asyncio.create_task(runner.run())
    while len(engine.seen) < 4:
        await asyncio.sleep(0)
    runner.observe(EngineReport(progress=0.0))
    while loop.stats.preemptions < 3:
        await asyncio.sleep(0)
    if ending != "continues":
        await runner.park(cut=ending == "cut")
    engine.go.set()
    await asyncio.wait_for(running, 20)
    assert budget.running == 0 and budget.reserved_tokens == 0
    assert len({t.rollout_index for t in back}) == len(back)
    if ending == "continues":
        assert [t.finish_reason for t in back] == [FinishReason.ANSWERED] * 6
        assert loop.stats.preemptions == 3 and loop.stats.parked == 0
        assert carried.response_ids[:2].tolist() == [8, 9] and carried.version_spans[0].version == 2
    else:  # those that wait for room with what they have, and the one that ran; one never started
        reason = FinishReason.CUT if ending == "cut" else None
        assert {t.rollout_index for t in back if t.finish_reason is reason} >= {1, 2, 3, 5}
        assert {t.rollout_index for t in back} == {0, 1, 2, 3, 5} and carried.response_ids.tolist() == [8, 9]
        assert all(t.response_tokens for t in back)
    for trajectory in back:
        trajectory.check()


async def test_an_environments_opening_is_no_response(tokenizer, tmp_path: Path) -> None:
    """The prompt is known to the end only when the trajectory has begun."""
    (tmp_path / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, problem): return 'Find my number. ' * 5\n"
        "    def step(self, text): return 'again', 0.0, text == 'b'\n"
    )
    loop = make_loop(tokenizer, ["a", "b"], environment=UserCode.model_validate(f"{tmp_path}/game.py:Game"))
    given = iter([[Slice(0, PROBLEM, [0])], None])
    seen: list[tuple[int, int]] = []

    async def next_work(room: int) -> list[Slice] | None:
        return next(given)

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        seen.append((runner.response_tokens, trajectory.response_tokens))

    runner = TrajectoryRunner(loop, AdmissionQueue(make_budget("kv_reserve", 9000, 4)), next_work, ended)
    await asyncio.wait_for(runner.run(), 20)
    ((counted, real),) = seen
    assert counted == real > 0


@pytest.mark.parametrize("cut", [False, True])
async def test_work_that_comes_after_the_end_of_the_phase(tokenizer, cut: bool) -> None:
    """What had not started is forgotten; what was carried here comes back with its tokens."""
    loop = make_loop(tokenizer, [ANSWER])
    loop.engine = ParkableEngine(tokenizer, [ANSWER])
    carried = Trajectory(PROBLEM.query_id, 1, loop.template.prompt_ids(PROBLEM), [8], [1], [-0.1])
    asked, over = asyncio.Event(), asyncio.Event()
    back: list[Trajectory] = []

    async def next_work(room: int) -> list[Slice] | None:
        asked.set()
        await over.wait()
        return [Slice(0, PROBLEM, [0, 1], {1: carried})]

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append(trajectory)

    runner = TrajectoryRunner(loop, AdmissionQueue(make_budget("kv_adaptive", 20_000, 4)), next_work, ended)
    running = asyncio.create_task(runner.run())
    await asked.wait()
    await runner.park(cut=cut)
    over.set()
    await asyncio.wait_for(running, 20)
    assert back == [carried] and carried.response_ids.tolist() == [8]
    assert carried.finish_reason is (FinishReason.CUT if cut else None)


def problems(count: int) -> list[Problem]:
    return [Problem(f"q{i}", [{"role": "user", "content": f"What is {i}+1?"}], [str(i + 1)]) for i in range(count)]


def giver(work: list[Problem]):
    iterator = iter(work)

    async def next_problem() -> Problem | None:
        await asyncio.sleep(0)
        return next(iterator, None)

    return next_problem


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_groups_are_complete_and_ordered(tokenizer, policy: str) -> None:
    loop = make_loop(tokenizer, [ANSWER], max_new_tokens=300)
    budget = make_budget(policy, 3000, 5)
    seen: list[str] = []

    async def scored(problem: Problem, trajectory: Trajectory) -> None:
        seen.append(problem.query_id)

    groups = [g async for g in run_groups(giver(problems(6)), loop, budget, group_size=4, on_trajectory=scored)]
    assert sorted(g.problem.query_id for g in groups) == [f"q{i}" for i in range(6)]
    for group in groups:
        assert [t.rollout_index for t in group.trajectories] == [0, 1, 2, 3]
        assert {t.query_id for t in group.trajectories} == {group.problem.query_id}
    assert budget.running == 0 and budget.reserved_tokens == 0
    assert len(seen) == 24 and loop.stats.trajectories == 24


async def test_a_spoiled_trajectory_still_completes_its_group(tokenizer) -> None:
    loop = make_loop(tokenizer, [EngineError("refused"), ANSWER])
    (group,) = [g async for g in run_groups(giver(problems(1)), loop, make_budget("kv_reserve", 9000, 1), group_size=3)]
    assert [t.usable for t in group.trajectories] == [False, True, True]


async def test_leaving_early_cancels_the_rest(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    budget = make_budget("static", 9000, 3)
    groups = run_groups(giver(problems(50)), loop, budget, group_size=2)
    async for _ in groups:
        break
    await groups.aclose()
    assert budget.running == 0 and budget.reserved_tokens == 0


async def test_trajectories_that_never_fit_are_an_error(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER], max_new_tokens=500)
    with pytest.raises(ValueError, match="never fits"):
        async for _ in run_groups(giver(problems(1)), loop, make_budget("kv_reserve", 100, 4), group_size=2):
            pass


async def test_the_same_problem_twice_makes_two_groups(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    budget = make_budget("static", 9000, 9)
    groups = [g async for g in run_groups(giver([PROBLEM, PROBLEM]), loop, budget, group_size=2)]
    assert [len(g.trajectories) for g in groups] == [2, 2]


async def test_the_log_shows_which_loop_holds_up_the_worker(
    tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No deadline interrupts a loop that never awaits, and no other trajectory of the worker goes on."""
    monkeypatch.setattr("rstar2_megatron.rollout.trajectory_runner._HELD_S", 0.2)
    (tmp_path / "busy.py").write_text(
        "import time\nasync def busy(problem, dialogue):\n    await dialogue.generate()\n    time.sleep(1.5)\n    return 1.0\n"
    )
    loop = make_loop(tokenizer, ["a"], loop=UserCode.model_validate(f"{tmp_path}/busy.py:busy"))
    given = iter([[Slice(0, PROBLEM, [0])], None])
    back: list[Trajectory] = []

    async def next_work(room: int) -> list[Slice] | None:
        return next(given)

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append(trajectory)

    await TrajectoryRunner(loop, AdmissionQueue(KVBudget(20_000, 4)), next_work, ended).run()
    said = capfd.readouterr().err
    assert back[0].environment_reward == 1.0 and f'File "{tmp_path}/busy.py", line 4 in busy' in said
