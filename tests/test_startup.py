"""Test signals that arrive during the start of a command."""

import signal

import pytest

from mpidl import startup
from mpidl.ranks.failure import Signals


@pytest.fixture
def handlers():
    """The signal handlers before the test. They are restored after the test."""
    before = {number: signal.getsignal(number) for number in startup.NUMBERS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_user_program_keeps_its_handlers(handlers):
    startup.begin()
    assert {number: signal.getsignal(number) for number in startup.NUMBERS} == handlers


def test_an_early_signal_stops_the_training(monkeypatch, handlers):
    monkeypatch.setattr(startup, "command", lambda: "train")
    monkeypatch.setattr(startup, "early_signal", None)
    signal.pthread_sigmask(signal.SIG_BLOCK, startup.NUMBERS)
    signal.raise_signal(signal.SIGUSR1)
    assert signal.sigpending() == {signal.SIGUSR1}
    startup.begin()
    with Signals() as signals:
        assert signals.name == "SIGUSR1" and not signals.agreed
    startup.end()
    assert {signal.getsignal(number) for number in startup.NUMBERS} == {signal.SIG_IGN}


def test_a_command_without_checkpoints_keeps_the_default(monkeypatch, handlers):
    monkeypatch.setattr(startup, "command", lambda: "info")
    signal.pthread_sigmask(signal.SIG_BLOCK, startup.NUMBERS)
    startup.begin()
    assert {number: signal.getsignal(number) for number in startup.NUMBERS} == handlers
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(startup.NUMBERS)


def test_signals_of_a_user_program_are_not_early(monkeypatch):
    """In a user's program, `Signals` ignores signals from before the training."""
    monkeypatch.setattr(startup, "early_signal", "SIGUSR1")
    with Signals() as signals:
        assert signals.name is None
