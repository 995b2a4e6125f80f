"""Assigns trajectories to data-parallel ranks and micro-batches. Pure, no torch."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


def split_minibatches(num_sequences: int, n_minibatches: int) -> list[range]:
    """Split the step's sequences, in order, into at most `n_minibatches` non-empty ranges of near-equal count."""
    parts = max(1, min(n_minibatches, num_sequences))
    edges = [num_sequences * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Distribute sequences over `parts` ranks with near-equal token sums. Returns the indices of each rank.

    Greedy: the longest sequence first, each to the rank with the fewest tokens, so the maximum is at most 4/3 of the
    optimum. Every index appears exactly once; ranks may stay empty. Ties break by index, so all ranks get the same result.
    """
    heap = [(0, rank) for rank in range(parts)]
    assigned: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, rank = heapq.heappop(heap)
        assigned[rank].append(index)
        heapq.heappush(heap, (tokens + lengths[index], rank))
    return [sorted(indices) for indices in assigned]


def pack(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split `indices` into micro-batches of at most `max_tokens` tokens, by best-fit decreasing: near the fewest possible.

    Most sequences share a micro-batch with those of similar length, to which plain attention pads it; short ones fill what
    is left. The micro-batches are then evened out, because pipeline stages wait for the largest. The longest come first, so
    that memory peaks at the start. Raises ValueError for a sequence longer than `max_tokens`.
    """
    order = sorted(indices, key=lambda i: (-lengths[i], i))
    if not order:
        return []
    longest = lengths[order[0]]
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit a micro-batch of {max_tokens}: raise runner."
            "max_tokens_per_mbs (times actor.model.context_parallel_size) to at least runner.seq_length"
        )
    fewest = len(_fill(order, lengths, max_tokens))
    low, high = longest, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_fill(order, lengths, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _fill(order, lengths, low)


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, micro-batch), sorted
    for index in order:
        place = bisect.bisect_left(rooms, (lengths[index], 0))  # the fullest that has room
        room, number = rooms.pop(place) if place < len(rooms) else (budget, len(batches))
        if number == len(batches):
            batches.append([])
        batches[number].append(index)
        bisect.insort(rooms, (room - lengths[index], number))
    return batches


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Assignment of a mini-batch: `microbatches[rank]` are lists of sequence indices."""

    microbatches: list[list[list[int]]]
    tokens_per_rank: list[int]

    @property
    def imbalance(self) -> float:
        """Tokens of the fullest rank divided by the mean; 1.0 is perfect balance."""
        total = sum(self.tokens_per_rank)
        return max(self.tokens_per_rank) * len(self.tokens_per_rank) / total if total else 1.0

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all ranks, including empty ones."""
        return sum(len(own) for own in self.microbatches)

    def microbatch_of(self, num_sequences: int) -> list[int]:
        """Globally unique micro-batch index of every sequence."""
        result = [0] * num_sequences
        for number, members in enumerate(itertools.chain(*self.microbatches)):
            for index in members:
                result[index] = number
        return result


def plan_microbatches(
    lengths: Sequence[int], ranks: int, *, max_tokens: int, multiple: int = 1, equal: bool = False
) -> MicroBatchPlan:
    """MicroBatchPlan of a mini-batch over `ranks` data-parallel ranks; every rank computes the same plan.

    max_tokens: token budget of a micro-batch.
    multiple: the number of micro-batches of a rank is a positive multiple of it (interleaved pipelines); empty ones are
        added where needed.
    equal: all ranks get the same number (expert parallelism: ranks exchange tokens in every layer).
    """
    microbatches = []
    assigned = balance(lengths, ranks)
    for indices in assigned:
        own = pack(indices, lengths, max_tokens)
        while not own or len(own) % multiple:
            own.append([])
        microbatches.append(own)
    if equal:
        most = max(len(own) for own in microbatches)
        for own in microbatches:
            own.extend([] for _ in range(most - len(own)))
    return MicroBatchPlan(microbatches, [sum(lengths[i] for i in indices) for indices in assigned])
