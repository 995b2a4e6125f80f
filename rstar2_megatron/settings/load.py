"""Loads a YAML with the overrides of the command line into checked settings.

Hydra composes the YAML (defaults list, interpolation, overrides), RLinf's keys are translated, and the schema
checks the rest. Every mistake is a ConfigError that names the key, the value and the nearest valid choice.
Neither torch nor Ray is imported, so bad input is answered in about a second.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rstar2_megatron.extension.user_code import FOLDERS, UserCode
from rstar2_megatron.model.tokenizer_files import OWN_TEMPLATE
from rstar2_megatron.settings import rlinf_keys
from rstar2_megatron.settings.precision import resolve_precision
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.settings.variant import PARTS, Origins, apply_variant, origins_of

CALLED_FROM = "RSTAR2_CALLED_FROM"
"""Environment variable with the directory from which the user called run_rstar2.sh."""
_PLACEMENT = "cluster.component_placement="
_HOME = re.compile(r"(?<=[=\[,'\"])~(?=/)")  # of an override's value, where no shell replaces it
_INPUTS = (
    "rollout.model.model_path", "data.train_data_paths", "data.val_data_paths", "sft.train_data_paths", "sft.val_data_paths",
    "preference.train_data_paths", "preference.val_data_paths", "search.reward_model", "runner.init_checkpoint",
    "runner.replay_rollouts", "runner.corridor", "runner.resume_dir",
)  # fmt: skip
_OUTPUTS = ("runner.output_dir", "runner.logger.log_path")
CONFIG_DIR = Path(__file__).resolve().parents[2] / "config"


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the place and the remedy."""


@dataclass
class Loaded:
    """Settings and notes for the user."""

    settings: Settings
    notes: list[str] = field(default_factory=list)
    origins: Origins = field(default_factory=dict)
    """Where the last value of a dotted key was set; a key that is absent has its default."""

    def print_notes(self) -> None:
        for note in self.notes:
            print(f"note: {note}", file=sys.stderr)


def load_settings(config: str, overrides: Sequence[str] = (), *, folder: Path | None = None) -> Settings:
    """As `load`, with the notes written to standard error."""
    loaded = load(config, overrides, folder=folder)
    loaded.print_notes()
    return loaded.settings


def load(config: str, overrides: Sequence[str] = (), *, folder: Path | None = None) -> Loaded:
    """Compose `config`, a name in config/ or a path to a YAML, with `key=value` overrides.

    A YAML elsewhere can have `defaults: [base, _self_]` too. An override may set any key of the schema,
    written in the YAML or not; `+key=value` means the same. `~key` removes a key of the YAML, so that its default
    holds. folder: where relative paths count from first, in place of the YAML's own directory. Raises ConfigError.
    """
    directory, name = find_config(config)
    overrides = [_HOME.sub(lambda _: str(Path.home()), word) for word in overrides]
    data = _compose(directory, name, overrides)
    origins = origins_of(directory, name, overrides, CONFIG_DIR)
    folders = [folder or directory, users_path(".").resolve()]
    try:
        notes = rlinf_keys.translate(data, {word.lstrip("+").partition("=")[0] for word in overrides})
        apply_variant(data, origins)
        notes += resolve_precision(data)
        _read_wording(data)
        _place_files(data, folders)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    without_meaning: list[str] = []
    for path in list(unknown_keys(data)):
        reason = rlinf_keys.why_without_meaning(path)
        if reason is None:
            raise ConfigError(_unknown_key_message(path))
        without_meaning.append(f"{path} ({reason})")
        rlinf_keys.drop(data, path)
    if without_meaning:
        notes.append("RLinf keys without meaning here: " + "; ".join(without_meaning))
    try:
        settings = Settings.model_validate(data, context={FOLDERS: folders})
    except ValidationError as error:
        raise ConfigError(_validation_message(error)) from None
    return Loaded(settings, notes, origins)


def print_config(settings: Settings) -> str:
    """The complete configuration as YAML; `load` reads it back to equal settings."""
    return yaml.safe_dump(to_plain(settings), sort_keys=False, allow_unicode=True, width=100)


