"""`run_rstar2.sh` itself, with every part real: Ray, RLinf, Megatron TP 2, SGLang, Redis, the judge.

Small numbers of steps; the supervised start is short, done once, and shared through the cache.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import time
from pathlib import Path

import pytest
import redis
import torch
from safetensors.torch import load_file

from rstar2_megatron.evaluation.model_directory import find_run_config, hugging_face_directory
from rstar2_megatron.records.trace import trace_path
from rstar2_megatron.records.trajectory_row import FLOATS, unpack
from rstar2_megatron.report.names import TO_VERL
from rstar2_megatron.report.step_bound import shares_of, timeline
from rstar2_megatron.report.trajectories import main as report_trajectories
from rstar2_megatron.services.redis_server import RedisServer
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.training.known_metrics import unknown_metric
from tests.e2e.runs import ONE_SLOT, RunProcess, arguments, read_jsonl

LIMIT_S = 600
pytestmark = pytest.mark.timeout(1200)  # two whole runs in a test, on a machine that may be busy
# means over what resampling kept, which a step may not have
RESAMPLED_ONLY = {"rollout/reward_scores", "rollout/prompt_length", "rollout/response_length"} | {
    f"rollout/{which}_of_response_length" for which in ("max", "min")
}


def queries_of_steps(directory: Path) -> dict[int, list[str]]:
    steps: dict[int, list[str]] = {}
    for row in read_jsonl(directory / "trajectories.jsonl"):
        ids = steps.setdefault(row["step"], [])
        if row["query_id"] not in ids:
            ids.append(row["query_id"])
    return steps


def test_metrics_of_every_step(first_run: Path) -> None:
    rows = read_jsonl(first_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/num_trajectories"] == 4 * 16
        assert row["rollout/dropped_infrastructure"] == 0
        assert 0 <= row["rollout/pass_rate"] <= 1
        assert row["rollout/groups_kept"] + row["rollout/groups_rejected"] == 4
        assert row["time/step"] >= row["time/rollout"] > 0
        assert "rollout/tool_calls_positive" in row
        assert row["rollout/logprob_min"] < 0 <= row["rollout/void_turn_ratio"] <= 1
        assert [name for name in row if name != "step" and unknown_metric(name)] == []
        judge = {k.rpartition("/")[2]: v for k, v in row.items() if k.startswith("rollout/engine/judge/")}
        answered = sum(value for name, value in judge.items() if name.startswith("outcome_"))
        assert judge["calls"] == answered > 0 and judge["outage_seconds"] >= 0
        missing = {name for name in TO_VERL if name.startswith(("rollout/", "time/"))} - set(row)
        assert missing <= RESAMPLED_ONLY if not row["rollout/groups_kept"] else not missing
    trained = [row for row in rows if not row["train/actor/skipped_update"]]
    assert trained, "no step had a group to train on; the supervised start of this test is too short"
    for row in trained:
        assert row["train/actor/grad_norm"] > 0
        assert row["rollout/logprob_diff_max"] < 1e-3
        assert row["rollout/total_num_sequence"] == 8 * row["rollout/groups_kept"]
        assert "train/actor/policy_loss" in row and row["time/training"] > 0


def test_the_traced_step_has_every_row_and_the_shares_of_its_metrics(first_run: Path) -> None:
    assert [path.name for path in (first_run / "traces").iterdir()] == ["step_2.json"]
    events = json.loads(trace_path(first_run, 2).read_text())
    step = timeline(events)
    rows = {"driver", "engine 0", "engine 1", "tool calls", "grading", "actor rank 0", "actor rank 1"}
    assert set(step.rows.values()) == rows | {"weight sync", "checkpoint"}
    assert len(step.tasks) == 4 * 16 and all(task.complete for task in step.tasks)
    (whole,) = [span for span in step.spans if span.name == "step 2"]
    inside = [span for span in (*step.spans, *step.tasks) if span is not whole]
    assert all(whole.start - 0.01 <= span.start <= span.end <= whole.end + 0.01 for span in inside)
    laps = ("training", "save", "sync_weights")
    begin = [min(span.start for span in step.spans if span.name == lap) for lap in laps]
    assert begin == sorted(begin), "a save after the sync would wake an actor that has given its memory to the engines"
    row = read_jsonl(first_run / "metrics.jsonl")[1]
    shares = shares_of(step)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares == pytest.approx({name: row[f"share/{name}"] for name in shares}, abs=0.02)


def test_the_profiled_step_has_a_file_of_every_rank(first_run: Path) -> None:
    (directory,) = (first_run / "profiles").iterdir()
    files = sorted(path.name for path in directory.iterdir())
    assert directory.name == "step_2" and files[:2] == ["actor_rank_0.json.gz", "actor_rank_1.json.gz"]
    assert [name[:9] for name in files[2:]] == ["engine_0-", "engine_1-"]
    for file in directory.iterdir():
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert names & {"aten::mm", "aten::addmm", "aten::matmul"}, file


def test_supervised_start_taught_the_format(first_run: Path) -> None:
    held_out = json.loads((first_run / "held_out.json").read_text())
    assert held_out["before_sft"] == 0.0
    assert held_out["after_sft"] is not None and held_out["after_rl"] is not None
    rows = read_jsonl(first_run / "trajectories.jsonl")
    assert any(call["outcome"] == "ok" for row in rows for call in row["tool_calls"])
    assert {version for row in rows if row["step"] == 2 for _, _, version in row["versions"]} == {1}


def test_checkpoint_has_rlinfs_layout(first_run: Path) -> None:
    checkpoint = first_run / "checkpoints" / "global_step_2"
    assert (checkpoint / "actor").is_dir() and any((checkpoint / "actor").iterdir())
    state = torch.load(checkpoint / "data" / "data.pt", weights_only=False)
    assert state["step"] == 2


def test_the_model_loads_in_transformers_and_has_changed(first_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(first_run / "model")
    model = AutoModelForCausalLM.from_pretrained(first_run / "model")
    ids = tokenizer("<|im_start|>user\n1 + 1<|im_end|>\n", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert (first_run / "model" / "rstar2_format.json").is_file()
    config = (first_run / "config.yaml").read_text()
    base = next(line.split(": ", 1)[1].strip().strip("'\"") for line in config.splitlines() if "model_path:" in line)
    start = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


def test_reports_are_there(first_run: Path) -> None:
    assert (first_run / "curves.png").stat().st_size > 10_000
    assert list((first_run / "tensorboard").rglob("events.out.tfevents.*"))
    log = (first_run.parent / "first.log").read_text()
    assert "held-out pass@1" in log and "|dlogp|" in log


def test_trajectories_of_a_run_become_a_page(first_run: Path, tmp_path: Path) -> None:
    """Whole groups with the actor's log-probs: in fp32 they agree with the engine's on every generated token."""
    rows = read_jsonl(first_run / "trajectories.jsonl")
    assert len(rows) == 2 * 4 * 16
    scored = [row for row in rows if "logprob_diff" in row]
    assert scored
    for row in scored:
        differences = unpack(row["logprob_diff"], FLOATS)
        assert len(differences) == row["trained_tokens"] and max(map(abs, differences)) < 1e-3
    for step in (1, 2):
        metrics = read_jsonl(first_run / "metrics.jsonl")[step - 1]
        kept = sum(row["kept"] for row in rows if row["step"] == step)
        assert kept == metrics["rollout/total_num_sequence"]
    assert report_trajectories([str(first_run), "--out", str(tmp_path / "page.html")]) == 0
    assert '"about": "8 groups, 128 of 128 trajectories"' in (tmp_path / "page.html").read_text()


def test_a_checkpoint_can_be_evaluated(first_run: Path) -> None:
    """The last checkpoint, converted, is the exported model; the run it lies in gives the conversation format."""
    checkpoint = first_run / "checkpoints" / "global_step_2"
    config = find_run_config(checkpoint)
    assert config == first_run / "config.yaml"
    settings = load_settings(str(config))
    converted = hugging_face_directory(checkpoint, settings.rollout.model.model_path)
    ours, exported = (load_file(path / "model.safetensors") for path in (converted, first_run / "model"))
    assert ours.keys() == exported.keys()
    assert all(torch.equal(ours[name], exported[name]) for name in ours)
    assert hugging_face_directory(first_run) == first_run / "model"
    with pytest.raises(ValueError, match="neither a Hugging Face directory"):
        hugging_face_directory(first_run / "logs")


def test_killed_in_mid_step_and_resumed(cache: Path, first_run: Path, tmp_path: Path) -> None:
    command = arguments(cache, tmp_path, "killed", *ONE_SLOT, "evaluation.before_and_after=False")
    metrics, checkpoints = (tmp_path / "killed" / name for name in ("metrics.jsonl", "checkpoints"))
    run = RunProcess(command, tmp_path / "killed.log").start()
    run.wait_for(lambda: len(read_jsonl(metrics)) >= 1, LIMIT_S, "a step")
    run.wait_for((checkpoints / "global_step_1").is_dir, LIMIT_S, "its checkpoint")
    time.sleep(0.5)  # into the second step
    run.send(signal.SIGKILL)
    run.assert_nothing_left(30, killed=True)

    # the second run also sweeps the directories that the killed one left
    again = RunProcess(command, tmp_path / "resumed.log", temporary=run.temporary).start()
    assert again.wait(LIMIT_S) == 0, again.text()[-6000:]
    again.assert_nothing_left()
    assert "resuming from" in again.text()
    assert [row["step"] for row in read_jsonl(metrics)] == [1, 2]
    # the same data order as a run that was never interrupted, and no problem twice
    ours, theirs = queries_of_steps(tmp_path / "killed"), queries_of_steps(first_run)
    assert ours == theirs
    assert len({query for queries in ours.values() for query in queries}) == 8


def listening_sockets() -> set[str]:
    """`socket:[INODE]` of every TCP socket that listens; a port alone may be another test's by now."""
    rows = (line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:])
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def listening_sockets_of(run: RunProcess) -> set[str]:
    opened = set()
    for process in run.processes():
        with contextlib.suppress(OSError):  # it has just ended
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it has just been closed
                    opened.add(os.readlink(descriptor))
    return opened & listening_sockets()


