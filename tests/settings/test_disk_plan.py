"""Disk of a run in the plan."""

from __future__ import annotations

from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.planning.disk import checkpoint_bytes, disk_needed
from rstar2_megatron.settings.planning.plan import make_plan


def test_disk_counts_what_the_settings_keep() -> None:
    overrides = ["runner.max_steps=100", "runner.keep_checkpoints=2", "runner.save_interval=10"]
    overrides += ["runner.save_rollout_tokens=True", "runner.keep_rollouts=5", "runner.max_file_mb=1"]
    settings = load_settings("rstar2-qwen2.5-14b-megatron-paper", overrides)
    model = known_model("Qwen2.5-14B-Instruct")
    assert model is not None
    disk = disk_needed(settings, model)
    assert disk.num_checkpoints == 4  # two newest, the best, one that is written
    assert disk.checkpoints == 4 * checkpoint_bytes(settings, model) == 4 * 14 * model.num_parameters
    batch = settings.data.rollout_batch_size * settings.algorithm.group_size * settings.runner.seq_length
    assert disk.rollouts == 5 * batch * 14
    assert disk.other == 2**20 + 100 * 8000  # trajectories.jsonl is bounded, there is no rollouts.jsonl and no trace
    (row,) = [value for section, _, value in make_plan(settings).rows if section == "disk"]
    assert row.startswith(f"at most {disk.total / 1e9:.0f} = 4 checkpoints")
