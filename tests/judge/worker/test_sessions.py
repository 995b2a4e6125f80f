"""Sessions: a live interpreter for the calls of one trajectory."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from tests.judge.conftest import MEMORY_MB, Run
from tests.judge.waiting import until

# A cell that runs past its limit on any machine: one that computes is told "too busy" where others leave it no CPU.
SLEEP = "import time\nwhile True: time.sleep(0.1)"


@pytest.fixture
async def client(judge: JudgeService) -> AsyncIterator[JudgeClient]:
    async with JudgeClient(judge.url, time_limit_s=3.0) as client:
        yield client


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


async def test_names_files_and_functions_live_on(client: JudgeClient, name: str) -> None:
    first = await client.run("import sympy\nx = 41\ndef f(n):\n    return n / 0\nopen('kept', 'w').write('a')", session=name)
    assert (first.outcome, first.session, first.stdout) == (Outcome.OK, "new", "1\n")
    second = await client.run("x += 1\nprint(x, open('kept').read(), input())", "typed", session=name)
    assert (second.stdout, second.session) == ("42 a typed\n", "kept")
    third = await client.run("open('given').read()", session=name, files={"given": b"\x41"})
    assert third.stdout == "'A'\n"
    failed = await client.run("f(1)", session=name)
    assert failed.outcome is Outcome.ERROR and failed.exit_code == 1
    assert 'File "cell_1.py", line 4, in f' in failed.stderr and "    return n / 0" in failed.stderr
    assert (await client.run("x", session=name)).stdout == "42\n"
    await client.close_session(name)


async def test_a_session_whose_program_ended_it_is_gone_for_other_clients_too(client: JudgeClient, name: str) -> None:
    ended = await client.run("import os; os._exit(3)", session=name)
    assert (ended.exit_code, ended.session) == (3, "lost")
    client.expect_session(name)
    assert (await client.run("1", session=name)).outcome is Outcome.SESSION_LOST


async def test_sessions_do_not_see_each_other(client: JudgeClient, name: str) -> None:
    await client.run("secret = 1; open('file', 'w').close()", session=name)
    other = await client.run("import os; os.listdir('.'), 'secret' in globals()", session=name + "b")
    assert other.stdout == "([], False)\n"
    assert (await client.run("import os; os.listdir('.')")).stdout == "['source.py']\n"
    for session in (name, name + "b"):
        await client.close_session(session)


async def test_a_cell_over_its_time_is_interrupted_and_keeps_its_names(client: JudgeClient, name: str) -> None:
    await client.run("x = 5", session=name)
    result = await client.run(f"x = 6\nprint('before')\n{SLEEP}", session=name, options={"time_limit_s": "1.0"})
    assert (result.outcome, result.session, result.stdout) == (Outcome.TIMEOUT, "kept", "before\n")
    assert "KeyboardInterrupt" in result.stderr
    assert (await client.run("x", session=name)).stdout == "6\n"
    await client.close_session(name)


async def test_a_cell_that_cannot_be_interrupted_ends_the_session(client: JudgeClient, name: str) -> None:
    stubborn = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{SLEEP}"
    await client.run("x = 5", session=name)
    result = await client.run(stubborn, session=name, options={"time_limit_s": "0.5"})
    assert (result.outcome, result.session) == (Outcome.TIMEOUT, "lost")
    assert "names of earlier calls are gone" in result.stderr
    fresh = await client.run("'x' in globals()", session=name)
    assert (fresh.session, fresh.stdout) == ("new", "False\n")
    await client.close_session(name)


@pytest.mark.parametrize(
    ("program", "outcome", "kept"),
    [
        ("import os; os._exit(0)", Outcome.ERROR, False),
        ("import os; os._exit(250)", Outcome.ERROR, False),
        ("import sys; sys.exit(3)", Outcome.ERROR, True),
        (f"y = bytearray({2 * MEMORY_MB} << 20)", Outcome.MEMORY, True),
        ("import os; os.write(3, b'done' * 2)", Outcome.KILLED, False),
        ("import os; os.close(3)", None, False),
        ("import os; child = os.fork()", Outcome.OK, True),
        ("import sys; sys.stdout = sys.stderr = sys.stdin = None", Outcome.OK, True),
        ("import os; os.kill(os.getpid(), 9)", Outcome.KILLED, False),
        ("import os; os.kill(os.getpid(), 15)", Outcome.KILLED, False),
    ],
)
async def test_what_a_cell_does_to_its_own_interpreter(
    client: JudgeClient, name: str, program: str, outcome: Outcome | None, kept: bool
) -> None:
    await client.run("x = 5", session=name)
    result = await client.run(program, session=name)
    assert result.session == ("kept" if kept else "lost")
    assert result.outcome is outcome or (outcome is None and result.outcome in (Outcome.ERROR, Outcome.KILLED))
    after = await client.run("print('x' in globals())", session=name)
    assert after.stdout == f"{kept}\n"
    await client.close_session(name)


async def test_calls_of_one_session_run_in_turn(client: JudgeClient, name: str) -> None:
    await client.run("seen = []", session=name)
    program = "seen.append(({0}, 'in')); import time; time.sleep(0.1); seen.append(({0}, 'out'))"
    await asyncio.gather(*(client.run(program.format(i), session=name) for i in range(4)))
    seen = (await client.run("[seen[i][0] == seen[i + 1][0] for i in range(0, 8, 2)]", session=name)).stdout
    assert seen == "[True, True, True, True]\n"
    await client.close_session(name)


async def test_nothing_runs_between_two_cells(client: JudgeClient, name: str) -> None:
    counting = """
