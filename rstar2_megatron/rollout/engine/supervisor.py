"""`SupervisedEngine`: starts, watches, restarts and ends an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rstar2_megatron.rollout.engine.child import EngineChild
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost, EngineReport, GenerationTimeout
from rstar2_megatron.settings.schema import ProfilerSettings, RolloutSettings

logger = logging.getLogger(__name__)
_PORT_TAKEN = "address already in use"


class SupervisedEngine:
    """Starts and supervises one engine process. All methods belong to one event loop.

    `arguments` go to SGLang. `name` appears in messages. `log_path` receives the engine's output (default: a temporary file).
    """

    def __init__(self, settings: RolloutSettings, arguments: dict[str, Any], *, name: str, log_path: Path | None) -> None:
        self.settings = settings
        self.name = name
        self.on_report: Callable[[EngineReport], None] = lambda report: None
        """Called about once a second with the engine's load."""
        self.restarts = 0  # total
        self._arguments = arguments
        self._log_path = log_path
        self._child: EngineChild | None = None
        self._closed = False
        self._request_ids = itertools.count(1)
        self._recovering = asyncio.Lock()
        self._restarts_in_a_row = 0  # since the last weight update
        self._changes = 0  # starts and updates in progress
        self._held = False  # nothing is to be generated: an update failed, and another one follows
        self._settled = asyncio.Event()
        self._settled.set()

    async def start(self) -> None:
        """Start the process and wait until it serves, once more if a port was taken before it listened.

        Raises EngineLost with the end of the process's log.
        """
        with self._changing():
            try:
                await self._start_child()
            except EngineLost as error:
                if _PORT_TAKEN not in str(error).lower() or self._closed:
                    raise
                await self._alive_child().end()
                await self._start_child()

    async def _start_child(self) -> None:
        self._child = EngineChild(self.settings, self._arguments, name=self.name, log_path=self._log_path)
        self._child.on_report = self._take_report
        await self._child.start()

    async def close(self) -> None:
        """End the engine and everything it started. Safe to call twice."""
        self._closed = True
        if self._child is not None:
            await self._child.end()

    @property
    def pid(self) -> int:
        """Process id of the engine. Raises EngineLost when it never started."""
        return self._alive_child().pid

    @property
    def lost(self) -> bool:
        return self._child is None or bool(self._child.lost_reason)

    async def wait_until_ready(self) -> None:
        """Wait while the engine starts or its weights change, when a request could run on old weights, or a change failed.

        The call has no deadline of its own, so the caller sets one. An engine that is ready may be lost.
        """
        while self._changes or self._held:  # another change may have begun before this task runs again
            await self._settled.wait()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._changes += 1
        self._settle()
        try:
            yield
        finally:
            self._changes -= 1
            self._settle()

    def _hold(self, held: bool) -> None:
        self._held = held
        self._settle()

    def _settle(self) -> None:
        if self._changes or self._held:
            self._settled.clear()
        else:
            self._settled.set()

    @property
    def num_waiting_calls(self) -> int:
        """Number of calls that have no answer yet."""
        return 0 if self._child is None else self._child.num_waiting

    async def recover(self) -> None:
        """Restart a lost engine. Returns at once when the engine is not lost.

        Concurrent callers share one restart. Raises EngineLost after `rollout.max_engine_restarts` restarts since the last
        weight update.
        """
        async with self._recovering:
            while self.lost:
                child = self._child
                message = f"{self.name} was never started." if child is None else child.lost_message()
                if self._closed or child is None:
                    raise EngineLost(message)
                if self._restarts_in_a_row >= self.settings.max_engine_restarts:
                    raise EngineLost(
                        f"{message} It was restarted {self._restarts_in_a_row} times since its last weights "
                        f"(rollout.max_engine_restarts={self.settings.max_engine_restarts})."
                    )
                self.restarts += 1
                self._restarts_in_a_row += 1
                logger.warning("%s is lost and starts again: %s; its log: %s", self.name, child.lost_reason, self._log_path)
                begun = time.monotonic()
                with self._changing(), contextlib.suppress(EngineLost):  # `lost` stays true
                    await child.end()
                    await self.start()
                    await self._restarted()
                    logger.warning("%s runs again after %.1f s", self.name, time.monotonic() - begun)

    # overridden by `EngineClient`

    def _take_report(self, report: EngineReport) -> None:
        self.on_report(report)

    async def _restarted(self) -> None:
        """Called after a restart, to restore the state of the old process."""

    # -------------------------------------------------------------------------------------------- calls

    def _alive_child(self) -> EngineChild:
        if self._child is None:
            raise EngineLost(f"{self.name} was never started.")
        return self._child

    async def _call(self, method: str, params: Any) -> Any:
        return await self._alive_child().call(method, params)

    def _new_request_id(self) -> str:
        # fixed width: SGLang aborts every request whose id starts with the given one
        return f"{next(self._request_ids):016x}"

    async def _ask(self, method: str, params: dict[str, Any], timeout_s: float) -> Any:
        """A call with a request id `rid`, which SGLang aborts when nobody waits for it any more."""
        child = self._alive_child()
        try:
            return await child.call(method, params, timeout_s)
        except (GenerationTimeout, asyncio.CancelledError):
            child.post("abort", {"rid": params["rid"]})
            raise

    # -------------------------------------------------------------------------------------- profiles

    async def start_profile(self, profiler: ProfilerSettings, directory: str, prefix: str) -> None:
        """Record a torch profile of the next `engine_forwards` forward passes into files of `directory`.

        An engine that is lost, or is starting again, records nothing, and the log says why.
        """
        kinds = {"cpu": "CPU", "cuda": "GPU"}
        try:
            await self._call(
                "start_profile",
                {
                    "output_dir": directory,
                    "num_steps": profiler.engine_forwards,
                    "activities": [kinds[name] for name in profiler.activities],
                    "with_stack": profiler.with_stack,
                    "record_shapes": profiler.record_shapes,
                    "profile_prefix": prefix,
                },
            )
        except (EngineLost, EngineError) as error:
            logger.warning("%s records no profile: %s", self.name, error)

    async def stop_profile(self) -> None:
        """Write the profile now. Does nothing when it is written already, or the engine is lost."""
        with contextlib.suppress(EngineLost, EngineError):
            await self._call("stop_profile", None)
