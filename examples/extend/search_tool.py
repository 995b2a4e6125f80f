"""A tool that looks formulas up: full-text search over a small corpus with SQLite's FTS5."""

import sqlite3
import threading

from rstar2_megatron.extension import ToolError

CORPUS = [
    "The sum of the first n positive integers is n(n+1)/2.",
    "The sum of the first n squares is n(n+1)(2n+1)/6.",
    "The sum of the first n cubes is the square of n(n+1)/2.",
    "A geometric series a + ar + ... + ar^(n-1) has the sum a(1-r^n)/(1-r).",
    "The area of a triangle with sides a, b, c and half perimeter s is the root of s(s-a)(s-b)(s-c) (Heron).",
    "The number of ways to choose k of n things is n!/(k!(n-k)!), the binomial coefficient.",
    "The greatest common divisor of a and b times their least common multiple is ab.",
    "By Vieta, the roots of x^2 + px + q have the sum -p and the product q.",
    "An integer is divisible by 9 exactly when the sum of its digits is.",
    "By Fermat, a^p - a is divisible by p for every integer a and prime p.",
]

_lock = threading.Lock()  # every call runs in a thread of its own
_index = sqlite3.connect(":memory:", check_same_thread=False)
_index.execute("CREATE VIRTUAL TABLE passages USING fts5(text, tokenize = 'porter')")
_index.executemany("INSERT INTO passages VALUES (?)", [(text,) for text in CORPUS])


def search(query: str, limit: int = 2) -> list[str]:
    """Find formulas and theorems in a small collection.

    Args:
        query: Words to look for, e.g. "sum of squares".
        limit: How many passages to return, the best first.
    """
    words = ["".join(filter(str.isalnum, word)) for word in query.split()]
    if not any(words):
        raise ToolError("the query has no words; write what to look for")
    match = " OR ".join(f'"{word}"' for word in words if word)
    with _lock:
        rows = _index.execute("SELECT text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?", (match, limit))
        return [text for (text,) in rows]
