"""The command line: `bash run_rstar2.sh [NAME] [key=value ...] [--help|--dry-run|--print-config]`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from rstar2_megatron.runs.ablation import run_ablation
from rstar2_megatron.runs.check.command import check
from rstar2_megatron.runs.execute import execute
from rstar2_megatron.runs.inputs.new_config import write_new_config
from rstar2_megatron.runs.recipe_run import execute_recipe
from rstar2_megatron.runs.stages import load_recipe
from rstar2_megatron.settings.load import ConfigError, load, print_config

DEFAULT_CONFIG = "rstar2-tiny-cpu"

HELP = f"""\
bash run_rstar2.sh [NAME] [key=value ...] [--dry-run | --check | --print-config | --help]
bash run_rstar2.sh --new NAME --model DIR --data FILE[,FILE]
bash run_rstar2.sh recipe=NAME [key=value ...] [STAGE/key=value ...] [--dry-run | --print-config]
bash run_rstar2.sh --ablate FILE [--arms NAME,NAME] [--seeds N,N] [key=value ...] [--dry-run]

  NAME            a file of config/ without .yaml, or a path to a YAML, relative to the working directory
                  (default {DEFAULT_CONFIG}); --config-path DIR --config-name NAME means DIR/NAME, as in RLinf's scripts
  key=value       Hydra overrides, e.g. runner.max_steps=10 actor.model.tensor_model_parallel_size=1
  recipe=NAME     the stages of config/recipe/NAME.yaml (or of a path) one after the other: SFT, RL, filter, RL;
                  after a kill, the same command continues in the right stage
  --ablate FILE   the arms of FILE under its seeds and their comparison (docs/ablations.md); what is
                  finished is not run again, so after a stop the same command continues
  --new NAME      write NAME.yaml here: a short YAML that fits this machine, a Hugging Face directory and jsonl of
                  problems (docs/your_model.md)
  --dry-run       check the configuration, print the plan (algorithm, placement, batch arithmetic, token budgets), exit
  --check         prove this machine for NAME before a night is spent on it: driver, versions, collectives, kernels,
                  layouts, optimizer, offload, checkpoint, engine, judge, weight routes and one whole step on a thin
                  random model; a line each, all of it in {{runner.output_dir}}/NAME.check.json; exit code 1 if one failed
  --print-config  print the resolved YAML, exit
  --help          this text

What a run does: starts Redis and the Code Judge on loopback (unless tools.codejudge names running ones), makes the
tiny model if the YAML asks for it, cold-starts it by SFT, evaluates, trains with GRPO-RoC, evaluates again, draws the
curves, prints a table, and stops what it started.

What it writes, under {{runner.output_dir}}/{{runner.experiment_name}}/ (default results/NAME/):
  metrics.jsonl  one object a step        tensorboard/   event files       trajectories.jsonl  samples
  curves.png     reward, length, errors   checkpoints/global_step_N/       model/              Hugging Face directory
  rollouts/      all tokens, with runner.save_rollout_tokens=True (runner.replay_rollouts=DIR trains on them again)
  traces/        with runner.trace=N: step N for Perfetto (python -m rstar2_megatron.report.timeline RUN draws it)
  profiles/      with runner.profiler.steps=N: torch profiles of actor and engines

Often changed:
  runner.max_steps=N runner.save_interval=N runner.experiment_name=NAME runner.resume_dir=auto|null|PATH
  rollout.model.model_path=DIR data.train_data_paths=[FILE] data.rollout_batch_size=N algorithm.group_size=N
  runner.metrics_port=N (Prometheus) runner.max_file_mb=N runner.keep_rollouts=N
  actor.model.tensor_model_parallel_size=N actor.optim.lr=X algorithm.recompute_logprobs=True
  algorithm.variant=paper|released|released-rlinf   resampling, reward, aggregation and limits of one code, together

Examples:
  bash run_rstar2.sh recipe=rstar2-tiny
  bash run_rstar2.sh
  bash run_rstar2.sh rstar2-tiny-cpu runner.max_steps=3 runner.experiment_name=smoke
  bash run_rstar2.sh rstar2-qwen2.5-7b-megatron rollout.model.model_path=/models/Qwen2.5-7B-Instruct
