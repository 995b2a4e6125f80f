"""The command line: `bash run_rstar2.sh [NAME] [key=value ...] [--help|--dry-run|--print-config]`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys

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
                  paths of models, data and own code count from the YAML's folder, then from where you stand, those of models
                  and data then from the clone; runner.output_dir counts from where you stand
  recipe=NAME     the stages of config/recipe/NAME.yaml (or of a path) one after the other: SFT, RL, filter, RL;
                  after a kill, the same command continues in the right stage
  --ablate FILE   the arms of FILE under its seeds and their comparison (docs/ablations.md); what is
                  finished is not run again, so after a stop the same command continues
  --new NAME      write NAME.yaml here: a short YAML that fits this machine, a Hugging Face directory and files of
                  problems (docs/your_model.md)
  --dry-run       check the configuration, print the plan (algorithm, placement, batch arithmetic, token budgets), exit
  --check         prove this machine for NAME before a night is spent on it: driver, versions, collectives, kernels,
                  layouts, optimizer, offload, checkpoint, engine, judge, weight routes and one whole step on a thin
                  random model; a line each, all of it in {{runner.output_dir}}/{{runner.experiment_name}}.check.json;
                  exit code 1 if one failed
  --print-config  print the resolved YAML, exit
  --help          this text

What a run does: starts Redis and the Code Judge on loopback (unless tools.codejudge names running ones), makes the
tiny model if the YAML asks for it, cold-starts it by SFT, evaluates, trains with GRPO-RoC, evaluates again, draws the
curves, prints a table, and stops what it started.

What it writes, under {{runner.output_dir}}/{{runner.experiment_name}}/ (e.g. results/rstar2-7b/):
  metrics.jsonl  one object a step        tensorboard/   event files       trajectories.jsonl  samples
  curves.png     reward, length, errors   checkpoints/global_step_N/       model/              Hugging Face directory
  rollouts/      all tokens, with runner.save_rollout_tokens=True (runner.replay_rollouts=DIR trains on them again)
  config.yaml    all settings             code/  own code                  held_out.json, evaluation/  held-out scores
  logs/          of judge and engines
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


_FLAGS = ("--help", "--dry-run", "--check", "--print-config")
_NEW, _ABLATE = ("--new", "--model", "--data"), ("--ablate", "--arms", "--seeds")
_HYDRA = {"--config-path": "-cp", "--config-name": "-cn"}  # as RLinf's scripts give them


def parse(argv: list[str]) -> argparse.Namespace:
    """`config` (NAME or the default), `names` that were given, `overrides`, and each option by its name.

    Raises ConfigError for an unknown one or a second NAME.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in _FLAGS:
        parser.add_argument(flag, *(["-h"] if flag == "--help" else []), action="store_true")
    for option in (*_NEW, *_ABLATE):
        parser.add_argument(option, nargs="?", const="")
    for option, short in _HYDRA.items():
        parser.add_argument(option, short, nargs="?", const="")
    arguments, words = parser.parse_known_args(argv)
    if arguments.help:
        return arguments
    known = (*_FLAGS, *_NEW, *_ABLATE, *_HYDRA)
    if unknown := [word for word in words if word.startswith("-")]:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"unknown option {unknown[0]}; {hint}")
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(arguments).items()}
    if empty := [option for option in _HYDRA if given[option] == ""]:
        raise ConfigError(f"{empty[0]} has no value")
    arguments.overrides = [word for word in words if "=" in word or word.startswith("~")]
    names = [word for word in words if word not in arguments.overrides]
    names += [arguments.config_name] if arguments.config_name else []
    if len(names) > 1:
        raise ConfigError(f"two configuration names, {names[0]!r} and {names[1]!r}; overrides are written key=value")
    if any(given[option] is not None for option in _NEW) and (missing := [option for option in _NEW if not given[option]]):
        raise ConfigError(f"{missing[0]} has no value; the whole form: --new NAME --model DIR --data FILE[,FILE]")
    if arguments.new and (names or arguments.overrides or arguments.check or arguments.dry_run or arguments.print_config):
        raise ConfigError("--new writes a YAML and takes --model and --data alone; plan it by its path and --dry-run then")
    ablates = [given[option] for option in _ABLATE if given[option] is not None]
    if ablates and (not all(ablates) or not arguments.ablate or names):
        raise ConfigError(
            "an ablation is --ablate FILE [--arms NAME,NAME] [--seeds N,N] [key=value ...]; FILE names its configuration"
        )
    if arguments.ablate and (arguments.check or arguments.print_config):
        raise ConfigError("--check and --print-config are for one configuration: give the NAME that the ablation's FILE names")
    if arguments.config_path and not names:
        raise ConfigError(f"--config-path {arguments.config_path} needs --config-name NAME, a YAML of that directory")
    arguments.names = names
    arguments.config = os.path.join(arguments.config_path or "", *(names or [DEFAULT_CONFIG]))
    return arguments


def main(argv: list[str]) -> int:
    """Run the program; returns its exit code (0 done, 1 failed while running, 2 bad input, 130/143 stopped, 140 by SIGUSR2)."""
    try:
        arguments = parse(argv)
        if arguments.help:
            print(HELP, end="")
            return 0
        if arguments.new:
            path = write_new_config(arguments.new, arguments.model, arguments.data.split(","))
            print(f"wrote {path}\nplan:  bash run_rstar2.sh {path} --dry-run\ntrain: bash run_rstar2.sh {path}")
            return 0
        if arguments.ablate:
            arms, seeds = ([x for x in (names or "").split(",") if x] for names in (arguments.arms, arguments.seeds))
            return run_ablation(arguments.ablate, arguments.overrides, arms, seeds, dry_run=arguments.dry_run)
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
    except BrokenPipeError:  # `| head`: what was asked for has been read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:  # a place that cannot be read or written
        print(f"error: {e.filename or 'a file'}: {e.strerror or e}", file=sys.stderr)
        return 2


def _run_recipe(recipes: list[str], arguments: argparse.Namespace) -> int:
    if arguments.check:
        raise ConfigError("--check proves a machine for one configuration: give the NAME that the recipe's stages use")
    if len(recipes) > 1 or arguments.names:
        others = ", ".join([*recipes[1:], *arguments.names])
        raise ConfigError(f"{recipes[0]} names its configuration itself; give one recipe and no other name (got {others})")
    recipe = load_recipe(recipes[0].removeprefix("recipe="))
    words = [word for word in arguments.overrides if word != recipes[0]]
    return execute_recipe(recipe, words, dry_run=arguments.dry_run, show_config=arguments.print_config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
