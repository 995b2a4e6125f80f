"""Runs checks one after the other, each under its deadline, and says of each in a line how it went."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.result import Check, CheckFailed, CheckResult, CheckSkipped, Finding

ON_CPU = "this YAML runs on CPU slots"
_GRACE_S = 60.0  # beyond a check's deadline, which the programs that it starts keep themselves


def run_checks(checks: Sequence[Check], context: Context, say: Callable[[str], object] = print) -> list[CheckResult]:
    """Results in the order of the checks. A failure stops only those that depend on it."""
    width = max(len(check.name) for check in checks)
    results: dict[str, CheckResult] = {}
    runner = CheckThread()
    for check in checks:
        reason = why_not(check, context, results)
        result = CheckResult(check.name, "skipped", reason) if reason else runner.run(check, context)
        results[check.name] = result
        say(result.line(width))
    return list(results.values())


def why_not(check: Check, context: Context, results: dict[str, CheckResult]) -> str:
    """Why a check is not made here, or ""."""
    if check.gpu and context.slots.is_cpu:
        return ON_CPU
    if check.nodes > context.settings.cluster.num_nodes:
        return f"needs {check.nodes} nodes, cluster.num_nodes={context.settings.cluster.num_nodes}"
    if check.ranks > context.slots_per_node:
        return f"needs {check.ranks} slots on a node, there is {context.slots_per_node}"
    for name in check.after:
        before = results.get(name)
        if before is not None and before.state != "passed" and before.words != ON_CPU:
            return f"depends on `{name}`, which {'failed' if before.state == 'failed' else 'was skipped'}"
    return ""


class CheckThread:
    """Makes checks in one thread, another when that one hangs.

    One for all of them: a process that dies with its parent (`services/parent_death.py`) dies with the thread that
    started it, and nodes and services started by one check serve the next.
    """

    def __init__(self) -> None:
        self._start_thread()

    def _start_thread(self) -> None:
        self._work: queue.Queue[tuple[Check, Context, queue.Queue[Finding | BaseException]]] = queue.Queue()
        threading.Thread(target=_make, args=(self._work,), name="checks", daemon=True).start()

    def run(self, check: Check, context: Context) -> CheckResult:
        """One check: whatever hangs in it, the next one follows."""
        answers: queue.Queue[Finding | BaseException] = queue.Queue()
        started = time.monotonic()
        self._work.put((check, context, answers))
        limit_s = check.deadline_s * context.nodes.patience + _GRACE_S
        answer: Finding | BaseException
        try:
            answer = answers.get(timeout=limit_s)
        except queue.Empty:
            answer = CheckFailed(f"did not end within {limit_s:.0f} s and was left behind")
            self._start_thread()
        return _result(check, answer, time.monotonic() - started)


def _make(work: queue.Queue[tuple[Check, Context, queue.Queue[Finding | BaseException]]]) -> None:
    while True:
        check, context, answers = work.get()
        try:
            answers.put(check.run(context))
        except BaseException as error:
            answers.put(error)


def _result(check: Check, answer: Finding | BaseException, seconds: float) -> CheckResult:
    if isinstance(answer, Finding):
        return CheckResult(check.name, "passed", answer.words, seconds, figures=answer.figures)
    if isinstance(answer, CheckSkipped):
        return CheckResult(check.name, "skipped", str(answer), seconds)
    if isinstance(answer, CheckFailed):
        details = answer.details or answer.words
        remedy = answer.remedy or check.remedy
        return CheckResult(check.name, "failed", answer.words, seconds, remedy, answer.figures, details)
    trace = "".join(traceback.format_exception(answer))
    words = f"{type(answer).__name__}: {answer}"
    return CheckResult(check.name, "failed", words, seconds, check.remedy, details=trace)
