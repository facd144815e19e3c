"""Test that only one process at a time holds the lock of a folder, even if processes die."""

import dataclasses
import errno
import os
import signal

import pytest

from mpidl.errors import FolderInUse, LostLock
from mpidl.training.files import lock_file
from mpidl.training.files.lock_file import NAME, LockFile
from mpidl.training.files.lock_holder import Holder

TAKERS = 8


def taker(folder, **values):
    """Return a LockFile whose holder is this process, except for the given values."""
    return LockFile(folder, dataclasses.replace(Holder.current({}), **values))


def taken(folder, **values):
    lock = taker(folder, **values)
    assert lock.attempt() is None
    return lock


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def fork():
    """Return a function that calls a given function in a child process and returns its PID."""
    pids = []

    def fork(function):
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                code = function()
            finally:
                os._exit(code)
        pids.append(pid)
        return pid

    yield fork
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ChildProcessError, ProcessLookupError):
            pass


@pytest.fixture(params=["links", "no links"])
def file_system(request, monkeypatch):
    """Run the test on a file system with hard links, and on one without."""
    if request.param == "no links":

        def link(source, target):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)


def test_the_second_of_two_is_refused(tmp_path, file_system):
    first = taken(tmp_path, host="n1")
    second = taker(tmp_path)
    with pytest.raises(FolderInUse, match=f"^process {os.getpid()} on host n1 since "):
        second.attempt()
    first.check()
    assert names(tmp_path) == [NAME]
    first.release()
    assert names(tmp_path) == []
    assert second.attempt() is None


def killed_holder(folder, fork):
    """Start a process that takes the lock, even from a dead holder, and kill the process."""
    reader, writer = os.pipe()

    def hold():
        LockFile(folder, Holder.current({})).attempt()
        os.write(writer, b"x")
        signal.pause()

    pid = fork(hold)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow("jobs"))])
def test_a_killed_holder_has_a_successor(tmp_path, fork, count):
    for _ in range(count):
        killed_holder(tmp_path, fork)
    taken(tmp_path).release()
    assert names(tmp_path) == []


def test_ended_holders_have_successors_50_times(tmp_path, file_system):
    for _ in range(50):
        taken(tmp_path, process_start=1)
    taken(tmp_path).release()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("job", "count"),
    [
        ({"SLURM_JOB_ID": "7"}, "SLURM_RESTART_COUNT"),
        ({"MPIDL_JOB_TOKEN": "ab"}, "MPIDL_JOB_START"),
    ],
    ids=["Slurm", "mpidl launch"],
)
def test_a_job_that_is_started_again_takes_over_its_lock_50_times(tmp_path, job, count):
    """A restarted job takes the lock on any machine, even if its earlier process seems alive."""
    locks = []
    for start in range(51):
        holder = Holder.current(job | {count: str(start)})
        holder = dataclasses.replace(holder, machine=f"machine {start}")
        locks.append(LockFile(tmp_path, holder))
        assert locks[-1].attempt() is None
    assert taker(tmp_path).attempt() is not None  # another job cannot take the lock
    for lock in locks[:-1]:
        lock.release()  # does not remove the lock of the last holder
        with pytest.raises(LostLock, match=f"{NAME}: this run has lost its lock: process "):
            lock.check()
    locks[-1].check()
    locks[-1].release()
    assert names(tmp_path) == []


def race(folder, fork):
    """Let processes try to take the lock at the same time. Return how many succeed."""
    readers, start = [], os.pipe()
    end = os.pipe()
    for _ in range(TAKERS):
        reader, writer = os.pipe()

        def take(writer=writer):
            os.close(start[1])
            os.close(end[1])
            os.read(start[0], 1)  # returns in all children when the parent closes the pipe
            lock = LockFile(folder, Holder.current({}))
            try:
                while lock.attempt() is not None:  # the lock file may not have its content yet
                    pass
                os.write(writer, b"1")
            except FolderInUse:
                os.write(writer, b"0")
            os.read(end[0], 1)  # the winners stay alive until all have tried
            return 0

        fork(take)
        os.close(writer)
        readers.append(reader)
    os.close(start[1])
    answers = b"".join(os.read(reader, 1) for reader in readers)
    os.close(end[1])
    for descriptor in (*readers, start[0], end[0]):
        os.close(descriptor)
    assert len(answers) == TAKERS, answers
    return answers.count(b"1")


def check_race(parent, fork, kind, rounds):
    for number in range(rounds):
        folder = parent / str(number)
        folder.mkdir()
        if kind != "no lock":
            dead = taken(folder, process_start=1)
        if kind == "dead successor":
            successor = taker(folder, process_start=1)
            claim = folder / f".{NAME}.{dead.holder.token}.claim"
            claim.write_bytes(successor.holder.content())
        assert race(folder, fork) == 1
        assert names(folder) == [NAME]


def test_one_of_many_takers_wins(tmp_path, fork):
    check_race(tmp_path, fork, "dead holder", 1)


@pytest.mark.slow("jobs")
@pytest.mark.parametrize("kind", ["no lock", "dead holder", "dead successor"])
def test_one_of_many_takers_wins_each_time(tmp_path, fork, file_system, kind):
    check_race(tmp_path, fork, kind, 10)


