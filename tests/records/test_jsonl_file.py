"""Files of rows: after a kill, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

from rstar2_megatron.algorithm.roc import resample_on_correct
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.run_files import RunFiles, rotate_log
from rstar2_megatron.records.samples import choose_shown
from rstar2_megatron.settings.schema import DownSamplingConfig, RunnerSettings
from rstar2_megatron.trajectory import Group, Problem, ToolOutcome
from tests.algorithm.trajectories import trajectory


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_survive_a_kill(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "run" / "metrics.jsonl")
    for step in range(1, 6):
        file.append({"step": step, "a": step / 2, "b": float("nan")})
    with file.path.open("a") as f:
        f.write('{"step": 6, "a"')  # the kill
    assert [row["step"] for row in file.rows()] == [1, 2, 3, 4, 5]
    assert file.rows()[0]["b"] is None
    file.truncate_after(3)
    file.append({"step": 4, "a": 9.0})
    assert steps(file.path) == [1, 2, 3, 4]
    assert list(file.path.parent.iterdir()) == [file.path]
    assert JsonlFile(tmp_path / "none.jsonl").rows() == []
    JsonlFile(tmp_path / "none.jsonl").truncate_after(3)
    assert not (tmp_path / "none.jsonl").exists()


def test_resumed_runs_drop_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3)) + '{"step": 1')
    JsonlFile(path).truncate_after(2)
    assert steps(path) == [1, 2, 2]


def test_a_kill_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    whole = '{"step": 1, "text": "π"}\n'.encode()
    for torn in ('{"step": 2, "text": "π'.encode()[:-1], b"{" * 200_000):
        path.write_bytes(whole + torn)
        assert [row["step"] for row in JsonlFile(path).rows()] == [1]
        JsonlFile(path).drop_torn_line()
        assert path.read_bytes() == whole
        path.write_bytes(whole + torn)
        JsonlFile(path).truncate_after(2)
        assert path.read_bytes() == whole


def test_a_resumed_run_has_the_rows_of_each_step_once(tmp_path: Path) -> None:
    config = DownSamplingConfig(down_sample_to_n=2, min_zero_reward_trace_num=1, min_non_zero_reward_trace_num=1)
    outcomes = [ToolOutcome.OK]
    group = Group(Problem("q", [], []), [trajectory(float(i < 2), outcomes, index=i) for i in range(4)])
    results = resample_on_correct([group.usable], config, ["seed"])
    shown = choose_shown([group], results, at_least=1)

    def run(first: int, last: int) -> None:
        """Steps `first` to `last` after a resume from the checkpoint of the step before."""
        files = RunFiles(tmp_path, RunnerSettings.model_construct(save_rollouts=True, save_rollout_tokens=True))
        files.truncate_after(first - 1)
        for step in range(first, last + 1):
            files.append(step, {"a": 1.0}, [group], shown)

    run(1, 3)
    run(2, 4)  # the run ended in step 4, its newest checkpoint was that of step 1
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    for name in ("trajectories.jsonl", "rollouts.jsonl"):
        assert steps(tmp_path / name) == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert len(list((tmp_path / "rollouts").iterdir())) == 4


def test_a_file_that_grows_too_large_keeps_its_newest_whole_steps(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "rows.jsonl")
    for step in range(1, 11):
        file.append(*({"step": step, "text": "x" * 76} for _ in range(10)))  # 1000 bytes a step, 1010 from step 10 on
    size = file.path.stat().st_size
    file.keep_newest(size)
    assert len(file.rows()) == 100
    file.keep_newest(size - 1)
    assert steps(file.path) == [step for step in range(6, 11) for _ in range(10)][10:]
    file.keep_newest(100)
    assert steps(file.path) == [10] * 10  # the newest step stays
    file.keep_newest(100)
    assert steps(file.path) == [10] * 10


def test_a_log_is_rotated_under_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old " * 30)
        rotate_log(log, 200)
        assert not (tmp_path / "engine-0.log.1").exists()
        rotate_log(log, 100)
        writer.write(b"new")
    assert log.read_bytes() == b"new" and (tmp_path / "engine-0.log.1").read_bytes() == b"old " * 30


def test_old_rollouts_are_removed(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, RunnerSettings.model_construct(save_rollout_tokens=True, keep_rollouts=2))
    for step in range(1, 6):
        files.append(step, {"a": 1.0}, [], [])
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000004.jsonl.gz", "step_000005.jsonl.gz"]
