"""`EngineClient`: one SGLang engine in a child process of its own, seen from asyncio.

Every call has a deadline. An engine that dies, stops reporting, or has work queued and produces no token for
`rollout.no_progress_timeout_s` is lost: every waiting call raises `EngineLost`, and `recover()` starts it again with
the current weights, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
from torch import Tensor

from rstar2_megatron.rollout.engine_arguments import child_environment, engine_arguments
from rstar2_megatron.rollout.engine_protocol import (
    REPORT_ID,
    EngineInfo,
    EngineReport,
    GeneratePayload,
    read_message,
    write_message,
)
from rstar2_megatron.rollout.shared_weights import SharedBucket, into_buckets
from rstar2_megatron.settings.schema import RolloutSettings

_LOG_TAIL_CHARS = 4000
_CONTROL_TIMEOUT_S = 120.0
_KILL_WAIT_S = 5.0
_FLUSH_RETRY_S = 0.05


class EngineLost(RuntimeError):
    """The engine died, made no progress, or was closed while somebody waited for it."""


class GenerationTimeout(EngineLost):
    """One request missed its deadline; the engine itself is still there and the request was aborted."""


class EngineError(RuntimeError):
    """The engine is well and refused a call."""


@dataclass(slots=True)
class GenerateResult:
    """Generated tokens; `token_ids` and `logprobs` (temperature applied) have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # stop | length | abort
    version_spans: list[tuple[int, int, int]]  # start, end, version: which weights made which tokens
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the KV cache
    retractions: int = 0

    @property
    def weight_version(self) -> int:
        """Version of the last token."""
        return self.version_spans[-1][2] if self.version_spans else 0


