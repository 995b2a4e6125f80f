"""A judge whose answers come later, as from slow tools: waits that need no core."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.settings.sections.environment import CodeJudgeSettings

_START_S = 10.0


@contextlib.contextmanager
def slow_judge(settings: CodeJudgeSettings, delay_s: float, log: Path) -> Iterator[int]:
    """A judge of these settings and, before it, a loopback port that passes on each answer `delay_s` later: that port."""
    judge = JudgeService(settings, log)
    try:
        judge.begin()
        address = urlsplit(judge.wait_ready())
        assert address.hostname is not None and address.port is not None
        with _delayed(address.hostname, address.port, delay_s) as port:
            yield port
    finally:
        judge.stop()


@contextlib.contextmanager
def _delayed(host: str, port: int, delay_s: float) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def serve() -> asyncio.Server:
        return await asyncio.start_server(lambda *streams: _pass_on(streams, host, port, delay_s), "127.0.0.1", 0)

    try:
        server = asyncio.run_coroutine_threadsafe(serve(), loop).result(_START_S)
        yield server.sockets[0].getsockname()[1]
        loop.call_soon_threadsafe(server.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_START_S)


async def _pass_on(client: tuple[asyncio.StreamReader, asyncio.StreamWriter], host: str, port: int, delay_s: float) -> None:
    judge = await asyncio.open_connection(host, port)
    first = await client[0].read(1 << 16)
    judge[1].write(first)
    is_call = first.startswith(b"POST")  # not a question whether the judge is there
    await asyncio.gather(_copy(client[0], judge[1], 0.0), _copy(judge[0], client[1], delay_s if is_call else 0.0))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass on what arrives, each part `delay_s` after its arrival, however many are under way."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            loop.call_later(delay_s, writer.write, part)
    loop.call_later(delay_s, writer.close)
