"""Test answers that the processes of a host share. In some tests, threads replace processes."""

import os
import tempfile
import threading
from pathlib import Path

import pytest

from mpidl.data.formats import shared_answer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def ask(count, compute, patience=60):
    """Ask from `count` threads at once. Return their answers."""
    answers = [None] * count

    def work(i):
        answers[i] = shared_answer.shared_answer(("a.h5", 1), lambda: compute(i), patience)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def test_one_process_computes_for_all_that_wait(folder, monkeypatch):
    opened, computed, open_file = threading.Semaphore(0), [], os.open

    def count_opened(*arguments, **keywords):
        file = open_file(*arguments, **keywords)
        opened.release()
        return file

    def compute(i):
        for _ in range(4):  # wait until all threads ask
            assert opened.acquire(timeout=60)
        computed.append(i)
        return "a problem \udcff\nof two lines"

    monkeypatch.setattr(os, "open", count_opened)
    assert ask(4, compute) == ["a problem \udcff\nof two lines"] * 4
    assert len(computed) == 1 and list(folder.iterdir()) == []


def test_a_process_that_asks_alone_or_later_computes(folder):
    for i in range(2):
        assert ask(1, lambda _, i=i: f"{i}") == [f"{i}"]
    assert list(folder.iterdir()) == []


def test_an_error_of_one_process_is_not_shared(folder):
    with pytest.raises(ZeroDivisionError):
        shared_answer.shared_answer("q", lambda: 1 // 0, 60)
    assert shared_answer.shared_answer("q", lambda: "fine", 60) == "fine"
    assert list(folder.iterdir()) == []


def test_a_later_file_of_the_same_name_stays(folder):
    """A process that answers from a removed file keeps the file that another process created."""

    def replace_file(_):
        (path,) = folder.iterdir()
        path.unlink()
        path.write_text("of another process")
        return "own"

    assert ask(1, replace_file) == ["own"]
    assert [path.read_text() for path in folder.iterdir()] == ["of another process"]


@pytest.mark.parametrize("kind", ["link", "mode", "locked", "missing folder"])
def test_files_that_cannot_be_trusted_or_locked(folder, monkeypatch, kind):
    root = folder / "none" if kind == "missing folder" else Path(tempfile.gettempdir())
    path, target = Path(f"{root}/file"), Path(f"{folder}/target")
    text = str(path)  # pathlib, too, calls os.path.join
    monkeypatch.setattr(os.path, "join", lambda *_: text)
    if kind != "missing folder":
        path.write_text("planted")
        path.chmod(0o644 if kind == "mode" else 0o600)
    if kind == "link":
        path.rename(target)
        path.symlink_to(target)
    file = shared_answer.os.open(path, os.O_RDONLY) if kind == "locked" else None
    if file is not None:
        shared_answer.fcntl.flock(file, shared_answer.fcntl.LOCK_EX)  # held by a suspended process
    assert shared_answer.shared_answer("q", lambda: "own", 0.02) == "own"
    assert kind == "missing folder" or path.read_text() == "planted"
    if file is not None:
        os.close(file)


def test_without_a_folder_for_temporary_files(monkeypatch):
    def fail():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert shared_answer.shared_answer("q", lambda: "own", 60) == "own"
