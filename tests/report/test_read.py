"""Reading the logs of several codes: what each really looks like, broken ones, several runs in one place."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest

from rstar2_megatron.report.arms import arm_label, group_runs
from rstar2_megatron.report.names import LENGTH, PASS_RATE, REWARD
from rstar2_megatron.report.read import read_logs
from tests.report.logs import read_log, write_run


def test_verl_console_with_colours_prefixes_and_numpy_values(tmp_path: Path) -> None:
    log_file = tmp_path / "train.log"
    log_file.write_text(
        "starting\n"
        "\x1b[36m(TaskRunner pid=77)\x1b[0m step:1 - critic/rewards/mean:np.float64(0.41) - "
        "actor/kl:tensor(0.5, device='cuda:0') - reward/a:b:0.7 - "
        "response_length/mean:512.5 - actor/lr:1e-06 - val-core/aime/reward/mean@16:-0.5\n"
        "(TaskRunner pid=77) step:2 - critic/rewards/mean:0.5 - response_length/mean:nan - broken:abc\n"
        "step:3 - critic/rewards/me"
    )
    log = read_log(log_file, verl=True)
    assert log.series[REWARD] == {1: 0.41, 2: 0.5}
    assert log.series[LENGTH] == {1: 512.5}
    assert log.series["train/actor/lr"] == {1: 1e-6} and {1: 0.5} in log.series.values() and {1: 0.7} in log.series.values()
    assert log.series["eval/aime/average"] == {1: -0.5}
    assert log.kind == "verl"
    assert log.messages == [f"{log_file}: line 4 has no end; its last value is left out"]


def test_a_value_cut_short_is_no_value(tmp_path: Path) -> None:
    """The 5 of 512.5 would draw a cliff at the end of the curve; Ray's remark behind a line is no part of its value."""
    log_file = tmp_path / "train.log"
    log_file.write_text(
        "(TaskRunner pid=7) step:1 - response_length/mean:510.0 - critic/rewards/mean:np.float64(0.2)"
        "\x1b[32m [repeated 2x across cluster]\x1b[0m\n"
        "progress 10%\r(TaskRunner pid=7) step:2 - critic/rewards/mean:0.3 - response_length/mean:5"
    )
    log = read_log(log_file, verl=True)
    assert log.series == {LENGTH: {1: 510.0}, REWARD: {1: 0.2, 2: 0.3}}


def test_initial_validation_of_verl_is_no_training_step(tmp_path: Path) -> None:
    log_file = tmp_path / "train.log"
    log_file.write_text(
        "step:0 - val-core/aime/reward/mean@16:0.1 - perf/gpu:1\nstep:1 - critic/rewards/mean:0.2 - critic/score/mean:0.9\n"
    )
    log = read_log(log_file, verl=True)
    assert log.aligned(REWARD) == {1: 0.2}  # the better of verl's two names
    assert log.series["eval/aime/average"] == {0: 0.1}


def test_verl_jsonl_rows_hold_data(tmp_path: Path) -> None:
    path = tmp_path / "exp.jsonl"
    rows = [{"step": s, "data": {"critic/score/mean": s / 10, "timing_s/gen": 3}} for s in (1, 2)]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "da')
    log = read_log(path)
    assert log.kind == "verl"  # by its names
    assert log.series[REWARD] == {1: 0.1, 2: 0.2} and log.series["time/rollout"] == {1: 3.0, 2: 3.0}
    assert log.messages == [f"{path}: 1 lines could not be read (3)"]


def test_wandb_export_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "wandb.csv"
    path.write_text(
        '"Step","run-a - critic/rewards/mean","run-a - critic/rewards/mean__MIN"\n"1","0.25","0"\n"x","1","1"\n"2","",""\n'
    )
    log = read_log(path, verl=True)
    assert log.series == {REWARD: {1: 0.25}}
    assert log.messages == [f"{path}: 1 rows could not be read (3)"]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "no column Step" in read_log(tmp_path / "other.csv").messages[0]


