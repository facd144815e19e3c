"""Test the separate process that writes checkpoints and plots, and its faults."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys

import faulty_calls
import faulty_saves
import limits
import numpy as np
import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.errors import Fault, LostLock, UserError
from mpidl.report import plots
from mpidl.training.files import background, checkpoint, lock_file, model_file
from mpidl.training.files.background import BackgroundWriter
from mpidl.training.files.lock_holder import Holder


@pytest.fixture
def writer(monkeypatch):
    """Return a writer that uses its process for checkpoints of any size."""
    monkeypatch.setattr(background, "SMALL", 0)
    writer = BackgroundWriter()
    yield writer
    writer.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    return tmp_path


def save(writer, folder, tables, iteration, claim=None):
    facts = {**faulty_saves.FACTS, "iteration": iteration}
    writer.save(str(folder), tables, facts, str(folder / "metrics.jsonl"), claim)


def all_kinds_of_arrays():
    return {
        "learnables": {
            "a.weight": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
            "b.empty": np.zeros((0, 3), np.float32),
            "c.big": np.arange(5, dtype=">f8"),
        },
        "none": {},
        "sums": {"loss": np.array(0.1), "flags": np.array([True, False]), "n": np.int64(7)},
    }


def test_the_process_writes_the_same_bytes_as_they_were_at_the_call(writer, folder):
    tables = all_kinds_of_arrays()
    checkpoint.save(folder, tables, {**faulty_saves.FACTS, "iteration": 1})
    expected = (folder / "checkpoint.h5").read_bytes()
    save(writer, folder, tables, 1)
    writer.process.send_signal(signal.SIGTERM)  # schedulers send SIGTERM to all processes of a job
    tables["learnables"]["a.weight"][:] = -1  # as in the next training step
    writer.plot(str(folder / "metrics.jsonl"), str(folder / "progress.png"), wait=False)
    save(writer, folder, tables, 2)  # waits for the previous checkpoint
    assert (folder / "checkpoint.h5").read_bytes() == expected
    writer.wait()
    assert (folder / "checkpoint-previous.h5").read_bytes() == expected
    arrays, facts = checkpoint.load(folder)
    assert (arrays["learnables"]["a.weight"] == -1).all() and facts["iteration"] == 2
    names = {"checkpoint.h5", "checkpoint-previous.h5", "metrics.jsonl"}
    assert set(os.listdir(folder)) - {"progress.png"} == names
    picture = str(folder / "progress.png")
    assert os.path.exists(picture) == bool(plots.progress(str(folder / "metrics.jsonl"), picture))

    shutil.rmtree(folder)
    process = writer.process
    save(writer, folder, tables, 3)
    for call in (writer.wait, writer.check, lambda: save(writer, folder, tables, 4)):
        with pytest.raises(UserError, match="metrics.jsonl: cannot be written: No such file"):
            call()
    writer.close()
    assert process.returncode == 0


@pytest.mark.parametrize("small", [0, 1 << 30])
def test_a_run_that_has_lost_its_lock_leaves_the_files_of_the_other(folder, monkeypatch, small):
    """A job that was suspended during a save does not overwrite the files of its successor."""
    monkeypatch.setattr(background, "SMALL", small)
    lock = lock_file.LockFile(folder, Holder.current())
    assert lock.attempt() is None
    claim, writer = (str(folder), lock.holder.token), BackgroundWriter()
    save(writer, folder, all_kinds_of_arrays(), 1, claim)
    writer.wait()
    pack = model_file.pack

    def continue_the_run():
        os.unlink(lock.path)
        assert lock_file.LockFile(folder, Holder.current()).attempt() is None
        checkpoint.save(folder, all_kinds_of_arrays(), {**faulty_saves.FACTS, "iteration": 9})

    def packed_late(*arguments):
        content = pack(*arguments)
        monkeypatch.setattr(model_file, "pack", pack)
        continue_the_run()
        return content

    if writer.process:
        writer.process.send_signal(signal.SIGSTOP)
        save(writer, folder, all_kinds_of_arrays(), 2, claim)
        continue_the_run()
        writer.process.send_signal(signal.SIGCONT)
    else:
        monkeypatch.setattr(model_file, "pack", packed_late)
    with pytest.raises(LostLock, match="run.lock: this run has lost its lock: process "):
        save(writer, folder, all_kinds_of_arrays(), 3, claim)
    assert checkpoint.load(folder)[1]["iteration"] == 9
    writer.close()


def test_a_process_that_is_killed_is_a_fault(writer, folder):
    save(writer, folder, all_kinds_of_arrays(), 1)
    writer.wait()
    writer.process.kill()
    save(writer, folder, all_kinds_of_arrays(), 2)
    with pytest.raises(Fault, match="writing the checkpoint was killed by signal 9; the last"):
        writer.wait()
    assert checkpoint.load(folder)[1]["iteration"] == 1


def test_small_checkpoints_and_a_last_plot_need_no_process(folder, monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(background.side_process, "start", refuse)
    writer = BackgroundWriter()
    save(writer, folder, all_kinds_of_arrays(), 1)
    assert checkpoint.load(folder)[1]["iteration"] == 1
    drawn = []
    monkeypatch.setattr(plots, "progress", lambda *paths: drawn.append(paths))
    writer.plot("metrics.jsonl", "progress.png", wait=True)
    assert drawn == [("metrics.jsonl", "progress.png")]
    # If no process can be started, rank 0 itself writes the checkpoint.
    monkeypatch.setattr(background, "SMALL", 0)
    save(writer, folder, all_kinds_of_arrays(), 2)
    assert checkpoint.load(folder)[1]["iteration"] == 2
    writer.close()


class RemovesTheMetrics:
    """A hook that counts steps and removes metrics.jsonl, so the next checkpoint fails."""

    def __init__(self, folder):
        self.folder, self.steps = folder, 0

    def step(self, trainer):
        self.steps += 1
        if trainer.position.iteration == 2 and trainer.world.rank == 0:
            os.unlink(os.path.join(self.folder, "metrics.jsonl"))


def train(world, out, **arguments):
    net = small()
    options = dl.TrainingOptions(
        epochs=40, batch_size=40, checkpoint_every=1, plots="none", verbose="off"
    )
    return net, dl.train(net, pictures(100), options, world=world, out=out, **arguments)


def test_all_ranks_end_when_a_checkpoint_cannot_be_written(world, tmp_path, monkeypatch):
    monkeypatch.setattr(background, "SMALL", 0)
    folder = world.broadcast(str(tmp_path / "run"))
    hook = RemovesTheMetrics(folder)
    with pytest.raises(UserError, match="run/metrics.jsonl: cannot be written: No such file"):
        train(world, folder, hooks=[hook])
    assert 2 <= hook.steps < 120


def test_a_run_ends_when_its_files_are_written(world, tmp_path, monkeypatch):
    monkeypatch.setattr(background, "SMALL", 0)
    folder = world.broadcast(str(tmp_path / "run"))
    net, result = train(world, folder)
    if world.rank == 0:
        arrays, facts = checkpoint.load(folder)
        assert facts["position"]["iteration"] == result.iterations == 120
        assert sorted(os.listdir(folder)) == [
            "checkpoint-previous.h5",
            "checkpoint.h5",
            "metrics.jsonl",
            "status.json",
        ]
    world.barrier()


@pytest.mark.slow("saves")
@pytest.mark.timeout(300)
def test_a_checkpoint_loads_whichever_system_call_kills_the_process(folder, monkeypatch, tmp_path):
    library = str(faulty_calls.compiled(tmp_path))
    run = folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    monkeypatch.setattr(background, "SMALL", 0)
    for iteration in (1, 2):
        checkpoint.save(run, all_kinds_of_arrays(), {**faulty_saves.FACTS, "iteration": iteration})
    for number in itertools.count(1):
        writer = BackgroundWriter()
        with monkeypatch.context() as patch:
            patch.setenv("LD_PRELOAD", library)
            patch.setenv("FAULTY_FOLDER", str(run))
            patch.setenv("FAULTY_CALL", str(number))
            patch.setenv("FAULTY_ERROR", str(faulty_calls.KILL))
            save(writer, run, all_kinds_of_arrays(), 2 + number)
        try:
            writer.wait()
        except Fault as fault:
            assert str(fault).endswith("was killed by signal 9; the last checkpoint is kept")
        else:
            break
        finally:
            writer.close()
        assert checkpoint.load(run, warn=lambda line: None)[1]["iteration"] in (
            1 + number,
            2 + number,
        )
        checkpoint.save(run, all_kinds_of_arrays(), {**faulty_saves.FACTS, "iteration": 2 + number})
        files = {"checkpoint.h5", "checkpoint-previous.h5", "metrics.jsonl"}
        assert set(os.listdir(run)) == files
    assert number > 15


ORPHAN = """
import pathlib, sys, time
import faulty_saves
from mpidl.training.files import background
background.SMALL = 0
folder = pathlib.Path(sys.argv[1])
(folder / "metrics.jsonl").touch()
writer = background.BackgroundWriter()
writer.save(str(folder), *faulty_saves.arguments(1), str(folder / "metrics.jsonl"))
print(writer.process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.slow("saves")
def test_the_process_ends_when_rank_0_is_killed(folder):
    path = os.pathsep.join([os.path.dirname(faulty_saves.__file__), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, folder],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as rank:
        process = int(rank.stdout.readline())
        rank.kill()
    limits.wait_until(lambda: not os.path.exists(f"/proc/{process}"))
