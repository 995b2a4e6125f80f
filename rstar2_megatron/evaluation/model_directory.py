"""Finds the Hugging Face directory behind `--model`: a model directory, a run's checkpoint, or a run."""

from __future__ import annotations

from pathlib import Path

from rstar2_megatron.records.checkpoint import complete_checkpoints

CONVERTED = "huggingface"  # inside a checkpoint, beside actor/ and data/, so that it is removed with the checkpoint


def find_run_config(path: Path) -> Path | None:
    """config.yaml of the run which contains a model or checkpoint; None when no run does."""
    for parent in (path, *path.parents[:3]):
        if (parent / "config.yaml").is_file() and (parent / "metrics.jsonl").is_file():
            return parent / "config.yaml"
    return None


def hugging_face_directory(path: str | Path, base_model: str | Path | None = None) -> Path:
    """A directory that the engine can load: `path` itself, or one that is converted from the checkpoint there.

    path: a Hugging Face directory; `global_step_N` of a run; or a run. Of a run the exported model is used unless a checkpoint
    was written since: `model/` is then that of fewer steps. base_model: the Hugging Face directory that the run started from
    (config and tokenizer). A checkpoint is converted once, into a directory inside it. Raises ValueError.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    exported = (path / "model" / "config.json").is_file()
    checkpoints = complete_checkpoints(path / "checkpoints")
    if exported and not (checkpoints and _is_newer(checkpoints[-1][1], path / "model")):
        return path / "model"
    if checkpoints:
        path = checkpoints[-1][1]
        why = ", because the run has gone on behind its model/" if exported else ""
        print(f"the model is that of {path}{why}", flush=True)
    elif (path / "checkpoints").is_dir():
        raise ValueError(f"{path} has neither model/ nor a complete checkpoint yet")
    if not (path / "actor" / "metadata.json").is_file():  # that of verl has none
        raise ValueError(
            f"{path} is neither a Hugging Face directory (config.json), nor a run, nor a run's checkpoint global_step_N; a "
            "checkpoint of verl becomes a Hugging Face directory by `python -m verl.model_merger merge`"
        )
    converted = path / CONVERTED
    if not (converted / "config.json").is_file():
        if base_model is None:
            raise ValueError(
                f"{path} is a checkpoint outside of its run: convert it first by "
                f"`python -m rstar2_megatron.actor.convert {path / 'actor'} BASE_MODEL OUTPUT`"
            )
        # Here, because torch and megatron-core take seconds to load, and a Hugging Face directory needs neither.
        from rstar2_megatron.actor.convert import convert

        print(f"converting {path} to {converted}", flush=True)
        convert(path / "actor", Path(base_model), converted)
    return converted


def _is_newer(checkpoint: Path, model: Path) -> bool:
    return (checkpoint / "data" / "data.pt").stat().st_mtime > (model / "config.json").stat().st_mtime
