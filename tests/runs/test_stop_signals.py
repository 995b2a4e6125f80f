"""A stop signal ends the run wherever Python or a library meets it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rstar2_megatron.runs.base_run import Stopped, StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    alarm = signal.getsignal(signal.SIGALRM)
    signals = StopSignals()
    signals.install()
    yield signals
    signals.ignore()
    signals.restore()
    signal.signal(signal.SIGALRM, alarm)


class _SignalInFinalizer:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # the handler runs before the next bytecode


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_a_finalizer_discards_is_raised_again(signals: StopSignals) -> None:
    _SignalInFinalizer()
    assert signals.received == signal.SIGTERM
    with pytest.raises(Stopped) as caught:
        time.sleep(30)
    stopped = signals.stop_behind(caught.value)
    assert stopped is not None and stopped.exit_code == 143
    signals.ignore()
    os.kill(os.getpid(), signal.SIGINT)  # during the clean-up
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_error_that_a_library_made_of_a_stop(signals: StopSignals) -> None:
    with pytest.raises(SystemError) as caught:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        except Stopped as stopped:
            raise SystemError("returned a result with an exception set") from stopped
    stopped = signals.stop_behind(caught.value)
    assert stopped is not None and stopped.exit_code == 130


def test_a_terminal_that_closes_ends_the_run_unless_nohup_says_otherwise() -> None:
    before = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGALRM)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):  # the second: as nohup leaves it
            signal.signal(signal.SIGHUP, handler)
            signals = StopSignals()
            signals.install()
            try:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.01)
                assert handler == signal.SIG_IGN
            except Stopped as stopped:
                assert (handler, stopped.exit_code) == (signal.SIG_DFL, 129)
            signals.ignore()
            signals.restore()
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGALRM, before[1])


def test_an_error_without_a_signal_is_no_stop(signals: StopSignals) -> None:
    assert signals.stop_behind(SystemError("a bug")) is None


def test_a_run_that_is_asked_to_end_goes_on_until_its_step_has_ended(signals: StopSignals) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.01)
    assert signals.end_asked and signals.received is None
    stopped = signals.stop_behind(Stopped(signal.SIGUSR2))
    assert stopped is not None and stopped.exit_code == 140
