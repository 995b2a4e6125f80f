"""Finds training problems that share an n-gram of words with an evaluation set. Pure.

The paper drops a problem for one common 8-gram (arXiv 2508.20722, section 3.2). Competition problems also share
wording ("where m and n are relatively prime positive integers"); `boilerplate` ignores n-grams that occur in
many evaluation problems. The report names the n-grams that dropped most problems, so that a user can choose a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rstar2_megatron.data.cleaning import words


class NGramIndex:
    """All n-grams of the evaluation problems."""

    def __init__(self, texts: Iterable[str], n: int = 8, boilerplate: int = 0) -> None:
        """boilerplate: an n-gram that occurs in at least this many problems does not count; 0: every n-gram counts."""
        if n < 1:
            raise ValueError(f"n-grams of {n} words; n must be at least 1")
        self.n = n
        self.num_problems = 0
        counts: Counter[tuple[str, ...]] = Counter()
        seen: set[tuple[str, ...]] = set()
        for text in texts:
            tokens = tuple(words(text))
            if not tokens or tokens in seen:
                continue
            seen.add(tokens)
            self.num_problems += 1
            counts.update(set(_ngrams(tokens, n)))
        self._ngrams = {gram for gram, count in counts.items() if not boilerplate or count < boilerplate or len(gram) < n}

    def match(self, text_words: list[str]) -> str | None:
        """The first n-gram that the problem shares with an evaluation problem, or None.

        An evaluation problem of fewer than n words is matched only by the same problem.
        """
        return next((" ".join(gram) for gram in _ngrams(tuple(text_words), self.n) if gram in self._ngrams), None)


def _ngrams(tokens: tuple[str, ...], n: int) -> Iterator[tuple[str, ...]]:
    if len(tokens) < n:
        yield tokens
    for start in range(len(tokens) - n + 1):
        yield tokens[start : start + n]