class Overtaken(LockFile):
    """A slow process: a faster process takes the lock after both see that its holder is dead."""

    winner = None

    def _is_free(self, entry, now):
        is_free = super()._is_free(entry, now)
        if self.winner is None:
            self.winner = taken(self.folder)
        return is_free


class Blind(Overtaken):
    """A faulty process that does not check again whether the dead holder still has the lock."""

    def _succeed(self, chain, part):
        os.replace(part, self.path)
        return True


@pytest.mark.parametrize("kind", [Overtaken, Blind])
def test_a_slow_taker_does_not_remove_the_lock_of_a_fast_one(tmp_path, kind):
    taken(tmp_path, process_start=1)
    slow = kind(tmp_path, Holder.current({}))
    if kind is Blind:  # the negative control: two processes believe that they hold the lock
        assert slow.attempt() is None
        return
    with pytest.raises(FolderInUse):
        slow.attempt()
    slow.winner.check()
    assert names(tmp_path) == [NAME]


@pytest.fixture
def short_times(monkeypatch):
    """Make locks of other machines expire after 0.05 s."""
    monkeypatch.setattr(lock_file, "STALE_SECONDS", 0.05)
    monkeypatch.setattr(lock_file, "WATCH_SECONDS", 0.0)


def test_a_lock_of_another_machine_is_free_if_nobody_renews_it(tmp_path, short_times):
    first = taken(tmp_path, machine="other")
    second = taker(tmp_path)
    entry = second.attempt()
    assert entry.holder == first.holder
    while second.attempt() is not None:
        pass
    with pytest.raises(LostLock, match=f"process {os.getpid()} on host .* holds it"):
        first.check()


def test_an_old_time_alone_does_not_free_a_lock(tmp_path, monkeypatch):
    """A process first watches an old lock, because the other machine's clock may be slow."""
    first = taken(tmp_path, machine="other")
    os.utime(first.path, (1, 1))
    second = taker(tmp_path)
    assert second.attempt().holder == first.holder
    monkeypatch.setattr(lock_file, "WATCH_SECONDS", 0.0)
    assert taker(tmp_path).attempt() is None


def test_a_lock_of_another_machine_is_in_use_if_it_is_renewed(tmp_path):
    first = taken(tmp_path, machine="other")
    os.utime(first.path, (1, 1))
    second = taker(tmp_path)
    assert second.attempt().holder == first.holder
    first.renew()
    with pytest.raises(FolderInUse):
        second.attempt()
    assert not first.is_lost


@pytest.mark.parametrize("content", [b"", b"\0\xff" * 5000])
def test_an_unreadable_lock_is_free_after_a_while(tmp_path, short_times, content):
    (tmp_path / NAME).write_bytes(content)
    lock = taker(tmp_path)
    assert lock.attempt().description == "a process that cannot be identified"
    while lock.attempt() is not None:
        pass
    lock.check()
    assert names(tmp_path) == [NAME]


def test_a_removed_lock_is_lost(tmp_path):
    lock = taken(tmp_path)
    lock.check()
    os.unlink(lock.path)
    lock.check(seconds=1000)  # checked a moment ago
    with pytest.raises(LostLock, match="the file has been removed"):
        lock.check()
    other = taken(tmp_path)
    assert lock.is_lost
    lock.release()
    other.check()


def test_a_file_server_that_does_not_answer_takes_no_lock_away(tmp_path, monkeypatch):
    lock = taken(tmp_path)

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", fail)
        lock.check()
    assert not lock.is_lost


def test_a_full_disk(tmp_path, monkeypatch):
    """On a full disk, a lock can be released, but no lock can be taken."""
    lock, write = taken(tmp_path), os.write

    def fail(descriptor, content):
        write(descriptor, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    lock.release()
    assert names(tmp_path) == []
    with pytest.raises(OSError, match="No space left"):
        taker(tmp_path).attempt()
    assert names(tmp_path) == []


def test_files_of_killed_takers_are_removed(tmp_path):
    old, young = f".{NAME}.0123.part", f".{NAME}.4567.claim"
    for name in (old, young, f".{NAME}.notes"):
        (tmp_path / name).touch()
    os.utime(tmp_path / old, (1, 1))
    taken(tmp_path)
    assert names(tmp_path) == sorted([young, f".{NAME}.notes", NAME])


def test_a_repeated_request_of_a_file_server(tmp_path, monkeypatch):
    """NFS may create a link, lose the reply, and find the link when it repeats the request."""
    link = os.link

    def link_twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    taken(tmp_path).check()


def test_the_lock_of_a_process_that_is_known_to_have_ended_is_free_at_once(tmp_path):
    """If rank 0 is lost, its successor immediately takes over its lock, even on another machine."""
    first = taken(tmp_path, machine="other")
    heir = LockFile(tmp_path, Holder.current({}), predecessor=first.holder.token)
    assert heir.attempt() is None
    with pytest.raises(LostLock):
        first.check()
    heir.release()
    assert names(tmp_path) == []
