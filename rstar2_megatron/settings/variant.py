"""`algorithm.variant`: one switch for everything in which the paper and the released codes differ (docs/parity.md).

A key of the switch yields to the command line and to the YAML that was named, but not to the parts of config/ (base,
paper, released) that this YAML includes. `--dry-run` prints every key with its value and where it comes from. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rstar2_megatron.settings.rlinf_keys import MISSING, get, put
from rstar2_megatron.settings.schema import Settings

PARTS = ("base", "paper", "released", "few_gpus")  # of config/, for the defaults lists of the others
KEY = "algorithm.variant"

_SAMPLING = "algorithm.down_sampling.down_sampling_config"
_RELEASED: dict[str, Any] = {
    f"{_SAMPLING}.mode": "released",
    f"{_SAMPLING}.min_zero_reward_trace_num": 2,
    f"{_SAMPLING}.min_non_zero_reward_trace_num": 2,
    "reward.mode": "released",
    "algorithm.loss_agg_func": "released-verl",
    "algorithm.recompute_logprobs": True,
    "algorithm.clip_ratio_c": 3.0,
    "algorithm.kl_clamp": 10.0,
    "agentloop.max_assistant_turns": 5,
    "agentloop.max_tool_response_length": 256,
    "agentloop.tool_response_truncate_side": "middle",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {
        f"{_SAMPLING}.mode": "paper",
        f"{_SAMPLING}.min_zero_reward_trace_num": 0,
        f"{_SAMPLING}.min_non_zero_reward_trace_num": 0,
        "reward.mode": "paper",
        "algorithm.loss_agg_func": "token-mean",
        "algorithm.recompute_logprobs": False,
        "algorithm.clip_ratio_c": None,
        "algorithm.kl_clamp": None,
        "agentloop.max_assistant_turns": 10,
    },
    "released": _RELEASED,
    "released-rlinf": {**_RELEASED, "algorithm.loss_agg_func": "released-rlinf", "algorithm.recompute_logprobs": False},
}
"""Values of each variant; the paper says nothing of the tool response."""
_WORDING = {"agentloop.chat_template": ("system_prompt", "user_prefix", "generation_prefix"), "agentloop.tool_descriptions": ()}

Origins = dict[str, str]


def origins_of(directory: Path, name: str, overrides: Sequence[str], config_dir: Path) -> Origins:
    """The last place that sets each dotted key: a YAML (the named one or one that it includes) or the command line."""
    origins: Origins = {}
    for label, data in _layers(directory, name, config_dir):
        origins |= dict.fromkeys(_paths(data), label)
    for word in overrides:
        key, _, text = word.lstrip("+~").partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:  # Hydra's grammar has quotes that YAML has not
            value = text
        origins |= dict.fromkeys(_paths({key: value}), "command line")
    return origins


def _layers(directory: Path, name: str, config_dir: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(label, content) of a YAML and of those in its defaults list, in Hydra's order."""
    path = next((file for place in (directory, config_dir) if (file := place / f"{name}.yaml").is_file()), None)
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path else None
    if path is None or not isinstance(content, dict):
        return
    included = [entry for entry in content.pop("defaults", []) if isinstance(entry, str)]
    for entry in included if "_self_" in included else [*included, "_self_"]:
        if entry == "_self_":
            yield (f"config/{name}.yaml" if path.parent == config_dir else path.name), content
        else:
            yield from _layers(path.parent, entry.removesuffix(".yaml"), config_dir)


def _paths(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _paths(value, path + ".")
        else:
            yield path


def apply_variant(data: dict[str, Any], origins: Origins) -> None:
    """Put the values of `algorithm.variant` into composed data, in place, and note their origin.

    Raises ValueError for an unknown variant.
    """
    variant = get(data, KEY)
    if variant in (MISSING, None):
        return
    if variant not in VARIANTS:
        raise ValueError(f"{KEY}={variant!r}; it is {', '.join(VARIANTS)}, or null for the keys one by one")
    weak = {f"config/{part}.yaml" for part in PARTS}
    origins.setdefault(KEY, "data.type=rstar2, RLinf's")
    for path, value in VARIANTS[variant].items():
        if origins.get(path, "config/base.yaml") in weak:
            put(data, path, value)
            origins[path] = f"{KEY}={variant}"


def algorithm_rows(settings: Settings, origins: Origins) -> list[tuple[str, str]]:
    """(key, value and origin) of every key in which the variants differ, and of the wording."""
    data = settings.model_dump(mode="json")
    variant = settings.algorithm.variant
    rows = [(KEY, f"{_text(variant)}  ({origins.get(KEY, 'default: the keys below, one by one')})")]
    for path in _RELEASED:
        value = get(data, path)
        meant = VARIANTS[variant].get(path, value) if variant else value
        other = "" if value == meant else f"; {variant} is {_text(meant)}"
        rows.append((path, f"{_text(value)}  ({origins.get(path, 'default')}{other})"))
    for path, pieces in _WORDING.items():
        written = [f"agentloop.{piece}" for piece in pieces if get(data, f"agentloop.{piece}") is not None]
        if get(data, path) is not None:
            text = f"set  ({origins.get(path, 'default')})"
        elif written:
            text = f"of {', '.join(written)}  ({origins.get(written[0], 'default')})"
        else:
            text = "this project's own wording, of the same format  (default; a file sets the public one)"
        rows.append((path, text))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, dict):  # code of the user
        value = value["reference"]
    return "null" if value is None else str(value)
