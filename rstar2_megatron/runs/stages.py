"""A recipe: stages that run one after the other, each with its own overrides; each passes its model to the next.

A recipe is a YAML (`config/recipe/NAME.yaml` or a path):

    config: rstar2-qwen2.5-14b-megatron     configuration of every stage, a name of config/ or a path
    overrides: {key: value, ...}            of all stages
    stages:
      - {name: sft, task: sft, overrides: {...}}
      - {name: rl-8k, overrides: {...}}
      - {name: filter, task: difficulty_filter}
      - {name: rl-12k, optimizer: reset, problems_from: filter, overrides: {...}}

rStar-Math's rounds: stages of task search make trees, `trees_from` gives them to stages of task sft and preference, and
`reward_model_from` gives the model of a preference stage to a later search. `model_from` is the stage whose model begins one,
or `configured`.

On the command line `key=value` goes to all stages and `STAGE/key=value` to one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from rstar2_megatron.records.checkpoint import complete_checkpoints
from rstar2_megatron.settings.load import CONFIG_DIR, ConfigError, load, users_path, valid_keys
from rstar2_megatron.settings.schema import Section, Settings

S = TypeVar("S", bound=Section)
RECIPE_DIR = CONFIG_DIR / "recipe"
CONFIGURED = "configured"
"""In place of a stage: the model of the recipe, from which every round of rStar-Math begins."""


class Stage(Section):
    """One stage; its results are in {output_dir}/{recipe}/{name}/."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    task: Literal["reasoning", "sft", "difficulty_filter", "search", "preference"] = "reasoning"
    """runner.task_type of the stage."""
    optimizer: Literal["keep", "reset"] = "reset"
    """keep: moments and step count of the stage before, which must also be a reasoning stage."""
    problems_from: str | None = None
    """An earlier difficulty_filter or search stage, whose problems this stage trains on."""
    model_from: str | None = None
    """An earlier reasoning or sft stage, whose model this stage starts from; configured: rollout.model.model_path of the
    recipe; null: the last one."""
    trees_from: list[str] = Field(default_factory=list)
    """Earlier search stages, whose right solutions an sft stage trains on, and whose pairs a preference stage."""
    reward_model_from: str | None = None
    """An earlier preference stage, whose model scores the prefixes of this search stage."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys; they override those of the recipe."""


class Recipe(Section):
    """A whole recipe."""

    name: str = ""
    """Directory under runner.output_dir; default: the name of the file."""
    config: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    stages: list[Stage] = Field(min_length=1)

    @model_validator(mode="after")
    def _stages_fit_together(self) -> Recipe:
        seen: dict[str, Stage] = {}
        for number, stage in enumerate(self.stages):
            if stage.name == CONFIGURED:
                raise ValueError(f"no stage may be named {CONFIGURED}: model_from has it for the recipe's model")
            if stage.name in seen:
                raise ValueError(f"two stages are named {stage.name!r}")
            if stage.optimizer == "keep" and (
                not number or self.stages[number - 1].task != "reasoning" or stage.task != "reasoning"
            ):
                raise ValueError(f"stage {stage.name!r} keeps an optimizer, but no reasoning stage comes before it")
            _check_sources(stage, seen)
            seen[stage.name] = stage
        return self

    def model_before(self, name: str) -> str | None:
        """The stage whose model `name` starts from: its `model_from`, else the last one before it that exports a policy.

        None: the configured model.
        """
        found = None
        for stage in self.stages:
            if stage.name == name:
                return None if stage.model_from == CONFIGURED else stage.model_from or found
            if stage.task in MODEL_TASKS:
                found = stage.name
        raise KeyError(name)


MODEL_TASKS = ("reasoning", "sft")
TASKS = (*MODEL_TASKS, "difficulty_filter", "search", "preference")


def _check_sources(stage: Stage, seen: Mapping[str, Stage]) -> None:
    """Raises ValueError for a source that is no earlier stage of the task that makes it, or that the stage cannot use."""
    wanted = [
        ("problems_from", stage.problems_from, ("difficulty_filter", "search"), TASKS),
        ("model_from", stage.model_from, MODEL_TASKS, TASKS),
        *(("trees_from", name, ("search",), ("sft", "preference")) for name in stage.trees_from),
        ("reward_model_from", stage.reward_model_from, ("preference",), ("search",)),
    ]
    for key, name, makers, users in wanted:
        if name is None or (key == "model_from" and name == CONFIGURED):
            continue
        if name not in seen or seen[name].task not in makers:
            raise ValueError(f"stage {stage.name!r} takes {key} {name!r}, which is no {' or '.join(makers)} stage before it")
        if stage.task not in users:
            raise ValueError(f"stage {stage.name!r} is of task {stage.task}, which uses no {key}")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPE_DIR.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """A recipe by its name in config/recipe/ or its path, relative to where the user stands. Raises ConfigError."""
    path = users_path(name)
    if Path(name).parent == Path(".") and not path.is_file():
        path = RECIPE_DIR / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(path.stem, recipe_names(), n=1, cutoff=0.3)
        hint = f"; nearest: {near[0]}" if near else ""
        raise ConfigError(f"no recipe {name!r}{hint}; there are {', '.join(recipe_names())}, or give a path")
    recipe = read_section(path, Recipe)
    recipe.name = recipe.name or path.stem
    return recipe


def read_section(path: Path, model: type[S]) -> S:
    """A YAML file of this form. Raises ConfigError."""
    try:
        return model.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_sentence(problem, model) for problem in error.errors())) from None


