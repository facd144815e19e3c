"""Test the file with which a user stops a run."""

import os

import pytest

from mpidl.report import stop_file


@pytest.mark.parametrize("moment", [stop_file.NOW, stop_file.EPOCH])
def test_a_request_is_read_until_it_is_removed(tmp_path, moment):
    stop_file.request(tmp_path, moment)
    assert os.listdir(tmp_path) == ["stop"]
    assert stop_file.read(tmp_path) == stop_file.read(tmp_path) == moment
    stop_file.remove(tmp_path)
    stop_file.remove(tmp_path)
    assert stop_file.read(tmp_path) is None and os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", ["now", " epoch\n\n"])
def test_a_shell_can_write_the_file(tmp_path, content):
    (tmp_path / "stop").write_text(content)
    assert stop_file.read(tmp_path) == content.strip()


@pytest.mark.parametrize("content", [b"", b"no", b"nowadays", b"\xff\xfe", b"now " * 1000])
def test_another_content_requests_nothing(tmp_path, content):
    (tmp_path / "stop").write_bytes(content)
    assert stop_file.read(tmp_path) is None


def test_links_pipes_and_folders_request_nothing(tmp_path):
    (tmp_path / "request").write_text("now")
    (tmp_path / "stop").symlink_to(tmp_path / "request")
    assert stop_file.read(tmp_path) is None
    os.unlink(tmp_path / "stop")
    os.mkfifo(tmp_path / "stop")  # a read that waits for a writer would hang
    assert stop_file.read(tmp_path) is None
    os.unlink(tmp_path / "stop")
    (tmp_path / "stop").mkdir()
    assert stop_file.read(tmp_path) is None


def test_the_run_of_a_colleague_can_read_the_file(tmp_path):
    before = os.umask(0o077)
    try:
        stop_file.request(tmp_path, stop_file.NOW)
    finally:
        os.umask(before)
    assert os.stat(tmp_path / "stop").st_mode & 0o777 == 0o644


def test_a_request_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        stop_file.request(tmp_path / "none", stop_file.NOW)
    (tmp_path / "stop").mkdir()
    with pytest.raises(OSError):
        stop_file.request(tmp_path, stop_file.NOW)
    assert os.listdir(tmp_path) == ["stop"]
    with pytest.raises(ValueError, match="now or epoch"):
        stop_file.request(tmp_path, "later")
