"""Builds the inputs of the default run without a GPU: tokenizer, model, problems and SFT data.

Deterministic under its seed, and cached: the directory's name holds a hash of every parameter and of the code that uses
them. The directory appears by one rename when it is complete, and a second call returns it unchanged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.tiny.problems import Level, TinyProblem, stream
from rstar2_megatron.tiny.recipe import TinyModelShape, TinyRecipe, chained_noisy_recipe, chained_recipe, smollm2_recipe
from rstar2_megatron.tiny.sft import Segments, TraceWriter, copy_rows, pieces

Base = Literal["tiny", "chained", "chained-noisy", "smollm2"]

_RECIPES: dict[Base, Callable[[], TinyRecipe]] = {
    "tiny": TinyRecipe,
    "chained": chained_recipe,
    "chained-noisy": chained_noisy_recipe,
    "smollm2": smollm2_recipe,
}

# Files whose code decides the result.
_CODE = (
    "build.py",
    "model.py",
    "problems.py",
    "recipe.py",
    "sft.py",
    "smollm2.py",
    "tokenizer.py",
    "../rollout/chat.py",
    "../rollout/tool_response.py",
)
# Agent-loop settings that the SFT data depends on; others may change without a new build.
_FORMAT = {
    "tools",
    "max_tool_response_length",
    "tool_response_truncate_side",
    "system_prompt",
    "user_prefix",
    "generation_prefix",
    "chat_template",
    "tool_descriptions",
}


class TinyPaths:
    """Paths of the parts under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = root / "model"  # Hugging Face directory: config.json, model.safetensors and the tokenizer's files
        self.train = root / "data" / "train.jsonl"
        self.heldout = root / "data" / "heldout.jsonl"
        self.copy = root / "sft" / "copy.jsonl"  # first SFT phase; rows in the order of training
        self.conversations = root / "sft" / "conversations.jsonl"  # second SFT phase


def build_tiny(
    cache_dir: str | Path,
    seed: int,
    *,
    agentloop: AgentLoopSettings,
    recipe: TinyRecipe | None = None,
    shape: TinyModelShape | None = None,
    base: Base = "tiny",
    progress: Callable[[str], None] = print,
) -> TinyPaths:
    """Build, or find, the tiny recipe's files below `cache_dir`.

    Args:
        cache_dir: Parent of the `{base}-...` directory; made when absent.
        seed: Of problems, traces and initial weights.
        agentloop: Conversation format of the SFT data; must be that of the rollouts.
        recipe, shape: Amounts, and the sizes of a tiny model.
        base: A tiny model from nothing, with short or with chained problems, or the pretrained one of `smollm2`.
        progress: Called with a line at the start of each part.

    Raises:
        OSError: when `cache_dir` cannot be written.
    """
    recipe = recipe or _RECIPES[base]()
    shape = None if base == "smollm2" else shape or TinyModelShape()
    parameters = {
        "seed": seed,
        "agentloop": agentloop.model_dump(include=_FORMAT),
        "recipe": asdict(recipe),
        "model": asdict(shape) if shape else base,
    }
    key = _content_key(parameters)
    root = Path(cache_dir).expanduser().resolve() / f"{base}-seed{seed}-{key}"
    if root.exists():
        return TinyPaths(root)
    root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        _build(TinyPaths(unfinished), seed, agentloop, recipe, shape, progress)
        manifest = json.dumps(parameters, indent=2, sort_keys=True)
        (unfinished / "manifest.json").write_text(manifest + "\n")
        unfinished.chmod(0o755)
        try:
            unfinished.rename(root)
        except OSError:
            if not root.exists():  # otherwise another process has just built the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return TinyPaths(root)


def _content_key(parameters: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for name in _CODE:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:10]


def _build(
    paths: TinyPaths,
    seed: int,
    agentloop: AgentLoopSettings,
    recipe: TinyRecipe,
    shape: TinyModelShape | None,
    progress: Callable[[str], None],
) -> None:
    # Here, because torch and transformers take seconds to import and a cached build needs neither.
    from transformers import AutoTokenizer

    from rstar2_megatron.tiny.model import build_model, save_model
    from rstar2_megatron.tiny.smollm2 import write_model
    from rstar2_megatron.tiny.tokenizer import save_tokenizer

    for directory in (paths.model, paths.train.parent, paths.copy.parent):
        directory.mkdir(parents=True)

    lower, level = recipe.levels
    progress("demonstration: problems")
    seen: set[str] = set()

    def problems(name: str, count: int) -> list[TinyProblem]:
        return _take(stream(level, random.Random(f"{name} {seed}"), seen, recipe.families), count)

    heldout, train = problems("heldout", recipe.heldout_problems), problems("train", recipe.train_problems)
    write_jsonl(paths.heldout, (p.row(f"tiny-heldout-{i}") for i, p in enumerate(heldout)))
    write_jsonl(paths.train, (p.row(f"tiny-train-{i}") for i, p in enumerate(train)))

    progress("demonstration: tokenizer and model")
    if shape is None:
        write_model(paths.model)
        tokenizer = AutoTokenizer.from_pretrained(paths.model)
    else:
        tokenizer = _tokenizer(recipe, agentloop)
        save_tokenizer(tokenizer, paths.model)
        model = build_model(shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed)
        save_model(model, paths.model)

    progress("demonstration: SFT data")
    rng = random.Random(f"sft {seed}")
    template = ChatTemplate(tokenizer, agentloop)
    # SFT questions may occur again in RL, but not in the held-out set; there are few easy ones, so they may repeat
    held = {p.question for p in heldout}
    easy, main = (_endless(name, rng, held, recipe.families) for name in (lower, level))
    writer = TraceWriter(template, rng, recipe.mix)
    rows = [writer.conversation(next(main if rng.random() < recipe.main_share else easy)) for _ in range(recipe.conversations)]
    write_jsonl(paths.conversations, ({"segments": row} for row in rows))
    if recipe.copy is None:
        return
    filler = pieces("".join(text for row in rows[:200] for text, _ in row))
    write_jsonl(paths.copy, ({"segments": row} for row in copy_rows(recipe.copy, main, filler, rng)))


def _take(problems: Iterator[TinyProblem], count: int) -> list[TinyProblem]:
    return list(itertools.islice(problems, count))


def _endless(level: Level, rng: random.Random, excluded: set[str], families: Sequence[str]) -> Iterator[TinyProblem]:
    """Problems that may repeat, but none whose question is in `excluded`."""
    while True:
        yield from _take(stream(level, rng, set(excluded), families), 90)


def _tokenizer(recipe: TinyRecipe, agentloop: AgentLoopSettings) -> Any:  # PreTrainedTokenizerFast
    """Trained on conversations of a fixed seed, so that every seed's model has the same tokens."""
    from rstar2_megatron.tiny.tokenizer import TEMPLATE_TAGS, train_tokenizer  # loads transformers

    rng = random.Random("tokenizer")
    bare: Any = train_tokenizer([], 256 + 3 + len(TEMPLATE_TAGS))
    writer = TraceWriter(ChatTemplate(bare, agentloop), rng, recipe.mix)
    problems = _endless("main", rng, set(), recipe.families)
    rows: list[Segments] = [writer.conversation(next(problems)) for _ in range(recipe.tokenizer_conversations)]
    tags = re.compile("|".join(re.escape(t) for t in bare.get_added_vocab()))
    texts = [part for row in rows for part in tags.split("".join(text for text, _ in row)) if part]
    return train_tokenizer(texts, recipe.vocab_size)
