"""`python -m rstar2_megatron.judge serve|worker|all`: the Code Judge's processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys

from rstar2_megatron.judge import commands
from rstar2_megatron.judge.limits import LEVELS, OPTION_NAMES, CallLimits, default_permits, default_processes

_SESSIONS_PER_CORE = 32


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rstar2_megatron.judge", description=__doc__)
    parser.add_argument("command", choices=["all", "serve", "worker"])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port (default)")
    parser.add_argument(
        "--redis-uri",
        default=os.environ.get("REDIS_URI"),
        help="running Redis; without it `all` starts one on loopback (environment: REDIS_URI)",
    )
    parser.add_argument("--workers", type=int, help="execution slots of this node (MAX_WORKERS; default: 8 a core)")
    parser.add_argument(
        "--max-running", type=int, default=default_permits(),
        help="calls that use CPU at once; sleeping and long ones do not count (default: 1.5 a core)",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", type=int, default=_SESSIONS_PER_CORE * (os.cpu_count() or 1),
        help="live interpreters of this node at a time (default: 32 a core)",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, default=default_processes(),
        help="worker processes that share the slots, permits and sessions (default: 1 for 8 cores)",
    )  # fmt: skip
    parser.add_argument("--session-ttl-s", type=float, default=900.0, help="an unused session ends (900)")
    parser.add_argument("--time-limit-s", type=float, help="time of a call without waits for a core (MAX_EXECUTION_TIME; 10)")
    parser.add_argument("--memory-mb", type=int, help="memory of a call (MAX_MEMORY; 512)")
    parser.add_argument("--output-chars", type=int, help="output returned (MAX_STDOUT_ERROR_LENGTH; 1000)")
    parser.add_argument("--queue-time-limit-s", type=float, help="MAX_QUEUE_WORK_LIFE_TIME; 50")
    parser.add_argument("--max-queued", type=int, default=100_000, help="jobs that may wait; more get 429")
    parser.add_argument("--cache", action="store_true", help="identical stateless calls of a client get one result (10 min)")
    parser.add_argument(
        "--require-isolation", choices=LEVELS, default=os.environ.get("JUDGE_REQUIRE_ISOLATION", "partial"),
        help="level below which no worker starts (JUDGE_REQUIRE_ISOLATION; partial)",
    )  # fmt: skip
    parser.add_argument("--port-file", help="JSON {url, redis_uri, pid} written here once ready")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the starting process ends")
    parser.add_argument("--drain-s", type=float, help="how long a stopping worker waits for its calls")
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser


def limits_of(arguments: argparse.Namespace) -> CallLimits:
    """Flags over environment variables over defaults. ValueError names a bad value."""
    limits = CallLimits.from_environment()
    given = {name: value for name in OPTION_NAMES if (value := getattr(arguments, name)) is not None}
    return limits.with_options(given, ceiling=None)


def slots_of(arguments: argparse.Namespace) -> int:
    slots = arguments.workers
    if slots is None:
        slots = int(os.environ.get("MAX_WORKERS") or 8 * (os.cpu_count() or 1))
    if not 1 <= slots <= 4096:
        raise ValueError(f"--workers {slots}: between 1 and 4096 execution slots")
    return slots


def check_counts(arguments: argparse.Namespace) -> None:
    if not arguments.max_running >= 1:
        raise ValueError(f"--max-running {arguments.max_running}: at least 1 call")
    if not 1 <= arguments.processes <= arguments.workers:
        raise ValueError(f"--processes {arguments.processes}: between 1 and the {arguments.workers} slots")
    if not 0 <= arguments.sessions <= 4096:
        raise ValueError(f"--sessions {arguments.sessions}: between 0 and 4096 live interpreters")
    if not arguments.session_ttl_s > 0:
        raise ValueError(f"--session-ttl-s {arguments.session_ttl_s}: must be above 0")
    if arguments.require_isolation not in LEVELS:
        raise ValueError(f"JUDGE_REQUIRE_ISOLATION={arguments.require_isolation!r}: one of {', '.join(LEVELS)}")


def main(argv: list[str] | None = None) -> int:
    """Run a command until a signal. Returns 0 after a clean stop, 1 after an error, which is printed in one line."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), stream=sys.stderr, format="judge %(levelname)s %(name)s: %(message)s"
    )

    runners = {"all": commands.run_all, "serve": commands.run_serve, "worker": commands.run_worker}
    try:
        if arguments.command != "serve":
            arguments.workers = slots_of(arguments)
            check_counts(arguments)
        limits = limits_of(arguments)
        if arguments.drain_s is None:
            arguments.drain_s = limits.time_limit_s
        commands.go_before_calls()
        with contextlib.suppress(ImportError):
            import uvloop  # optional: absent where it cannot be built

            uvloop.install()
        asyncio.run(runners[arguments.command](arguments, limits))
    except (ValueError, RuntimeError) as error:
        print(f"judge: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
