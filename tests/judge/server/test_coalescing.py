"""How long a server lets answers gather: a share of what requests wait anyway, and never more than the bound."""

from __future__ import annotations

import pytest

from rstar2_megatron.judge.scheduling import Rate, reply_pause_s


def after(per_s: float, seconds: float = 5.0) -> Rate:
    """One that has seen `per_s` answers a second for a while."""
    rate = Rate(0.0)
    for number in range(round(per_s * seconds)):
        rate.add(1, (number + 1) / per_s)
    return rate


@pytest.mark.parametrize(
    ("waiting", "per_s", "expected_s"),
    [
        (1, 100.0, 0.0),
        (15, 1000.0, 0.0),  # so few that somebody would be idle meanwhile
        (16, 250.0, 0.016),  # 4 answers at 250 a second, a quarter of the 64 ms that each request waits
        (2000, 300.0, 0.025),
        (32, 10.0, 0.025),  # slow calls: nobody waits longer than the bound for a quick one
    ],
)
def test_the_pause_is_a_quarter_of_the_wait(waiting: int, per_s: float, expected_s: float) -> None:
    assert reply_pause_s(waiting, after(per_s)) == pytest.approx(expected_s, rel=0.01)


def test_the_first_answers_are_read_at_once() -> None:
    assert reply_pause_s(1000, Rate(0.0)) == 0.0


def test_an_old_rate_is_forgotten() -> None:
    rate = after(1000.0)
    rate.add(0, 10.0)  # nothing for five seconds
    rate.add(1, 10.01)
    assert reply_pause_s(100, rate) == 0.025


def test_answers_at_the_same_moment_are_no_infinite_rate() -> None:
    rate = Rate(1.0)
    rate.add(5, 1.0)
    rate.add(5, 1.0)
    assert reply_pause_s(100, rate) == 0.0
