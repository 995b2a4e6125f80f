"""`SupervisedEngine`: the life of an engine process: started, watched, lost, started again, ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rstar2_megatron.rollout.engine.child import EngineChild
from rstar2_megatron.rollout.engine.protocol import EngineLost, EngineReport
from rstar2_megatron.settings.schema import RolloutSettings


class SupervisedEngine:
    """Starts and supervises one engine process. All methods belong to one event loop.

    `arguments` are SGLang's; `name` shows in messages; `log_path` takes the engine's own output (a temporary file
    otherwise).
    """

    def __init__(
        self, settings: RolloutSettings, arguments: dict[str, Any], *, name: str, log_path: Path | None
    ) -> None:
        self.settings = settings
        self.name = name
        self.on_report: Callable[[EngineReport], None] = lambda report: None
        """Called about once a second with the engine's load."""
        self.restarts = 0  # in all
        self._arguments = arguments
        self._log_path = log_path
        self._child: EngineChild | None = None
        self._closed = False
        self._recovering = asyncio.Lock()
        self._restarts_in_a_row = 0  # since the last update of weights
        self._changes = 0  # starts and updates under way
        self._settled = asyncio.Event()
        self._settled.set()

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineLost with the end of its log."""
        with self._changing():
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
        """The engine process. Raises EngineLost when there is none."""
        return self._alive_child().pid

    @property
    def lost(self) -> bool:
        return self._child is None or bool(self._child.lost_reason)

    async def settled(self) -> None:
        """Wait while the engine starts or its weights change: a request sent then would run on the old weights.

        As long as a restart or an update takes; wait with a deadline. An engine may be settled and lost.
        """
        while self._changes:  # another change may have begun before this task runs again
            await self._settled.wait()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._changes += 1
        self._settled.clear()
        try:
            yield
        finally:
            self._changes -= 1
            if not self._changes:
                self._settled.set()

    @property
    def num_waiting_calls(self) -> int:
        """Calls that the engine has not answered yet."""
        return 0 if self._child is None else self._child.num_waiting

    async def recover(self) -> None:
        """Make a lost engine serve again; returns at once when it is well.

        Many callers may wait together: one restart serves them all. Raises EngineLost after
        `rollout.max_engine_restarts` restarts since the last update of weights.
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
                with self._changing(), contextlib.suppress(EngineLost):  # then `lost` is still true
                    await child.end()
                    await self.start()
                    await self._restarted()

    # what an engine that does something adds

    def _take_report(self, report: EngineReport) -> None:
        self.on_report(report)

    async def _restarted(self) -> None:
        """The process serves again, without what it had."""

    # -------------------------------------------------------------------------------------------- calls

    def _alive_child(self) -> EngineChild:
        if self._child is None:
            raise EngineLost(f"{self.name} was never started.")
        return self._child

    async def _call(self, method: str, params: Any) -> Any:
        return await self._alive_child().call(method, params)
