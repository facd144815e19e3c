"""Test HDF5 files: layouts, labels and targets, and hostile and damaged files."""

import os
import signal
import subprocess
import sys

import datafiles
import h5py
import mutations
import numpy as np
import pytest
from image_sets import on_ranks, pixels_of, refusal

import mpidl as dl
from mpidl.data import HDF5Datastore, MinibatchQueue, open_data, open_test_data
from mpidl.data.formats import hdf5_probe


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (1, 4, 5, 3)}, {"chunks": (4, 2, 5, 3), "compression": "gzip"}],
    ids=["contiguous", "one image a chunk", "compressed"],
)
def test_images_and_labels(tmp_path, options):
    images, labels = pixels_of(0, 11, 3, 4, 5), np.arange(11) % 3
    path = datafiles.hdf5(
        tmp_path / "x.h5", images.transpose(0, 2, 3, 1), labels, ["a", "b", "c"], **options
    )
    store, test = open_data(str(path))
    assert test is None and store.classes == ["a", "b", "c"] and store.image_shape == (3, 4, 5)
    assert store.labels.dtype == np.int64 and np.array_equal(store.labels, labels)
    for indices in ([10, 0, 3, 3, 9], np.arange(11), []):
        pixels = store.read(indices)
        assert pixels.dtype == np.uint8 and np.array_equal(pixels, images[indices])
    assert store.describe() == f"{path}: 11 images of 3x4x5 in 3 classes"
    assert store.located(2) == f"{path}: image 2"
    stores = on_ranks(3, lambda world: HDF5Datastore(path, world))
    assert {s.fingerprint() for s in stores} == {store.fingerprint()}
    assert all(np.array_equal(s.read([4]), images[[4]]) for s in stores)


@pytest.mark.parametrize(
    ("layout", "order"), [("NHWC", (0, 2, 3, 1)), ("NCHW", (0, 1, 2, 3)), (None, None)]
)
def test_layouts(tmp_path, layout, order):
    images = pixels_of(0, 6, 3, 3, 3)
    stored = images.transpose(order) if order else images[:, 0]
    path = datafiles.hdf5(tmp_path / "x.h5", stored, np.zeros(6, int), layout=layout)
    assert np.array_equal(HDF5Datastore(path).read(np.arange(6))[:, 0], images[:, 0])
    if layout:
        path = datafiles.hdf5(tmp_path / "y.h5", stored, np.zeros(6, int))
        text = refusal(HDF5Datastore, path)
        assert "(6, 3, 3, 3) may be NHWC or NCHW: set the attribute layout" in text
        assert np.array_equal(HDF5Datastore(path, layout=layout).read(np.arange(6)), images)
    assert "expected " in refusal(HDF5Datastore, path, layout="HWC")


def test_each_chunk_is_read_once_per_mini_batch(tmp_path, monkeypatch):
    images, labels = pixels_of(0, 40, 2, 2), np.zeros(40, int)
    store = HDF5Datastore(datafiles.hdf5(tmp_path / "x.h5", images, labels, chunks=(10, 2, 2)))
    reads, get = [], h5py.Dataset.__getitem__

    def spy(dataset, key):
        reads.append(key)
        return get(dataset, key)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    store.read([35, 2, 9, 31, 1, 0])
    assert reads == [slice(0, 10), slice(31, 36)]


def test_float_images_and_targets(tmp_path):
    images = np.random.default_rng(0).normal(size=(7, 2, 3, 4))
    targets = np.arange(14.0).reshape(7, 2)
    path = datafiles.hdf5(tmp_path / "x.h5", images, layout="NCHW", targets=targets)
    store = HDF5Datastore(path)
    assert store.dtype == np.float32 and store.targets_shape == (2,) and store.labels is None
    assert np.array_equal(store.read([5]), images[[5]].astype(np.float32))
    ((x, y),) = MinibatchQueue(store, shuffle="never").epoch(0)
    assert y.dtype == np.float32 and np.array_equal(y.local(), targets)
    codes = np.arange(42).reshape(7, 2, 3)
    path = datafiles.hdf5(tmp_path / "y.h5", images, layout="NCHW", targets=codes)
    ((_, y),) = MinibatchQueue(HDF5Datastore(path), shuffle="never").epoch(0)
    assert y.dtype == np.int32 and np.array_equal(y.local(), codes)
    path = datafiles.hdf5(tmp_path / "z.h5", images, layout="NCHW", targets=np.full((7, 1), 2**31))
    assert "targets in the range of int32" in refusal(HDF5Datastore(path).targets, [0])


