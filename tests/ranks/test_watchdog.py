"""Test that the watchdog ends a process if and only if MPI blocks or the launcher has ended."""

import pytest

from mpidl.ranks import acts, watchdog


@pytest.fixture
def dog(monkeypatch):
    """Return a watchdog that records exit codes instead of ending the process."""
    monkeypatch.setattr(watchdog, "TURN", 0.0)
    codes = []
    dog = watchdog.Watchdog(acts.ActRecord(), codes.append)
    dog.codes = codes
    return dog


def looks(dog, count, before=lambda: None):
    for _ in range(count):
        before()
        dog.look(0.5)


def test_a_call_that_does_not_return(dog, capsys):
    looks(dog, 20)  # the rank computes and calls no MPI
    assert dog.codes == []
    dog.describe = lambda operation, limit: f"{operation} has taken {limit} s"
    dog.record.begin("MPI_Comm_split", 3.0)
    looks(dog, 6)
    assert dog.codes == [] and capsys.readouterr().err == ""
    looks(dog, 1)
    assert dog.codes == [1] and capsys.readouterr().err == "MPI_Comm_split has taken 3.0 s\n"


def test_a_wait_that_polls(dog):
    dog.record.begin("gop max", 3.0)
    looks(dog, 20, before=dog.record.renew)
    assert dog.codes == []
    looks(dog, 6)  # an MPI poll does not return
    assert dog.codes == [1]


def test_many_short_operations(dog):
    def operation():
        dog.record.end(dog.record.begin("gop max", 3.0))
        dog.record.begin("gop max", 3.0)

    looks(dog, 20, before=operation)
    assert dog.codes == []


def test_a_launcher_that_has_ended(dog, monkeypatch, capsys):
    """A rank ends if its parent process changes, because the launcher has ended."""
    monkeypatch.setenv("PMI_SIZE", "3")
    looks(dog, 1)
    assert dog.codes == []
    monkeypatch.setattr(watchdog.os, "getppid", lambda: 1)
    looks(dog, 1)
    assert dog.codes == [1]
    assert capsys.readouterr().err.endswith(": the launcher on this host has ended\n")


def test_the_guard_records_the_operation():
    record = acts.record()
    outer = record.operation
    with pytest.raises(ValueError), watchdog.guard("MPI_Comm_split", 7):
        assert (record.operation, record.limit) == ("MPI_Comm_split", 7)
        raise ValueError
    assert record.operation == outer
