"""Runs the stages of a recipe in order, each in a process of its own, and continues in the right stage after a kill.

A stage is done when its process ended with 0; {root}/recipe.json says so at once. A stage that was begun is run again and
resumes from its own newest checkpoint. {root}/metrics.jsonl and curves.png hold all reasoning stages, with steps numbered
through and the borders of the stages.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.disk import reason_of
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.whole_file import write_json, write_jsonl, write_text
from rstar2_megatron.report.draw import draw_run
from rstar2_megatron.report.table import render_table
from rstar2_megatron.runs.base_run import FINISHED, Stopped, StopSignals
from rstar2_megatron.runs.execute import execute
from rstar2_megatron.runs.stages import MODEL_TASKS, Recipe, Stage, StagePlan
from rstar2_megatron.services.parent_death import die_with_parent
from rstar2_megatron.services.process import terminate_tree
from rstar2_megatron.settings.load import ConfigError, print_config
from rstar2_megatron.settings.planning.estimates import preference_hours, search_hours, sft_hours
from rstar2_megatron.settings.planning.plan import make_plan, model_of

STATE = "recipe.json"
_END_GRACE_S = 90.0  # in which a stage ends its workers, engines, judge and Ray


def execute_recipe(recipe: Recipe, words: Sequence[str], *, dry_run: bool, show_config: bool = False) -> int:
    """Run, plan or print a recipe; returns the exit code. Raises ConfigError for bad input."""
    plan = StagePlan(recipe, words)
    if show_config:
        for stage in recipe.stages:
            print(f"# stage {stage.name}\n---\n{print_config(plan.settings(stage, for_plan=True))}", end="")
        return 0
    if dry_run:
        return _dry_run(plan)
    try:
        return _Runner(plan).run()
    except OSError as error:
        print(f"\nerror: {reason_of(error, plan.root, 'runner.output_dir')}", file=sys.stderr)
        return 1


def _dry_run(plan: StagePlan) -> int:
    total = 0.0
    for number, stage in enumerate(plan.recipe.stages, 1):
        print(_title(number, plan, stage), flush=True)
        later = [f"{stage.task}.train_data_paths"] if stage.trees_from else []
        execute(plan.settings(stage, for_plan=True), dry_run=True, later=later)
        total += _say_hours(plan, stage)
        print()
    if total:
        print(f"expected in all: {total:,.0f} GPU hours on H100s (stages of task search, and those that train on trees)")
    return 0


def _say_hours(plan: StagePlan, stage: Stage) -> float:
    """Print and return the GPU hours of a search, or of a stage that trains on trees; 0.0 for the others and on CPU slots."""
    settings = plan.settings(stage, for_plan=True)
    if stage.reward_model_from:
        search = settings.search.model_copy(update={"reward_model": stage.reward_model_from})
        settings = settings.model_copy(update={"search": search})
    model, _ = model_of(settings)
    if model is None or settings.actor.model.precision != "bf16":
        return 0.0
    more, assumed = 0.0, ""
    if stage.task == "search" and settings.search.num_problems > 0:
        capacity = make_plan(settings).kv_capacity_tokens
        assert capacity is not None  # the plan fits
        hours, more = search_hours(settings, model, capacity)
        assumed = f"{settings.search.num_problems:,} problems, solutions of half the longest length"
    elif stage.trees_from:
        searches = [s for s in plan.recipe.stages if s.name in stage.trees_from]
        trees = sum(max(0, plan.settings(s, for_plan=True).search.num_problems) for s in searches)
        of_task = sft_hours if stage.task == "sft" else preference_hours
        hours = of_task(settings, model, trees)
        assumed = f"a right solution in each of {trees:,} trees"
    else:
        return 0.0
    if not hours:
        return 0.0
    extra = f", and up to {more:,.0f} more for problems without a right solution" if more else ""
    print(f"expected: {hours:,.0f} GPU hours on H100s{extra} ({assumed})")
    return hours


def _title(number: int, plan: StagePlan, stage: Stage) -> str:
    return f"== stage {number} of {len(plan.recipe.stages)}: {stage.name} ({stage.task})"


class _Runner:
    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self.state_path = plan.root / STATE
        self.state: dict[str, Any] = {"recipe": plan.recipe.name, "stages": {}}
        if self.state_path.is_file():
            self.state = json.loads(self.state_path.read_text())
        self.signals = StopSignals()

    def run(self) -> int:
        plan = self.plan
        self._check_finished_stages()
        plan.root.mkdir(parents=True, exist_ok=True)
        self.signals.install()
        try:
            for number, stage in enumerate(plan.recipe.stages, 1):
                print(_title(number, plan, stage), flush=True)
                if self._done(stage):
                    print(f"done before, results in {plan.directory(stage.name)}", flush=True)
                    continue
                code = self._run_stage(stage)
                if self.signals.end_asked:
                    return 128 + signal.SIGUSR2
                if code:
                    print(
                        f"error: stage {stage.name} ended with {code}; the same command continues at this stage",
                        file=sys.stderr,
                    )
                    return code
                write_curve(plan)
        except Stopped as stopped:
            return stopped.exit_code
        finally:
            self.signals.ignore()
            self.signals.restore()
        self._report()
        return 0

    def _done(self, stage: Stage) -> bool:
        known = self.state["stages"].get(stage.name)
        if known is None:
            return False
        ended = (self.plan.directory(stage.name) / FINISHED).is_file()
        if known["status"] == "running" and ended and known["fingerprint"] == self.plan.fingerprint(stage):
            # this process was killed before it could write this
            self._write_state(stage, "done", seconds=known.get("seconds", 0.0))
        return bool(self.state["stages"][stage.name]["status"] == "done")

    def _check_finished_stages(self) -> None:
        """Raises ConfigError when a finished stage had other settings than now."""
        for stage in self.plan.recipe.stages:
            known = self.state["stages"].get(stage.name)
            if known and known["status"] == "done" and known["fingerprint"] != self.plan.fingerprint(stage):
                raise ConfigError(
                    f"stage {stage.name} in {self.plan.root} was run with other settings; restore them, "
                    f"give the recipe another name (runner.experiment_name=NAME), or remove {self.plan.root}"
                )

    def _run_stage(self, stage: Stage) -> int:
        settings = self.plan.settings(stage)
        before = self.state["stages"].get(stage.name, {}).get("seconds", 0.0)  # of earlier, stopped attempts
        self._write_state(stage, "running", seconds=before)
        started = time.monotonic()
        # The complete configuration in a file, so that the stage runs exactly with the checked settings.
        config = self.plan.root / f"{stage.name}.yaml"
        write_text(config, print_config(settings))
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "rstar2_megatron.runs.main", str(config)],
            preexec_fn=die_with_parent,
            start_new_session=True,  # so that a Ctrl-C reaches the stage once, from here
        )
        code = None
        try:
            self.signals.ask_with_us(child)
            code = child.wait()
        except Stopped:
            self.signals.ignore()
            terminate_tree(child.pid, grace_s=_END_GRACE_S, first_signal=self.signals.received or signal.SIGTERM)
            raise
        finally:
            seconds = round(before + time.monotonic() - started, 1)
            self._write_state(stage, "done" if code == 0 else "running", seconds=seconds)
        return code

    def _write_state(self, stage: Stage, status: str, **more: Any) -> None:
        entry = {"status": status, "fingerprint": self.plan.fingerprint(stage), **more}
        self.state["stages"][stage.name] = entry
        write_json(self.state_path, self.state)

    def _report(self) -> None:
        plan = self.plan
        last = next(s for s in reversed(plan.recipe.stages) if s.task in MODEL_TASKS)
        if write_curve(plan) is not None:
            print(render_table(plan.root), flush=True)
            print(f"curves over all stages: {plan.root / 'curves.png'}", flush=True)
        print(f"the recipe is done; model: {plan.directory(last.name) / 'model'}", flush=True)


def write_curve(plan: StagePlan) -> Path | None:
    """Write metrics.jsonl, stages.json and curves.png of all reasoning stages so far; None without a step."""
    rows: list[Mapping[str, Any]] = []
    borders: list[dict[str, Any]] = []
    for stage in plan.recipe.stages:
        own = JsonlFile(plan.directory(stage.name) / "metrics.jsonl").rows()
        if stage.task != "reasoning" or not own:
            continue
        done = len(rows)
        borders.append({"name": stage.name, "first_step": done + 1, "steps": len(own)})
        rows += [
            {**row, "step": done + number, "stage": stage.name, "stage_step": row["step"]} for number, row in enumerate(own, 1)
        ]
    if not rows:
        return None
    write_jsonl(plan.root / "metrics.jsonl", rows)
    write_json(plan.root / "stages.json", borders)
    _write_held_out(plan)
    return draw_run(plan.root)


def _write_held_out(plan: StagePlan) -> None:
    """Write held_out.json: scores before the first and after each reasoning stage, and the seconds of all stages."""
    tables: dict[str, dict[str, Any]] = {}
    for stage in plan.recipe.stages:
        path = plan.directory(stage.name) / "held_out.json"
        if stage.task == "reasoning" and path.is_file():
            tables[stage.name] = json.loads(path.read_text())
    if not tables:
        return
    first = next(iter(tables.values()))
    state = json.loads((plan.root / STATE).read_text()) if (plan.root / STATE).is_file() else {"stages": {}}
    write_json(
        plan.root / "held_out.json",
        {
            "before_rl": first.get("before_rl", first.get("after_sft")),
            "after_stage": {name: table.get("after_rl") for name, table in tables.items()},
            "seconds": sum(stage.get("seconds", 0.0) for stage in state["stages"].values()),
        },
    )
