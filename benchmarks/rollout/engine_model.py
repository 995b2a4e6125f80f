"""A model of one SGLang engine in time: prefill and decode speed, KV cache, prefix cache, eviction and recompute.

It follows SGLang 0.5.21's scheduler: prefill goes before decode; a request is taken in when its prompt and a share
of what the running ones may still need fit (`new_token_ratio`, 0.7 falling to 0.098 over 600 decode steps, 1 .. 4096
tokens a request); when the cache is full all the same, the requests with the fewest generated tokens are evicted and
computed again; finished turns stay in the prefix cache until their room is needed, least recently used first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from rstar2_megatron.settings.planning.estimates import EngineSpeed

_RATIO_START, _RATIO_END, _RATIO_STEPS = 0.7, 0.098, 600
_RETRACT_STEPS = 20  # decode steps a running request counts with after an eviction
_CLIPPED_TOKENS = 4096  # most that one request counts with at its admission
_SORTED_QUEUE = 128  # longer queues are first come, first served


@dataclass(slots=True)
class Request:
    """One turn of one trajectory as the engine sees it."""

    key: int
    group: int
    prompt_tokens: int  # of the group, shared
    context: int  # tokens before this turn, prompt included
    generate: int  # how many it will generate (the engine does not know)
    max_new: int  # how many it may
    generated: int = 0
    started_at: int = 0  # decode step at which it joined


@dataclass
class Counters:
    busy_s: float = 0.0
    recompute_s: float = 0.0
    evictions: int = 0
    evicted_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0


class EngineModel:
    """One engine. `submit` turns, `advance` to the next thing that happens, read `finished`."""

    def __init__(self, speed: EngineSpeed, capacity_tokens: int, max_requests: int, evict_share: float = 0.0) -> None:
        """`evict_share`: of the running requests, at least so many go when the cache is full."""
        self.speed = speed
        self.capacity = capacity_tokens
        self.max_requests = max_requests
        self.evict_share = evict_share
        self.counters = Counters()
        self.now = 0.0
        self.finished: list[Request] = []
        self.started: dict[int, float] = {}  # when a trajectory's first prefill began
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}
        self._ends: list[tuple[int, int]] = []  # decode step, key
        self._steps = 0
        self._full = False  # nothing more is taken in until something ends
        self._ratio = _RATIO_START
        self._running_tokens = 0  # in the cache for running requests, shared prompts apart
        self._cache: OrderedDict[int, int] = OrderedDict()  # idle trajectory: its own tokens
        self._cached_tokens = 0
        self._prompts: dict[int, list[int]] = {}  # group: tokens, users (running or cached)
        self._prompt_tokens = 0
        self._computed: dict[int, int] = {}  # own tokens of a trajectory that were computed once

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def forget(self, key: int) -> None:
        """The trajectory has ended; what it left in the cache goes when room is needed."""
        self._computed.pop(key, None)

    def lengths(self) -> dict[int, int]:
        """Tokens of running requests now."""
        return {key: r.context + self._done(r) for key, r in self._running.items()}

    def used_tokens(self) -> int:
        """What running requests hold, shared prompts once: SGLang's own figure."""
        prompts = {r.group: r.prompt_tokens for r in self._running.values()}
        return self._running_tokens + sum(prompts.values())

    def abort(self, key: int) -> int | None:
        """Take a turn out of the engine; how many tokens it has generated, None when it is not here."""
        if (request := self._running.pop(key, None)) is not None:
            request.generated = self._done(request)
            self._leave(request, cached=True)
            self._order_ends()
            self._full = False
            return request.generated
        for position, request in enumerate(self._waiting):
            if request.key == key:
                del self._waiting[position]
                return request.generated
        return None

    def interrupt(self) -> dict[int, int]:
        """Take every turn out of the engine and empty its cache, as for new weights; generated tokens by key."""
        keys = [*self._running, *(request.key for request in self._waiting)]
        generated = {key: self.abort(key) or 0 for key in keys}
        self._make_room(self.capacity)
        return generated

    def advance(self, until: float) -> None:
        """One prefill, or decode steps until a request ends, the cache is full or `until` has passed."""
        batch = self._take_in()
        if batch:
            self._prefill(batch)
        elif self._running:
            self._decode(until)
        else:
            self.now = max(self.now, until)

    # ------------------------------------------------------------------------------------------- memory

    @property
    def free_tokens(self) -> int:
        """What neither running requests nor the cache hold."""
        return self.capacity - self._running_tokens - self._cached_tokens - self._prompt_tokens

    @property
    def _available(self) -> int:
        """Free tokens and those of the cache that nobody uses."""
        return self.capacity - self._running_tokens - self._prompt_tokens

    def _make_room(self, tokens: int) -> bool:
        while self.free_tokens < tokens and self._cache:
            key, own = next(iter(self._cache.items()))
            lacking = tokens - self.free_tokens
            if own > lacking:
                self._cache[key] = own - lacking
                self._cached_tokens -= lacking
            else:
                del self._cache[key]
                self._cached_tokens -= own
                self._drop_prompt(key >> 20)
        return self.free_tokens >= tokens

    def _drop_prompt(self, group: int) -> None:
        entry = self._prompts[group]
        entry[1] -= 1
        if entry[1] == 0:
            self._prompt_tokens -= entry[0]
            del self._prompts[group]

    # ---------------------------------------------------------------------------------------- admission

    def _cached(self, request: Request) -> int:
        """Tokens of the request's context found in the cache."""
        if request.group not in self._prompts:
            return 0
        return request.prompt_tokens + self._cache.get(request.key, 0)

    def _take_in(self) -> list[tuple[Request, int]]:
        """Requests for the next prefill with their uncached tokens."""
        if self._full or not self._waiting:
            return []
        if len(self._waiting) <= _SORTED_QUEUE:
            self._waiting.sort(key=self._cached, reverse=True)
        promised = self._max_new_left_clipped() * self._ratio
        batch: list[tuple[Request, int]] = []
        tokens = 0
        taken = 0
        for request in self._waiting:
            if len(self._running) + len(batch) >= self.max_requests or tokens >= self.speed.prefill_chunk_tokens:
                break
            cached = self._cached(request)
            own_cached = max(0, cached - request.prompt_tokens)
            fresh = request.context + request.generated - cached
            need = fresh + own_cached + min(request.max_new, _CLIPPED_TOKENS)
            if need + promised > self._available and (self._running or batch):
                self._full = True
                break
            # what it has in the cache is locked now
            if own_cached:
                del self._cache[request.key]
                self._cached_tokens -= own_cached
                self._running_tokens += own_cached
            elif request.group in self._prompts:
                self._prompts[request.group][1] += 1
            if request.group not in self._prompts:
                self._make_room(request.prompt_tokens)
                self._prompts[request.group] = [request.prompt_tokens, 1]
                self._prompt_tokens += request.prompt_tokens
                own = fresh - request.prompt_tokens
            else:
                own = fresh
            self._make_room(own)
            self._running_tokens += own
            promised += min(request.max_new, _CLIPPED_TOKENS) * self._ratio
            tokens += fresh
            taken += 1
            batch.append((request, fresh))
            self.started.setdefault(request.key, self.now)
            self.counters.cached_tokens += cached
            self.counters.prefill_tokens += fresh
            own_before = self._computed.get(request.key, 0)
            again = max(0, min(fresh, own_before - own_cached))
            self.counters.recomputed_tokens += again
            self.counters.recompute_s += again * self.speed.prefill_per_token_s
            self._computed[request.key] = max(own_before, request.context + request.generated - request.prompt_tokens)
        del self._waiting[:taken]
        return batch

    def _max_new_left_clipped(self) -> float:
        return float(sum(min(r.max_new - self._done(r), _CLIPPED_TOKENS) for r in self._running.values()))

    def _done(self, request: Request) -> int:
        return request.generated + self._steps - request.started_at

    def _prefill(self, batch: list[tuple[Request, int]]) -> None:
        tokens = sum(fresh for _, fresh in batch)
        seconds = self.speed.prefill_base_s + tokens * self.speed.prefill_per_token_s
        self._spend(seconds)
        for request, _ in batch:
            request.started_at = self._steps
            self._running[request.key] = request
            heapq.heappush(self._ends, (self._steps + request.generate - request.generated, request.key))

    # ------------------------------------------------------------------------------------------- decode

    def _decode(self, until: float) -> None:
        count = len(self._running)
        context = self._running_tokens + self._prompt_tokens
        speed = self.speed
        per_step = speed.decode_base_s + count * speed.decode_per_request_s + context * speed.decode_per_token_s
        steps = self._ends[0][0] - self._steps
        steps = min(steps, max(1, int((until - self.now) / per_step)), 64 if self._waiting else 256)
        if self._available < count:
            self._make_room(count)  # also frees prompts that only cached trajectories use
        room = self._available // count
        if room < 1:
            self._evict()
            return
        steps = max(1, min(steps, room))
        self._make_room(steps * count)
        self._spend(steps * (per_step + (steps - 1) / 2 * count * speed.decode_per_token_s))
        self._steps += steps
        self._running_tokens += steps * count
        self.counters.decoded_tokens += steps * count
        self._ratio = max(_RATIO_END, self._ratio - steps * (_RATIO_START - _RATIO_END) / _RATIO_STEPS)
        while self._ends and self._ends[0][0] <= self._steps:
            _, key = heapq.heappop(self._ends)
            request = self._running.pop(key, None)
            if request is None:
                continue
            request.generated = request.generate
            self._leave(request, cached=True)
            self.finished.append(request)
            self._full = False
        if not self._running:
            self._ratio, self._full = _RATIO_START, False

    def _order_ends(self) -> None:
        self._ends = [(r.started_at + r.generate - r.generated, r.key) for r in self._running.values()]
        heapq.heapify(self._ends)

    def _leave(self, request: Request, *, cached: bool) -> None:
        """Free the request's room, or leave its tokens in the prefix cache."""
        own = request.context + request.generated - request.prompt_tokens
        self._running_tokens -= own
        self._computed[request.key] = max(self._computed.get(request.key, 0), own)
        if cached and own:
            self._cache[request.key] = own
            self._cached_tokens += own
        else:
            self._drop_prompt(request.group)

    def _evict(self) -> None:
        """Those with the fewest generated tokens go until the others have room for some steps."""
        order = sorted(self._running.values(), key=lambda r: (self._done(r), -r.context))
        least = self.evict_share * len(order)
        for number, request in enumerate(order[:-1], start=1):
            request.generated = self._done(request)
            del self._running[request.key]
            self._leave(request, cached=False)
            self.counters.evictions += 1
            self.counters.evicted_tokens += request.context + request.generated
            self._waiting.append(request)
            if number >= least and self._available >= len(self._running):
                break
        self._order_ends()
        decoded = sum(self._done(r) for r in self._running.values())
        allowed = sum(r.max_new for r in self._running.values())
        self._ratio = min(1.0, (decoded + _RETRACT_STEPS * len(self._running)) / (allowed + 1))

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.counters.busy_s += seconds
