"""One reinforcement-learning run: services, cold start, evaluation, training, report."""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from rstar2_megatron.algorithm.batch import TrainSequence, logprob_difference, train_sequence
from rstar2_megatron.cluster.launch import check_progress, start_loggers
from rstar2_megatron.cluster.phases.coordinator import RolloutCoordinator
from rstar2_megatron.cluster.phases.server import DriverChannel
from rstar2_megatron.cluster.tracing import StepProfiles, StepTraces
from rstar2_megatron.data.loader import EpochsOver, ProblemLoader
from rstar2_megatron.data.problems import drop_long_prompts, read_problems, trained_note
from rstar2_megatron.evaluation.held_out import evaluate
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.records import checkpoint
from rstar2_megatron.records.checkpoint import CheckpointNote, UnfinishedCheckpoint, load_data_state
from rstar2_megatron.records.model_format import wording_note, write_format
from rstar2_megatron.records.run_files import RunFiles
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.report.arms import changes
from rstar2_megatron.report.draw import draw_run
from rstar2_megatron.report.table import render_table
from rstar2_megatron.reward.answer_text import worked_note
from rstar2_megatron.rollout.chat import ChatTemplate, check_tools_in_prompt
from rstar2_megatron.rollout.live_view import export_progress
from rstar2_megatron.runs.base_run import Stopped, StopSignals
from rstar2_megatron.runs.cluster_run import ClusterRun
from rstar2_megatron.runs.cold_start import ColdStartResult, find_cached, find_reference, run_cold_start
from rstar2_megatron.runs.stopping import MetricWatch, first_that_holds
from rstar2_megatron.services.loopback import listening_address
from rstar2_megatron.services.metrics_server import MetricsServer
from rstar2_megatron.settings.load import to_plain
from rstar2_megatron.settings.placement import collocated, slots_of, visible_gpus
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.training import gates
from rstar2_megatron.training.collapse import PASS_RATE, CollapseError, CollapseWatch, EmptySteps
from rstar2_megatron.training.metrics import HEADER_LINE, logprob_drift, step_line, step_metrics
from rstar2_megatron.training.trainer import Trainer
from rstar2_megatron.trajectory import Group

_LAST_PUBLISH_S = 15.0  # for a checkpoint that is being written when the run fails or is stopped
_SCORE_STEPS = 5  # whose mean pass rate is a checkpoint's


