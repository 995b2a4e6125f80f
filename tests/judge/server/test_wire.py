"""The wire contract: every route and field of the public server, and ours beside them."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import httpx
import pytest

from rstar2_megatron.judge.client.service import JudgeService
from tests.judge.calls import HELD, let_go

RESULT_FIELDS = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}
EXTRA_FIELDS = {"outcome", "exit_code", "signal", "truncated", "peak_memory_bytes", "queue_seconds", "worker", "session"}


def submission(solution: str, **fields: Any) -> dict[str, Any]:
    return {"type": "python", "solution": solution, **fields}


def test_status(http: httpx.Client) -> None:
    status = http.get("/status").json()
    assert status["queue"] == 0
    assert status["num_workers"] == 2
    assert status["isolation"] in ("full", "partial", "minimal")
    (worker,) = status["workers"].values()
    assert worker["isolation"]["level"] == status["isolation"]
    # a layer is either on or its absence is explained
    assert all(reason for reason in worker["isolation"]["missing"].values())


def test_health_and_readiness(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200


def test_run_has_every_field(http: httpx.Client) -> None:
    result = http.post("/run", json=submission("print(6 * 7)", sub_id="mine")).json()
    assert set(result) == RESULT_FIELDS | EXTRA_FIELDS
    assert result["sub_id"] == "mine"
    assert (result["success"], result["run_success"], result["reason"]) == (True, True, "")
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("42\n", "", 0)
    assert result["cost"] > 0
    assert result["outcome"] == "ok"


def test_sub_id_is_made_when_absent(http: httpx.Client) -> None:
    first, second = (http.post("/run", json=submission("1")).json()["sub_id"] for _ in range(2))
    assert first and second and first != second


def test_judge_compares_and_hides_output(http: httpx.Client) -> None:
    wanted = submission("print(int(input()) * 2)", input="21\n", expected_output=" 42 ")
    right = http.post("/judge", json=wanted).json()
    wrong = http.post("/judge", json={**wanted, "expected_output": "43"}).json()
    assert set(right) == (RESULT_FIELDS | EXTRA_FIELDS) - {"stdout", "stderr"}
    assert right["success"] and right["run_success"]
    assert not wrong["success"] and wrong["run_success"] and wrong["reason"] == ""


@pytest.mark.parametrize("route", ["/run/batch", "/run/long-batch", "/judge/batch", "/judge/long-batch"])
def test_batches_keep_order(http: httpx.Client, route: str) -> None:
    programs = ["import time; time.sleep(0.1); print('slow')", "print('quick')", "1/0"]
    body = {"type": "batch", "sub_id": "b", "submissions": [submission(p) for p in programs]}
    answer = http.post(route, json=body).json()
    assert set(answer) == {"sub_id", "results"} and answer["sub_id"] == "b"
    assert [r["success"] for r in answer["results"]] == [True, True, False]
    if route.startswith("/run"):
        assert [r["stdout"] for r in answer["results"]] == ["slow\n", "quick\n", ""]
    else:
        assert all("stdout" not in r and "stderr" not in r for r in answer["results"])


async def test_stream_answers_in_order_of_completion(judge: JudgeService) -> None:
    body = {"type": "batch", "submissions": [submission(HELD), submission("print('quick')")]}
    async with (
        httpx.AsyncClient(base_url=judge.url, trust_env=False, timeout=60) as http,
        http.stream("POST", "/run/stream", json=body) as response,
    ):
        lines = response.aiter_lines()
        quick = json.loads(await anext(lines))
        (slow,) = map(json.loads, await let_go(judge, asyncio.ensure_future(anext(lines))))
    assert [(line["index"], line["result"]["stdout"]) for line in (quick, slow)] == [(1, "quick\n"), (0, "done\n")]


@pytest.mark.parametrize(
    "body", [{"type": "python"}, {"type": "fortran", "solution": "x"}, {"solution": "x"}, {"type": "python", "solution": 3}]
)
def test_schema_errors_are_422(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/run", json=body).status_code == 422


def test_empty_batch_is_422(http: httpx.Client) -> None:
    assert http.post("/run/batch", json={"type": "batch", "submissions": []}).status_code == 422


def test_timeout_is_worker_timeout(http: httpx.Client) -> None:
    body = submission("import time; time.sleep(60)", options={"time_limit_s": "0.2"})
    result = http.post("/run", json=body).json()
    assert (result["reason"], result["outcome"]) == ("worker_timeout", "timeout")
    assert not result["success"] and not result["run_success"]


@pytest.mark.parametrize("options", [{"time_limit_s": "soon"}, {"memory_mb": "-1"}])
def test_bad_options_are_invalid_input(http: httpx.Client, options: dict[str, str]) -> None:
    result = http.post("/run", json=submission("1", options=options)).json()
    assert result["reason"] == "invalid_input"
    assert next(iter(options)) in result["stderr"]


@pytest.mark.parametrize(
    ("solution", "expected", "success", "verdict"),
    [
        ("1/2", "\\frac{1}{2}", True, "correct"),
        ("2x+1+x", "3x+1", True, "correct"),
        ("<reason>so</reason> <answer>\\boxed{7}</answer>", "7", True, "correct"),
        ("8", "7", False, "wrong"),
    ],
)
def test_math_is_graded_by_the_projects_grader(
    http: httpx.Client, solution: str, expected: str, success: bool, verdict: str
) -> None:
    body = {"type": "math", "solution": solution, "expected_output": expected}
    result = http.post("/run", json=body).json()
    assert (result["success"], result["run_success"]) == (success, True)
    assert (result["stdout"], result["reason"]) == (f"{verdict}\n", "")


def test_math_without_expected_output_is_a_result_not_an_http_error(http: httpx.Client) -> None:
    result = http.post("/run", json={"type": "math", "solution": "1"}).json()
    assert not result["success"] and result["reason"] == "invalid_input"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_cpp(http: httpx.Client) -> None:
    good = "#include <iostream>\nint main(){int n;std::cin>>n;std::cout<<n*2;return 3;}"
    result = http.post("/run", json={"type": "cpp", "solution": good, "input": "21"}).json()
    assert (result["stdout"], result["exit_code"], result["run_success"]) == ("42", 3, False)
    bad = http.post("/run", json={"type": "cpp", "solution": "int main({"}).json()
    assert not bad["run_success"] and "error" in bad["stderr"]


def test_metrics_are_prometheus_text(http: httpx.Client) -> None:
    http.post("/run", json=submission("1"))
    text = http.get("/metrics").text
    assert 'judge_calls_total{outcome="ok"}' in text
    assert "judge_slots 2.0" in text


def test_same_sub_id_and_program_run_once(http: httpx.Client) -> None:
    body = submission("import os; print(os.urandom(8).hex())", sub_id="once-only")
    first, again = (http.post("/run", json=body).json() for _ in range(2))
    assert first["stdout"] == again["stdout"]
    other = http.post("/run", json={**body, "solution": body["solution"] + " "}).json()
    assert other["stdout"] != first["stdout"]


def test_single_submission_in_a_long_batch(http: httpx.Client) -> None:
    item = {"type": "python", "solution": "print('x')", "input": "", "expected_output": ""}
    body = {"type": "batch", "submissions": [item]}
    (result,) = http.post("/run/long-batch", json=body).json()["results"]
    # an expected output that is given counts, an empty one too
    assert result["run_success"] and not result["success"]


def test_files_lie_in_the_working_directory(http: httpx.Client) -> None:
    files = {"data/table.csv": "a,ü\n", "x.bin": {"base64": "AP8="}}
    program = "print(open('data/table.csv').read() + repr(open('x.bin', 'rb').read()))"
    for given in (files, json.dumps(files)):
        result = http.post("/run", json=submission(program, options={"files": given})).json()
        assert result["stdout"] == "a,ü\nb'\\x00\\xff'\n", result["stderr"]


@pytest.mark.parametrize(
    "files",
    [
        {"/etc/x": ""},
        {"../x": ""},
        {"a/../../x": ""},
        {"": ""},
        {"x": 3},
        {"x": {"base64": "é"}},
        {"x": "y" * (2 << 20)},
        {str(i): "" for i in range(65)},
        "no json",
        ["x"],
    ],
)
def test_bad_files_are_invalid_input(http: httpx.Client, files: Any) -> None:
    result = http.post("/run", json=submission("1", options={"files": files})).json()
    assert result["outcome"] == "invalid_input" and "files" in result["stderr"]
