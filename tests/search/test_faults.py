"""`python -m rstar2_megatron.search` under faults, with every part real: the trees are those of a run without them."""

from __future__ import annotations

import functools
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.services.process import free_port
from tests.e2e.runs import ProgramRun, read_jsonl
from tests.evaluation.test_evaluation import OVERRIDES
from tests.rollout.memorised import CONVERSATIONS

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]
AWAY_S = 20.0
COPIES = 4  # of each problem, so that a stop falls into the middle


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    yield free_port()


@pytest.fixture
def judge(port: int) -> Iterator[JudgeService]:
    with judge_at(port) as service:
        yield service


def judge_at(port: int) -> JudgeService:
    return JudgeService(port=port, workers=1, time_limit_s=1.0)


def command(model: Path, data: Path, out: Path, port: int) -> list[str]:
    flags = ["--model", str(model), "--data", str(data), "--out", str(out), "--mode", "mcts"]
    flags += ["--rollouts", "4", "--candidates", "3", "--depth", "2", "--max-tokens", "400"]
    own = ["search.temperature=0.6", "search.guide=answers", "search.trees=2"]
    own += ["tools.codejudge.host_addr=127.0.0.1", f"tools.codejudge.host_port={port}"]
    own += ["tools.codejudge.time_limit_s=1"]
    others = [word for word in OVERRIDES if "time_limit_s" not in word]
    return [sys.executable, "-m", "rstar2_megatron.search", *flags, *others, *own]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "memorised.jsonl"
    rows = [
        {"prompt": f"{name}?", "solutions": ["42"], "query_id": f"{name}-{copy}"}
        for copy in range(COPIES)
        for name in CONVERSATIONS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(memorised_model: Path, data: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The trees of a search without a fault."""
    out = tmp_path_factory.mktemp("whole")
    with judge_at(port):
        run = ProgramRun(command(memorised_model, data, out, port), out / "log").start()
        assert run.wait(400) == 0, run.text()[-3000:]
        run.assert_nothing_left()
    found = trees(out)
    assert len(found) == COPIES * len(CONVERSATIONS)
    return found


def trees(out: Path) -> dict[str, Any]:
    """What is the same whenever the tree is: everything but seconds, and log-probs to the last bit."""
    found = {}
    for row in read_jsonl(out / "mcts.jsonl"):
        for node in row["nodes"]:
            if node["step"] is not None:
                node["step"].pop("logprobs")
                for call in node["step"]["tool_calls"]:
                    call["seconds"] = 0
        found[row["query_id"]] = row["nodes"]
    return found


def journal(out: Path) -> list[dict]:
    return read_jsonl(out / "mcts.expansions.jsonl")


def grown(out: Path, wanted: int) -> bool:
    return len(journal(out)) >= wanted


def test_a_stopped_and_a_killed_search_end_with_the_same_trees(
    memorised_model: Path, data: Path, whole: dict[str, Any], judge: JudgeService, port: int, tmp_path: Path
) -> None:
    words = command(memorised_model, data, tmp_path, port)
    recorded = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        run = ProgramRun(words, tmp_path / f"{number.name}.log").start()
        enough = functools.partial(grown, tmp_path, recorded + 3)
        run.wait_for(enough, 300, "expansions")
        run.send(number)
        assert run.wait(60) == code, run.text()[-3000:]
        run.assert_nothing_left(killed=number is signal.SIGKILL)
        recorded = len(journal(tmp_path))
        assert len(trees(tmp_path)) < len(whole), "the stop came too late to test anything"
    kept = {(row["query_id"], row["tag"], step["text"]) for row in journal(tmp_path) for step in row["steps"]}
    finished = (tmp_path / "mcts.jsonl").read_text()
    last = ProgramRun(words, tmp_path / "last.log").start()
    assert last.wait(400) == 0, last.text()[-3000:]
    last.assert_nothing_left()
    assert trees(tmp_path) == whole
    assert (tmp_path / "mcts.jsonl").read_text().startswith(finished)
    found = {
        (query_id, node["tag"].rpartition(".")[0], node["step"]["text"])
        for query_id, nodes in whole.items()
        for node in nodes
        if node["step"] is not None
    }
    assert kept <= found, "an expansion that was written is part of its tree"


def test_a_judge_that_is_away_changes_no_tree(
    memorised_model: Path, data: Path, whole: dict[str, Any], judge: JudgeService, port: int, tmp_path: Path
) -> None:
    run = ProgramRun(command(memorised_model, data, tmp_path, port), tmp_path / "log").start()
    run.wait_for(lambda: len(journal(tmp_path)) >= 2, 300, "an expansion")
    judge.stop()
    time.sleep(AWAY_S)
    assert len(trees(tmp_path)) < len(whole), "the judge went too late to test anything"
    with judge_at(port):
        assert run.wait(400) == 0, run.text()[-3000:]
    run.assert_nothing_left()
    assert trees(tmp_path) == whole
