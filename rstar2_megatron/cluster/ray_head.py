"""A private Ray head on loopback, for runs without a Ray cluster.

`ray.init()` would listen on every interface and start a dashboard of nine processes. RLinf attaches to the cluster of
`RAY_ADDRESS`, so this module starts a head bound to 127.0.0.1 and ends it after the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rstar2_megatron.services.owned_directory import make_owned_directory
from rstar2_megatron.services.process import free_ports, start_child, terminate_tree

logger = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_STARTS = 3
# Ray gives its own processes 30 s, which no setting changes. A busy machine may need more the first time.
_TOO_SLOW = "timed out during startup"
_SOCKET_PATH = 107  # longest path of a Unix socket
_BELOW = len("/ray-abcdefgh/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")


class RayHeadError(RuntimeError):
    """The private Ray head did not start."""


class RayHead:
    """`ray start --head --block` as a child process. The kernel ends it when this process dies."""

    def __init__(self, *, num_cpus: int, object_store_mb: int = 512) -> None:
        self.num_cpus = num_cpus
        self.object_store_mb = object_store_mb
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    def start(self) -> str:
        """Start the head, set RAY_ADDRESS to its address and return the address. Raises RayHeadError."""
        for left in reversed(range(_STARTS)):
            try:
                self._wait_until_started(self._launch())
                break
            except RayHeadError as error:
                self.stop()
                if not left or _TOO_SLOW not in str(error):
                    raise
                logger.warning("Ray's processes took more than 30 s to start: they are started again")
        os.environ["RAY_ADDRESS"] = self.address
        return self.address

    def _wait_until_started(self, log_path: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while b"Ray runtime started" not in log_path.read_bytes():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                late = f"did not start within {_START_TIMEOUT_S:.0f} s"
                what = late if code is None else f"ended with code {code}"
                text = log_path.read_text(errors="replace")[-2000:]
                raise RayHeadError(f"Ray at {self.address} {what}; its output:\n{text}")
            time.sleep(0.1)

    def _launch(self) -> Path:
        """Start Ray's processes. Returns the file of their output."""
        parent = tempfile.gettempdir()
        self._directory = make_owned_directory("ray-", parent if len(parent) + _BELOW <= _SOCKET_PATH else "/tmp")
        port, client_port, agent_port, metrics_port = free_ports(4)
        self.address = f"127.0.0.1:{port}"
        log_path = self._directory / "ray-start.log"
        env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        # Workers inherit this. Otherwise Megatron and torch warn of deprecations and a missing TransformerEngine on every
        # rank, which a user cannot act on.
        env.setdefault("PYTHONWARNINGS", "ignore")
        # Ray would run its workers at nice 15.
        env.setdefault("RAY_worker_niceness", "0")
        # RLinf's workers have their own environments, so they cannot use workers that Ray starts in advance.
        env.setdefault("RAY_prestart_worker_first_driver", "0")
        # Ray's control process keeps a record of each call for a dashboard that is not started: 0.5 MB a step, 170 MB in all.
        env.setdefault("RAY_task_events_max_num_task_in_gcs", "1000")
        with log_path.open("wb") as log:
            self._process = start_child(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start"),
                    "--head",
                    "--block",
                    "--node-ip-address=127.0.0.1",
                    f"--port={port}",
                    f"--ray-client-server-port={client_port}",
                    # The kernel gives every worker a port. From a range, two heads of a machine would give theirs the same one.
                    "--min-worker-port=0",
                    "--max-worker-port=0",
                    "--no-monitor",  # no autoscaler
                    f"--dashboard-agent-listen-port={agent_port}",
                    f"--metrics-export-port={metrics_port}",
                    "--include-dashboard=false",
                    "--disable-usage-stats",
                    f"--num-cpus={self.num_cpus}",
                    f"--object-store-memory={self.object_store_mb << 20}",
                    f"--temp-dir={self._directory}",
                    f"--object-spilling-directory={parent}",  # where there is room, wherever the sockets are
                ],
                log,
                env=env,
                cwd=None,  # Ray's workers inherit the driver's directory
            )
        return log_path

    def stop(self) -> None:
        """End every process of the head and remove its directory. Safe to call twice."""
        if self._process is not None:
            terminate_tree(self._process.pid, grace_s=8.0, first_signal=signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            self._process = None
        if os.environ.get("RAY_ADDRESS") == self.address:
            os.environ.pop("RAY_ADDRESS", None)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
