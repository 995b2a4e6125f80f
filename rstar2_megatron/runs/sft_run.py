"""`runner.task_type: sft`: supervised fine-tuning of a model on conversations, from data to exported model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rstar2_megatron.cluster.launch import start_loggers
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.records import checkpoint
from rstar2_megatron.records.checkpoint import load_data_state
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.model_format import other_wording, write_format
from rstar2_megatron.report.arms import changes
from rstar2_megatron.report.draw import SFT_PANELS, draw_run
from rstar2_megatron.runs.cluster_run import ClusterRun
from rstar2_megatron.settings.load import to_plain
from rstar2_megatron.settings.schema import SFTPhaseSettings, SFTSettings
from rstar2_megatron.sft.rows import has_messages, load_sft_rows
from rstar2_megatron.sft.training import Metrics, run_sft_phase, sft_phase_of, validation_loss

VALIDATION_LOSS = "eval/sft_loss"


class SFTRun(ClusterRun):
    """A run with actor workers only, without engine and judge."""

    rows: Any
    """What is trained on, as this kind of run reads it."""
    held_out: Any
    """The same of the validation data; None without any."""
    how: Mapping[str, Any] = {}
    """How `run_sft_phase` trains on the rows, if not by cross entropy: its `put` and `method`."""
    panels = SFT_PANELS

    @property
    def section(self) -> SFTSettings:
        """The settings of this kind of run."""
        return self.settings.sft

    def train(self) -> None:
        runner = self.settings.runner
        phase = self.read()
        resume = self.begin(phase.steps)
        self.metrics = JsonlFile(self.directory / "metrics.jsonl")
        self._start(self.settings.rollout.model.model_path)
        self.ask_actor("start_sft_phase", phase)
        start = 0
        if resume:
            start = resume[0]
            self._say(f"resuming from {resume[1]}")
            self._compare(load_data_state(resume[1]))
            self.ask_actor("load_checkpoint", str(resume[1] / "actor"))
            self.metrics.truncate_after(start)
        elif self.held_out is not None:
            found = ", ".join(f"{name} {value:.4f}" for name, value in self.validate().items())
            self._say(f"before training: {found}")
        run_sft_phase(
            self.actor,
            phase,
            self.rows,
            self.section.seed,
            runner.step_timeout_s,
            start=start,
            pauses=(runner.save_interval, self.section.val_interval),
            after=lambda done, steps: self._after(done, steps, phase),
            **self.how,
        )
        self._finish(phase)

    def _compare(self, state: Mapping[str, Any]) -> None:
        """Name what is otherwise than in the checkpoint's run. Raises DataError for another number of rows: the order of all
        of them depends on it.
        """
        for change in changes(state.get("settings", to_plain(self.settings)), to_plain(self.settings)):
            self._say(f"the checkpoint is of a run with {change}")
        if (rows := state.get("rows", len(self.rows))) != len(self.rows):
            raise DataError(
                f"the checkpoint was made with {rows} rows, now there are {len(self.rows)}; use the same data files, lengths "
                "and limits, or runner.resume_dir=null"
            )

    # what a run of another kind replaces

    def read(self) -> SFTPhaseSettings:
        """Read the data, say what it is, and return the schedule."""
        sft = self.settings.sft
        tokenizer, length = self._tokenizer(), sft.max_length or self.settings.runner.seq_length
        self.rows = load_sft_rows(sft.train_data_paths, tokenizer, length)
        given = self.settings.agentloop
        others = other_wording(given, given.in_own_wording())
        if others and has_messages(sft.train_data_paths):
            self._say(
                f"{others}: not used; rows of messages have their own system messages, in ChatML and with calls in "
                "<tool_call>, and RL needs the same (docs/your_model.md)"
            )
            own = given.model_copy(update={"chat_template": None, "tool_call_format": "hermes"})  # as the rows are written
            self.settings = self.settings.model_copy(update={"agentloop": own})
        paths = sft.val_data_paths
        self.held_out = load_sft_rows(paths, tokenizer, length) if paths else None
        rows, phase = self.rows, sft_phase_of(sft, len(self.rows))
        self._say(
            f"SFT: {len(rows):,} conversations, {rows.num_tokens:,} tokens, {rows.num_trained_tokens:,} of them "
            f"trained; {phase.steps} steps of {phase.batch_size}, {phase.warmup_steps} of warm-up"
            + (f"; {rows.skipped} left out as too long" if rows.skipped else "")
            + (f"; {rows.cut} cut to {length} tokens" if rows.cut else "")
        )
        return phase

    def validate(self) -> Metrics:
        """Figures of the held-out data by the name of their metric."""
        size, timeout = self.section.batch_size, self.settings.runner.step_timeout_s
        return {VALIDATION_LOSS: validation_loss(self.actor, self.held_out, size, timeout)}

    def line(self, step: int, steps: int, row: Mapping[str, Any]) -> str:
        """What is printed of a step."""
        text = (
            f"sft {step:>6}/{steps}  loss {row['train/sft/token_loss']:.4f}  grad {row['train/sft/grad_norm']:.3f}  "
            f"lr {row['train/sft/lr']:.2e}  {row['train/sft/total_tokens'] / max(row['time/step'], 1e-9):>8.0f} tok/s"
        )
        return text + (f"  validation {row[VALIDATION_LOSS]:.4f}" if VALIDATION_LOSS in row else "")

    # the same in every kind of run

    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.settings.rollout.model.model_path)

    def _start(self, model: str) -> None:
        self.log = start_loggers(self.settings, self.cluster.config)
        self._closing.callback(self.log.finish)
        self._say("starting Ray, RLinf and the actor")
        self.cluster.start()
        self.signals.install()
        self.actor = self.cluster.launch_actor()
        timeout = self.settings.runner.step_timeout_s
        address = self.actor.call("rendezvous_address", timeout_s=timeout, ranks=[0])[0]
        parameters = self.ask_actor("initialize", model, address, self.cluster.device)[0]
        self._say(f"ready: {parameters / 1e6:.2f} M parameters on {len(self.actor)} actor ranks")
        self._lap = time.perf_counter()

    def _after(self, done: int, steps: list[Metrics], phase: SFTPhaseSettings) -> None:
        """Log the steps of a call; validate and save after its last step when that is due."""
        runner, every = self.settings.runner, self.section.val_interval
        now = time.perf_counter()
        seconds, self._lap = (now - self._lap) / len(steps), now
        for number, step in enumerate(steps, done - len(steps) + 1):
            row: dict[str, Any] = {f"train/{name}": value for name, value in step.items()}
            row["time/step"] = seconds
            last = number == done
            validated = last and self.held_out is not None and (number == phase.steps or (every > 0 and number % every == 0))
            if validated:
                row |= self.validate()
            self.metrics.append({"step": number, **row})
            self.log.log(row, number)
            if number % 10 == 0 or number == phase.steps or validated:
                print(self.line(number, phase.steps, row), flush=True)
        if done == phase.steps or (runner.save_interval > 0 and done % runner.save_interval == 0):
            checkpoint.save(
                self.checkpoints,
                done,
                lambda directory: self.ask_actor("save_checkpoint", directory),
                {"step": done, "rows": len(self.rows), "settings": to_plain(self.settings)},
                runner.keep_checkpoints,
            )
        self._lap = time.perf_counter()  # validation and checkpoint are no part of the next steps

    def _finish(self, phase: SFTPhaseSettings) -> None:
        model: Path = self.directory / "model"
        self.ask_actor("export_hf", str(model))
        write_format(model, self.settings)
        curves = draw_run(self.directory, panels=self.panels)
        self.mark_finished(phase.steps)
        self._say(f"done: {model}, {curves}")