def leaves_nothing(run: RunProcess, sockets: set[str]) -> None:
    run.assert_nothing_left()
    assert sockets and not sockets & listening_sockets()
    assert not list(Path("/dev/shm").glob("rstar2*"))


@pytest.mark.release  # SIGTERM and Ctrl-C at other moments: below and test_recipe.py
def test_sigterm_while_starting(cache: Path, first_run: Path, tmp_path: Path) -> None:
    run = RunProcess(arguments(cache, tmp_path, "stopped"), tmp_path / "stopped.log").start()
    run.wait_for(lambda: "ready:" in run.text(), LIMIT_S, "readiness")
    sockets = listening_sockets_of(run)
    run.send(signal.SIGTERM)
    assert run.wait(60) == 143, run.text()[-4000:]
    leaves_nothing(run, sockets)
    assert "Unhandled error" not in run.text(), run.text()[-4000:]


@pytest.mark.ci
def test_ctrl_c_while_rolling_out_with_a_running_redis(cache: Path, first_run: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal's group; a Redis that the YAML names is used and left alone."""
    with RedisServer() as redis_server, redis.Redis.from_url(redis_server.uri) as client:
        run = RunProcess(
            arguments(
                cache,
                tmp_path,
                "interrupted",
                f"tools.codejudge.redis_uri={redis_server.uri}",
                "evaluation.before_and_after=False",
                "runner.max_steps=100",
            ),
            tmp_path / "interrupted.log",
        ).start()

        def calls() -> int:
            """INCRBY counts the jobs that wait, up and down: two calls of it a tool call."""
            return int(client.info("commandstats").get("cmdstat_incrby", {}).get("calls", 0)) // 2

        run.wait_for(lambda: calls() > 5, LIMIT_S, "tool calls through the Redis that the YAML names")
        sockets = listening_sockets_of(run)
        assert run.process is not None
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(90) == 130
        leaves_nothing(run, sockets)
        assert client.ping()
    assert "Traceback" not in run.text(), run.text()[-4000:]


@pytest.mark.ci
def test_variants_and_evaluation_by_override(cache: Path, first_run: Path, tmp_path: Path) -> None:
    run = RunProcess(
        arguments(
            cache,
            tmp_path,
            "variants",
            "runner.max_steps=1",
            "evaluation.before_and_after=False",
            "algorithm.recompute_logprobs=True",
            "algorithm.refill={enabled: True, min_share: 1.0, max_extra: 1.0}",
            "algorithm.adv_type=leave-one-out",
            "algorithm.overlong.buffer_tokens=256",  # the whole response: every trajectory is punished
            "algorithm.turn_returns={discount: 0.9, malformed_penalty: 0.1}",
            "algorithm.entropy_bonus=0.01",
            "algorithm.entropy_bonus_tokens=8",
            "algorithm.loss_agg_func=released-verl",
            "reward.mode=released",
            "runner.val_check_interval=1",
            f"runner.corridor={Path(__file__).parents[2] / 'benchmarks/results/tiny_corridor.json'}",
            "evaluation.num_samples=2",
            "actor.offload_weight=True",  # actor and engines take turns with the memory
            "actor.offload_grad=True",
            "actor.offload_optimizer=True",
        ),
        tmp_path / "variants.log",
    ).start()
    assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    run.assert_nothing_left()
    (row,) = read_jsonl(tmp_path / "variants" / "metrics.jsonl")
    assert row["train/actor/skipped_update"] or row["rollout/logprob_diff_max"] < 1e-3
    refilled = row["rollout/engine/refilled_problems"]  # until four groups are kept or four were added
    assert row["rollout/num_trajectories"] == 16 * (4 + refilled)
    assert refilled == 4 or row["rollout/groups_kept"] >= 4
    assert ("train/actor/overlong_punishment" in row) != row["train/actor/skipped_update"]
    assert -1 <= row.get("train/actor/overlong_punishment", -0.5) < 0
    assert row["rollout/outside_corridor"] >= 0  # in the file, where runner.stop_when reads it
    assert 0 <= row["eval/average"] <= row["eval/pass@2"] <= 1 and row["eval/samples"] == 32
    evaluated = read_jsonl(tmp_path / "variants" / "evaluation" / "held-out_at_step_1.jsonl")
    assert len(evaluated) == 32
    assert sum(r["reward"] for r in evaluated) / 32 == pytest.approx(row["eval/average"])
    assert row["train/actor/handover_seconds"] > 0 and row["train/actor/sync_bytes"] > 1e6