def test_labels(tmp_path):
    images = pixels_of(0, 4, 2, 2)
    for labels in (np.array([0.0, 1.0, 2.0, 1.0]), np.array([[0], [1], [2], [1]], np.uint8)):
        path = datafiles.hdf5(tmp_path / "x.h5", images, labels)
        assert HDF5Datastore(path).labels.tolist() == [0, 1, 2, 1]
    for labels, text in (
        ([0.5, 1, 2, 3], "fractions; store numeric targets in a dataset targets"),
        ([0, 0, 0], "expected one label per image, (4,), found shape (3,)"),
        ([[0, 0], [0, 0]], "found shape (2, 2)"),
    ):
        assert text in refusal(HDF5Datastore, datafiles.hdf5(tmp_path / "x.h5", images, labels))


def test_class_names(tmp_path):
    images = pixels_of(0, 4, 2, 2)
    path = datafiles.hdf5(tmp_path / "x.h5", images, [0, 1, 1, 0], ["cat", "dog"])
    assert HDF5Datastore(path, classes=["dog", "emu", "cat"]).labels.tolist() == [2, 0, 0, 2]
    assert "class dog is not one of the classes (cat)" in refusal(
        HDF5Datastore, path, classes=["cat"]
    )
    path = datafiles.hdf5(tmp_path / "x.h5", images)
    text = refusal(HDF5Datastore, path)
    assert (
        text == f"{path}: expected a dataset labels or targets in addition to images; found images"
    )
    assert HDF5Datastore(path, labelled=False).labels is None
    assert open_test_data(str(path), labelled=False, classes=["a"]).classes == ["a"]