class RLRun(ClusterRun):
    """Reinforcement learning."""

    def __init__(self, settings: Settings, signals: StopSignals) -> None:
        super().__init__(settings, signals)
        self.judge = JudgeService(
            settings.tools.codejudge,
            self.directory / "logs" / "judge.log",
            host=listening_address(settings.cluster.num_nodes),
            needed=settings.agentloop.needs_judge,
        )
        self.files = RunFiles(self.directory, settings.runner)
        self.cached_sft: ColdStartResult | None = None  # whose model actor and engines start with
        self.last_evaluation: tuple[int, Any] = (-1, None)
        self.watch = CollapseWatch(settings.runner.max_empty_steps)
        self.metric_watch = MetricWatch(settings)
        self._unfinished: UnfinishedCheckpoint | None = None
        self._unfinished_updated = False
        self._updated = False  # the weights changed since the last checkpoint
        self._resumed_from: int | None = None
        self._export_step: Callable[[Mapping[str, float]], None] = lambda row: None
        self._scored: list[TrainSequence] = []  # a group of the last step, scored again after a resume

    def train(self) -> None:
        """The whole run."""
        resume = self.begin(self.settings.runner.max_steps)
        state: dict[str, Any] = {}
        if resume:
            state = load_data_state(resume[1])  # it may be damaged: before anything starts
            self.cached_sft = find_reference(self.settings)
        elif self.settings.cold_start.enabled:
            self.cached_sft = find_cached(self.settings)
        self._start()
        step = 0
        if resume:
            step = self._resume(*resume, state)
        else:
            self._cold_start()
        step, condition = self._train_steps(step)
        self._finish(step)
        self.mark_finished(step, condition)

    # ------------------------------------------------------------------------------------------- starting

    def _start(self) -> None:
        """Start judge, Ray, RLinf, actor, engines and reward workers in parallel."""
        settings, timeout = self.settings, self.settings.rollout.engine_start_timeout_s
        data = settings.data
        model = str(self.cached_sft.model) if self.cached_sft else settings.rollout.model.model_path
        self.log = start_loggers(settings, self.cluster.config)
        self._closing.callback(self.log.finish)
        metrics = self._serve_metrics()
        self._say(f"starting {'the Code Judge, ' if settings.agentloop.needs_judge else ''}Ray and RLinf")
        self._closing.callback(self.judge.stop)
        self.judge.begin()
        self.cluster.start()
        self.signals.install()
        self._say("starting actor, engines and reward workers")
        self.actor = self.cluster.launch_actor()
        self.rollout = self.cluster.launch_rollout()
        self.reward = self.cluster.launch_reward()
        for group in (self.reward, self.rollout):
            self._closing.callback(group.call, "shutdown", timeout_s=15)
        judge_url = self.judge.wait_ready()
        self.judge.watch()
        address = self.actor.call("rendezvous_address", timeout_s=timeout, ranks=[0])[0]
        actors = self.actor.start("initialize", model, address, self.cluster.device)
        shared = collocated(settings.cluster, slots_of(settings.cluster, visible_gpus()))
        colocated = shared and settings.actor.offloads
        if colocated:  # an engine sizes its KV cache by the memory that it finds free
            actors.result(timeout)
            self.actor.call("offload", timeout_s=timeout)
        engines = self.rollout.start_engines(model, judge_url)
        template = self._template()
        problems = read_problems(data.train_data_paths, data, self._say)
        if settings.reward.has_math and (note := worked_note(problems)):
            self._say(note)
        first = template.prompt_text(problems[0])
        check_tools_in_prompt(first, template.schemas)
        taught = settings.cold_start.enabled
        if said := wording_note(Path(model), settings.agentloop, settings.reward, first, trained_here=taught):
            self._say(said)
        if data.filter_prompt_by_length:
            problems, dropped = drop_long_prompts(
                problems, lambda problem: len(template.prompt_ids(problem)), data.max_prompt_length
            )
            if dropped:
                self._say(f"{dropped} problems left out: longer than data.max_prompt_length")
        self.loader = ProblemLoader(problems, data, max_epochs=settings.runner.max_epochs)
        self.held_out = read_problems(data.val_data_paths, data) if data.val_data_paths else []
        if note := trained_note(self.held_out, problems):
            self._say(note)
        kv_tokens = sum(engines.result(timeout))
        parameters = actors.result(timeout)[0]
        channel = DriverChannel(self.cluster.channel, self.rollout, self.reward, settings.runner)
        self.coordinator = RolloutCoordinator(channel, settings)
        self._closing.callback(self._publish_checkpoint, _LAST_PUBLISH_S)
        self._closing.callback(channel.close)
        self.coordinator.channel.check_services = self.judge.check
        self.trainer = Trainer(
            settings, self.actor, self.rollout, self.coordinator, device=self.cluster.device, colocated=colocated
        )
        self._closing.callback(self.trainer.source.close)
        self.traces = StepTraces(self.directory, settings.runner.trace, (self.actor, self.rollout, self.reward))
        if metrics:
            channel.show_progress = functools.partial(export_progress, metrics)
        self.profiles = StepProfiles(self.directory, settings.runner.profiler, self.actor, self.rollout)
        self._say(
            f"ready: {parameters / 1e6:.2f} M parameters on {len(self.actor)} actor ranks, "
            f"{len(self.rollout)} engines with {kv_tokens} KV tokens, {len(problems)} problems, "
            + (f"judge at {judge_url}" if settings.agentloop.needs_judge else "no tool that needs the Code Judge")
        )

    def _serve_metrics(self) -> MetricsServer | None:
        """Where `runner.metrics_port` asks for it. Raises PortUnusable."""
        if (port := self.settings.runner.metrics_port) is None:
            return None
        server = MetricsServer(listening_address(self.settings.cluster.num_nodes), port)
        self._closing.callback(server.close)
        self._export_step = server.set_step
        return server

    def _template(self) -> ChatTemplate:
        tokenizer: Any = AutoTokenizer.from_pretrained(self.settings.rollout.model.model_path)
        return ChatTemplate(tokenizer, self.settings.agentloop)

    def _cold_start(self) -> None:
        """The first sync, SFT unless it is off or cached, evaluation, and the optimizer of RL."""
        settings = self.settings
        if settings.runner.init_checkpoint:
            self._say(f"starting from {settings.runner.init_checkpoint}, optimizer included")
            self._load_init_checkpoint()
        trains = settings.cold_start.enabled and self.cached_sft is None
        if not trains:  # before the sync: on shared accelerators the actor would wake for it again, and the engines sleep
            self._begin_rl()
        self.trainer.sync_weights(version=0)
        self.trainer.check_weights()
        self.table: dict[str, float | None] = {}
        if settings.cold_start.enabled:
            result = self.cached_sft or run_cold_start(
                settings, self.actor, lambda: self.trainer.sync_weights(version=0), self._evaluate if self._evaluates else None
            )
            if self.cached_sft:
                self._say(f"SFT: reusing {result.model}")
                if result.after is None and self._evaluates:
                    result.after = self._evaluate("held-out after SFT").average
            self.table.update(before_sft=result.before, after_sft=result.after)
        elif self._evaluates:
            self.last_evaluation = (0, self._evaluate("held-out before RL"))
            self.table["before_rl"] = self.last_evaluation[1].average
        self._write_table()
        if trains:
            self._begin_rl()

    def _begin_rl(self) -> None:
        """A fresh optimizer; with `runner.init_checkpoint` the loaded one. The present weights become the reference."""
        settings = self.settings
        if settings.runner.init_checkpoint:
            self.ask_actor("continue_rl")
        else:
            self.ask_actor("start_rl", settings.actor.optim, settings.actor.lr_sched, settings.runner.max_steps)

    def _load_init_checkpoint(self) -> None:
        self.ask_actor("load_checkpoint", str(Path(self.settings.runner.init_checkpoint or "") / "actor"))

    def _resume(self, step: int, checkpoint: Path, state: dict[str, Any]) -> int:
        """Load a checkpoint, with its `state` of the data, into actor, loader and engines; returns its step."""
        self._say(f"resuming from {checkpoint}")
        if self.settings.runner.init_checkpoint and self.settings.algorithm.kl_beta:
            self._load_init_checkpoint()  # the reference of the KL term
        self.ask_actor("resume", str(checkpoint / "actor"))
        self.loader.load_state_dict(state["loader"])
        random.setstate(state["python_random"])
        self.table = state["table"]
        if "settings" in state:
            for change in changes(state["settings"], to_plain(self.settings)):
                self._say(f"the checkpoint is of a run with {change}")
        self.trainer.source.restore(state, version=step)
        if not self._scores_otherwise(state):
            self._check_scores(state["scored"])
        self.files.truncate_after(step)
        runner = self.settings.runner
        before = self.files.metrics.rows() if runner.check_after_resume else []
        self.watch = CollapseWatch(runner.max_empty_steps, before)
        self._resumed_from = step
        self.trainer.sync_weights(version=step)
        self.trainer.check_weights()
        return step

    def _scores_otherwise(self, state: Mapping[str, Any]) -> bool:
        """Whether the settings give the checkpoint's group other log-probs than then, or no room.

        Raises ValueError for another temperature where trajectories go on.
        """
        runner, sampling = self.settings.runner, self.settings.algorithm.sampling_params
        saved = state.get("settings", {}).get("algorithm", {}).get("sampling_params", {})
        before = saved.get("temperature", sampling.temperature)
        if before != sampling.temperature and (state.get("carried") or state.get("unfinished")):
            raise ValueError(
                "the checkpoint holds trajectories that go on, with log-probs at algorithm.sampling_params.temperature="
                f"{before}; resume with it, not with {sampling.temperature}"
            )
        longest = max((sequence.length for sequence in (state["scored"] or ([], []))[0]), default=0)
        return bool(before != sampling.temperature or longest > runner.seq_length)

    def _check_scores(self, saved: tuple[list[TrainSequence], list[np.ndarray]] | None) -> None:
        """The resumed actor must score the checkpoint's group as the saving actor did.

        saved: None when no trajectory of the checkpoint's step was usable.
        """
        if saved:
            sequences, logprobs = saved
            before = [replace(s, rollout_logprobs=row) for s, row in zip(sequences, logprobs, strict=True)]
            difference = logprob_difference(before, self.trainer.score(sequences))
            gates.check_resumed_logprobs(difference, self.settings.actor.model.precision)

    # ------------------------------------------------------------------------------------------- training

    def _train_steps(self, done: int) -> tuple[int, str]:
        """Train until `runner.max_steps`, a condition of `runner.stop_when` holds, or `runner.max_epochs` are over.

        Returns the last step, and the condition that ended the run early or "".
        """
        runner = self.settings.runner
        for step in range(done + 1, runner.max_steps + 1):
            earlier = self.files.metrics.rows()
            if runner.stop_when and (held := first_that_holds(runner.stop_when, earlier)):
                return self._stop_early(step - 1, held)
            if self.signals.end_asked:
                self._stop_early(step - 1, "SIGUSR2 asks for it, the same command continues")
                raise Stopped(signal.SIGUSR2)
            if (step - done - 1) % 20 == 0:
                print(HEADER_LINE, flush=True)
            validate, save, _ = check_progress(step, runner.max_steps, runner.val_check_interval, runner.save_interval, 1.0)
            # The last checkpoint is written while this step rolls out; this step's is begun while the actor is awake.
            after_training = functools.partial(self._trained, step, save or step == runner.max_steps)
            try:
                with self.profiles.step(step), self.traces.step(step):
                    result = self.trainer.step(step, self.loader, self._publish_checkpoint, after_training)
            except EpochsOver as end:
                return self._stop_early(step - 1, str(end))
            row = {
                "step": float(step),
                "rollout/judge_restarts": float(self.judge.restarts),
                **step_metrics(result.groups, result.resampled, result.actor_metrics, result.rollout_stats, result.seconds),
            }
            if (drift := logprob_drift([*earlier, row])) is not None:
                row["train/actor/logprob_drift"] = drift
            if step == done + 1:
                row["time/to_first_step"] = time.perf_counter() - self.started
            try:
                if validate and self.held_out:
                    self.last_evaluation = (step, self._evaluate(f"held-out at step {step}"))
                    row.update(self.last_evaluation[1].metrics())
            finally:  # also of an evaluation that was stopped: the step's checkpoint is there
                warnings = self.metric_watch.lines(earlier, row)  # which adds a metric to the row
                self.files.append(step, row, result.groups, result.shown)
            print("\n".join([step_line(row), *(f"warning: {line}" for line in warnings)]), flush=True)
            self._export_step(row)
            self.log.log({k: v for k, v in row.items() if k != "step"}, step)
            self._stop_on_collapse(step, row)
        self._publish_checkpoint()
        return max(done, runner.max_steps), ""

    def _stop_early(self, step: int, condition: str) -> tuple[int, str]:
        """A condition of `runner.stop_when` holds after `step`."""
        self._say(f"ending after step {step}: {condition}")
        self._publish_checkpoint()
        if step and not (self.checkpoints / f"global_step_{step}").is_dir():
            self._save(step)
        self._publish_checkpoint()
        return step, condition

    def _trained(self, step: int, save: bool, groups: Sequence[Group], updated: bool) -> None:
        """Save after training on `groups`, while the actor is still awake."""
        self._updated |= updated
        usable = next((group.usable for group in groups if group.usable), [])
        self._scored = [train_sequence(trajectory) for trajectory in usable]
        if save:
            self._save(step)

    def _stop_on_collapse(self, step: int, row: dict[str, float]) -> None:
        """Raises CollapseError for a ruined run; a checkpoint of ruined weights is discarded."""
        try:
            self.watch.add(row)
        except EmptySteps:
            if self._updated:  # by steps before the empty ones
                self._save(step)
            self._publish_checkpoint()
            raise
        except CollapseError:
            if self._unfinished is not None:
                self.ask_actor("finish_checkpoint")
                self._unfinished.discard()
                self._unfinished = None
            raise

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            **self.trainer.source.state(),  # before the loader's, which goes on until this is complete
            "loader": self.loader.state_dict(),
            "python_random": random.getstate(),
            "table": self.table,
            "settings": to_plain(self.settings),
            "scored": (self._scored, self.trainer.score(self._scored)) if self._scored else None,
        }
        self._publish_checkpoint()
        self._unfinished = checkpoint.begin_save(
            self.checkpoints, step, lambda directory: self.ask_actor("save_checkpoint", directory, False), state
        )
        self._unfinished_updated, self._updated = self._updated, False

    def _publish_checkpoint(self, timeout_s: float | None = None) -> None:
        """Wait for the files of an unfinished checkpoint, if there is one, and give it its name."""
        if self._unfinished is not None:
            timeout_s = timeout_s or self.settings.runner.step_timeout_s
            self.actor.call("finish_checkpoint", timeout_s=timeout_s)
            # The checkpoint that the run resumed from stays until the steps after it are known to be sound.
            protected = [self._resumed_from] if self._resumed_from and self.watch.compares_with_before else []
            self._unfinished.publish(
                self.settings.runner.keep_checkpoints,
                self._note(self._unfinished.step),
                best=self.settings.runner.keep_best,
                protected=protected,
            )
            self._unfinished = None

    def _note(self, step: int) -> CheckpointNote:
        rows = [row for row in self.files.metrics.rows() if row["step"] <= step][-_SCORE_STEPS:]
        rates = [row[PASS_RATE] for row in rows if row.get(PASS_RATE) is not None]
        at, evaluation = self.last_evaluation
        return CheckpointNote(
            updated=self._unfinished_updated,
            held_out=evaluation.average if evaluation is not None and at == step else None,
            pass_rate=sum(rates) / len(rates) if rates else None,
        )

    @property
    def _evaluates(self) -> bool:
        return self.settings.evaluation.before_and_after and bool(self.held_out)

    def _evaluate(self, label: str) -> Any:
        directory = self.directory / "evaluation" if self.settings.evaluation.save_trajectories else None
        self.trainer.source.pause()
        result = evaluate(self.coordinator, self.held_out, self.settings, label, directory)
        self._say(f"{label}: {result}")
        return result

    # ------------------------------------------------------------------------------------------ finishing

    def _finish(self, step: int) -> None:
        """Final evaluation, Hugging Face export, curves and table."""
        if self._evaluates:
            at, result = self.last_evaluation
            if result is None or at != step:
                result = self._evaluate("held-out after RL")
            self.table["after_rl"] = result.average
        model = self.directory / "model"
        self.ask_actor("export_hf", str(model))
        write_format(model, self.settings)
        self.table["seconds"] = time.perf_counter() - self.started
        self._write_table()
        if self.files.metrics.rows():  # none with runner.max_steps=0
            draw_run(self.directory)
            print(render_table(self.directory), flush=True)
            print(f"curves: {self.directory / 'curves.png'}", flush=True)
        print(f"model: {model}", flush=True)

    def _write_table(self) -> None:
        write_json(self.directory / "held_out.json", self.table)
