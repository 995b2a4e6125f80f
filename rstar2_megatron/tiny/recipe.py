"""Amounts and sizes of the tiny recipe. Everything here is part of the cache's key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rstar2_megatron.tiny.problems import CHAINED, FAMILIES, Level


@dataclass(frozen=True, slots=True)
class TinyModelShape:
    """Sizes of the model. Heads and KV heads divide by 2, so that it runs with tensor parallel size 2."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 2048
    rope_theta: float = 10000.0
    initializer_range: float = 0.05
    previous_token_score: float = 20.0
    """Peak of the first layer's attention scores by distance (`model`); 0 leaves it random."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of the five kinds of conversation, and how often a careless one (`error`) is corrected."""

    right: float = 0.28
    wrong: float = 0.25
    error: float = 0.22
    guess: float = 0.10
    untagged: float = 0.15
    retry_right: float = 0.85
    """Share of careless conversations whose second program is the right one (otherwise the wrong one)."""
    chain_mistakes: dict[str, float] = field(default_factory=lambda: {"+": 0.3, "-": 0.3, "*": 0.3, "%": 0.6})
    """Chained problems: how often a step has another operator than the question, by the question's. Where it is above a half,
    the most likely step is wrong."""
    failed_calls: float = 0.0
    """Chained problems: how often a call fails for no fault of its own, as `agentloop.tool_noise` lets it. It is made again
    as often as a careless conversation is corrected (`retry_right`); else the conversation goes on with a number of its own."""


@dataclass(frozen=True, slots=True)
class CopyCurriculum:
    """Rows of a source text, filler whose length grows along the file, and the trained copy."""

    rows: int = 15360
    adjacent: float = 0.3
    """Share of the rows, from the start, with no filler at all."""
    full: float = 0.85
    """Place in the file from which the filler has its full range."""
    longest: int = 40
    """Longest filler in pieces, about as many tokens."""
    answers: float = 0.25
    """Share of rows that copy a tool's output into a box; the others copy a question's numbers into code."""

    def reach(self, place: float) -> int:
        """Longest filler at `place` in [0, 1) of the file."""
        grown = (place - self.adjacent) / (self.full - self.adjacent)
        return int(self.longest * min(1.0, max(0.0, grown)))


@dataclass(frozen=True, slots=True)
class TinyRecipe:
    """Amounts of data, apart from the seed, the model's shape and the conversation format."""

    levels: tuple[Level, Level] = ("easy", "main")
    """Sizes of the numbers: of the easier SFT conversations, and of RL, held-out and the other conversations."""
    families: tuple[str, ...] = tuple(FAMILIES)
    vocab_size: int = 640
    tokenizer_conversations: int = 3000
    train_problems: int = 4096
    heldout_problems: int = 288
    conversations: int = 6400
    main_share: float = 0.5
    """Share of the SFT conversations about problems of the main level; the others are easy."""
    mix: Mix = field(default_factory=Mix)
    copy: CopyCurriculum | None = field(default_factory=CopyCurriculum)


def chained_recipe() -> TinyRecipe:
    """Chained problems alone: each takes three dependent tool calls, and the policy makes mistakes on the way."""
    return TinyRecipe(families=tuple(CHAINED), train_problems=1024, conversations=4096, main_share=0.8)


def chained_noisy_recipe() -> TinyRecipe:
    """Chained problems of which some calls fail, and conversations that do not always call again."""
    return replace(chained_recipe(), conversations=8192, mix=Mix(failed_calls=0.15, retry_right=0.8))


def smollm2_recipe() -> TinyRecipe:
    """Problems whose numbers no model multiplies by heart, for a pretrained model, which can copy them already."""
    return TinyRecipe(
        levels=("main", "large"),
        families=("product", "gcd", "lcm", "remainder", "series"),
        train_problems=2048,
        heldout_problems=96,
        conversations=1024,
        main_share=0.8,
        copy=None,
    )
