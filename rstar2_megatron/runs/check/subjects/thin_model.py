"""A model of the same width as the YAML's with few layers and random weights, in a directory that is removed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rstar2_megatron.model.known_models import known_config
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.runs.check.result import Check, CheckFailed, Finding

LAYERS = 2
_MORE_TIME = 1e9  # so many parameters double every later deadline
_NOT_COPIED = {"config.json", "generation_config.json"}
_TOKENIZER_WORDS = ("token", "vocab", "merges", "chat_template", "special")


def layers_for(settings: Any) -> int:
    """So few layers that every pipeline stage of the layout has one."""
    model = settings.actor.model
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    return max(LAYERS, stages)


def thin_config(model_path: str, layers: int) -> dict[str, Any]:
    """A config.json of `layers` layers: the directory's own, or the known model's of that name. Raises CheckFailed."""
    path = Path(model_path) / "config.json"
    if path.is_file():
        raw: dict[str, Any] = json.loads(path.read_text())
        raw.pop("layer_types", None)
        return {**raw, "num_hidden_layers": layers, "max_window_layers": layers}
    known = known_config(model_path)
    if known is None:
        raise CheckFailed(f"rollout.model.model_path={model_path} has no config.json, and its name is not a known model's")
    return {**known, "num_hidden_layers": layers}


def thin_parameters(settings: Any) -> int:
    """Parameters of the thin model; 0 where the model is not known yet (another check says so)."""
    try:
        raw = thin_config(settings.rollout.model.model_path, layers_for(settings))
        return ModelConfig.from_dict(raw).num_parameters
    except (CheckFailed, ValueError, KeyError):
        return 0


def build(job: Job, raw: dict[str, Any], directory: str, precision: str, tokenizer_from: str) -> dict[str, float]:
    """Write the directory: random weights, biases and norms too, so that a wrong mapping shows; the tokenizer's files."""
    import torch  # here: the driver reads this file and does no torch work
    from transformers import AutoConfig, AutoModelForCausalLM

    target = Path(directory)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config = AutoConfig.for_model(**raw)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.02)
    model.save_pretrained(target)
    source = Path(tokenizer_from)
    for path in source.iterdir() if source.is_dir() else []:
        if path.name not in _NOT_COPIED and any(word in path.name for word in _TOKENIZER_WORDS) and path.is_file():
            shutil.copy(path, target / path.name)
    return {"parameters": float(sum(p.numel() for p in model.parameters()))}


def make(context: Context) -> Finding:
    settings = context.settings
    raw = thin_config(settings.rollout.model.model_path, layers_for(settings))
    figures = context.nodes.one(
        "rstar2_megatron.runs.check.subjects.thin_model:build",
        280.0,
        raw=raw,
        directory=str(context.thin),
        precision=settings.actor.model.precision,
        tokenizer_from=settings.rollout.model.model_path,
    )
    context.nodes.patience = 1 + figures["parameters"] / _MORE_TIME
    model = context.thin_config
    words = (
        f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, vocabulary {model.vocab_size}: "
        f"{figures['parameters'] / 1e6:.1f} M parameters"
    )
    return Finding(words, figures)


CHECKS = [
    Check(
        "thin model",
        make,
        "give rollout.model.model_path a Hugging Face directory, and room in runner.output_dir",
        deadline_s=300.0,
        after=("driver",),
    )
]
