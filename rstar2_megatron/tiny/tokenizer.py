"""The tiny model's tokenizer: byte-level BPE with Qwen's splitting rule and special tokens.

transformers 5 gives every tokenizer beside a qwen2 `config.json` Qwen's own pre-tokenizer and ignores the one in its file.
This tokenizer has that pre-tokenizer from the start, so that every reader encodes alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TEMPLATE_TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<reason>",
    "</reason>",
    "<answer>",
    "</answer>",
    "<tools>",
    "</tools>",
)

# Qwen2's rule: contractions, words with one leading sign, single digits, runs of signs, line ends, blanks.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train on `corpus`; the result holds at most `vocab_size` tokens, template tags among them.

    Raises ValueError when `vocab_size` has no room for the 256 bytes and the special tokens.
    """
    special = [END_OF_TEXT, TURN_START, TURN_END, *TEMPLATE_TAGS]
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special)} special tokens need {256 + len(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    # like Qwen2.5's <tool_call>: one token, but text that skip_special_tokens keeps
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TEMPLATE_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the tokenizer files of a Hugging Face model directory."""
    tokenizer.save_pretrained(directory)
