"""A worker's slots: the sandbox processes that it starts, and one socket to each of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rstar2_megatron.judge.limits import LEVELS
from rstar2_megatron.judge.sandbox import isolation
from rstar2_megatron.judge.sandbox.call import LENGTH, receive_message
from rstar2_megatron.judge.scheduling import FreeList
from rstar2_megatron.services.owned_directory import make_owned_directory
from rstar2_megatron.services.process import PROJECT

log = logging.getLogger(__name__)
_REMEDIES = {
    "partial": "Programs could end the judge and read its files. Give it what is missing (libseccomp; root, user namespaces "
    "or landlock), or, for trusted programs only, set JUDGE_REQUIRE_ISOLATION=minimal or --require-isolation",
    "full": "Run as root with control groups, or ask for --require-isolation partial",
}
_SESSION_START_S = 10.0


class SlotDied(Exception):
    """The slot's process ended in the middle of a call."""


class SandboxFailed(RuntimeError):
    """The sandbox processes did not start, or the machine does not support the isolation that was asked for."""


class Slot:
    """A sandbox process that runs one call at a time, as the worker sees it: a socket."""

    def __init__(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.index = index
        self._reader = reader
        self._writer = writer

    async def run(self, job: bytes, deadline_s: float, on_demotion: Callable[[], None] = lambda: None) -> bytes:
        """Run a job (JSON) and return its result (JSON). Raises SlotDied, TimeoutError after `deadline_s`.

        `on_demotion` is called when the call sleeps or has used its slice of CPU: another call may begin beside it.
        """
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(LENGTH.pack(len(job)) + job)
                while True:
                    (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                    if size:
                        return await self._reader.readexactly(size)
                    on_demotion()
        except (asyncio.IncompleteReadError, OSError) as error:
            self.close()
            raise SlotDied(f"slot {self.index} ended in mid-call ({type(error).__name__})") from None

    def cancel(self) -> None:
        """End the running call. Its result still arrives and has to be ignored."""
        self._writer.write(LENGTH.pack(0))

    def close(self) -> None:
        self._writer.close()


class SlotPool:
    """Starts the sandbox, hands out free slots, and adopts the slots that the zygote starts for dead ones.

    Slots 0 to `count` - 1 run calls. The `sessions` numbers after them start on demand (`open_session_slot`).
    """

    def __init__(self, count: int, sessions: int = 0) -> None:
        self.count = count
        self.sessions = sessions
        # They are used in turn: one that was just used still drops the namespace of its last call.
        self.free: FreeList[Slot] = FreeList()
        self._session_slots = list(range(count, count + sessions))  # numbers free for new sessions
        self._opening: dict[int, asyncio.Future[Slot]] = {}
        self.description: dict[str, Any] = {}
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, timeout_s: float = 60.0) -> None:
        """Start the sandbox and wait for its first slot. Raises SandboxFailed."""
        try:
            scratch = make_owned_directory("rstar2-judge-", "/tmp")  # the launcher removes it
            scratch.chmod(0o711)
        except OSError as error:
            raise SandboxFailed(f"no directory for calls can be made in /tmp: {error}") from None
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            # Without `site`: every call would copy the modules that it imports. The paths that it would find are passed.
            [sys.executable, "-S", "-m", "rstar2_megatron.judge.sandbox.zygote"]
            + [str(part) for part in (theirs.fileno(), self.count, self.sessions, scratch, sys.prefix, *sys.path)],
            pass_fds=[theirs.fileno()],
            cwd=PROJECT,
            env=isolation.ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(timeout_s)
        self._control = ours
        try:
            self.description = await asyncio.to_thread(receive_message, ours)
            ours.setblocking(False)
            asyncio.get_running_loop().add_reader(ours.fileno(), self._on_control)
            async with asyncio.timeout(timeout_s):
                self.free.put(await self.free.get())
        except (TimeoutError, EOFError) as error:
            await self.stop()
            raise SandboxFailed(
                f"the sandbox ended at its start or took over {timeout_s:.0f} s: {error!r}, see above"
            ) from None

    async def check_isolation(self, required: str) -> None:
        """Log what is missing. Raises SandboxFailed, and ends the sandbox, below the level `required`."""
        found = self.description["isolation"]
        log.info("isolation %s: %s", found["level"], ", ".join(found["active"]))
        for layer, why in found["missing"].items():
            log.warning("isolation layer %s is missing: %s", layer, why)
        if LEVELS.index(found["level"]) < LEVELS.index(required):
            await self.stop()
            missing = "; ".join(f"{layer}: {why}" for layer, why in found["missing"].items())
            raise SandboxFailed(
                f"isolation {required!r} is required, this machine gives {found['level']!r} ({missing}). {_REMEDIES[required]}"
            )

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            message, fds, _, _ = socket.recv_fds(self._control, LENGTH.size, 1)
        except BlockingIOError:
            return
        if not message:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            log.error("the sandbox has ended")
            return
        task = asyncio.ensure_future(self._adopt(*LENGTH.unpack(message), *fds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _adopt(self, index: int, fd: int) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd), limit=1 << 20)
        slot = Slot(index, reader, writer)
        if index < self.count:
            self.free.put(slot)
        elif index in self._opening:
            self._opening.pop(index).set_result(slot)
        else:
            slot.close()

    @property
    def session_room(self) -> int:
        """How many more sessions can be opened."""
        return len(self._session_slots)

    async def open_session_slot(self) -> Slot:
        """A slot for one session. Raises SlotDied when the sandbox does not start it."""
        assert self._control is not None
        index = self._session_slots.pop(0)
        waiting = self._opening[index] = asyncio.get_running_loop().create_future()
        try:
            self._control.send(LENGTH.pack(index))
            async with asyncio.timeout(_SESSION_START_S):
                return await waiting
        except (TimeoutError, OSError) as error:
            self._opening.pop(index, None)
            self._session_slots.append(index)
            raise SlotDied(f"session slot {index} did not start ({error!r})") from None

    def close_session_slot(self, slot: Slot) -> None:
        """End a session's process and free its number."""
        slot.close()
        self._session_slots.append(slot.index)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def stop(self) -> None:
        """End the sandbox with all its processes. Safe to call twice."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, 10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
