"""Tools of an MCP server: a command that is started, or an address. It needs the package `mcp`.

The connection lives in a thread with an event loop of its own and is made at the first call. A server that died is started
again at the next call.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
from collections.abc import Coroutine
from typing import Any

from rstar2_megatron.extension import ToolError
from rstar2_megatron.rollout.tool import CallContext, LimitedTool, Malformed
from rstar2_megatron.settings.schema import AgentLoopSettings, McpSettings
from rstar2_megatron.trajectory import ToolOutcome

_START_S = 60.0
_WRONG_ARGUMENTS, _CLOSED = -32602, -32000  # codes of JSON-RPC


class McpServer:
    """One server as a process of a run uses it."""

    def __init__(self, settings: McpSettings) -> None:
        """Raises ValueError when it gives no list of tools."""
        self.settings = settings
        self.slots = asyncio.Semaphore(settings.max_concurrency)
        self._loop = asyncio.new_event_loop()
        self._client: asyncio.Future[Any] | None = None
        threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        try:
            self.tools = asyncio.run_coroutine_threadsafe(self._list(), self._loop).result(_START_S)
        except ImportError:
            raise ValueError(
                f"{settings.mcp} is an MCP server, and the package mcp is not installed; "
                "run .venv/bin/pip install -c requirements/constraints.txt -r requirements/mcp.txt"
            ) from None
        except (Exception, BaseExceptionGroup) as error:
            raise ValueError(f"the MCP server {settings.mcp} lists no tools: {_innermost(error)}") from None

    async def start(self) -> None:
        """Connect, unless that is done. Raises what the connection raises."""
        await self._from_any_loop(self._use(None))

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self._from_any_loop(self._use((name, arguments)))

    async def _from_any_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _connection(self) -> Any:
        from mcp import Client, StdioServerParameters  # Here: it is an optional package.

        if self.settings.mcp.startswith(("http://", "https://")):
            return Client(self.settings.mcp)
        command, *words = shlex.split(self.settings.mcp)
        # Without `env` it would get PATH and its like alone, and no key of a service; it needs none of Ray's.
        environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
        return Client(StdioServerParameters(command=command, args=words, env=environment))

    async def _list(self) -> list[Any]:
        async with self._connection() as client:
            found, page = [], await client.list_tools()
            found += page.tools
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                found += page.tools
            return found

    async def _use(self, call: tuple[str, dict[str, Any]] | None) -> Any:
        if self._client is None:
            self._client = self._loop.create_future()
            self._holder = asyncio.create_task(self._hold(self._client))
        client = self._client
        try:
            connected = await asyncio.shield(client)
            return await connected.call_tool(*call) if call else None
        except Exception as error:
            code = getattr(error, "code", _CLOSED)  # of an error of the protocol
            if code == _WRONG_ARGUMENTS:
                raise Malformed(str(error)) from error
            if code == _CLOSED and self._client is client:  # the next call connects again; no other call needs this connection
                self._client = None
                self._holder.cancel()
            raise

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Keep a connection until it is cancelled: the task that opened it must close it."""
        try:
            async with self._connection() as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(RuntimeError(_innermost(error)))


class McpTool(LimitedTool):
    def __init__(self, server: McpServer, described: Any, agentloop: AgentLoopSettings) -> None:
        """described: as the server lists it."""
        parameters = {"type": "object", "properties": {}, **described.input_schema}
        function = {"name": described.name, "description": described.description or "", "parameters": parameters}
        super().__init__({"type": "function", "function": function}, server.settings, agentloop)
        self.server = server
        self.slots = server.slots

    async def run(self, arguments: dict[str, Any], context: CallContext) -> tuple[ToolOutcome, str]:
        def failed(error: BaseException) -> Exception:
            if isinstance(error, Malformed):
                return error
            return RuntimeError(f"the MCP server {self.server.settings.mcp}: {_innermost(error)}")

        try:  # how long a server takes to start is no fault of the model's
            await asyncio.wait_for(self.server.start(), _START_S)
        except TimeoutError:
            raise RuntimeError(f"the MCP server {self.server.settings.mcp} did not start within {_START_S:.0f} s") from None
        except Exception as error:
            raise failed(error) from error
        result = await self.limited(self.server.call, {"name": self.name, "arguments": arguments}, failed)
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return ToolOutcome.OK, text


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
