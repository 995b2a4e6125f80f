"""`precision: auto` on processors with and without bf16 instructions, and on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.settings import precision
from rstar2_megatron.settings.load import load

SMOLLM2 = "rstar2-smollm2-135m-cpu"
AUTO = ["actor.model.precision=auto"]
X86 = "processor\t: 0\nflags\t\t: fpu vme {}\nvmx flags\t: vnmi\n\nprocessor\t: 1\nflags\t\t: fpu\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86.format("avx512f avx512_bf16"), "bf16"),
        (X86.format("amx_tile amx_bf16"), "bf16"),
        (X86.format("avx2 avx512f"), "fp32"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "bf16"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", "fp32"),
        ("", "fp32"),
    ],
)
def test_the_processor_decides_on_cpu_slots(text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(precision, "_CPUINFO", tmp_path / "cpuinfo")
    loaded = load(SMOLLM2, AUTO)
    assert loaded.settings.actor.model.precision == expected
    assert loaded.settings.rollout.model.precision == expected
    [note] = [note for note in loaded.notes if "precision" in note]
    assert f"actor.model.precision, rollout.model.precision: {expected}" in note


def test_a_processor_that_cannot_be_read_gets_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_CPUINFO", tmp_path / "absent")
    assert load(SMOLLM2, AUTO).settings.actor.model.precision == "fp32"


def test_gpus_get_bf16_and_an_override_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_CPUINFO", tmp_path / "absent")
    gpus = load("rstar2-qwen2.5-7b-megatron", ["actor.model.precision=auto", "rollout.model.model_path=/m"])
    assert gpus.settings.actor.model.precision == gpus.settings.rollout.model.precision == "bf16"
    forced = load(SMOLLM2, ["actor.model.precision=bf16"])
    assert forced.settings.rollout.model.precision == "bf16"
    assert not any("precision" in note for note in forced.notes)