def to_plain(settings: Settings) -> dict[str, Any]:
    """Settings as nested dicts; an absent `cluster.node_groups` is left out, as RLinf requires."""
    data = settings.model_dump(mode="json")
    if data["cluster"].get("node_groups") is None:
        data["cluster"].pop("node_groups", None)
    return data


def to_dict_config(settings: Settings) -> DictConfig:
    """Settings as the DictConfig that RLinf's placement and logger classes read."""
    return OmegaConf.create(to_plain(settings))


# ------------------------------------------------------------------------------------------------ finding


def config_names() -> list[str]:
    """Names of config/ that can be run."""
    return sorted(p.stem for p in CONFIG_DIR.glob("*.yaml") if p.stem not in PARTS)


def users_path(path: str | Path) -> Path:
    """A path as the user wrote it: a relative one is taken from where the user called run_rstar2.sh."""
    return Path(os.environ.get(CALLED_FROM, ".")) / Path(path).expanduser()


def _read_wording(data: dict[str, Any]) -> None:
    """Replace files of the wording by their content, so that a saved configuration is complete without them."""
    template = rlinf_keys.get(data, "agentloop.chat_template")
    tools = rlinf_keys.get(data, "agentloop.tool_descriptions")
    try:
        if isinstance(template, str) and "{{" not in template and template != OWN_TEMPLATE:
            text = users_path(template).read_text(encoding="utf-8")
            rlinf_keys.put(data, "agentloop.chat_template", text)
        if isinstance(tools, str):
            text = users_path(tools).read_text(encoding="utf-8")
            rlinf_keys.put(data, "agentloop.tool_descriptions", yaml.safe_load(text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"a file of agentloop.chat_template or agentloop.tool_descriptions: {' '.join(str(error).split())}"
        ) from None


def _place_files(data: dict[str, Any], folders: Sequence[Path]) -> None:
    """Paths of models, data and checkpoints count as those of own code do; what is in neither folder stays as it is written.

    What a run writes counts from where the user stands, the last folder.
    """

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(one) for one in value]
        if not isinstance(value, str) or value in ("", "auto"):  # auto: of runner.resume_dir
            return value
        found = (folder / Path(value).expanduser() for folder in folders)
        return next((str(path) for path in found if path.exists() and path != Path.cwd() / value), value)

    for key in _INPUTS:
        if rlinf_keys.get(data, key) is not rlinf_keys.MISSING:
            rlinf_keys.put(data, key, placed(rlinf_keys.get(data, key)))
    phases = rlinf_keys.get(data, "cold_start.phases")
    for phase in phases if isinstance(phases, list) else []:
        if isinstance(phase, dict) and "data_path" in phase:
            phase["data_path"] = placed(phase["data_path"])
    for key in _OUTPUTS:
        if isinstance(value := rlinf_keys.get(data, key), str) and folders[-1] != Path.cwd():
            rlinf_keys.put(data, key, str(folders[-1] / Path(value).expanduser()))


def find_config(config: str) -> tuple[Path, str]:
    """(directory, stem) of the YAML; a relative path counts from the user's working directory.

    Raises ConfigError listing the nearest names.
    """
    path = users_path(config)
    is_path = Path(config).parent != Path(".") or path.is_file()
    if is_path:
        if path.suffix == ".yml":
            raise ConfigError(f"{path}: Hydra reads .yaml files alone; rename it to {path.stem}.yaml")
        if path.suffix != ".yaml":
            path = path.with_name(path.name + ".yaml")
        if not path.is_file():
            raise ConfigError(f"no configuration file {path}; {_names_hint(path.stem)}")
        return path.resolve().parent, path.stem
    stem = config.removesuffix(".yaml")
    if not (CONFIG_DIR / f"{stem}.yaml").is_file():
        raise ConfigError(f"no configuration {stem!r} in {CONFIG_DIR}; {_names_hint(stem)}")
    return CONFIG_DIR, stem


