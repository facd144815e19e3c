"""Test packed datasets: their contents, checksums, and damaged files."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, save

from mpidl.cli import pack
from mpidl.data import ArrayDatastore, ImageFolder, NodeCache, PackedDatastore, combined, open_data
from mpidl.data.formats import pack_contents, packing


def packed_of(store, path, **options):
    """Pack a dataset and open the packed file."""
    assert packing.pack({"train": store}, path, **options)
    return PackedDatastore(path)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_packed_folder_is_the_folder(tmp_path, channels):
    grow(tmp_path / "set", shape=(channels, 6, 5))
    folder = ImageFolder(tmp_path / "set")
    store = packed_of(folder, tmp_path / "x.h5", threads=3)
    assert len(store) == 9 and store.image_shape == (channels, 6, 5) and store.dtype == np.uint8
    assert store.classes == folder.classes and np.array_equal(store.labels, folder.labels)
    assert store.fingerprint() == folder.fingerprint()
    for indices in ([8, 0, 3, 3, 4, 5], np.arange(9), [], [7]):
        assert np.array_equal(store.read(indices), folder.read(indices))
    assert [store.name(i) for i in (0, 8)] == ["cat/0.png", "emu/2.png"]
    assert store.located(4) == f"{tmp_path}/x.h5: dog/1.png"
    assert store.describe() == f"{tmp_path}/x.h5: 9 images of {channels}x6x5 in 3 classes"
    halves = [s.split(0.67, seed=3)[0] for s in (store, folder)]
    assert np.array_equal(halves[0].indices, halves[1].indices)
    assert sorted(os.listdir(tmp_path)) == ["set", "x.h5"]
    store.verify()


def test_names_that_are_not_utf8_or_hold_a_line_end(tmp_path):
    for name in (b"\xff", "é\n".encode()):
        path = save(tmp_path / "set" / "plain" / "0.png", pixels_of(0, 1, 4, 4))
        os.rename(path.parent, os.path.join(os.fsencode(tmp_path / "set"), name))
    folder = ImageFolder(tmp_path / "set")
    store = packed_of(folder, tmp_path / "x.h5")
    assert store.classes == folder.classes and store.fingerprint() == folder.fingerprint()
    assert [store.name(i) for i in (0, 1)] == ["é\\n/0.png", "\\xff/0.png"]
    text = refusal(PackedDatastore, tmp_path / "x.h5", classes=["a", "é\n"])
    assert text.endswith("class \\xff is not one of the classes (a, é\\n)")


def test_images_are_stored_in_one_piece(tmp_path):
    images = pixels_of(0, 5, 3, 4, 2)
    store = packed_of(ArrayDatastore(images, [0, 1, 2, 1, 0]), tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["train/images"], images) and file["train/images"].chunks is None
        offset = file["train/images"].id.get_offset()
        assert file["train/labels"][()].tolist() == [0, 1, 2, 1, 0]
        sums = file["train/checksums"][()]
    data = (tmp_path / "x.h5").read_bytes()
    assert data[offset : offset + images.size] == images.tobytes()
    assert bytes(sums[0]) == hashlib.sha256(images.tobytes()).digest()
    assert store.name(3) == "image 3"


def test_floats_and_targets(tmp_path):
    images = np.random.default_rng(0).random((7, 1, 3, 3)).astype(np.float32)
    codes = ArrayDatastore(pixels_of(0, 7, 3, 3))
    for n, targets in enumerate((np.arange(14.0).reshape(7, 2), codes)):
        source = combined(ArrayDatastore(images), targets, pixel_labels=targets is codes)
        store = packed_of(source, tmp_path / f"{n}.h5")
        assert store.targets_dtype == (np.int32 if n else np.float32) and store.labels is None
        assert np.array_equal(store.targets([6, 2, 3]), source.targets([6, 2, 3]))
        assert np.array_equal(store.read([6, 2, 3]), images[[6, 2, 3]])
        assert store.fingerprint() == source.fingerprint()
        store.verify()
    numbers = combined(ArrayDatastore(images), np.arange(7.0))
    assert np.array_equal(packed_of(numbers, tmp_path / "x.h5").targets([3, 1]), [3, 1])
    images[4, 0, 1, 1] = np.nan
    text = refusal(packing.pack, {"train": ArrayDatastore(images)}, tmp_path / "nan.h5")
    assert text.startswith("arrays: image 4: expected finite pixels, found nan")
    assert not (tmp_path / "nan.h5").exists()


def test_ranks_open_one_packed_file(tmp_path, world):
    folder = world.broadcast(tmp_path)
    if world.rank == 0:
        grow(folder / "set")
        packed_of(ImageFolder(folder / "set"), folder / "x.h5")
    world.barrier()
    store = NodeCache(PackedDatastore(folder / "x.h5", world), world, budget_bytes=120)
    assert store.capacity == 3
    assert np.array_equal(store.read([1, 8, 0]), ImageFolder(folder / "set").read([1, 8, 0]))
    assert len(set(world.allgather(store.fingerprint()))) == 1
    store.close()
    world.barrier()


# Damaged files


@pytest.fixture
def file_path(tmp_path):
    """The path of a packed file of 12 images."""
    grow(tmp_path / "set", per_class=4)
    packed_of(ImageFolder(tmp_path / "set"), tmp_path / "x.h5")
    return tmp_path / "x.h5"


def test_verify_finds_a_changed_pixel(file_path, monkeypatch):
    with h5py.File(file_path) as file:
        offset = file["train/images"].id.get_offset()
    data = bytearray(file_path.read_bytes())
    data[offset + 100] ^= 1
    file_path.write_bytes(data)
    text = refusal(PackedDatastore(file_path).verify)
    assert text.startswith(f"{file_path}: images 0 to 11 of train do not match their checksum")
    assert refusal(pack.run, pack.parse([str(file_path), "--verify"])) == text


@pytest.mark.parametrize("name", ["labels", "checksums", "names", "name_ends"])
def test_small_arrays_are_checked_when_a_file_is_opened(file_path, name):
    with h5py.File(file_path, "r+") as file:
        file[f"train/{name}"][0] = 1 if name != "names" else 65
    text = refusal(PackedDatastore, file_path)
    assert text == f"{file_path}: the content does not match its checksum"


def test_attributes_are_checked_too(file_path):
    for group, name, value in (
        ("/", "classes", '["x", "y", "z"]'),
        ("train", "fingerprint", "0" * 64),
        ("train", "chunk_images", 1),
    ):
        with h5py.File(file_path, "r+") as file:
            original = file[group].attrs[name]
            file[group].attrs[name] = value
        assert "does not match its checksum" in refusal(PackedDatastore, file_path)
        with h5py.File(file_path, "r+") as file:
            file[group].attrs[name] = original
    PackedDatastore(file_path)
    with h5py.File(file_path, "r+") as file:
        file.attrs["format_version"] = 3
    assert "its format_version is 3, but this version of mpidl reads 1 and 2" in refusal(
        PackedDatastore, file_path
    )


def forge(path, **changes):
    """Change a packed file and correct its checksum, as an attacker would."""
    with h5py.File(path, "r+") as file:
        for name, value in changes.items():
            if name in file["train"].attrs:
                file["train"].attrs[name] = value
                continue
            if name in file["train"]:
                del file["train"][name]
            if value is not None:
                value(file["train"], name)
        file.attrs["sha256"] = pack_contents.content(file)


def rows(value, **options):
    """Return a function that writes `value` to a dataset of an HDF5 group."""
    return lambda group, name: group.create_dataset(name, data=value, **options)


PIXELS = np.zeros((12, 1, 6, 5), np.uint8)
ENDS = np.arange(12) * 9 + 9  # the end of each name in bytes
FORGED = [
    (
        {"images": rows(PIXELS, chunks=True)},
        "expected images and targets as mpidl.pack",
    ),
    ({"images": rows(PIXELS.astype(float))}, "expected images and targets as mpidl.pack"),
    ({"images": None}, "expected images and targets as mpidl.pack"),
    ({"images": rows(np.zeros((12, 6), np.uint8))}, "expected images and targets as mpidl.pack"),
    ({"labels": rows(np.zeros((12, 2), int))}, "got labels of shape (12, 2)"),
    ({"labels": rows(np.zeros(11, int))}, "expected checksums and labels of 12 images"),
    ({"labels": rows(np.full(12, 3))}, "expected labels below 3"),
    ({"labels": None}, "expected labels, found none"),
    ({"name_ends": rows(ENDS[::-1])}, "expected the names of 12 images"),
    ({"name_ends": rows(ENDS[:5])}, "expected the names of 12 images"),
    ({"name_ends": rows(ENDS + 100)}, "expected the names of 12 images"),
    ({"chunk_images": 5}, "expected checksums and labels of 12 images"),
    ({"chunk_images": 0}, "expected checksums and labels of 12 images"),
]


def test_forged_files(file_path, tmp_path):
    content = file_path.read_bytes()
    for changes, text in FORGED:
        file_path.write_bytes(content)
        forge(file_path, **changes)
        assert text in refusal(PackedDatastore, file_path)
    (tmp_path / "raw").write_bytes(bytes(360))
    raw = [(str(tmp_path / "raw"), 0, 12 * 30)]
    external = rows(None, shape=(12, 1, 6, 5), dtype=np.uint8, external=raw)
    text = refusal(forge, file_path, images=external)
    assert "expected the numbers in this file, found a reference to another file" in text


def test_truncated_and_changed_files(file_path):
    content = file_path.read_bytes()
    for length in (0, 10, 100, len(content) // 2, len(content) - 1):
        file_path.write_bytes(content[:length])
        text = refusal(open_data, str(file_path))
        assert str(file_path) in text and len(text) < 300
    file_path.write_bytes(content)
    store = PackedDatastore(file_path)
    store.read([0])
    with open(file_path, "r+b") as file:
        file.truncate(len(content) - 200)
    assert "the file has changed since the run began" in refusal(store.read, [11])
    file_path.write_bytes(content)
    late = PackedDatastore(file_path)
    file_path.unlink()
    assert refusal(late.read, [0]) == f"{file_path}: no such file"


def test_an_open_file_can_be_read_after_it_is_replaced(file_path):
    """A datastore continues to read the old bytes after the file has been replaced."""
    store = PackedDatastore(file_path)
    before = store.read([3])
    file_path.unlink()
    file_path.write_bytes(b"another")
    assert np.array_equal(store.read([3]), before)


def test_many_threads_read_one_set(file_path):
    expected = PackedDatastore(file_path).read(np.arange(12))
    store = PackedDatastore(file_path)
    with ThreadPoolExecutor(8) as pool:
        for images in pool.map(store.read, [np.arange(12)] * 8):
            assert np.array_equal(images, expected)


def test_only_the_requested_images_are_read(tmp_path, monkeypatch):
    store = packed_of(ArrayDatastore(pixels_of(0, 50, 4, 4), np.zeros(50, int)), tmp_path / "x.h5")
    store.read([0])
    sizes, read = [], os.preadv

    def spy(descriptor, buffers, offset):
        sizes.append(sum(map(len, buffers)))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    store.read([40, 3, 4, 5])
    assert sizes == [16, 48]


def test_simulated_ranks_read_one_file(file_path):
    stores = on_ranks(3, lambda world: PackedDatastore(file_path, world))
    assert all(np.array_equal(s.read([5]), stores[0].read([5])) for s in stores)
    errors = on_ranks(2, lambda world: PackedDatastore(file_path, world, "test"))
    assert {str(e) for e in errors} == {f"{file_path}: expected a part test; found train"}
