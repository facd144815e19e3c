"""Test faults of an HTTP store on loopback: the client retries or reports an error in one line."""

import contextlib
import functools
import http.server
import subprocess
import sys

import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal
from object_store import LoopbackServer, QuietHandler

from mpidl.data import ArrayDatastore, HDF5Datastore, ImageFolder, configure_storage, pack, paths
from mpidl.data.formats.packed import PackedDatastore
from mpidl.data.storage import retries
from mpidl.errors import StorageFault


class Server(LoopbackServer):
    """Serves `content` as /set.h5; `faults` lists the faults of the next GET requests.

    A fault is an HTTP status, "drop" to close the connection in the middle of the reply, or
    "refuse" to close the connection before the reply.
    """

    def __init__(self, content):
        self.content, self.tag, self.faults, self.count = content, "1", [], 0
        self.encoding = None
        super().__init__(Handler)
        self.url += "/set.h5"


class Handler(QuietHandler):
    def do_GET(self):
        server = self.server
        server.count += self.command == "GET"
        fault = server.faults.pop(0) if server.faults and self.command == "GET" else None
        if self.path != "/set.h5":
            fault = 404
        if fault == "refuse":
            self.close_connection = True
            return
        content, status = server.content, fault or 200
        headers = {"ETag": f'"{server.tag}"'}
        span = self.headers.get("Range")
        if span and status == 200:
            start, stop = map(int, span.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {start}-{stop}/{len(content)}"
            content, status = content[start : stop + 1], 206
        if server.encoding:
            headers["Content-Encoding"] = server.encoding
        if isinstance(fault, int):
            content = b""
        self.send_response_only(206 if fault == "drop" else status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "drop":
            content, self.close_connection = content[: len(content) // 2], True
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET


UNFINISHED = """
import asyncio, atexit, sys, time

atexit.register(lambda: print(len(asyncio.all_tasks(store.fs.loop))))  # runs last

from mpidl.data.storage import objects
from mpidl.data.storage.store import store_of
from mpidl.files import Stamp

store = store_of(sys.argv[1])
requests = [objects.request(sys.argv[1], Stamp(1 << 20, 0)) for _ in range(200)]
time.sleep(0.2)
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.005)
    configure_storage()
    images = ArrayDatastore(pixels_of(0, 40, 1, 8, 8), np.arange(40) % 3)
    pack({"train": images}, tmp_path / "set.h5")
    running = Server((tmp_path / "set.h5").read_bytes())
    yield running
    running.close()
    configure_storage()


def test_requests_are_repeated(server):
    """A busy store, time-outs, truncated replies and closed connections only delay the images."""
    store = PackedDatastore(server.url)
    expected = pixels_of(0, 40, 1, 8, 8)
    for fault in (503, 429, 500, "drop", "refuse"):
        server.faults = [fault] * 2
        server.count = 0
        assert store.read([7, 3]).tobytes() == expected[[7, 3]].tobytes()
        assert not server.faults and server.count == 3, fault
    server.faults = [503, "drop"] * 3
    assert len(HDF5Datastore(server.url, images="train/images", labels="train/labels")) == 40
    assert not server.faults


def test_requests_are_cancelled_when_the_process_ends(server):
    """Cancelling avoids asyncio's message "Task was destroyed but it is pending!"."""
    server.faults = [503] * 1000  # the request is repeated until the process ends
    command = [sys.executable, "-c", UNFINISHED, server.url]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (process.stdout, process.stderr) == ("0\n", "")


def test_an_object_that_is_stored_compressed(server):
    """The stored bytes are read without decompression."""
    server.encoding = "gzip"
    store = PackedDatastore(server.url)
    assert store.read([3]).tobytes() == pixels_of(0, 40, 1, 8, 8)[[3]].tobytes()


def test_a_server_that_cannot_be_reached_is_no_missing_file(server):
    configure_storage(retry_seconds=0.1)
    server.server_close()
    with pytest.raises(StorageFault, match="the store did not answer for 0.1 s"):
        ImageFolder(server.url)


class Folder(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_index_pages_show_no_sizes(tmp_path):
    """Index pages without sizes and with encoded names give the folder's images and classes."""
    grow(tmp_path, classes=("a b", "ü&c", "z"))
    handler = functools.partial(Folder, directory=tmp_path)
    with contextlib.closing(LoopbackServer(handler)) as running:
        local, remote = (ImageFolder(path) for path in (tmp_path, running.url))
        assert remote.classes == local.classes and remote.sizes.tolist() == local.sizes.tolist()
        assert remote.read(range(9)).tobytes() == local.read(range(9)).tobytes()


def test_a_store_that_does_not_answer_in_time(server, capsys, monkeypatch):
    monkeypatch.setattr(retries, "NOTICE_SECONDS", 0.0)
    store = PackedDatastore(server.url)
    configure_storage(retry_seconds=1)
    store.read([0])  # the first request to a store takes longer
    server.faults = [503] * 1000
    with pytest.raises(StorageFault) as caught:
        store.read([1])
    text = f"{server.url}: the store did not answer for 1 s (--retry-seconds): HTTP status 503"
    assert str(caught.value).startswith(text)
    assert capsys.readouterr().err.count("trying again for 1 s at most") == 1
    assert len(server.faults) > 985  # the time between attempts grows


def test_refusals_of_the_store(server):
    store = PackedDatastore(server.url)
    for status, text in (
        (401, "HTTP status 401"),
        (403, "HTTP status 403"),
        (404, "HTTP status 404"),
    ):
        server.faults = [status] * 2  # one for the read-ahead, one for the request itself
        line = refusal(store.read, [1])
        assert line.startswith(f"{server.url}: {text}") and retries.HINTS[status] in line
    server.faults = []
    text = refusal(PackedDatastore, server.url.replace("set", "other"))
    assert text == f"{server.url.replace('set', 'other')}: no such file"
    server.tag = "2"
    assert "the file has changed since the run began (same size)" in refusal(store.read, [1])


def test_a_damaged_file_does_not_crash_this_process(server):
    """A helper process first reads a remote HDF5 file. This process sends its requests."""
    content = bytearray(server.content)
    content[40:2000] = bytes(b ^ 0x55 for b in content[40:2000])
    server.content, server.tag = bytes(content), "damaged"
    text = refusal(HDF5Datastore, server.url)
    assert text.startswith(f"{server.url}: ")


def test_errors_of_botocore_are_understood():
    exceptions = pytest.importorskip("botocore.exceptions")
    for code, status, transient in (
        ("SlowDown", 503, True),
        ("RequestTimeout", 400, True),
        ("SignatureDoesNotMatch", 403, False),
        ("NoSuchBucket", 404, False),
    ):
        response = {
            "Error": {"Code": code, "Message": "some\nlines"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }
        error = exceptions.ClientError(response, "GetObject")
        translated = OSError("translated")
        translated.__cause__ = error
        for one_error in (error, translated):
            assert retries.is_transient(one_error) == transient
            assert retries.describe(one_error).startswith(f"{code}: some")
            assert "\n" not in retries.describe(one_error)
    assert not retries.is_transient(exceptions.NoCredentialsError())
    assert "AWS_PROFILE" in retries.describe(exceptions.NoCredentialsError())
    assert retries.is_transient(exceptions.EndpointConnectionError(endpoint_url="http://x"))


def test_without_fsspec_or_a_package_for_the_store(monkeypatch, tmp_path):
    grow(tmp_path / "photos")
    url = f"file://{tmp_path}/photos"
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    configure_storage(requests=7)  # different settings create another Store
    expected = "expected the package fsspec, which is not installed: pip install 'mpidl[s3]'"
    assert refusal(ImageFolder, url) == f"file://: {expected}"
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "paramiko", None)
    assert "a package is missing: " in refusal(paths.exists, "sftp://host/x")
    assert refusal(paths.exists, f"zip://{tmp_path}").startswith("zip://: ")
    text = refusal(paths.exists, "abfs://container/x")
    assert text == (
        "abfs://: expected the package adlfs, which is not installed: pip install adlfs"
    )
    configure_storage()
