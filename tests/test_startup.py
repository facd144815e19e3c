"""Test how a command is recognized, and signals that arrive during its start."""

import signal
import sys
from types import SimpleNamespace

import pytest

from mpidl import startup
from mpidl.ranks.failure import Signals

TRAIN = ["--epochs", "2"]


@pytest.mark.parametrize(
    ("words", "argv", "expected"),
    [
        (["python", "-m", "mpidl.train", *TRAIN], ["-m", *TRAIN], "train"),
        (["python", "-I", "-Wignore", "-mmpidl.train", *TRAIN], ["-m", *TRAIN], "train"),
        (["python", "-m", "mpidl", "sweep", "a.toml"], ["-m", "sweep", "a.toml"], "sweep"),
        (["python", "-m", "mpidl"], ["-m"], None),
        (["python", "-m", "pytest", "mpidl.train"], ["-m", "mpidl.train"], None),
        (["python", "-m", "mpidlx.train"], ["-m"], None),
        (["python", "mine.py", "-m", "mpidl.train"], ["mine.py", "-m", "mpidl.train"], None),
        (["python", "-c", "import mpidl", "-m"], ["-c", "-m"], None),
        (["python"], [""], None),
    ],
)
def test_the_command_of_a_process(monkeypatch, words, argv, expected):
    """The command is recognized although sys.argv[0] is "-m" during `python -m mpidl.train`."""
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", argv)
    assert startup.command() == expected


def test_the_command_of_the_program_mpidl(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpidl_command", SimpleNamespace(command="train"))
    assert startup.command() == "train"


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
    monkeypatch.setattr(startup, "early_signals", [])
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
    monkeypatch.setattr(startup, "early_signals", ["SIGUSR1"])
    with Signals() as signals:
        assert signals.name is None
