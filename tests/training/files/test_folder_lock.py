"""Test that only one run at a time uses a folder, and that a run that loses its lock stops."""

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
from limits import wait_until
from short_training import pictures, small

import mpidl as dl
from mpidl.errors import Fault, FolderInUse, LostLock, UserError
from mpidl.training.files import folder_lock, lock_file
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.files.lock_file import NAME, LockFile
from mpidl.training.files.lock_holder import Holder

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture
def folder(world, tmp_path):
    """Return a folder that all ranks use."""
    return Path(world.broadcast(str(tmp_path)))


@pytest.fixture(autouse=True)
def quick_renewals(monkeypatch):
    monkeypatch.setattr(lock_file, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.01)


def train(world, out, hooks=(), **arguments):
    options = dl.TrainingOptions(epochs=2, batch_size=40, verbose="off")
    net = small()
    dl.train(net, pictures(100), options, world=world, out=str(out), hooks=hooks, **arguments)
    return dl.weights_sha256(net)


def content(world, folder):
    """Return the content of a folder, {file name: bytes}, on all ranks."""
    world.barrier()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    world.barrier()
    return files


def holder(**values):
    return dataclasses.replace(Holder.current({}), **values)


@contextlib.contextmanager
def lock_of(world, folder, **values):
    """Hold the lock of a folder on rank 0 during the block, as another process would."""
    lock = LockFile(folder, holder(**values))
    if world.rank == 0:
        folder.mkdir(exist_ok=True)
        assert lock.attempt() is None
    world.barrier()
    yield lock
    world.barrier()
    if world.rank == 0:
        lock.release()
    world.barrier()


def test_a_second_training_is_refused(world, folder):
    """The error says that the folder is in use, and does not suggest resuming the other run."""
    out = folder / "run"
    expected = train(world, out)
    with lock_of(world, out, host="n1", job="7 of cluster blue"):
        before = content(world, out)
        advice = f"wait until it ends, write now to {out}/stop to end it with a checkpoint, or "
        text = "process [0-9]+ on host n1 \\(Slurm job 7 of cluster blue, restart 0\\) since .*; "
        for arguments, spelled in (
            ({}, "out="),
            ({"overwrite": True}, "out="),
            ({"resume": str(out)}, "out="),
        ):
            with pytest.raises(FolderInUse, match=f"^{spelled}{out}: in use by {text}{advice}"):
                train(world, out, **arguments)
        assert content(world, out) == before
    assert train(world, out, overwrite=True) == expected


def test_a_folder_that_is_resumed_is_locked(world, folder):
    out = folder / "run"
    train(world, out)
    net, options = small(), dl.TrainingOptions(epochs=3, batch_size=40, verbose="off")
    with lock_of(world, out), pytest.raises(FolderInUse, match=f"^resume={out}: in use by "):
        dl.train(net, pictures(100), options, world=world, resume=str(out))


def test_a_run_resumes_another_one_that_is_in_use(world, folder):
    """Resuming in another folder only reads the locked folder, so the lock does not matter."""
    first, second = folder / "first", folder / "second"
    expected = train(world, first)
    with lock_of(world, first):
        assert train(world, second, resume=str(first)) == expected


class AtIteration:
    """A hook that calls a function on rank 0 after an iteration."""

    def __init__(self, iteration, function):
        self.due_iteration, self.function = iteration, function

    def step(self, trainer):
        if trainer.position.iteration == self.due_iteration and trainer.world.rank == 0:
            self.function(trainer)
        trainer.world.barrier()


@pytest.mark.parametrize("end", ["done", "stopped", "fault", "user error"])
def test_the_lock_goes_at_every_end(world, folder, end):
    def look(trainer):
        assert Holder.parse((folder / NAME).read_bytes()).pid == os.getpid()

    class End:
        def step(self, trainer):
            if end == "stopped":
                trainer.stop()
            if end == "fault":
                raise Fault("NaN")
            if end == "user error":
                raise UserError("a.png: not an image")

    expects_error = end in ("fault", "user error")
    with pytest.raises((Fault, UserError)) if expects_error else contextlib.nullcontext():
        train(world, folder, [AtIteration(1, look), End()])
    assert NAME not in content(world, folder)
    train(world, folder, overwrite=True)


def replaced(out):
    """Replace the lock with another process's lock."""
    part = out / "part"
    part.write_bytes(holder(host="n2").content())
    os.replace(part, out / NAME)


def removed(out):
    os.unlink(out / NAME)


