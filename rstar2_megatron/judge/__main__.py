"""`python -m rstar2_megatron.judge serve|worker|all`: the Code Judge's processes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import sys

import uvloop

from rstar2_megatron.judge import commands
from rstar2_megatron.judge.limits import (
    LEVELS,
    MOST,
    OPTION_NAMES,
    CallLimits,
    cores,
    default_permits,
    default_processes,
    default_sessions,
)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rstar2_megatron.judge", description=__doc__)
    add, given = parser.add_argument, os.environ.get
    add("command", choices=["all", "serve", "worker"])
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=0, help="0 takes a free port (default)")
    add("--redis-uri", default=given("REDIS_URI"), help="running Redis (REDIS_URI); without it `all` starts one")
    slots = f"execution slots of this node (MAX_WORKERS; default: 8 a core, up to {MOST})"
    add("--workers", type=int, default=given("MAX_WORKERS") or min(8 * cores(), MOST), help=slots)
    running = "calls that use CPU at once; sleeping and long ones do not count (default: 1.5 a core)"
    add("--max-running", type=int, default=default_permits(), help=running)
    sessions = f"live interpreters of this node at a time (default: 32 a core, up to {MOST}, and 1 for 8 open files)"
    add("--sessions", type=int, default=default_sessions(), help=sessions)
    processes = "worker processes that share the slots, permits and sessions (default: 1 for 8 cores and 8 slots)"
    add("--processes", type=int, help=processes)
    add("--session-ttl-s", type=float, default=900.0, help="an unused session ends (900)")
    add("--time-limit-s", type=float, help="time of a call without waits for a core (MAX_EXECUTION_TIME; 10)")
    add("--memory-mb", type=int, help="memory of a call (MAX_MEMORY; 512)")
    add("--output-chars", type=int, help="output returned (MAX_STDOUT_ERROR_LENGTH; 1000)")
    add("--queue-time-limit-s", type=float, help="MAX_QUEUE_WORK_LIFE_TIME; 50")
    add("--max-queued", type=int, default=100_000, help="jobs that may wait; more get 429")
    level = given("JUDGE_REQUIRE_ISOLATION", "partial")
    isolation = "level below which no worker starts (JUDGE_REQUIRE_ISOLATION; partial)"
    add("--require-isolation", choices=LEVELS, default=level, help=isolation)
    add("--port-file", help="JSON {url, redis_uri, pid} written here once ready")
    add("--exit-with-parent", action="store_true", help="stop when the starting process ends")
    add("--drain-s", type=float, help="how long a stopping worker waits for its calls")
    add("--name", help=argparse.SUPPRESS)
    add("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser


def settle_counts(arguments: argparse.Namespace) -> None:
    """Choose the number of processes where none is given. Raises ValueError for a value out of its bounds."""
    if arguments.processes is None:
        arguments.processes = default_processes(arguments.workers)
    for name, least, most in (
        ("workers", 1, MOST), ("processes", 1, arguments.workers), ("max_running", 1, math.inf),
        ("sessions", 0, MOST), ("session_ttl_s", 0.1, math.inf),
    ):  # fmt: skip
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} {value}: between {least} and {most}")
    if arguments.require_isolation not in LEVELS:
        raise ValueError(f"JUDGE_REQUIRE_ISOLATION={arguments.require_isolation!r}: one of {', '.join(LEVELS)}")


def main(argv: list[str] | None = None) -> int:
    """Run a command until a signal. Returns 0 after a clean stop, 2 for wrong options, 1 after another error."""
    arguments = command_line().parse_args(argv)
    form = "judge %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=arguments.log_level.upper(), stream=sys.stderr, format=form)
    runners = {"all": commands.run_all, "serve": commands.run_serve, "worker": commands.run_worker}
    try:
        if arguments.command != "serve":
            settle_counts(arguments)
        given = {name: value for name in OPTION_NAMES if (value := getattr(arguments, name)) is not None}
        limits = CallLimits.from_environment().with_options(given, ceiling=None)
        if arguments.drain_s is None:
            arguments.drain_s = limits.time_limit_s
        commands.go_before_calls()
        uvloop.install()
        asyncio.run(runners[arguments.command](arguments, limits))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"judge: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
