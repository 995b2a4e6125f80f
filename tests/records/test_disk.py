"""A full disk is told with the file, the free space and the remedy, whichever writer meets it."""

from __future__ import annotations

import errno
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2_megatron.records import checkpoint
from rstar2_megatron.records.disk import NotWritten, reason_of, writing
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.run_files import RunFiles
from rstar2_megatron.records.trajectory_files import write_groups
from rstar2_megatron.records.whole_file import write_json, write_jsonl
from rstar2_megatron.report.draw import draw_run
from rstar2_megatron.settings.schema import RunnerSettings
from rstar2_megatron.trajectory import Group, Problem
from tests.small_disk import small_disk

MUCH = os.urandom(2 << 20).hex()


def safetensors(path: Path) -> None:
    import torch  # here, because most tests of records do without
    from safetensors.torch import save_file

    with writing(path):
        save_file({"weight": torch.zeros(1 << 20)}, path)


def torch_without_python(path: Path) -> None:
    import torch  # as above

    with writing(path):
        torch.save(torch.zeros(1 << 20), path)


def curves(path: Path) -> None:
    (path.parent / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "time/step": {n}}}\n' for n in (1, 2)))
    (path.parent / "filler").write_bytes(b"0" * (1 << 19))
    with pytest.raises(OSError):
        (path.parent / "rest").write_bytes(b"0" * (1 << 20))
    draw_run(path.parent)


def step(path: Path) -> None:
    RunFiles(path.parent, RunnerSettings.model_construct()).append(1, {"text": MUCH}, [], [])


WRITERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": step,
    "rows.jsonl": lambda path: JsonlFile(path).append({"text": MUCH}),
    "whole.json": lambda path: write_json(path, MUCH),
    "whole.jsonl": lambda path: write_jsonl(path, [{"text": MUCH}]),
    "step_1.jsonl.gz": lambda path: write_groups(path, [Group(Problem(MUCH, [], []), [])]),
    "curves.png": curves,
    "model.safetensors": safetensors,
    "0of1.pt": torch_without_python,
    "data.pt": lambda path: checkpoint.save(path.parent, 1, lambda directory: None, {"text": MUCH}, keep=1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(tmp_path: Path, name: str) -> None:
    with small_disk(tmp_path, 1):
        with pytest.raises(NotWritten) as caught:
            WRITERS[name](tmp_path / name)
        told = reason_of(caught.value, tmp_path, "runner.output_dir")
        assert re.fullmatch(
            rf"could not write {tmp_path}/\S*{re.escape(name)}: (No space left on device|is the disk full\?) "
            r"\(\d MB are free there\)\. Checkpoints .* written before are whole: .* set runner\.output_dir to another disk.*",
            told,
        ), told
        assert not checkpoint.complete_checkpoints(tmp_path)


def test_a_directory_without_permission_a_quota_and_other_errors(tmp_path: Path) -> None:
    """The kernel's errors for what cannot be made here by root, as Python raises them."""
    for number in (errno.EACCES, errno.EROFS, errno.EDQUOT):
        with pytest.raises(NotWritten, match=f"could not write {tmp_path}/a: {os.strerror(number)}"), writing(tmp_path / "a"):
            raise OSError(number, os.strerror(number))
    with pytest.raises(NotWritten, match="/a/b: No space") as inner, writing(tmp_path / "a"), writing(tmp_path / "a" / "b"):
        raise OSError(errno.ENOSPC, "full")
    assert isinstance(inner.value.__cause__, OSError) and not isinstance(inner.value.__cause__, NotWritten)
    with pytest.raises(ConnectionResetError), writing(tmp_path / "a"):
        raise ConnectionResetError(errno.ECONNRESET, "not the disk")
    with pytest.raises(RuntimeError, match="not the disk"), writing(tmp_path / "a"):
        raise RuntimeError("not the disk")
    assert reason_of(ValueError("other"), tmp_path, "key") == "other"
    assert "Errno" in reason_of(PermissionError(errno.EACCES, "read", "/data"), tmp_path, "key")  # it may be a file to read


def test_an_error_that_no_writer_named(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert reason_of(full, tmp_path, "--out").startswith(f"could not write {tmp_path}/a file: No space left on device (")
    copied = OSError(errno.ENOSPC, "No space left on device", "/from", None, f"{tmp_path}/to")
    assert reason_of(copied, tmp_path, "--out").startswith(f"could not write {tmp_path}/to: ")


def test_the_error_of_a_worker_reaches_the_driver(tmp_path: Path) -> None:
    with pytest.raises(NotWritten) as caught, writing(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
