"""Test packing: the bytes of the file, resuming after an interruption, and refused sources."""

import fcntl
import itertools
import os
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal, save

from mpidl.data import ArrayDatastore, ImageFolder, PackedDatastore
from mpidl.data.formats import packing


def test_the_same_content_gives_the_same_bytes(tmp_path):
    grow(tmp_path / "set")
    for name, threads in (("a.h5", 1), ("b.h5", 4)):
        packing.pack({"train": ImageFolder(tmp_path / "set")}, tmp_path / name, threads=threads)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of 30 images, which are packed in chunks of four."""
    monkeypatch.setattr(packing, "CHUNK", 4 * 30)
    grow(tmp_path / "set", per_class=10)
    return tmp_path / "set"


def pack(folder, name="x.h5", calls=99, **options):
    """Pack until call number `calls` of `stop`. Return (whether packing finished, chunks read)."""
    store, reads, count = ImageFolder(folder), [], itertools.count(1)
    read = store.read
    store.read = lambda indices: reads.append(indices[0]) or read(indices)
    sources, target = {"train": store}, folder.parent / name
    return packing.pack(sources, target, stop=lambda: next(count) >= calls, **options), reads


def test_an_interrupted_packing_is_resumed(folder, tmp_path):
    finished, first = pack(folder, calls=3)
    assert not finished and not (tmp_path / "x.h5").exists() and (tmp_path / ".x.h5.part").exists()
    counts = []
    finished, second = pack(folder, progress=counts.append)
    assert finished and len(first) >= 2
    assert sorted(first + second) == list(range(0, 30, 4)) and sum(counts) == 30  # every chunk once
    assert pack(folder, "y.h5")[0]
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "y.h5").read_bytes()


def test_a_torn_chunk_is_written_again(folder, tmp_path):
    assert not pack(folder, calls=6)[0]
    part = tmp_path / ".x.h5.part"
    with h5py.File(part) as file:
        offset = file["train/images"].id.get_offset()
    with open(part, "r+b") as file:  # a chunk that was half written at a power failure
        file.seek(offset + 130)
        file.write(bytes(50))
    finished, reads = pack(folder)
    assert finished and 4 in reads and 0 not in reads
    expected = ImageFolder(folder).read(np.arange(30))
    assert np.array_equal(PackedDatastore(tmp_path / "x.h5").read(np.arange(30)), expected)


@pytest.mark.parametrize("change", ["other set", "changed file", "no HDF5", "empty part"])
def test_the_part_of_another_packing_is_not_resumed(folder, tmp_path, change):
    assert not pack(folder, calls=6)[0]
    if change == "other set":
        save(folder / "cat" / "new.png", pixels_of(0, 1, 6, 5))
    elif change == "changed file":
        os.utime(folder / "cat" / "0.png", ns=(1, 1))
    else:
        (tmp_path / ".x.h5.part").write_bytes(b"no HDF5" if change == "no HDF5" else b"")
    finished, reads = pack(folder)
    store = ImageFolder(folder)
    assert finished and sorted(reads) == list(range(0, len(store), 4))
    assert PackedDatastore(tmp_path / "x.h5").fingerprint() == store.fingerprint()


def test_packing_is_resumed_after_a_bad_image(folder, tmp_path):
    bad = folder / "emu" / "5.png"
    content = bad.read_bytes()
    bad.write_bytes(b"x" * 50)
    text = refusal(pack, folder, threads=2)
    assert text.startswith(f"{bad}: expected a PNG") and not (tmp_path / "x.h5").exists()
    bad.write_bytes(content)
    assert pack(folder)[0]


def test_two_processes_do_not_pack_to_one_file(tmp_path):
    store = ArrayDatastore(pixels_of(0, 5, 4, 4), np.zeros(5, int))
    with open(tmp_path / ".x.h5.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        text = refusal(packing.pack, {"train": store}, tmp_path / "x.h5")
        assert text == f"{tmp_path}/.x.h5.part: another process is packing to this file"
    assert packing.pack({"train": store}, tmp_path / "x.h5")
    text = refusal(packing.pack, {"train": store}, tmp_path / "x.h5")
    assert text.startswith(f"{tmp_path}/x.h5: the file already exists")


def test_targets_that_cannot_be_written(tmp_path, monkeypatch):
    store = ArrayDatastore(pixels_of(0, 5, 4, 4), np.zeros(5, int))
    text = refusal(packing.pack, {"train": store}, tmp_path / "no" / "x.h5")
    assert text == f"{tmp_path}/no/x.h5: cannot be written: No such file or directory"
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: SimpleNamespace(free=79))
    text = refusal(packing.pack, {"train": store}, tmp_path / "x.h5")
    assert "expected 0 MB of free disk space, found 0 MB" in text
    monkeypatch.undo()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.os, "pwrite", full)
    text = refusal(packing.pack, {"train": store}, tmp_path / "x.h5")
    assert text == f"{tmp_path}/x.h5: cannot be written: No space left on device"
    empty = ArrayDatastore(np.zeros((0, 2, 2), np.uint8))
    assert "found none" in refusal(packing.pack, {"train": empty}, tmp_path / "x.h5")
