"""The cold start: SFT phases before reinforcement learning, done once and cached.

The cache is a directory under `cold_start.cache_dir`. Its name is a hash of everything that decides its content: path of the
base model, phases, their data, seed and precision. It holds the Hugging Face model and
`result.json` with the held-out scores before and after, so that a later run prints the same table
without the SFT.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.evaluation.held_out import HeldOutResult
from rstar2_megatron.records.model_format import write_format
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.settings.schema import RewardSettings, Settings
from rstar2_megatron.sft.rows import load_sft_rows
from rstar2_megatron.sft.training import run_sft_phase


@dataclass
class ColdStartResult:
    """The model that SFT made, and the held-out scores before and after."""

    model: Path
    before: float | None
    after: float | None


def cache_dir(settings: Settings) -> Path:
    """Directory of the result for these settings, whether it exists or not."""
    phases = [phase.model_dump() for phase in settings.cold_start.phases]
    for phase in phases:
        stat = Path(phase["data_path"]).stat()
        phase["data"] = [stat.st_size, stat.st_mtime_ns]
    parts: dict[str, Any] = {
        "model": settings.rollout.model.model_path,
        "phases": phases,
        "seed": settings.cold_start.seed,
        "precision": settings.actor.model.precision,
        "max_tokens_per_mbs": settings.runner.max_tokens_per_mbs,
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]
    return Path(settings.cold_start.cache_dir).resolve() / f"sft-{key}"


def _scored_by(settings: Settings) -> dict[str, Any]:
    """What decides the scores of a model: other settings of these cannot be compared with them."""
    parts: dict[str, Any] = {
        **dict.fromkeys(("evaluation", "reward", "agentloop"), True),
        "data": {"val_data_paths", "prompt_key", "answer_key", "rows", "max_prompt_length"},
        "tools": {"codejudge": {"time_limit_s", "memory_mb"}},
        "algorithm": {"sampling_params": {"max_new_tokens"}},
    }
    return settings.model_dump(mode="json", include=parts, exclude={"evaluation": {"save_trajectories"}})


def find_cached(settings: Settings) -> ColdStartResult | None:
    """The cached result, or None. Its scores are None where they are of another evaluation."""
    path = cache_dir(settings) / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    if result.get("scored_by") != _scored_by(settings):
        return ColdStartResult(path.parent / "model", None, None)
    return ColdStartResult(path.parent / "model", result["before"], result["after"])


def find_reference(settings: Settings) -> ColdStartResult | None:
    """The cached result that a resumed run needs, because the reference of the KL term must be the model that RL began with.

    Returns None when that model was not the cold start's, or without a KL term: the data of the SFT may be gone then.
    Raises ValueError when the cache is gone or belongs to other settings: the run would silently take the model before SFT
    as its reference.
    """
    begins_elsewhere = settings.runner.init_checkpoint or not settings.cold_start.enabled
    if not settings.algorithm.kl_beta or begins_elsewhere:
        return None
    try:
        found, where = find_cached(settings), f"{cache_dir(settings)} is gone"
    except OSError as error:  # the SFT data that name the cache are gone as well
        found, where = None, f"its name needs the SFT data: {error}"
    if found is None or not (found.model / "config.json").is_file():
        raise ValueError(
            f"resuming with algorithm.kl_beta={settings.algorithm.kl_beta} needs the cold start's model as reference, but "
            f"{where}; restore it, set algorithm.kl_beta=0, or start a new run by runner.resume_dir=null"
        )
    return found


def run_cold_start(
    settings: Settings, actor: WorkerGroup, sync: Callable[[], object], evaluate: Callable[[str], HeldOutResult] | None
) -> ColdStartResult:
    """Train all phases, export the model, and evaluate before and after if `evaluate` is given.

    `sync` sends the actor's weights to the engines. The cache directory appears by one rename when it is complete.
    """
    final = cache_dir(settings)
    before = evaluate("held-out before SFT") if evaluate else None
    tokenizer = AutoTokenizer.from_pretrained(settings.rollout.model.model_path)
    for phase in settings.cold_start.phases:
        lap = time.perf_counter()
        timeout = settings.runner.step_timeout_s
        rows = load_sft_rows([phase.data_path], tokenizer, settings.runner.seq_length)
        actor.call("start_sft_phase", phase, timeout_s=timeout)
        history = run_sft_phase(actor, phase, rows, settings.cold_start.seed, timeout)
        if history:
            print(
                f"SFT {phase.name}: {phase.steps} steps in {time.perf_counter() - lap:.0f} s, loss "
                f"{history[0]['sft/loss']:.3f} -> {history[-1]['sft/loss']:.3f}",
                flush=True,
            )
    partial = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    actor.call("export_hf", str(partial / "model"), timeout_s=settings.runner.step_timeout_s)
    # without the reward of this run: others start from the model too
    write_format(partial / "model", settings.model_copy(update={"reward": RewardSettings(mode=settings.reward.mode)}))
    sync()
    after = evaluate("held-out after SFT") if evaluate else None
    scores = {"before": before.average if before else None, "after": after.average if after else None}
    write_json(partial / "result.json", {**scores, "scored_by": _scored_by(settings)})
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return ColdStartResult(final / "model", **scores)
