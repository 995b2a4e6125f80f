"""`precision: auto` on processors with and without bf16 instructions, and on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.settings import precision
from rstar2_megatron.settings.load import load
from rstar2_megatron.settings.precision import host_precision

SMOLLM2 = "rstar2-smollm2-135m-cpu"
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
def test_the_processor_decides(text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(text)
    assert host_precision() == expected


def test_a_processor_that_cannot_be_read_gets_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_CPUINFO", tmp_path / "absent")
    assert host_precision() == "fp32"


def test_cpu_slots_get_what_the_processor_multiplies_in() -> None:
    loaded = load(SMOLLM2, ["actor.model.precision=auto"])
    assert loaded.settings.actor.model.precision == loaded.settings.rollout.model.precision == host_precision()
    [note] = [note for note in loaded.notes if "precision" in note]
    assert f"actor.model.precision, rollout.model.precision: {host_precision()}" in note


def test_gpus_get_bf16_and_an_override_holds() -> None:
    """Whatever the processor of the machine that plans."""
    gpus = load("rstar2-qwen2.5-7b-megatron", ["actor.model.precision=auto", "rollout.model.model_path=/m"])
    assert gpus.settings.actor.model.precision == gpus.settings.rollout.model.precision == "bf16"
    assert any(note.endswith("bf16 (of GPUs)") for note in gpus.notes)
    other = "fp32" if host_precision() == "bf16" else "bf16"
    forced = load(SMOLLM2, [f"actor.model.precision={other}"])
    assert forced.settings.rollout.model.precision == other
    assert not any("precision" in note for note in forced.notes)
