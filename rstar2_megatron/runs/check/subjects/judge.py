"""The Code Judge of the YAML, asked from every node."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from typing import Any

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import WITHOUT_PROXY, JudgeService, JudgeServiceError
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.check.result import Check, CheckFailed, Finding
from rstar2_megatron.runs.preflight import cluster_problems
from rstar2_megatron.services.loopback import listening_address

_CALLS = 16


def call_judge(job: Job, url: str, calls: int, token: str | None = None) -> dict[str, Any]:
    """Calls of a small program from this node; raises where one does not come back right."""
    return asyncio.run(_call_judge(url, calls, token)) | {"libraries": importable(url, token)}


async def _call_judge(url: str, calls: int, token: str | None) -> dict[str, Any]:
    client = JudgeClient(url, token=token, max_outage_s=10.0, max_overload_s=30.0, request_timeout_s=30.0)
    try:
        started = time.perf_counter()
        results = await asyncio.gather(*(client.run(f"print({n} * 7)") for n in range(calls)))
        seconds = time.perf_counter() - started
        wrong = [(n, r.outcome.value, r.stdout, r.stderr) for n, r in enumerate(results) if r.stdout.strip() != str(7 * n)]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {calls} calls came back wrong, the first: {wrong[0]}")
        return {"calls_per_s": calls / seconds, "seconds": seconds}
    finally:
        await client.close()


def importable(url: str, token: str | None) -> dict[str, str]:
    """What programs may import, each package with its version, at all workers of this judge; {} from the public server."""
    request = urllib.request.Request(f"{url}/status", headers={"Authorization": f"Bearer {token}"} if token else {})
    with WITHOUT_PROXY.open(request, timeout=10) as reply:
        workers = json.load(reply).get("workers") or {}
    told = [worker.get("libraries") or {} for worker in workers.values()] if isinstance(workers, dict) else []
    packages = sorted({package for libraries in told for package in libraries})
    return {name: " or ".join(sorted({libraries.get(name, "missing") for libraries in told})) for name in packages}


def why_not_started(text: str) -> tuple[str, str]:
    """(words, remedy) of a judge that did not start: the reason is the last line of its log. remedy: "" for the check's own."""
    words = text.strip().splitlines()[-1]
    if "isolation" not in words:
        return words, ""
    return words, (
        "run as root, allow user namespaces (Ubuntu 24.04: by the command that the judge's log shows), or, for programs that "
        "you trust, set JUDGE_REQUIRE_ISOLATION=minimal (docs/judge.md)"
    )


def judge(context: Context) -> Finding:
    problems = list(cluster_problems(context.settings))
    if problems:
        raise CheckFailed("; ".join(problems), remedy="see docs/multi_node.md")
    if not context.settings.agentloop.needs_judge:
        return Finding("no tool of this YAML runs programs", {})
    host = listening_address(context.settings.cluster.num_nodes)
    service = JudgeService(context.settings.tools.codejudge, context.scratch / "judge.log", host=host)
    try:
        try:
            service.begin()
            url = service.wait_ready()
        except (JudgeServiceError, RuntimeError, OSError) as error:
            words, remedy = why_not_started(str(error))
            raise CheckFailed(words, remedy=remedy, details=str(error)) from error
        answers = context.nodes.everywhere(
            "rstar2_megatron.runs.check.subjects.judge:call_judge",
            60.0,
            url=url,
            calls=_CALLS,
            token=os.environ.get("JUDGE_TOKEN"),
        )
    finally:
        service.stop()
    bad = [answer for answer in answers if answer.error]
    if bad:
        last = bad[0].error.strip().splitlines()[-1]
        raise CheckFailed(
            f"{len(bad)} of {len(answers)} nodes got no right answer from {url}; node {bad[0].node}: {last}",
            details="\n\n".join(f"node {answer.node}:\n{answer.error}" for answer in bad),
        )
    slowest = min(answer.value["calls_per_s"] for answer in answers)
    libraries = answers[0].value["libraries"]
    shown = ", ".join(f"{name} {version}" for name, version in libraries.items()) or "what its machine has"
    words = f"{url}: {_CALLS} calls from each of {len(answers)} node(s), {slowest:.0f} calls/s; programs may import {shown}"
    return Finding(words, {"calls_per_s": slowest, "url": url, "libraries": libraries})


CHECKS = [
    Check(
        "judge",
        judge,
        "start it (python -m rstar2_megatron.judge all), open its port to every node, the same JUDGE_TOKEN on both sides",
    )
]
