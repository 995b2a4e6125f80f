"""Seeds of single requests: a request draws the same tokens whatever runs beside it, and on whichever engine."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, number: int, query_id: str, rollout: int, turn: int) -> int:
    """31 bits that depend on nothing but the request's place in the run.

    number: the step, or with `algorithm.max_staleness` the problem's number in the run, so that an epoch later a problem is
    drawn anew. SGLang also takes the position of each token into account, so a turn that was interrupted goes on with the
    draws that it would have had.
    """
    text = f"{run_seed}\0{number}\0{query_id}\0{rollout}\0{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
