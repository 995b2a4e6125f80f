"""Draws k trajectories per problem from a model directory: engine, agent loop, judge and grader as in training.

A caller needs only `sample(problems, settings, out)`:

    settings = SamplingSettings.of(load_settings(NAME), spec, model="DIR")
    samples = sample(problems, settings, Path("out/trajectories.jsonl"))

It starts SGLang engines, grading processes, and the Code Judge with its Redis unless the settings name a running judge. It
writes every trajectory to `out` as it ends. It stops what it started, also when it is interrupted. A further call with the
same `out` draws only the missing attempts. No Ray: one process drives all engines of this node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from rstar2_megatron.evaluation.attempt_queue import AttemptQueue, run_together
from rstar2_megatron.evaluation.samples import Sample, SampleFile, try_row
from rstar2_megatron.evaluation.services import SamplingSettings, running_services
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.scheduling.adaptive_budget import make_budget
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.trajectory import Problem, Trajectory


def sample(
    problems: Sequence[Problem], settings: SamplingSettings, out: str | Path, *, label: str = "sampling"
) -> list[Sample]:
    """`settings.spec.samples` attempts at each problem, graded, in the order of problems and attempts.

    out: jsonl of trajectories (`trajectory_row`); attempts that it already holds are not drawn again. An attempt that the
        infrastructure spoiled is tried `attempt_queue.MAX_TRIES` times, then left out; a later call tries it again.
    Logs of engines and judge go to `logs/` beside `out`. Sampling is not reproducible token by token: an engine's batches
    depend on timing.

    Raises SamplesError when `out` was made with other settings or problems, ValueError for problems that cannot be
    sampled (no room in the context, a trajectory that never fits the KV cache), EngineLost, JudgeServiceError, GraderLost.
    SIGINT ends it with KeyboardInterrupt, SIGTERM with asyncio.CancelledError, both after everything is stopped.
    """
    file = SampleFile(out, settings.identity)
    found = file.open(problems)
    keys = [(p.query_id, i) for p in problems for i in range(settings.spec.samples)]
    if any(key not in found for key in keys):
        asyncio.run(_draw(problems, settings, file, found, label))
    return [found[key] for key in keys if key in found]


async def _draw(
    problems: Sequence[Problem], settings: SamplingSettings, file: SampleFile, found: dict[tuple[str, int], Sample], label: str
) -> None:
    """Draw the attempts that `found` lacks, into it and `file`: services up, engines pulling attempts, services down."""
    missing = [
        (group, index)
        for group, problem in enumerate(problems)
        for index in range(settings.spec.samples)
        if (problem.query_id, index) not in found
    ]
    rollout = settings.rollout
    async with running_services(settings, problems, file.path.parent.resolve() / "logs") as services:
        attempts = AttemptQueue(problems, missing, rollout.slice_size)
        with tqdm(total=len(missing), desc=label, disable=None) as bar:

            async def finished(work: Slice, trajectory: Trajectory) -> None:
                if trajectory.usable:
                    await services.rewards.grade([(work.problem, trajectory)])
                row = try_row(work.problem, trajectory, rollout.trajectory_timeout_s)
                file.append(row)
                if trajectory.usable:
                    found[trajectory.query_id, trajectory.rollout_index] = Sample.from_row(row)
                    bar.update()
                attempts.ended(work.group, trajectory.rollout_index, usable=trajectory.usable)

            async def keep_busy(engine: EngineClient) -> None:
                """Until no attempt is left."""
                budget = make_budget(rollout.scheduler, engine.kv_capacity_tokens, rollout.max_running_requests)
                agent_loop = services.agent_loop(engine, settings)
                runner = TrajectoryRunner(agent_loop, AdmissionQueue(budget), attempts.next, finished)
                engine.on_report = runner.observe
                await runner.run()

            await run_together(map(keep_busy, services.engines))