def test_links_to_other_files_are_refused(tmp_path):
    secret = datafiles.hdf5(tmp_path / "secret.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    (tmp_path / "raw").write_bytes(bytes(100))
    layout = h5py.VirtualLayout((4, 2, 2), np.uint8)
    layout[...] = h5py.VirtualSource(str(secret), "images", (4, 2, 2))

    def linked(file):
        file["images"] = h5py.ExternalLink(str(secret), "images")

    def soft(file):
        file["images"] = h5py.SoftLink("/labels")

    def virtual(file):
        file.create_virtual_dataset("images", layout)

    def external(file):
        raw = [(str(tmp_path / "raw"), 0, 16)]
        file.create_dataset("images", (4, 2, 2), np.uint8, external=raw)

    for make in (linked, soft, virtual, external):
        path = tmp_path / f"{make.__name__}.h5"
        with h5py.File(path, "w") as file:
            file["labels"] = [0, 1, 0, 1]
            make(file)
        text = refusal(open_data, str(path))
        assert text.startswith(f"{path}: images: expected ") and "found a" in text


def test_hostile_files_are_refused(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:  # a petabyte of images that were never written
        file.create_dataset("images", (1 << 40, 32, 32), np.uint8, chunks=(1, 32, 32))
    assert "bytes of numbers, found 0 stored" in refusal(open_data, str(path))
    with h5py.File(path, "w") as file:
        shape = 2, 1 << 15, 1 << 14
        images = file.create_dataset("images", shape, np.uint8, chunks=(1, *shape[1:]))
        images.id.write_direct_chunk((0, 0, 0), bytes(100), 1)
        file["labels"] = [0, 1]
    assert refusal(open_data, str(path)).startswith(f"{path}: images: expected ")
    images = np.zeros((300, 1 << 10, 1 << 10), np.uint8)
    options = {"chunks": images.shape, "compression": "gzip"}
    datafiles.hdf5(path, images, np.zeros(300, int), **options)
    assert "expected chunks of 256 MB at most, found 300 MB" in refusal(open_data, str(path))
    datafiles.hdf5(path, np.array([b"text", b"more"]), [0, 1])
    assert "images: expected numbers, found" in refusal(open_data, str(path))
    with h5py.File(path, "w") as file:
        file["images/inner"] = [1]
    assert "images: expected a dataset, found a group" in refusal(open_data, str(path))
    datafiles.hdf5(path, pixels_of(0, 4, 2, 2).astype(np.int16), [0, 1, 0, 1])
    text = refusal(open_data, str(path))
    assert "expected uint8 (pixels 0 to 255) or floats, found int16" in text


def test_a_chunk_larger_than_the_file_is_refused(tmp_path):
    """A chunk's size in the index must not make HDF5 allocate more bytes than the file has."""
    path, images = tmp_path / "x.h5", pixels_of(0, 4, 20, 20)
    datafiles.hdf5(path, images, [0, 1, 0, 1], chunks=images.shape, compression="gzip")
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    (place,) = (
        i
        for i in range(len(content))
        if content[i : i + 4] == chunk.size.to_bytes(4, "little")
        and content[i + 40 : i + 48] == chunk.byte_offset.to_bytes(8, "little")
    )
    content[place + 3] = 200  # the highest byte of the size
    path.write_bytes(content)
    expected = f"{path}: images: expected {chunk.size + (200 << 24)} stored bytes in the file"
    assert refusal(open_data, str(path)).startswith(expected)


def test_a_heap_larger_than_the_file_is_refused(tmp_path):
    """A heap's size must not make HDF5 allocate more bytes than the file has."""
    path = datafiles.hdf5(tmp_path / "x.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    content = path.read_bytes()
    place = content.index(b"HEAP") + 8
    heap = (1 << 30).to_bytes(8, "little") + bytes(8) + (1 << 36).to_bytes(8, "little")
    path.write_bytes(content[:place] + heap + content[place + 24 :])  # size, free list, address
    expected = f"{path}: the file cannot be read: the HDF5 library needs more memory"
    assert refusal(open_data, str(path)).startswith(expected)
    path.write_bytes(content)
    assert len(HDF5Datastore(path)) == 4


def test_damaged_and_missing_files(tmp_path):
    path = tmp_path / "x.h5"
    datafiles.hdf5(path, pixels_of(0, 400, 16, 16), np.zeros(400, int))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert refusal(open_data, str(path)).startswith(f"{path}: the file cannot be read: ")
    assert refusal(HDF5Datastore, tmp_path / "no.h5") == f"{tmp_path}/no.h5: no such file"


def test_a_file_that_changes_during_the_run(tmp_path):
    path = datafiles.hdf5(tmp_path / "x.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    store, late = HDF5Datastore(path), HDF5Datastore(path)
    store.read([0])
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    for reader in (store, late):
        text = refusal(reader.read, [1])
        assert text.startswith(f"{path}: the file has changed since the run began (same size)")


HELPERS = {  # {behaviour of the helper process: (its code, part of the error message)}
    "crashes": ("import os, sys; sys.stdin.buffer.readline(); os.kill(os.getpid(), 11)", "SIGSEGV"),
    "hangs": ("import time; time.sleep(60)", "did not finish reading it within 0.5 s"),
    "does not start": ("raise SystemExit(1)", None),
    "has ended": ("", None),
}


@pytest.mark.parametrize("kind", HELPERS)
def test_a_helper_process_reads_a_file_first(tmp_path, monkeypatch, kind):
    """If HDF5 crashes or hangs on a damaged file, only the helper process is affected."""
    path = datafiles.hdf5(tmp_path / "x.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    code, text = HELPERS[kind]
    start = subprocess.Popen
    monkeypatch.setattr(hdf5_probe, "HELPER", hdf5_probe.Helper())
    monkeypatch.setattr(hdf5_probe, "SECONDS", 0.5 if kind == "hangs" else 60)
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **options: start([words[0], "-c", code], **options)
    )
    if text is None:
        assert len(HDF5Datastore(path)) == 4
    else:
        message = refusal(open_data, str(path))
        assert message.startswith(f"{path}: the file cannot be read: the HDF5 library ")
        assert text in message


def test_one_helper_process_reads_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5_probe, "HELPER", hdf5_probe.Helper())
    paths = [tmp_path / name for name in ("a b\n.h5", "c.h5")]
    for path in paths:
        datafiles.hdf5(path, pixels_of(0, 4, 2, 2), [0, 1, 0, 1], ["x", "y"])
        HDF5Datastore(path)
    helper = hdf5_probe.HELPER.process
    assert helper.poll() is None  # one helper process for both files
    helper.kill()
    helper.wait()
    assert hdf5_probe.problem_of(paths[0], 1) is None
    assert hdf5_probe.HELPER.process is not helper
    hdf5_probe.HELPER.end()


def test_a_helper_that_nobody_ends_ends_itself(tmp_path, monkeypatch):
    """The helper ends even if its parent is killed while HDF5 hangs."""
    path = tmp_path / "model.h5"
    dl.save_model(path, dl.Network([dl.Dense(2)], (3,)))
    path.write_bytes(mutations.endless(path.read_bytes()))
    monkeypatch.setattr(hdf5_probe, "SECONDS", 0.5)
    helper = hdf5_probe.Helper().started()
    helper.stdin.write(os.fsencode(path).hex().encode() + b"\n")
    helper.stdin.close()
    assert helper.wait() == -signal.SIGPROF
    helper.stdout.close()


def test_a_helper_that_somebody_kills_is_started_again(tmp_path, monkeypatch):
    """A killed helper, for example after an out-of-memory error, does not mean a damaged file."""
    path = datafiles.hdf5(tmp_path / "x.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    killed = subprocess.Popen(
        [sys.executable, "-c", "import os; input(); os.kill(os.getpid(), 9)"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    helper = hdf5_probe.Helper()
    helper.process, helper.owner = killed, os.getpid()
    monkeypatch.setattr(hdf5_probe, "HELPER", helper)
    assert len(HDF5Datastore(path)) == 4
    assert helper.process is not killed