def _sentence(problem: ErrorDetails, model: type[Section]) -> str:
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{place} has no value"
    if problem["type"] == "extra_forbidden":
        names = [key.rpartition(".")[2] for key in valid_keys(model)]
        near = difflib.get_close_matches(str(problem["loc"][-1]), names, n=1)
        return f"unknown key {place}; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(dict.fromkeys(names))}"
    return f"{place}: {problem['msg'].removeprefix('Value error, ')}"


def split_overrides(recipe: Recipe, words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(overrides of all stages, overrides by stage). Raises ConfigError for an unknown stage."""
    names = [stage.name for stage in recipe.stages]
    common: list[str] = []
    own: dict[str, list[str]] = {name: [] for name in names}
    for word in words:
        stage, slash, rest = word.partition("/")
        if not slash or "=" in stage:
            common.append(word)
        elif stage in own:
            own[stage].append(rest)
        else:
            raise ConfigError(f"{word}: {recipe.name} has no stage {stage!r}; its stages are {', '.join(names)}")
    return common, own


def override_words(values: Mapping[str, Any]) -> list[str]:
    """`key=value` of each in Hydra's grammar."""
    return [f"{key}={_hydra(value)}" for key, value in values.items()]


def _hydra(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    if isinstance(value, Mapping):
        # Hydra has no quoted keys; `settings/load.py` reads the placement, whose keys need quotes, as YAML.
        keys = {key: str(key) if re.fullmatch(r"[\w.-]+", str(key)) else _hydra(str(key)) for key in value}
        return "{" + ", ".join(f"{keys[key]}: {_hydra(item)}" for key, item in value.items()) + "}"
    # Hydra takes a backslash literally, unless quotes follow it.
    text = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), str(value))
    return f"'{text}'"


class StagePlan:
    """Stages of a recipe under the user's overrides: their settings, directories and fingerprints."""

    def __init__(self, recipe: Recipe, words: Sequence[str] = ()) -> None:
        """Raises ConfigError for overrides that do not fit."""
        self.recipe = recipe
        self._loaded: dict[tuple[str, ...], Settings] = {}
        self._common, self._own = split_overrides(recipe, words)
        if named := [word for word in self._common if word.startswith("runner.experiment_name=")]:
            recipe.name = named[0].partition("=")[2].strip("'\"")  # of its directory; `_load` gives each stage its own
        first = self._load(recipe.stages[0], {})
        self.root = Path(first.runner.output_dir) / recipe.name

    def _load(self, stage: Stage, passed_on: Mapping[str, Any]) -> Settings:
        words = [
            *override_words(self.recipe.overrides),
            *override_words(stage.overrides),
            *self._common,
            *self._own[stage.name],
            *override_words({"runner.task_type": stage.task, "runner.experiment_name": stage.name}),
            *override_words(passed_on),
        ]
        key = tuple(words)
        try:
            if key not in self._loaded:
                self._loaded[key] = load(self.recipe.config, words).settings
            return self._loaded[key]
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name}: {error}") from None

    def directory(self, name: str) -> Path:
        return self.root / name

    def settings(self, stage: Stage, *, for_plan: bool = False) -> Settings:
        """Settings of the stage. for_plan: with the first model, because earlier stages have not run yet."""
        passed_on = {} if for_plan else self._passed_on(stage)
        return self._load(stage, {"runner.output_dir": str(self.root), **passed_on})

    def _passed_on(self, stage: Stage) -> dict[str, Any]:
        """Model, optimizer, problems, trees and reward model of earlier stages, by dotted keys."""
        passed: dict[str, Any] = {}
        before = self.recipe.model_before(stage.name)
        if before is not None:
            passed["rollout.model.model_path"] = str(self.directory(before) / "model")
        if stage.optimizer == "keep":
            assert before is not None
            checkpoints = complete_checkpoints(self.directory(before) / "checkpoints")
            if not checkpoints:
                raise ConfigError(
                    f"stage {stage.name} keeps the optimizer of stage {before}, but {self.directory(before)} has no "
                    "checkpoint; set optimizer: reset"
                )
            passed["runner.init_checkpoint"] = str(checkpoints[-1][1])
        if stage.problems_from:
            passed["data.train_data_paths"] = [str(self.directory(stage.problems_from) / "train.jsonl")]
            passed["data.rows"] = None  # they are mapped already
        if stage.trees_from:
            file = "mcts.jsonl" if stage.task == "preference" else "mcts.sft.jsonl"
            passed[f"{stage.task}.train_data_paths"] = [str(self.directory(name) / file) for name in stage.trees_from]
        if stage.reward_model_from:
            passed["search.reward_model"] = str(self.directory(stage.reward_model_from) / "model")
        return passed

    def fingerprint(self, stage: Stage) -> str:
        """A hash of the stage and its settings; a key at its default, such as one of a newer version, does not change it.

        Nor does the machine: its nodes, the judge that runs there, where results are written and which checkpoint was taken.
        """
        place: dict[str, Any] = {
            "cluster": True,
            "runner": {"output_dir", "logger", "resume_dir", "metrics_port"},
            "tools": {"codejudge": {"host_addr", "host_port"}},
        }
        plain = self.settings(stage, for_plan=True).model_dump(mode="json", exclude_defaults=True, exclude=place)
        own = stage.model_dump(exclude={"overrides"}, exclude_defaults=True)
        text = json.dumps({"stage": own, "settings": plain}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