"""


@dataclass
class Arguments:
    config: str = DEFAULT_CONFIG
    overrides: list[str] = field(default_factory=list)
    help: bool = False
    dry_run: bool = False
    check: bool = False
    print_config: bool = False
    new: dict[str, str] = field(default_factory=dict)
    """Of --new: its NAME, --model and --data."""
    ablate: dict[str, str] = field(default_factory=dict)
    """Of --ablate: its FILE, --arms and --seeds."""


def parse(argv: list[str]) -> Arguments:
    """Split the command line. Raises ConfigError for an unknown flag or a second NAME."""
    arguments = Arguments()
    name_given = False
    directory = ""
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--config-path", "-cp", "--config-name", "-cn"):  # Hydra's, as RLinf's scripts give them
            value = value if equals else next(words, "")
            if not value:
                raise ConfigError(f"{option} has no value")
            if option in ("--config-path", "-cp"):
                directory = value
            else:
                arguments.config, name_given = value, True
        elif option in ("--new", "--model", "--data"):
            arguments.new[option] = value if equals else next(words, "")
        elif option in ("--ablate", "--arms", "--seeds"):
            arguments.ablate[option] = value if equals else next(words, "")
        elif word in ("--help", "-h"):
            arguments.help = True
        elif word == "--dry-run":
            arguments.dry_run = True
        elif word == "--check":
            arguments.check = True
        elif word == "--print-config":
            arguments.print_config = True
        elif word.startswith("-"):
            known = "--help, --dry-run, --check, --print-config, --new, --model, --data, --ablate, --arms, --seeds"
            known += ", --config-path, --config-name"
            raise ConfigError(f"unknown option {word}; known: {known}")
        elif "=" in word or word.startswith("~"):
            arguments.overrides.append(word)
        elif name_given:
            raise ConfigError(f"two configuration names, {arguments.config!r} and {word!r}; overrides are written key=value")
        else:
            arguments.config, name_given = word, True
    if arguments.new and (missing := [o for o in ("--new", "--model", "--data") if not arguments.new.get(o)]):
        raise ConfigError(f"{missing[0]} has no value; the whole form: --new NAME --model DIR --data FILE[,FILE]")
    if arguments.ablate and (not all(arguments.ablate.values()) or "--ablate" not in arguments.ablate or name_given):
        raise ConfigError(
            "an ablation is --ablate FILE [--arms NAME,NAME] [--seeds N,N] [key=value ...]; FILE names its configuration"
        )
    if directory and not name_given:
        raise ConfigError(f"--config-path {directory} needs --config-name NAME, a YAML of that directory")
    if directory:
        arguments.config = os.path.join(directory, arguments.config)
    return arguments


def main(argv: list[str]) -> int:
    """Run the program; returns its exit code (0 done, 1 failed while running, 2 bad input, 130/143 stopped, 140 by SIGUSR2)."""
    try:
        arguments = parse(argv)
        if arguments.help:
            print(HELP, end="")
            return 0
        if arguments.new:
            name, model, data = (arguments.new[option] for option in ("--new", "--model", "--data"))
            path = write_new_config(name, model, data.split(","))
            print(f"wrote {path}\nplan:  bash run_rstar2.sh {path} --dry-run\ntrain: bash run_rstar2.sh {path}")
            return 0
        if arguments.ablate:
            arms, seeds = ([x for x in arguments.ablate.get(option, "").split(",") if x] for option in ("--arms", "--seeds"))
            return run_ablation(arguments.ablate["--ablate"], arguments.overrides, arms, seeds, dry_run=arguments.dry_run)
        recipes = [word for word in arguments.overrides if word.startswith("recipe=")]
        if recipes:
            return _run_recipe(recipes, arguments)
        loaded = load(arguments.config, arguments.overrides)
        loaded.print_notes()
        if arguments.print_config:
            print(print_config(loaded.settings), end="")
            return 0
        if arguments.check:
            return check(loaded.settings)
        return execute(loaded.settings, dry_run=arguments.dry_run, origins=loaded.origins)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _run_recipe(recipes: list[str], arguments: Arguments) -> int:
    if arguments.check:
        raise ConfigError("--check proves a machine for one configuration: give the NAME that the recipe's stages use")
    if len(recipes) > 1 or arguments.config != DEFAULT_CONFIG:
        raise ConfigError(
            f"{recipes[0]} names its configuration itself; give one recipe and no other name (got {arguments.config})"
        )
    recipe = load_recipe(recipes[0].removeprefix("recipe="))
    words = [word for word in arguments.overrides if word != recipes[0]]
    return execute_recipe(recipe, words, dry_run=arguments.dry_run, show_config=arguments.print_config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