@pytest.mark.parametrize(
    ("lose", "cause"),
    [
        (replaced, "process [0-9]+ on host n2 since .* holds it"),
        (removed, "the file has been removed"),
    ],
)
def test_a_run_that_has_lost_its_lock_writes_nothing(world, folder, lose, cause):
    """The run writes no checkpoint, no buffered records and no error to status.json."""
    out, snapshot = folder / "run", {}

    def lose_lock(trainer):
        lose(out)
        wait_until(lambda: trainer.session.lock.is_lost)
        snapshot.update((path.name, path.read_bytes()) for path in out.iterdir())

    text = f"^{out}/{NAME}: this run has lost its lock: {cause}"
    with pytest.raises(LostLock, match=text):
        train(world, out, [AtIteration(4, lose_lock)])
    after = content(world, out)
    snapshot = world.broadcast(snapshot)
    assert "metrics.jsonl" in snapshot and "checkpoint.h5" in snapshot  # written in epoch 1
    if lose is removed:
        assert NAME not in after
    assert after == snapshot


def test_a_run_notices_the_loss_before_the_next_checkpoint(world, folder):
    """A thread checks the lock. If the lock is lost, the thread ends the run like a signal."""
    iterations = []

    class Wait:
        def step(self, trainer):
            iterations.append(trainer.position.iteration)
            if len(iterations) == 2 and world.rank == 0:
                removed(folder)
                wait_until(lambda: trainer.session.lock.is_lost)
            trainer.world.barrier()

    with pytest.raises(LostLock):
        train(world, folder, [Wait()])
    assert iterations == [1, 2]
    assert "checkpoint.h5" not in content(world, folder)


def test_a_lock_with_the_same_content_is_not_lost(world, folder):
    """Negative control: a lock file replaced by an identical file does not end the run."""

    def rewrite(trainer):
        path = folder / NAME
        part = folder / "part"
        part.write_bytes(path.read_bytes())
        os.replace(part, path)

    train(world, folder, [AtIteration(4, rewrite)])


def test_a_run_waits_for_a_lock_that_may_be_free(world, folder, monkeypatch, capfd):
    monkeypatch.setattr(lock_file, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(lock_file, "WATCH_SECONDS", 0.1)
    if world.rank == 0:
        assert LockFile(folder, holder(machine="other", host="n9")).attempt() is None
    world.barrier()
    train(world, folder)
    assert NAME not in content(world, folder)
    lines = [line for line in capfd.readouterr().err.splitlines() if "is locked by" in line]
    if world.rank == 0:
        (line,) = lines
        assert line.startswith(f"mpidl: {folder} is locked by process {os.getpid()} on host n9 ")
        assert line.endswith("ended: waiting up to 0.2 s to see whether it still runs")
    else:
        assert lines == []


def test_a_lock_is_renewed(world, folder):
    with FolderLock(world) as lock:
        lock.take(folder)
        if world.rank == 0:
            os.utime(folder / NAME, (1, 1))
            wait_until(lambda: os.stat(folder / NAME).st_mtime > 1)
    world.barrier()
    assert not (folder / NAME).exists()


def test_a_missing_folder_is_locked_when_it_is_created(world, folder):
    with FolderLock(world) as lock:
        lock.take(folder / "run", create=False)
        world.barrier()
        assert not (folder / "run").exists()
        world.barrier()
        lock.take(folder / "run")
        assert NAME in content(world, folder / "run")
        lock.take(folder / "run")  # a second call has no effect


def test_a_folder_that_cannot_be_written_to(world, folder):
    path = folder / "file"
    path.touch()
    with (
        FolderLock(world) as lock,
        pytest.raises(UserError, match=f"^--out {path}/run: cannot be wr"),
    ):
        lock.take(path / "run", "--out {}")


def test_the_next_rank_0_takes_over_the_lock_of_a_lost_one(world, folder, monkeypatch):
    machine = dataclasses.replace(Holder.current({}), machine="other", host="n1")
    with FolderLock(world) as lock:
        with monkeypatch.context() as patch:
            patch.setattr(folder_lock.Holder, "current", lambda: machine)
            lock.take(folder)
        lock.take_over()
        file, token = lock._file, lock._token
        assert token == world.broadcast(machine.token)  # rank 0 is not lost, so nothing changes
        lock._file = None  # simulate a rank that has never held the lock
        lock._thread = folder_lock.threading.Thread(target=lock._renew, daemon=True)
        lock.take_over()
        assert lock._token != token and (world.rank or lock._file.attempt is not None)
        lock.confirm()
        if world.rank == 0:
            with pytest.raises(LostLock):
                file.check()
    assert NAME not in content(world, folder)
