"""SandboxFusion's dialect, as verl's client reads it."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest


def post(http: httpx.Client, code: str, **fields: Any) -> dict[str, Any]:
    body = {"code": code, "language": "python", "compile_timeout": 10, "run_timeout": 10, "stdin": "", **fields}
    response = http.post("/run_code", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_output_and_input(http: httpx.Client) -> None:
    answer = post(http, "print(int(input()) * 2)", stdin="21\n", files={}, fetch_files=[], memory_limit_MB=-1)
    run = answer["run_result"]
    assert (answer["status"], answer["message"], answer["compile_result"], answer["files"]) == ("Success", "", None, {})
    assert (run["status"], run["return_code"], run["stdout"], run["stderr"]) == ("Finished", 0, "42\n", "")
    assert 0 <= run["execution_time"] < 10


def test_a_failing_program_is_finished_with_its_code(http: httpx.Client) -> None:
    answer = post(http, "print('before'); raise ValueError('no')")
    assert (answer["status"], answer["run_result"]["status"], answer["run_result"]["return_code"]) == ("Failed", "Finished", 1)
    assert answer["run_result"]["stdout"] == "before\n" and "ValueError: no" in answer["run_result"]["stderr"]
    assert post(http, "import sys; sys.exit(3)")["run_result"]["return_code"] == 3


def test_a_time_limit_keeps_what_was_printed(http: httpx.Client) -> None:
    answer = post(http, "print('so far', flush=True)\nwhile True: pass", run_timeout=1)
    assert (answer["status"], answer["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert answer["run_result"]["stdout"] == "so far\n"


def test_a_killed_program_has_its_signal(http: httpx.Client) -> None:
    answer = post(http, "import os; os.kill(os.getpid(), 9)")
    assert (answer["status"], answer["run_result"]["status"], answer["run_result"]["return_code"]) == ("Failed", "Finished", -9)


def test_files_are_base64(http: httpx.Client) -> None:
    files = {"data/a.txt": base64.b64encode(b"written").decode(), "absent.txt": None}
    assert post(http, "print(open('data/a.txt').read())", files=files)["run_result"]["stdout"] == "written\n"


def test_what_cannot_be_run_is_a_sandbox_error(http: httpx.Client) -> None:
    answer = post(http, "print(1)", run_timeout=-5)
    assert answer["status"] == "SandboxError" and answer["run_result"] is None and "time_limit_s=-5" in answer["message"]


@pytest.mark.parametrize(
    ("field", "value"), [("language", "rust"), ("code", 7), ("stdin", 7), ("files", [1])], ids=lambda value: str(value)
)
def test_wrong_fields_are_named(http: httpx.Client, field: str, value: Any) -> None:
    response = http.post("/run_code", json={"code": "", "language": "python", field: value})
    assert response.status_code == 422 and response.json()["detail"][0]["loc"] == ["body", field]
