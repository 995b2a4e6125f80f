"""`runner.task_type: preference`: a process preference model from the trees of a search, from data to exported model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_megatron.algorithm.preference import check_room
from rstar2_megatron.report.draw import PREFERENCE_PANELS
from rstar2_megatron.runs.sft_run import SFTRun
from rstar2_megatron.search.preference.rows import PreferenceRows, load_preference_rows
from rstar2_megatron.settings.schema import PreferenceSettings, SFTPhaseSettings
from rstar2_megatron.sft.preference import put_comparisons, validate_preferences
from rstar2_megatron.sft.training import Metrics, sft_phase_of


class PreferenceRun(SFTRun):
    """As an SFT run, on comparisons of prefixes."""

    how: Mapping[str, Any] = {"put": put_comparisons, "method": "preference_steps"}
    panels = PREFERENCE_PANELS

    @property
    def section(self) -> PreferenceSettings:
        return self.settings.preference

    def read(self) -> SFTPhaseSettings:
        own, tokenizer = self.section, self._tokenizer()
        rows = self._load(own.train_data_paths, tokenizer)
        self.rows = rows.comparisons
        self.held_out = self._load(own.val_data_paths, tokenizer).comparisons if own.val_data_paths else None
        phase = sft_phase_of(own, len(rows.comparisons)).model_copy(update={"name": "preference"})
        self._say(
            f"preference: {len(rows.comparisons):,} comparisons with {rows.num_pairs:,} pairs from {rows.trees:,} trees, "
            f"{rows.num_tokens:,} tokens; {phase.steps} steps of {phase.batch_size}, {phase.warmup_steps} of warm-up"
            + (f"; {rows.too_long} pairs left out as too long" if rows.too_long else "")
        )
        return phase

    def _load(self, paths: Sequence[str], tokenizer: Any) -> PreferenceRows:
        runner = self.settings.runner
        length = self.section.max_length or runner.seq_length
        rows = load_preference_rows(paths, tokenizer, self.section, length)
        check_room(rows.largest, runner.max_tokens_per_mbs * self.settings.actor.model.context_parallel_size)
        return rows

    def validate(self) -> Metrics:
        size, timeout = self.section.batch_size, self.settings.runner.step_timeout_s
        found = validate_preferences(self.actor, self.held_out, size, timeout)
        return {f"eval/preference_{name}": value for name, value in found.items()}

    def line(self, step: int, steps: int, row: Mapping[str, Any]) -> str:
        own = {name.removeprefix("train/preference/"): value for name, value in row.items()}
        text = (
            f"preference {step:>6}/{steps}  loss {own['loss']:.4f}  accuracy {own['accuracy']:.3f}  margin "
            f"{own['margin']:.3f}  grad {own['grad_norm']:.3f}  lr {own['lr']:.2e}"
        )
        accuracy = row.get("eval/preference_accuracy")
        return text + ("" if accuracy is None else f"  validation {accuracy:.3f}")