def test_tensorboard_of_rlinf_counts_from_0_and_is_shifted(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run" / "tensorboard")) as writer:
        for step in range(4):
            writer.add_scalar(REWARD, step / 10, step)
    log = read_log(tmp_path / "run")
    assert log.first_step == 0
    assert log.aligned(REWARD) == pytest.approx({1: 0.0, 2: 0.1, 3: 0.2, 4: 0.3})
    assert arm_label([log]) == "run"


def test_rlinf_steps_in_mini_batches_become_training_steps(tmp_path: Path) -> None:
    """RLinf logs step 0, 4, 8, ... when a step has four mini-batches."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step in range(3):
            writer.add_scalar(REWARD, step / 10, 4 * step)
            writer.add_scalar("time/step", 1.0, 4 * step)
            for i in range(4):  # the losses of each mini-batch have a number of their own
                writer.add_scalar("train/actor/policy_loss", float(4 * step + i), 4 * step + i)
    log = read_log(tmp_path)
    assert log.aligned(REWARD) == pytest.approx({1: 0.0, 2: 0.1, 3: 0.2})
    assert log.aligned("train/actor/policy_loss") == {1: 1.5, 2: 5.5, 3: 9.5}
    assert log.messages == [f"{tmp_path}: steps are multiples of 4; read as one training step each"]


def test_rlinf_log_that_does_not_begin_at_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, REWARD: 0.5}) + "\n" for s in (40, 41)))
    assert "begins at step 40" in read_log(path).messages[0]
    path.write_text("".join(json.dumps({"step": s, REWARD: 0.5, PASS_RATE: 0.4}) + "\n" for s in (40, 41)))
    assert read_log(path).messages == []  # ours: counts from 1


def test_runs_that_lie_together_are_not_mixed(tmp_path: Path) -> None:
    """A project's directory, an export of a chart with several runs, jsonl files of several experiments."""
    from torch.utils.tensorboard import SummaryWriter

    project = tmp_path / "tensorboard_log" / "project"
    for seed in (1, 2):
        with SummaryWriter(str(project / f"exp-seed{seed}")) as writer:
            writer.add_scalar("critic/rewards/mean", seed / 10, 1)
            writer.add_scalars("sub", {"a": 1.0}, 1)  # makes a directory of its own, which is no run
    logs = read_logs(project, verl=True)
    assert [log.label for log in logs] == ["exp-seed1", "exp-seed2"]
    assert [log.series[REWARD][1] for log in logs] == pytest.approx([0.1, 0.2])
    assert f"{project}: holds 2 runs, each read by itself (exp-seed1, exp-seed2)" in logs[0].messages
    assert [arm.label for arm in group_runs(logs)] == ["verl exp-seed1", "verl exp-seed2"]  # nobody said: seeds

    chart = tmp_path / "chart.csv"
    chart.write_text('"Step","a_s1 - critic/rewards/mean","a_s1 - _step","a_s2 - critic/rewards/mean"\n1,0.1,1,0.3\n2,0.2,2,\n')
    logs = read_logs(chart, verl=True)
    assert {log.label: log.series for log in logs} == {"a_s1": {REWARD: {1: 0.1, 2: 0.2}}, "a_s2": {REWARD: {1: 0.3}}}
    ours = [write_run(tmp_path / "results" / f"ours-seed{seed}", [0.1 * seed]) for seed in (1, 2)]
    logs = read_logs(tmp_path / "results")
    assert [log.path for log in logs] == ours and [log.label for log in logs] == ["ours-seed1", "ours-seed2"]

    (tmp_path / "verl").mkdir()
    for seed in (1, 2):
        row = {"step": 1, "data": {"critic/rewards/mean": seed / 10}}
        (tmp_path / "verl" / f"exp_s{seed}.jsonl").write_text(json.dumps(row) + "\n")
    assert [log.label for log in read_logs(tmp_path / "verl")] == ["exp_s1", "exp_s2"]


def test_rows_that_call_their_step_global_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"global_step": step, "critic/rewards/mean": step / 10}) + "\n" for step in (1, 2)))
    assert read_log(path, verl=True).series == {REWARD: {1: 0.1, 2: 0.2}}