import os, select, threading, time
count = 0
def run():
    global count
    while True: count += 1
threading.Thread(target=run, daemon=True).start()
reader, writer = os.pipe2(os.O_NONBLOCK)
if os.fork() == 0:
    while True:
        os.write(writer, b'x'); time.sleep(0.001)
"""
    assert (await client.run(counting, session=name)).outcome is Outcome.OK
    # Waits for the child's next byte, which a busy machine brings late: it goes on within a cell.
    look = "before = count\nselect.select([reader], [], [], 5)\nlen(os.read(reader, 100000)), count"
    await client.run(look, session=name)
    await asyncio.sleep(2.0)
    written = (await client.run(look, session=name)).stdout
    assert int(written.strip("(").split(",")[0]) < 800  # of about 2,000 had it not been stopped
    await client.close_session(name)


def test_the_same_sub_id_runs_a_cell_once(http: httpx.Client, run: Run, name: str) -> None:
    body = {"sub_id": name, "options": {"session": name}}
    run("x = 0", options={"session": name})
    first, again = (run("x += 1; print(x)", **body) for _ in range(2))
    assert first["stdout"] == again["stdout"] == "1\n"
    assert http.delete(f"/session/{name}").json() == {"session": name, "ended": True}
    assert http.delete(f"/session/{name}").status_code == 200


@pytest.mark.parametrize(
    "options",
    [{"session": "no spaces"}, {"session": "x" * 129}, {"session": 3}, {"session": "a", "session_must_exist": "maybe"}],
)
def test_bad_session_options_are_invalid_input(run: Run, options: dict[str, str]) -> None:
    result = run("1", options=options)
    assert result["outcome"] == "invalid_input" and "session" in result["stderr"]


def test_a_session_that_must_be_open_and_is_not(run: Run, name: str) -> None:
    result = run("1", options={"session": name, "session_must_exist": "true"})
    assert (result["outcome"], result["reason"], result["session"]) == ("session_lost", "internal_error", "lost")


@pytest.fixture(scope="module")
def small() -> Iterator[JudgeService]:
    extra = ("--sessions", "2", "--session-ttl-s", "1")
    with running_judge(num_workers=2, time_limit_s=5.0, extra_arguments=extra) as service:
        yield service


@pytest.mark.ci
async def test_more_sessions_than_room_wait_for_the_time_to_live(small: JudgeService, name: str) -> None:
    async with JudgeClient(small.url, time_limit_s=3.0) as client:
        started = time.monotonic()
        opened = [asyncio.create_task(client.run("x = 1", session=f"{name}{i}")) for i in range(3)]
        assert (await client.run("print(1)")).ok  # nothing else is held up
        assert all(result.ok for result in await asyncio.gather(*opened))
        assert time.monotonic() - started > 1.0  # the third waited until an idle one ended

        async def has_room() -> bool:
            status = (await asyncio.to_thread(httpx.get, f"{small.url}/status", trust_env=False)).json()
            assert status["session_room"] + status["sessions"] == 2
            return bool(status["session_room"] == 2)

        await until(has_room, "all have ended")
        lost = await client.run("x", session=f"{name}2")
        assert lost.outcome is Outcome.SESSION_LOST and lost.is_infrastructure
        assert (await client.run("'x' in globals()", session=f"{name}2")).stdout == "False\n"
        await client.close_session(f"{name}2")