def _names_hint(stem: str) -> str:
    names = config_names()
    near = difflib.get_close_matches(stem, names, n=3, cutoff=0.4)
    return f"nearest: {', '.join(near)}; all: {', '.join(names)}" if near else f"there are: {', '.join(names)}"


# ---------------------------------------------------------------------------------------------- composing


def _register_resolvers() -> None:
    """Arithmetic for YAML interpolation, under RLinf's names."""
    resolvers: dict[str, Callable[..., Any]] = {
        "add": lambda x, y: x + y,
        "subtract": lambda x, y: x - y,
        "multiply": lambda x, y: x * y,
        "int_div": lambda x, y: x // y,
        "not": lambda x: not bool(x),
    }
    for name, resolver in resolvers.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolver)


def _compose(directory: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    _register_resolvers()
    if own := [word for word in overrides if word.lstrip("+~").startswith("hydra.")]:
        raise ConfigError(f"{own[0]}: Hydra's own keys do nothing here; leave it out (runner.output_dir: where a run writes)")
    # The whole placement replaces that of the YAML, because merging would place a component twice. It is read as YAML, because
    # RLinf's "actor,rollout,reward" is not a key in Hydra's grammar.
    placements = [word for word in overrides if word.lstrip("+").startswith(_PLACEMENT)]
    # `++key=value` also sets a key which the YAML does not have.
    words = [word if word.startswith("~") else "++" + word.lstrip("+") for word in overrides if word not in placements]
    words += [f"++{_PLACEMENT}null"] if placements else []  # the YAML may have none: ???
    if directory != CONFIG_DIR:
        words.append(f"hydra.searchpath=['file://{CONFIG_DIR}']")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(directory), version_base="1.3"):
            composed = compose(config_name=name, overrides=words)
        data: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        placement = yaml.safe_load(placements[-1].lstrip("+").removeprefix(_PLACEMENT)) if placements else None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(_compose_message(name, error)) from None
    composed_data = {str(key): value for key, value in data.items() if key != "hydra"}
    if placements:
        rlinf_keys.put(composed_data, "cluster.component_placement", placement)
    return composed_data


def _compose_message(name: str, error: Exception) -> str:
    """In the user's words: those of Hydra and OmegaConf name their own classes, and no remedy."""
    said = str(error) or str(error.__cause__ or error.__context__ or repr(error))  # Hydra's own may be empty
    said = " ".join(said.split()).replace("'++", "'")
    text = re.split(" See https://hydra.cc| full_key: ", said)[0].rstrip(".")
    place = re.search(r" full_key: ([\w.-]+) ", said)
    match error:
        case UnicodeDecodeError():
            return f"{name}.yaml or one of its defaults is no UTF-8 text ({error}); save it as UTF-8"
        case RecursionError():
            return f"{name}.yaml: its defaults name each other, or it is nested too deeply"
        case yaml.MarkedYAMLError(problem_mark=yaml.Mark() as mark):
            where = f"{mark.name}:{mark.line + 1}" if Path(mark.name).is_file() else "cluster.component_placement"
            remedy = "indent by blanks, close each bracket, and put other signs in quotes"
            return f"{where}: {error.problem}; {'write it once' if 'duplicate key' in str(error.problem) else remedy}"
        case MissingConfigException(missing_cfg_file=str(other)):
            return f"{name}.yaml: its defaults name {other}, and no such YAML is beside it or in {CONFIG_DIR}; mend the name"
        case MissingMandatoryValue(full_key=key):
            return f"{key} has no value; set it in {name}.yaml or on the command line: {key}=..."
    if place:
        what = text.rpartition(" raised while resolving interpolation: ")[2]
        remedy = "${section.key} is the value of another key, ${oc.env:NAME} that of a variable"
        return f"{place[1]} cannot be computed: {what}; {remedy}"
    if text.startswith("Could not delete"):
        return f"{text.partition('. ')[2]}; ~key removes a key that {name}.yaml or one of its defaults has"
    if isinstance(error, OverrideParseException) or "Ambiguous value" in text or "config group" in text:
        text = getattr(error, "override", text.split(" 1. ")[0].removeprefix("Ambiguous value for argument "))
        text = text.lstrip("+")
        return (
            f"{text} cannot be read; an override is written key=value, a list key=[a,b], null is null, and a value with "
            "brackets, spaces, commas or other signs in quotes: \"key=['a (1).jsonl']\""
        )
    if "ListConfig" in text:
        return f"{name}.yaml has a list where keys and values belong"
    remedy = "; defaults are a list of names of YAMLs, and _self_ once: defaults: [base, _self_]"
    return f"{name}.yaml: {text.replace('override ++', 'override ')}{remedy if 'default' in text or '_self_' in text else ''}"


