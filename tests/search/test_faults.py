"""`python -m rstar2_megatron.search` under faults, with every part real: the trees are those of a run without them."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.services.process import free_port
from tests.e2e.runs import ProgramRun, read_jsonl
from tests.evaluation.test_evaluation import OVERRIDES
from tests.rollout.memorised import CONVERSATIONS
from tests.search.written_trees import trees

pytestmark = [pytest.mark.timeout(1200), pytest.mark.ci]
AWAY_S = 5.0
COPIES = 4  # of each problem, so that a stop falls into the middle


def judge_at(port: int) -> AbstractContextManager[JudgeService]:
    return running_judge(host_port=port, num_workers=1, time_limit_s=1.0)


def command(model: Path, data: Path, out: Path, port: int) -> list[str]:
    flags = ["--model", str(model), "--data", str(data), "--out", str(out), "--mode", "mcts"]
    flags += ["--rollouts", "4", "--candidates", "3", "--depth", "2", "--max-tokens", "400"]
    own = ["search.temperature=0.6", "search.guide=answers", "search.trees=2"]
    own += ["tools.codejudge.host_addr=127.0.0.1", f"tools.codejudge.host_port={port}"]
    own += ["tools.codejudge.time_limit_s=1"]
    others = [word for word in OVERRIDES if "time_limit_s" not in word]
    return [sys.executable, "-m", "rstar2_megatron.search", *flags, *others, *own]


def write_data(path: Path) -> Path:
    names = [(name, copy) for copy in range(COPIES) for name in CONVERSATIONS]
    write_jsonl(path, ({"prompt": f"{name}?", "solutions": ["42"], "query_id": f"{name}-{copy}"} for name, copy in names))
    return path


def journal(out: Path) -> list[dict]:
    return read_jsonl(out / "mcts.expansions.jsonl")


def expansions(out: Path) -> set[tuple[str, str]]:
    """Query id and tag of every expanded node, by the finished trees and the journal."""
    rows = trees(out / "mcts.jsonl").items()
    finished = {(query_id, node["tag"].rpartition(".")[0]) for query_id, nodes in rows for node in nodes[1:]}
    return finished | {(row["query_id"], row["tag"]) for row in journal(out)}


def test_faults_change_no_tree(memorised_model: Path, tmp_path: Path) -> None:
    """A search is stopped by Ctrl-C, goes on, is killed, goes on, and loses its judge for a while."""
    data, port = write_data(tmp_path / "memorised.jsonl"), free_port()
    with judge_at(port) as judge:
        run = ProgramRun(command(memorised_model, data, tmp_path / "whole", port), tmp_path / "whole.log").start()
        assert run.wait(400) == 0, run.text()[-3000:]
        run.assert_nothing_left()
        whole = trees(tmp_path / "whole" / "mcts.jsonl")
        assert len(whole) == COPIES * len(CONVERSATIONS)
        under_faults(command(memorised_model, data, tmp_path / "out", port), tmp_path / "out", whole, judge, port)


def under_faults(words: list[str], out: Path, whole: dict[str, Any], judge: JudgeService, port: int) -> None:
    file = out / "mcts.jsonl"
    recorded = 0

    def search_until_grown(name: str) -> ProgramRun:
        run = ProgramRun(words, out.with_name(f"{name}.log")).start()
        run.wait_for(lambda: len(expansions(out)) >= recorded + 3, 300, "expansions")
        return run

    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        run = search_until_grown(number.name)
        run.send(number)
        assert run.wait(60) == code, run.text()[-3000:]
        run.assert_nothing_left(killed=number is signal.SIGKILL)
        recorded = len(expansions(out))
        assert len(trees(file)) < len(whole), "the stop came too late to test anything"
    kept = {(row["query_id"], row["tag"], step["text"]) for row in journal(out) for step in row["steps"]}
    finished = file.read_text() if file.exists() else ""
    last = search_until_grown("last")
    try:
        judge.stop()
        time.sleep(AWAY_S)
        assert len(trees(file)) < len(whole), "the judge went too late to test anything"
        with judge_at(port):
            assert last.wait(400) == 0, last.text()[-3000:]
        last.assert_nothing_left()
    finally:
        last.kill_all()
    assert trees(file) == whole
    assert file.read_text().startswith(finished)
    found = {
        (query_id, node["tag"].rpartition(".")[0], node["step"]["text"])
        for query_id, nodes in whole.items()
        for node in nodes
        if node["step"] is not None
    }
    assert kept <= found, "an expansion that was written is part of its tree"
