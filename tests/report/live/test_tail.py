"""Test reading metrics.jsonl while it grows."""

import json
import os

import pytest

from mpidl.report import Metrics
from mpidl.report.live import tail
from mpidl.report.live.folder import Folder
from mpidl.report.metrics import Cut


def line(iteration, **values):
    return json.dumps({"kind": "iteration", "iteration": iteration, **values}) + "\n"


def numbers(answer):
    """Return the iterations of the records, and whether reading has restarted at the beginning."""
    records, has_restarted = answer
    return [record["iteration"] for record in records], has_restarted


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def reader(tmp_path):
    return tail.Tail(Folder(str(tmp_path)))


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_each_record_is_returned_once(path, reader):
    assert numbers(reader.read()) == ([], False)
    append(path, line(1) + line(2))
    assert numbers(reader.read()) == ([1, 2], True)
    assert numbers(reader.read()) == ([], False)
    append(path, line(3))
    assert numbers(reader.read()) == ([3], False)


def test_half_a_line_is_returned_once_it_is_complete(path, reader):
    text = line(1) + line(2)
    for position in range(len(text)):
        append(path, text[position])
        expected = [1] if position == len(line(1)) - 1 else []
        expected = [2] if position == len(text) - 1 else expected
        assert numbers(reader.read()) == (expected, position == 0)


def test_lines_that_are_not_records_are_skipped(path, reader):
    append(path, "\n[]\n{}\n\x00\x01\n" + '{"iteration": "1"}\n' + "[" * 10**5 + "\n" + line(5))
    assert numbers(reader.read()) == ([5], True)
    assert reader.is_complete


def test_a_long_file_is_read_in_pieces(path, reader, monkeypatch):
    monkeypatch.setattr(tail, "PIECE", 100)
    count = 50
    append(path, "".join(map(line, range(count))))
    iterations, reads = [], 0
    while not reader.is_complete:
        iterations += numbers(reader.read())[0]
        reads += 1
    assert iterations == list(range(count)) and reads > 10


def test_a_line_beyond_the_limit_is_skipped(path, reader, monkeypatch):
    monkeypatch.setattr(tail, "PIECE", 64)
    monkeypatch.setattr(tail, "MAX_LINE", 100)
    append(path, line(1) + line(2, text="x" * 500) + line(3))
    iterations = []
    while not reader.is_complete:
        iterations += numbers(reader.read())[0]
    assert iterations == [1, 3] and len(reader.rest) <= 165


def test_a_resumed_run_that_cuts_the_file_restarts_it(path, reader):
    """A file that `Metrics` has cut is read again from the start, even if it is longer now."""
    append(path, "".join(map(line, range(1, 6))))
    assert numbers(reader.read()) == ([1, 2, 3, 4, 5], True)
    with Metrics(str(path), cut=Cut(2, 2)) as metrics:
        for iteration in range(3, 10):
            metrics.record("iteration", 1, iteration, 1.0, 0.1, 10.0, 1.0)
    assert numbers(reader.read()) == (list(range(1, 10)), True)
    assert numbers(reader.read()) == ([], False)


def test_a_file_that_is_written_anew_in_place_restarts(path, reader):
    append(path, "".join(map(line, range(1, 6))))
    reader.read()
    with open(path, "r+") as file:  # the same inode
        file.truncate()
        file.write("".join(map(line, range(11, 20))))
    assert numbers(reader.read()) == (list(range(11, 20)), True)


def test_a_file_that_disappears_and_returns(path, reader):
    append(path, line(1))
    reader.read()
    os.unlink(path)
    assert numbers(reader.read()) == ([], True)
    assert numbers(reader.read()) == ([], False)
    append(path, line(7))
    assert numbers(reader.read()) == ([7], True)


def test_only_regular_files_of_the_folder_are_read(tmp_path, path, reader):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    append(outside / "metrics.jsonl", line(1))
    path.symlink_to(outside / "metrics.jsonl")
    assert numbers(reader.read()) == ([], False)
    os.unlink(path)
    os.mkfifo(path)  # opening the pipe must not wait for a writer
    assert numbers(reader.read()) == ([], False)
    os.unlink(path)
    path.mkdir()
    assert numbers(reader.read()) == ([], False)
    # The folder that the user names may itself be a link.
    (tmp_path / "link").symlink_to(outside)
    linked = tail.Tail(Folder(str(tmp_path / "link")))
    assert numbers(linked.read()) == ([1], True)
