"""Text of token ids, special tokens included, as the tokenizer itself decodes them.

A turn has thousands of tokens and is decoded whole. The tokenizers library makes the bytes of each token again every time. For
byte-level tokenizers (Qwen, Llama 3) the bytes of all tokens are kept here, and decoding takes a fifth to a ninth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode


class TokenText:
    """Decodes ids of one Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = _bytes_of_tokens(tokenizer) if _joins_bytes(tokenizer) else None

    def __call__(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Ids that the tokenizer has not are left out."""
        if self._bytes is None:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        ids = np.asarray(token_ids, np.int64)
        return b"".join(self._bytes.take(ids, mode="clip").tolist()).decode(errors="replace")


def _joins_bytes(tokenizer: Any) -> bool:
    """Whether the text of tokens is that of their bytes one after another."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (
        backend is not None
        and isinstance(backend.decoder, decoders.ByteLevel)
        and isinstance(backend.model, models.BPE)
        and not getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    )


def _bytes_of_tokens(tokenizer: Any) -> np.ndarray:
    """The bytes of each id, and none at the end: for ids beyond."""
    byte_of = {character: value for value, character in bytes_to_unicode().items()}
    backend = tokenizer.backend_tokenizer
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    result = np.full(highest + 2, b"", object)
    for number in range(highest + 1):
        token = backend.id_to_token(number) or ""
        try:
            result[number] = bytes(byte_of[character] for character in token)
        except KeyError:  # an added token is written as it is
            result[number] = token.encode()
    return result