# ------------------------------------------------------------------------------------------ unknown keys


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The classes of the sections that a field may hold; empty for values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_of(argument)]


def valid_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Every dotted path of the schema, sections included; own code is one value."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for section in _sections_of(info.annotation):
            if section is not UserCode:
                yield from valid_keys(section, path + ".")


def unknown_keys(data: dict[str, Any], model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Dotted paths of `data` that the schema does not have; for an unknown section only its own path."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        info = model.model_fields.get(str(name))
        if info is None:
            yield path
            continue
        sections = _sections_of(info.annotation)
        items = [(f"{path}.{i}", item) for i, item in enumerate(value)] if isinstance(value, list) else [(path, value)]
        for place, item in items:
            if sections and isinstance(item, dict):
                yield from unknown_keys(item, _closest_section(sections, item), place + ".")


def _closest_section(sections: list[type[BaseModel]], data: dict[str, Any]) -> type[BaseModel]:
    """The section that has most of these keys: an entry of `agentloop.tools` is an own tool or an MCP server."""
    return max(sections, key=lambda section: len(section.model_fields.keys() & data.keys()))


def nearest_keys(path: str) -> list[str]:
    """Valid keys most similar to `path`, by the whole path or by its last name, best first."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, path, candidate).ratio()
        last = difflib.SequenceMatcher(None, path.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.6 * last + 0.4 * whole if "." in path else last)

    keys = dict.fromkeys(valid_keys())
    ranked = sorted(keys, key=lambda key: (likeness(key), key == path), reverse=True)  # of equal ones the first of the schema
    return [key for key in ranked[:3] if likeness(key) > 0.6]


_VERLS = re.compile(
    r"(?:actor_rollout_ref|trainer|custom_reward_function|reward\.custom_reward_function|algorithm\.(?:adv_estimator|rollout_correction)|"
    r"data\.(?:max_response_length|train_batch_size|train_files|val_files))(?:\..*)?"
)


def _unknown_key_message(path: str) -> str:
    if _VERLS.fullmatch(path):
        return f"unknown key {path}, which is verl's; docs/parity.md lists verl's keys with those of this project"
    near = nearest_keys(path)
    if path in near:  # "runner.max_steps: 3" in a YAML
        return f"{path} is one name in the YAML; write it nested: {path.replace('.', ': {')}: ...{'}' * path.count('.')}"
    if near:
        rest = f" (or {', '.join(near[1:])})" if near[1:] else ""
        return f"unknown key {path}; the nearest valid key is {near[0]}{rest}"
    return f"unknown key {path}; the sections are {', '.join(Settings.model_fields)}"


def _validation_message(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        loc = problem["loc"]
        # pydantic puts the kind of a tool's entry behind its number, which is no key.
        path = ".".join(str(part) for i, part in enumerate(loc) if not (loc[i - 2 : i - 1] == ("tools",) and i > 2))
        if problem["type"] == "missing":
            lines.append(f"{path} has no value; set it in the YAML or on the command line: {path}=...")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            remedy = f"; write {path}=[{problem['input'] or ''}]" if problem["type"] == "list_type" else ""
            lines.append(f"{path}={problem['input']!r}: {message[:1].lower()}{message[1:]}{remedy}")
    return "; ".join(lines)
