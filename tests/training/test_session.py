"""Test which folder a session prepares for a run, and which folders it refuses.

The tests run on one rank; test_run_folder.py tests whole runs on any number of ranks.
"""

import os

import pytest

import mpidl as dl
from mpidl import numerics
from mpidl.backends import settings
from mpidl.training.files import checkpoint
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.files.run_folder import COMMAND_WORDS
from mpidl.training.session import Session

RUN = ("checkpoint.h5", "checkpoint-previous.h5", "metrics.jsonl", "notes.txt")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current working folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "load", lambda folder: ({}, {"folder": folder}))
    return tmp_path


def session_of(*, title=None, **arguments):
    """Return a session of the command. With a title, its folder has been made."""
    from mpi4py import MPI

    world = dl.World(MPI.COMM_SELF, threads=1)
    with FolderLock(world) as lock:
        session = Session(world, lock, **arguments, words=COMMAND_WORDS)
        if title is not None:
            session.make_folder(title)
    return session


def refused(**arguments):
    """Return the message of the error that `session_of` raises. The message must be one line."""
    with pytest.raises(dl.UserError) as error:
        session_of(**arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_runs_from_before_the_first_numerics(folder, monkeypatch):
    """They continue with the arithmetic of numerics 1, and not with another one."""
    monkeypatch.setattr(numerics, "VERSION", 1)
    assert session_of(resume=({}, {})).checkpoint == ({}, {})
    monkeypatch.setattr(numerics, "VERSION", 2)
    assert refused(resume=({}, {})) == (
        "resume: expected a checkpoint of numerics 2, found one from before numerics 1, whose "
        "arithmetic gives other weights: to continue the run, use the mpidl that wrote the "
        "checkpoint"
    )
    assert session_of(resume=({}, {"numerics": 2})).checkpoint is not None


def test_a_run_without_a_folder_gets_a_new_one(folder):
    assert session_of(title="digits").out == "runs/digits"
    assert session_of(title="digits").out == "runs/digits-2"
    assert session_of(title="nets/my.py:small").out == "runs/small"
    session = session_of(title="digits", resume="runs/digits")
    assert session.out == "runs/digits" and session.checkpoint[1] == {"folder": "runs/digits"}


def test_files_of_an_earlier_run_are_removed(folder):
    assert session_of(out="mine/one", title="digits").out == "mine/one"
    for name in RUN:
        (folder / "mine/one" / name).write_text("old")
    assert session_of(out="mine/two", resume="mine/one", title="digits").out == "mine/two"
    assert os.listdir("mine/two") == ["metrics.jsonl"]
    assert set(os.listdir("mine/one")) == set(RUN)
    session_of(out="mine/one", overwrite=True, title="digits")
    assert os.listdir("mine/one") == ["notes.txt"]


@pytest.mark.parametrize("name", RUN[:2])
def test_a_folder_with_another_run_is_refused(folder, monkeypatch, name):
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    os.mkdir("run")
    session_of(out="run")
    session_of(out="none")
    (folder / "run" / name).write_text("old")
    text = refused(out="run")
    assert text.startswith("--out run: it contains a run, whose checkpoint cannot be loaded: ")
    assert text.endswith(": --resume run continues it, --overwrite replaces it")
    assert refused(out="run", resume=str(folder)) == text
    session_of(out="run", overwrite=True)
    monkeypatch.setattr(checkpoint, "load", lambda folder: ({}, {}))
    session_of(out="run", resume=f"{folder}/run")  # a different path of the same folder


def test_a_folder_that_cannot_be_created_is_refused(folder):
    (folder / "file").write_text("")
    out = str(folder / "file" / "run")
    assert refused(out=out, title="digits").startswith(f"--out {out}: cannot be written: ")
    (folder / "runs").write_text("")
    assert refused(title="digits").startswith("runs: cannot be written: ")


def test_a_run_computes_in_the_precision_of_its_options(folder, monkeypatch):
    """A run sets it, whatever an earlier run has set, and refuses what its device lacks."""
    monkeypatch.setattr(settings, "precision", "fp32")
    session = session_of()
    for precision in ("bf16", "fp32"):
        session.use_options(dl.TrainingOptions(precision=precision, device="cpu"))
        assert settings.precision == precision
    for device in ("auto", "cpu"):
        with pytest.raises(dl.UserError, match="^--precision tf32: expected fp32 or bf16 on CPUs;"):
            session.use_options(dl.TrainingOptions(precision="tf32", device=device))


def test_a_run_on_a_gpu_has_the_precision_of_its_options(folder, monkeypatch):
    """The precision of an earlier run does not count for the choice of the device."""
    monkeypatch.setattr(settings, "precision", "bf16")
    session, precisions = session_of(), []

    def use_device(device, gpus):
        precisions.append(settings.precision)
        settings.on_gpu = True
        return []

    monkeypatch.setattr(settings, "on_gpu", False)
    monkeypatch.setattr(session.world, "use_device", use_device)
    session.use_options(dl.TrainingOptions(device="gpu", precision="tf32"))
    assert precisions == ["fp32"] and settings.precision == "tf32"
    session.use_options(dl.TrainingOptions(device="gpu", precision="bf16"))
    assert precisions == ["fp32", "fp32"] and settings.precision == "bf16"