def test_a_resumed_wandb_run_is_one_run(tmp_path: Path) -> None:
    for part, steps in (("a", (1, 2)), ("b", (2, 3))):
        directory = tmp_path / f"offline-run-{part}-x1"
        directory.mkdir()
        records = [history(s, {"critic/rewards/mean": s / 10}) for s in steps]
        (directory / "run-x1.wandb").write_bytes(leveldb(records))
    assert read_log(tmp_path, verl=True).series == {REWARD: {1: 0.1, 2: 0.2, 3: 0.3}}


# An offline wandb file written by its published layout, apart from the reader: LevelDB records of protobuf messages.


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def history(step: int, values: dict[str, float]) -> bytes:
    items = b"".join(
        field(1, field(1, name.encode()) + field(16, json.dumps(value).encode()))
        for name, value in {**values, "_step": step}.items()
    )
    return field(1, step) + field(2, items + field(2, field(1, step)))


def leveldb(records: list[bytes]) -> bytes:
    out = b":W&B\xe1\xbe\x00"
    for record in records:
        first = True
        while first or record:
            left = 32768 - len(out) % 32768
            if left < 7:
                out += b"\x00" * left
                continue
            piece, record = record[: left - 7], record[left - 7 :]
            kind = bytes([(1 if first else 4) if not record else (2 if first else 3)])
            out += struct.pack("<IHB", zlib.crc32(kind + piece), len(piece), kind[0]) + piece
            first = False
    return out


def test_wandb_offline_file(tmp_path: Path) -> None:
    """Records that cross blocks, other record kinds, nested names; cut and damaged files up to the break."""
    path = tmp_path / "wandb" / "offline-run-1" / "run-1.wandb"
    path.parent.mkdir(parents=True)
    long = {f"x/{i}": float(i) for i in range(900)}
    records = [field(17, b"the run") + field(1, 7)]
    records += [history(s, {"critic/rewards/mean": s / 100, "response_length/mean": 5, **long}) for s in range(1, 9)]
    records.append(field(1, 99) + field(2, field(1, field(2, b"val") + field(2, b"acc") + field(16, b"0.5"))))
    data = leveldb(records)
    assert len(data) > 3 * 32768
    path.write_bytes(data)
    log = read_log(tmp_path, verl=True)
    assert log.messages == []
    assert log.series[REWARD] == {s: s / 100 for s in range(1, 9)} and log.series["x/899"][8] == 899.0
    assert list(log.series["val.acc"].values()) == [0.5]

    path.write_bytes(data[: len(data) // 2])
    cut = read_log(tmp_path, verl=True)
    assert 2 <= len(cut.series[REWARD]) < 8 and "middle of a record" in cut.messages[0]
    path.write_bytes(data[:70_000] + b"\xff" * 10 + data[70_010:])
    damaged = read_log(tmp_path, verl=True)
    assert 1 <= len(damaged.series[REWARD]) < 8 and "damaged record" in damaged.messages[0]
    path.write_bytes(b"something else")
    assert "is not a .wandb file" in read_log(path).messages[0]


def test_a_broken_event_file_is_read_up_to_the_break(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 40):
            writer.add_scalar(REWARD, 0.5, step)
    event_file = next(tmp_path.glob("events*"))
    data = bytearray(event_file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = struct.pack("<40B", *range(40))
    event_file.write_bytes(bytes(data))
    log = read_log(tmp_path)
    assert 0 < len(log.series[REWARD]) < 39
    assert "read up to a broken record" in log.messages[0]


def test_what_holds_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none does not exist"):
        read_log(tmp_path / "none")
    assert "no training curves found" in read_log(tmp_path).messages[-1]
    (tmp_path / "noise.log").write_bytes(b"\xff\xfe\x00 hello")
    assert any("no lines of the form" in message for message in read_log(tmp_path / "noise.log").messages)
