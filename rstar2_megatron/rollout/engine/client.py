"""`EngineClient`: asyncio interface to one SGLang engine in its own child process.

Every call has a deadline. When the engine is lost (see `child`), every waiting call raises `EngineLost`. `recover()` restarts
the engine with the current weights, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from rstar2_megatron.rollout.engine.arguments import engine_arguments
from rstar2_megatron.rollout.engine.child import EngineChild
from rstar2_megatron.rollout.engine.protocol import (
    INTERRUPTED,
    EngineError,
    EngineLost,
    EngineReport,
    GenerateResult,
    GenerationTimeout,
)
from rstar2_megatron.rollout.engine.supervisor import SupervisedEngine
from rstar2_megatron.settings.schema import RolloutSettings
from rstar2_megatron.weights.shared_memory import WeightBucket

_FLUSH_RETRY_S = 0.05
_ABORT_RETRY_S = 0.05
UPDATE_TIMEOUT_S = 30.0
"""Longest wait for one call of a weight update."""

TokensCallback = Callable[[int], None]
MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class EngineClient(SupervisedEngine):
    """Generation, weights and memory of one engine. All methods belong to one event loop.

    `keep_weights_bytes` bounds the copy of the last weights that is kept for a restart. `memory_saver` lets a GPU engine
    release its memory (`release_memory`), which a collocated actor needs.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        seed: int = 0,
        name: str = "engine",
        log_path: Path | None = None,
        max_context_tokens: int | None = None,
        memory_saver: bool = False,
        keep_weights_bytes: int = 4 << 30,
    ) -> None:
        arguments = engine_arguments(settings, seed=seed, max_context_tokens=max_context_tokens, memory_saver=memory_saver)
        super().__init__(settings, arguments, name=name, log_path=log_path)
        self.weight_version = 0
        self._keep_weights_bytes = keep_weights_bytes
        self._on_tokens: dict[str, TokensCallback] = {}  # by id of the running request
        self._owned: dict[object, str] = {}  # request ids of running requests by owner
        self._kept: list[WeightBucket] = []  # buckets of the current weights, for a restart
        self._missing_weights = False  # restarted without current weights, or their memory was released
        self._keeping = True  # every bucket of this update could be kept
        self._updates = 0  # begun so far, host copies included; after the first the weights differ from the model's files
        self._released: set[MemoryTag] = set()
        self._generating = 0  # requests in the engine
        self._all_arrived = asyncio.Event()  # every bucket of the update under way, or there is none
        self._all_arrived.set()

    async def start(self) -> None:
        self._released.clear()  # a fresh engine has all its memory
        await super().start()

    async def close(self) -> None:
        await super().close()
        self._forget_kept()

    async def recover(self, *, with_weights: bool = True) -> None:
        """`SupervisedEngine.recover` with the current weights.

        With `with_weights`, also raises EngineLost when no host copy of the current weights was kept; `update_weights` must
        then run before generation.
        """
        await super().recover()
        await self._all_arrived.wait()  # of an update that will load the restarted engine
        await super().recover()
        if not with_weights:
            return
        await self._load_kept()
        if self._missing_weights:
            raise EngineLost(
                f"{self.name} was restarted without weight version {self.weight_version}: no copy of it was kept on the host"
            )

    async def _load_kept(self) -> None:
        """Load what was kept into an engine that was restarted before all of it was here. One caller does it for all."""
        async with self._recovering:
            if self._missing_weights and self._kept:
                with self._changing():
                    await self._restarted()

    async def _restarted(self) -> None:
        update = -1
        while update != self._updates:  # a new one may begin while kept weights are sent
            update = self._updates
            if not self._all_arrived.is_set():  # the update loads its weights when it has all of them
                self._missing_weights = True
            elif self._kept:
                await self._send_kept()
            else:  # the model's files are current only until the first update, whatever its version
                self._missing_weights = self._updates > 0

    async def _send_kept(self) -> None:
        update, kept, self._kept = self._updates, self._kept, []  # so that a new update does not close them meanwhile
        try:
            await self._send_weights(self._alive_child(), _stream((bucket, bucket is kept[-1]) for bucket in kept), again=True)
        finally:
            if update == self._updates:
                self._kept = kept
            else:
                _close(kept)

    # ------------------------------------------------------------------------------------- generation

    async def generate(
        self,
        input_ids: Sequence[int] | np.ndarray,
        sampling: dict[str, Any],
        *,
        timeout_s: float,
        on_tokens: TokensCallback | None = None,
        owner: object = None,
    ) -> GenerateResult:
        """Continue `input_ids`. `sampling` holds SGLang's sampling parameters (stop_token_ids, max_new_tokens, ...).

        `on_tokens` gets the number of generated tokens about once a second. `abort(owner)` ends the request early, and so
        does a weight update: its finish reason is then INTERRUPTED.

        Raises EngineLost, or its subclass GenerationTimeout after `timeout_s`, which also aborts the request in the engine.
        Raises EngineError when SGLang refuses the request, for example because it is too long, and when the engine is not
        `wait_until_ready`.
        """
        if self._changes:
            raise EngineError(f"{self.name} starts or changes its weights: await wait_until_ready first")
        if self._released:
            raise EngineError(f"{self.name} has released its memory {sorted(self._released)}: resume_memory first")
        if self._missing_weights:
            raise EngineLost(f"{self.name} has no current weights: call update_weights first")
        rid = self._new_request_id()
        if on_tokens is not None:
            self._on_tokens[rid] = on_tokens
        if owner is not None:
            self._owned[owner] = rid
        self._generating += 1
        try:
            result = await self._ask("generate", {"input_ids": input_ids, "sampling": sampling, "rid": rid}, timeout_s)
        finally:
            self._generating -= 1
            self._on_tokens.pop(rid, None)
            self._owned.pop(owner, None)
        answer = msgspec.convert(result, GenerateResult)
        if not self._all_arrived.is_set() and answer.finish_reason == "abort":
            answer.finish_reason = INTERRUPTED
        return answer

    def _take_report(self, report: EngineReport) -> None:
        for rid, tokens in report.generated.items():
            if rid in self._on_tokens:
                self._on_tokens[rid](tokens)
        self.on_report(report)

    def abort(self, owner: object) -> None:
        """End the request of `owner`, if any. Its caller gets finish_reason `abort` and the tokens so far."""
        if (rid := self._owned.get(owner)) is not None:
            self._alive_child().post("abort", {"rid": rid})

    def abort_all(self) -> None:
        """End every running request. Their callers get finish_reason `abort` and the tokens so far."""
        self._alive_child().post("abort", {"rid": ""})

    # ---------------------------------------------------------------------------------------- weights

    async def update_weights(self, buckets: AsyncIterable[tuple[WeightBucket, bool]], version: int) -> None:
        """Load buckets of Hugging Face tensors, then empty the KV cache. Later tokens carry `version`.

        The buckets arrive one by one, the last one flagged. The client closes them. Running requests end as INTERRUPTED. An
        engine that is lost before or during the update is restarted when all buckets have arrived, if they could be kept.

        Raises EngineLost when the restart fails or the buckets could not be kept (`keep_weights` repairs the latter).
        Raises EngineError when SGLang refuses a tensor, or when the memory of the weights is released. Nothing is then
        generated until an update succeeds.
        """
        self._begin_version(version)
        self._all_arrived.clear()
        try:
            with self._changing():
                await self._update(buckets)
        except EngineLost:
            self._hold(False)
            raise
        except Exception:
            self._hold(True)
            raise
        finally:
            self._all_arrived.set()
        self._hold(False)
        self._restarts_in_a_row = 0

    async def _update(self, buckets: AsyncIterable[tuple[WeightBucket, bool]]) -> None:
        try:
            if self.lost or self._recovering.locked():
                raise EngineLost(f"{self.name} was lost before its weights arrived")
            child = self._alive_child()  # whatever is started meanwhile, this one gets all of them or it is lost
            await self._interrupt(child)
            await self._send_weights(child, buckets)
        except EngineLost:
            # before the restart: senders and other engines wait for each bucket
            async for bucket, _ in buckets:
                self._keep(bucket)
            self._all_arrived.set()
            if not self._kept:
                raise
            await super().recover()
            await self._load_kept()

    async def _interrupt(self, child: EngineChild) -> None:
        """End every running request. One that is on its way into the engine ends at a later attempt."""
        deadline = time.monotonic() + UPDATE_TIMEOUT_S
        while self._generating and not child.lost_reason:
            if time.monotonic() > deadline:
                child.lose(f"its requests did not end within {UPDATE_TIMEOUT_S:.0f} s")
                raise EngineLost(child.lost_message())
            await self._update_call(child, "abort", {"rid": ""})
            await asyncio.sleep(_ABORT_RETRY_S)

    async def keep_weights(self, buckets: Sequence[WeightBucket], version: int) -> None:
        """Keep a host copy of the last update's weights. An engine without current weights is restarted or loaded from it.

        Raises EngineLost when the restart fails.
        """
        self._forget_kept()
        self._kept = list(buckets)
        self.weight_version = version
        self._updates += 1
        await self.recover(with_weights=False)
        await self._load_kept()
        self._restarts_in_a_row = 0

    def _begin_version(self, version: int) -> None:
        if "weights" in self._released and not self.lost:
            raise EngineError(f"{self.name} has released the memory of its weights: resume_memory first")
        self.weight_version = version
        self._updates += 1
        self._forget_kept()
        self._keeping = True

    async def _send_weights(
        self, child: EngineChild, buckets: AsyncIterable[tuple[WeightBucket, bool]], *, again: bool = False
    ) -> None:
        """Load the buckets and empty the KV cache. New buckets are kept for a restart, up to `keep_weights_bytes`.

        `again` sends kept buckets, which stay kept. After EngineLost the buckets that have arrived stay kept. The caller has
        marked the engine as `_changing`.
        """
        self._missing_weights, sent = True, str(self.weight_version)
        await self._update_call(child, "begin_update")
        try:
            async for bucket, last in buckets:
                try:
                    await self._update_call(child, "load_bucket", {**bucket.load(), "version": sent if last else None})
                finally:
                    if not again:
                        self._keep(bucket)
        except BaseException as error:
            if not again and not isinstance(error, EngineLost):
                self._forget_kept()
            with contextlib.suppress(EngineLost, EngineError):  # SGLang's update session must not stay open
                await self._update_call(child, "end_update")
            raise
        await self._update_call(child, "end_update")
        if "kv_cache" not in self._released:  # a released cache is empty
            await self._flush(child)
        self._missing_weights = False

    async def _update_call(self, child: EngineChild, method: str, params: Any = None) -> Any:
        """One call of an update. An engine that does not answer in time is declared lost."""
        try:
            return await child.call(method, params, UPDATE_TIMEOUT_S)
        except GenerationTimeout as error:
            child.lose(f"{method} was not answered within {UPDATE_TIMEOUT_S:.0f} s")
            raise EngineLost(child.lost_message()) from error

    def _keep(self, bucket: WeightBucket) -> None:
        """Keep all buckets of an update or none: a bucket that cannot be kept, or exceeds the limit, frees the others."""
        self._kept.append(bucket)
        num_bytes = sum(kept.num_bytes for kept in self._kept)
        self._keeping = self._keeping and bucket.keepable and num_bytes <= self._keep_weights_bytes
        if not self._keeping:
            self._forget_kept()

    def _forget_kept(self) -> None:
        kept, self._kept = self._kept, []
        _close(kept)

    async def weights_checksum(self) -> dict[str, int]:
        """Checksum of every tensor in the engine by Hugging Face name (see `weights.checksum.tensor_checksum`).

        A tied output head is left out. The actor's tensors have equal checksums in the engine's dtype.
        """
        sums: dict[str, int] = await self._call("checksums", None)
        return sums

    # ----------------------------------------------------------------------------------------- memory

    async def release_memory(self) -> None:
        """Release GPU memory for a collocated actor: the KV cache is emptied, the weights are dropped.

        Generation needs `resume_memory` and then `update_weights` first. The call waits until the engine is idle. It needs
        `memory_saver`; on a CPU the engine goes through the same states and frees nothing. The call does nothing for memory
        that is already released, or for an engine that is lost or dies meanwhile. Raises EngineError while other calls are
        running.
        """
        wanted = [tag for tag in MEMORY_TAGS if tag not in self._released]
        if not wanted or self.lost:
            return
        if self.num_waiting_calls:
            raise EngineError(f"{self.name} cannot release its memory with {self.num_waiting_calls} calls under way")
        with self._unless_lost():
            await self.flush_cache()  # waits for an idle scheduler; releasing a busy one kills it
            await self._call("release_memory", {"tags": wanted})
            self._released.update(wanted)
            if "weights" in wanted:
                self._missing_weights = True

    async def resume_memory(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> None:
        """Allocate memory again: `["weights"]` before `update_weights`, `["kv_cache"]` once the actor has offloaded.

        A lost engine is restarted, with all its memory; one that dies meanwhile is left to the next restart.
        """
        await self.recover(with_weights=False)
        wanted = [tag for tag in tags if tag in self._released]
        if wanted:
            with self._unless_lost():
                await self._call("resume_memory", {"tags": wanted})
                self._released.difference_update(wanted)

    @contextlib.contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """End the block where the engine is lost: a dead process holds no memory. A slow one does, and raises EngineLost."""
        try:
            yield
        except EngineLost:
            if not self.lost:
                raise

    async def flush_cache(self) -> None:
        """Empty the KV cache. SGLang refuses while it cleans up after the last request, so the call is retried."""
        await self._flush(self._alive_child())

    async def _flush(self, child: EngineChild) -> None:
        deadline = time.monotonic() + UPDATE_TIMEOUT_S
        while not await self._update_call(child, "flush_cache"):
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} would not flush its cache for {UPDATE_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_FLUSH_RETRY_S)

    @property
    def kv_capacity_tokens(self) -> int:
        """KV cache in tokens; 0 before the start."""
        return 0 if self._child is None else self._child.report.max_total_tokens

    @property
    def kv_used_tokens(self) -> int:
        """Tokens in the KV cache by the last report."""
        return 0 if self._child is None else self._child.report.used_tokens


def _close(buckets: Iterable[WeightBucket]) -> None:
    for bucket in buckets:
        bucket.close()


async def _stream(buckets: Iterable[tuple[WeightBucket, bool]]) -> AsyncIterator[tuple[WeightBucket, bool]]:
    for bucket in buckets:
        yield bucket
