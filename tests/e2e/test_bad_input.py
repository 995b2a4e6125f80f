"""Bad input: a clear error that names the value and the remedy, a non-zero exit, nothing left running."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.e2e.runs import RunProcess

LIMIT_S = 60  # seen: 4 s, for a named judge that keeps silent 11 s; more where the program is read from the disk first


def fails(tmp_path: Path, *arguments: str) -> str:
    run = RunProcess(
        [*arguments, f"runner.output_dir={tmp_path}/results"] if "--help" not in arguments else list(arguments),
        tmp_path / "out.log",
    ).start()
    code = run.wait(LIMIT_S)
    text = run.text()
    assert code not in (0, None), text
    assert "Traceback" not in text, text
    run.assert_nothing_left()
    return text.split("error:", 1)[1]


def test_help_and_print_config(tmp_path: Path) -> None:
    run = RunProcess(["--help"], tmp_path / "help.log").start()
    assert run.wait(LIMIT_S) == 0
    assert "--dry-run" in run.text() and len(run.text().splitlines()) < 50
    run = RunProcess(["--print-config", "runner.max_steps=7"], tmp_path / "config.log").start()
    assert run.wait(LIMIT_S) == 0
    assert "max_steps: 7" in run.text()


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    run = RunProcess(["--dry-run", f"runner.output_dir={tmp_path}/results"], tmp_path / "plan.log").start()
    assert run.wait(LIMIT_S) == 0
    assert "16 problems x 16 rollouts" in run.text() and "KV" in run.text()
    assert not (tmp_path / "results").exists()


def test_unknown_config_names_the_nearest(tmp_path: Path) -> None:
    error = fails(tmp_path, "rstar2-tiny-gpu")
    assert "rstar2-tiny-gpu" in error and "rstar2-tiny-cpu" in error


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    error = fails(tmp_path, "runner.max_stepz=3")
    assert "runner.max_stepz" in error and "runner.max_steps" in error


def test_missing_model(tmp_path: Path) -> None:
    error = fails(tmp_path, f"rollout.model.model_path={tmp_path}/nowhere")
    assert f"{tmp_path}/nowhere" in error


def test_model_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 640,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert "tokenizer" in fails(tmp_path, f"rollout.model.model_path={tmp_path}/model")


def test_row_without_solutions_names_file_and_line(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    good = {"prompt": [{"role": "user", "content": "1+1?"}], "solutions": ["2"], "query_id": "a"}
    data.write_text(json.dumps(good) + "\n" + json.dumps({"prompt": good["prompt"], "query_id": "b"}) + "\n")
    error = fails(tmp_path, f"data.train_data_paths=[{data}]")
    assert f"{data}:2" in error and "solutions" in error


def test_empty_data_set(tmp_path: Path) -> None:
    data = tmp_path / "empty.jsonl"
    data.write_text("")
    assert str(data) in fails(tmp_path, f"data.train_data_paths=[{data}]")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("actor.model.tensor_model_parallel_size", "3"),
        ("actor.model.tensor_model_parallel_size", "4"),
        ("actor.model.pipeline_model_parallel_size", "3"),
    ],
)
def test_parallel_sizes_that_do_not_divide(tmp_path: Path, override: str, value: str) -> None:
    assert value in fails(tmp_path, f"{override}={value}")


def test_placement_on_slots_that_do_not_exist(tmp_path: Path) -> None:
    error = fails(tmp_path, '+cluster.component_placement={actor: "0-3", rollout: "0-3", reward: "0-3"}')
    assert "3" in error and "slots" in error


def test_taken_judge_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in fails(tmp_path, f"tools.codejudge.host_port={port}")


def test_named_redis_that_is_not_there(tmp_path: Path) -> None:
    error = fails(tmp_path, "tools.codejudge.redis_uri=redis://127.0.0.1:1/0")
    assert "redis://127.0.0.1:1" in error


def test_named_judge_that_is_not_there(tmp_path: Path) -> None:
    error = fails(tmp_path, "tools.codejudge.host_addr=127.0.0.1", "tools.codejudge.host_port=1")
    assert "127.0.0.1:1" in error


def test_too_little_disk(tmp_path: Path) -> None:
    """A file system too small for the checkpoint: simulated where a small one can be mounted."""
    small = Path("/dev/shm")
    import shutil
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip(f"cannot mount a small file system here ({small} is {shutil.disk_usage(small).total >> 20} MB)")
    try:
        run = RunProcess([f"runner.output_dir={mount}/results"], tmp_path / "out.log").start()
        assert run.wait(LIMIT_S) != 0
        assert "disk" in run.text() or "free" in run.text()
        run.assert_nothing_left()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