class EngineClient:
    """Starts, serves and supervises one engine. All methods belong to one event loop.

    `name` shows in messages; `log_path` takes the engine's own output (a temporary file otherwise);
    `keep_weights_bytes` bounds the copy of the last weights kept for a restart.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        seed: int = 0,
        name: str = "engine",
        log_path: Path | None = None,
        context_length: int | None = None,
        bucket_bytes: int = 512 << 20,
        keep_weights_bytes: int = 4 << 30,
    ) -> None:
        self.settings = settings
        self.name = name
        self._arguments = engine_arguments(settings, seed=seed, context_length=context_length)
        self._log_path = log_path
        self._bucket_bytes = bucket_bytes
        self._keep_weights_bytes = keep_weights_bytes
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._report = EngineReport(ready=False, progress=0.0)
        self._progress_seen = 0.0  # our clock
        self._report_seen = 0.0
        self._lost_reason = "not started"
        self._recovering = asyncio.Lock()
        self._kept: list[SharedBucket] = []  # the current weights, for a restart
        self._missing_weights = False  # restarted without them
        self.weight_version = 0
        self.restarts = 0  # in all
        self._restarts_in_a_row = 0  # since the last update of weights

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineLost with the end of its log."""
        ours, theirs = socket.socketpair()
        self._log = open(self._log_path, "ab") if self._log_path else tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rstar2_megatron.rollout.engine_process",
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=child_environment(self.settings, dict(os.environ)),
                start_new_session=True,  # Ctrl-C goes to us, who then end it in order
            )
        finally:
            theirs.close()
        self._ready.clear()
        self._report = EngineReport(ready=False, progress=0.0)
        self._lost_reason = ""
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._progress_seen = time.monotonic()
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._watch())]
        write_message(self._writer, [0, "start", {"server_args": self._arguments}])
        try:
            await asyncio.wait_for(self._ready.wait(), self.settings.engine_start_timeout_s)
        except TimeoutError:
            await self._lose(f"did not start within {self.settings.engine_start_timeout_s:.0f} s")
        except asyncio.CancelledError:
            await self._end_process()
            raise
        if self._lost_reason:
            raise EngineLost(self._lost_message())

    async def close(self) -> None:
        """End the engine and everything it started. Safe to call twice."""
        if not self._lost_reason:
            await self._lose("closed")
        await self._end_process()
        self._forget_kept()
        if self._log is not None:
            self._log.close()
            self._log = None

    @property
    def pid(self) -> int:
        """The engine process. Raises EngineLost when there is none."""
        if self._process is None:
            raise EngineLost(self._lost_message())
        return self._process.pid

    @property
    def lost(self) -> bool:
        return bool(self._lost_reason)

    async def recover(self, *, with_weights: bool = True) -> None:
        """Make a lost engine serve again with the current weights; returns at once when it is well.

        Many trajectories may call this together: one restart serves them all. Raises EngineLost after
        `rollout.max_engine_restarts` restarts since the last update of weights, or when the weights of that
        update were too large to keep: then `update_weights` must be called before anything is generated
        (`with_weights=False` is for it).
        """
        async with self._recovering:
            while self.lost:
                if self._lost_reason == "closed":
                    raise EngineLost(self._lost_message())
                if self._restarts_in_a_row >= self.settings.max_engine_restarts:
                    raise EngineLost(
                        f"{self._lost_message()} It was restarted {self._restarts_in_a_row} times since its "
                        f"last weights (rollout.max_engine_restarts={self.settings.max_engine_restarts})."
                    )
                self.restarts += 1
                self._restarts_in_a_row += 1
                await self._end_process()
                try:
                    await self.start()
                    await self._restore_weights()
                except EngineLost:
                    continue
            if self._missing_weights and with_weights:
                raise EngineLost(
                    f"{self.name} was restarted without weight version {self.weight_version}; call update_weights"
                )

    async def restart(self) -> None:
        """End the engine if it still runs, and start it again with the current weights."""
        if not self.lost:
            await self._lose("restart asked for")
        await self.recover()

    async def _restore_weights(self) -> None:
        if self._kept:
            await self._send_weights([(b, b is self._kept[-1]) for b in self._kept], again=True)
        else:
            self._missing_weights = self.weight_version > 0

    # ----------------------------------------------------------------------------------------- calls

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], *, timeout_s: float
    ) -> GenerateResult:
        """Continue `input_ids`. `sampling` holds SGLang's sampling parameters (stop_token_ids, max_new_tokens, ...).

        Raises EngineLost, its subclass GenerationTimeout after `timeout_s` (the request is aborted in the engine),
        or EngineError when SGLang refuses the request, for example because it is too long.
        """
        if self._missing_weights:
            raise EngineLost(f"{self.name} has no current weights after its restart")
        rid = f"{next(self._ids):016x}"  # fixed width: SGLang aborts every request whose id begins like the given one
        params = {"input_ids": input_ids, "sampling": sampling, "rid": rid}
        try:
            result = await self._call("generate", params, timeout_s)
        except GenerationTimeout:
            self._post("abort", {"rid": rid})
            raise
        except asyncio.CancelledError:
            self._post("abort", {"rid": rid})
            raise
        payload = msgspec.convert(result, GeneratePayload)
        return GenerateResult(
            token_ids=payload.token_ids,
            logprobs=payload.logprobs,
            finish_reason=payload.finish_reason,
            version_spans=payload.version_spans,
            prompt_tokens=payload.prompt_tokens,
            cached_tokens=payload.cached_tokens,
            retractions=payload.retractions,
        )

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load Hugging Face tensors by name, then empty the KV cache; later tokens carry `version`.

        Waits for running generations to end. The stream is consumed bucket by bucket. A lost engine is started
        again first; one lost on the way is tried again when `named_tensors` can be iterated twice. Raises
        EngineLost when that does not help, EngineError when SGLang refuses a tensor.
        """
        repeatable = iter(named_tensors) is not named_tensors
        self.weight_version = version
        self._forget_kept()
        while True:
            if self.lost:
                await self.recover(with_weights=False)
            try:
                await self._send_weights(into_buckets(named_tensors, self._bucket_bytes))
            except EngineLost:
                if not repeatable or not self.lost:
                    raise
                continue
            self._restarts_in_a_row = 0
            return

    async def _send_weights(
        self, buckets: Iterable[tuple[SharedBucket, bool]], *, again: bool = False
    ) -> None:
        """Load the buckets and empty the KV cache; `again` sends kept ones, which stay kept whatever happens."""
        sent: list[SharedBucket] = []
        num_bytes = 0
        self._missing_weights = True
        await self._call("begin_update", None)
        try:
            for bucket, last in buckets:
                sent.append(bucket)
                version = str(self.weight_version) if last else None
                await self._call("load_shared", {"path": bucket.path, "version": version})
                num_bytes += bucket.num_bytes
                if num_bytes > self._keep_weights_bytes:
                    _close(sent)
        except BaseException:
            if not again:
                _close(sent)
            with contextlib.suppress(EngineLost, EngineError):  # the session must not stay open
                await self._call("end_update", None)
            raise
        self._kept = sent
        await self._call("end_update", None)
        await self.flush_cache()
        self._missing_weights = False

    def _forget_kept(self) -> None:
        _close(self._kept)

    async def flush_cache(self) -> None:
        """Empty the KV cache, retrying while the engine still tidies up after the last request."""
        deadline = time.monotonic() + _CONTROL_TIMEOUT_S
        while not await self._call("flush_cache", None):
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} would not flush its cache for {_CONTROL_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_FLUSH_RETRY_S)

    async def weights_checksum(self) -> dict[str, int]:
        """Checksum of every tensor in the engine by Hugging Face name (see `weights_checksum.tensor_checksum`).

        A tied output head is not listed. Values compare with the actor's tensors in the engine's dtype.
        """
        sums: dict[str, int] = await self._call("checksums", None)
        return sums

    async def abort_all(self) -> None:
        """End every running request; their callers get finish_reason `abort` and the tokens so far."""
        await self._call("abort", {"rid": ""})

    async def info(self) -> EngineInfo:
        """KV capacity and use, running and waiting requests."""
        return msgspec.convert(await self._call("info", None), EngineInfo)

    @property
    def kv_capacity_tokens(self) -> int:
        """KV cache in tokens, known once started."""
        return self._report.max_total_tokens

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt the engine takes."""
        return self._report.max_context_tokens

    # ------------------------------------------------------------------------------------- the wire

    async def _call(self, method: str, params: Any, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        if self.lost:
            raise EngineLost(self._lost_message())
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._pending:
            self._progress_seen = time.monotonic()
        request_id = self._post(method, params, future)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise GenerationTimeout(f"{self.name}: {method} took longer than {timeout_s:.1f} s") from None
        finally:
            self._pending.pop(request_id, None)

    def _post(self, method: str, params: Any, future: asyncio.Future[Any] | None = None) -> int:
        request_id = next(self._ids)
        if future is not None:
            self._pending[request_id] = future
        if self._writer is not None and not self.lost:
            write_message(self._writer, [request_id, method, params])
        return request_id

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                request_id, error, result = await read_message(reader)
                if request_id == REPORT_ID:
                    self._take_report(msgspec.convert(result, EngineReport))
                    continue
                self._progress_seen = time.monotonic()
                future = self._pending.get(request_id)
                if future is None or future.done():
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(EngineError(f"{self.name}: {error}"))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as error:
            await self._lose(f"its process ended ({type(error).__name__})")

    def _take_report(self, report: EngineReport) -> None:
        self._report_seen = time.monotonic()
        if report.progress != self._report.progress:
            self._progress_seen = self._report_seen
        self._report = report
        self._ready.set()

    async def _watch(self) -> None:
        """Heartbeat and progress; a start has its own deadline."""
        await self._ready.wait()
        limit = self.settings.no_progress_timeout_s
        while not self.lost:
            await asyncio.sleep(min(1.0, limit / 4))
            now = time.monotonic()
            if now - self._report_seen > limit:
                await self._lose(f"its process has not reported for {limit:.0f} s")
            elif self._pending and now - self._progress_seen > limit:
                await self._lose(f"no token for {limit:.0f} s with {len(self._pending)} calls waiting")

    async def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self._lost_reason = reason
        self._ready.set()
        self._kill_tree()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineLost(self._lost_message()))
        self._pending.clear()

    def _lost_message(self) -> str:
        message = f"{self.name} is lost: {self._lost_reason}."
        if self._lost_reason not in ("closed", "not started") and (tail := self._log_tail()):
            message += f" End of its log:\n{tail}\n"
        return message

    def _log_tail(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - _LOG_TAIL_CHARS)
        with open(f"/proc/self/fd/{self._log.fileno()}", "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace").strip()

    def _kill_tree(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        try:
            root = psutil.Process(self._process.pid)
            family = [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    async def _end_process(self) -> None:
        self._kill_tree()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            with contextlib.suppress(TimeoutError):  # stuck in the kernel: it has been signalled
                await asyncio.wait_for(self._process.wait(), _KILL_WAIT_S)
            self._process = None


def _close(buckets: list[SharedBucket]) -> None:
    """Free the buckets' memory and empty the list."""
    while buckets:
        buckets.pop().close()
