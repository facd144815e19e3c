"""Test packed files with the contents of image files, and packed sets in shards."""

import io
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal, save
from PIL import Image

import mpidl as dl
from mpidl.cli import pack
from mpidl.data import (
    ArrayDatastore,
    ImageFolder,
    MinibatchQueue,
    PackedDatastore,
    combined,
    open_data,
    preprocessed,
)
from mpidl.data.formats import file_set, pack_contents, packing


def photographs(folder, count=9, shape=(3, 40, 32), suffix="jpg"):
    """Write smooth images, which JPEG compresses well, in three classes."""
    for i in range(count):
        y, x = np.mgrid[: shape[1], : shape[2]] / 32
        planes = [128 + 100 * np.sin(3 * x + c + i) * np.cos(2 * y - c) for c in range(shape[0])]
        noise = np.random.default_rng(i).integers(-5, 6, shape)
        pixels = (np.stack(planes) + noise).clip(0, 255).astype(np.uint8)
        save(folder / "abc"[i % 3] / f"{i:02}.{suffix}", pixels, quality=85)
    return ImageFolder(folder)


def assert_same_set(store, expected):
    """Check that two sets have the same bytes, labels, names, targets and fingerprint."""
    assert len(store) == len(expected) and store.image_shape == expected.image_shape
    assert store.classes == expected.classes and store.fingerprint() == expected.fingerprint()
    assert np.array_equal(store.labels, expected.labels)
    for indices in ([len(store) - 1, 0, 3, 3, 4], np.arange(len(store)), [], [2]):
        assert np.array_equal(store.read(indices), expected.read(indices))
    if expected.targets_shape is not None:
        assert np.array_equal(store.targets([5, 1, 1]), expected.targets([5, 1, 1]))
    store.verify()


KINDS = [
    pytest.param(images, shards, id=f"{images}, {shards}")
    for images in ("decoded", "encoded")
    for shards in (None, 1, 4)
]


@pytest.mark.parametrize(("images", "shards"), KINDS)
def test_a_pack_is_the_folder(tmp_path, images, shards):
    folder = photographs(tmp_path / "set")
    parts = {"train": folder, "test": folder.subset([7, 2])}
    packing.pack(parts, tmp_path / "x.h5", images=images, shards=shards, threads=2)
    names = [f"x-{i + 1:05}-of-{shards:05}.bin" for i in range(shards or 0)]
    assert sorted(os.listdir(tmp_path)) == ["set", *names, "x.h5"]
    train, test = open_data(str(tmp_path / "x.h5"))
    assert_same_set(train, folder)
    assert np.array_equal(test.read([1, 0]), folder.read([2, 7]))
    assert train.name(4) == os.path.relpath(folder.name(4), folder.folder)
    assert train.is_encoded == (images == "encoded")
    assert train.describe() == f"{tmp_path}/x.h5: 9 images of 3x40x32 in 3 classes"


def test_pixels_are_those_of_pillow(tmp_path):
    """The pixels equal Pillow's result for the bytes in the packed file."""
    folder = photographs(tmp_path / "set")
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded")
    store = PackedDatastore(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5") as file:
        stored, ends = file["train/encoded"][()].tobytes(), file["train/ends"][()]
    for i, pixels in enumerate(store.read(np.arange(9))):
        content = stored[ends[i - 1] if i else 0 : ends[i]]
        with open(folder.name(i), "rb") as file:
            assert content == file.read() == store.read_encoded([i])[0]
        expected = np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1)
        assert np.array_equal(pixels, expected)
    decoded = 9 * 3 * 40 * 32
    assert ends[-1] < 0.5 * decoded


@pytest.mark.parametrize("shards", [None, 2])
def test_images_of_many_sizes_and_kinds_are_converted_while_decoding(tmp_path, shards):
    """--resize and --colour apply to encoded images, as in a folder."""
    for i, (suffix, shape) in enumerate(
        [("jpg", (3, 20, 30)), ("png", (1, 9, 12)), ("bmp", (3, 15, 7)), ("tif", (1, 30, 11))]
    ):
        save(tmp_path / "set" / "ab"[i % 2] / f"{i}.{suffix}", pixels_of(i, *shape))
    folder = ImageFolder(tmp_path / "set")
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded", shards=shards)
    store = PackedDatastore(tmp_path / "x.h5")
    assert store.fingerprint() == folder.fingerprint()
    text = refusal(store.read, [0, 1, 2])
    assert text.startswith(f"{tmp_path}/x.h5: a/2.bmp: expected a 20x30 RGB image like the first")
    fit = dl.Preprocess(size=(8, 6), colour="rgb")
    pair = [preprocessed(s, fit) for s in (store, folder)]
    assert_same_set_without_verify(*pair)
    train, _ = open_data(str(tmp_path / "x.h5"), preprocess=fit)
    assert train.preprocess == fit and train.fingerprint() == pair[1].fingerprint()
    smaller = [preprocessed(s, dl.Preprocess(size=(4, 4))) for s in pair]
    assert np.array_equal(smaller[0].read([3, 0]), smaller[1].read([3, 0]))


def assert_same_set_without_verify(store, expected):
    assert store.image_shape == expected.image_shape
    assert store.fingerprint() == expected.fingerprint()
    assert np.array_equal(store.read([3, 0, 2, 1]), expected.read([3, 0, 2, 1]))


@pytest.mark.parametrize(("images", "shards"), KINDS)
def test_targets_and_subsets(tmp_path, images, shards):
    folder = photographs(tmp_path / "set")
    numbers = np.random.default_rng(0).random((9, 2)).astype(np.float32)
    source = combined(folder, numbers).subset([8, 1, 5, 0, 3, 2])
    packing.pack({"train": source}, tmp_path / "x.h5", images=images, shards=shards)
    store = PackedDatastore(tmp_path / "x.h5")
    assert store.targets_shape == (2,) and np.array_equal(store.read([4, 0]), folder.read([3, 8]))
    assert_same_set(store, source)


def test_an_encoded_pack_is_a_source(tmp_path):
    folder = photographs(tmp_path / "set")
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded", shards=3)
    shutil.rmtree(tmp_path / "set" / "a")
    source = PackedDatastore(tmp_path / "x.h5")
    packing.pack({"train": source}, tmp_path / "y.h5", images="encoded")
    packing.pack({"train": source}, tmp_path / "z.h5")
    for name in ("y.h5", "z.h5"):
        assert PackedDatastore(tmp_path / name).fingerprint() == source.fingerprint()
        copy = PackedDatastore(tmp_path / name)
        assert np.array_equal(copy.read(np.arange(9)), source.read(np.arange(9)))


def test_the_bytes_of_mini_batches_do_not_depend_on_workers(tmp_path):
    folder = photographs(tmp_path / "set", count=40)
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded", shards=3)
    batches = []
    for store, workers in ((folder, 1), (PackedDatastore(tmp_path / "x.h5"), 3)):
        queue = MinibatchQueue(store, 16, 3, workers=workers)
        batches.append([images.local().tobytes() for images, _ in queue.epoch(2)])
    assert batches[0] == batches[1]


@pytest.mark.parametrize("images", ["decoded", "encoded"])
@pytest.mark.parametrize("by_size", [False, True])
def test_shards_have_about_one_size(tmp_path, images, by_size):
    folder = photographs(tmp_path / "set", count=60, shape=(3, 20, 16))
    total = 60 * 960 if images == "decoded" else int(folder.sizes.sum())
    words = {"shard_mb": total / 5e6} if by_size else {"shards": 5}
    packing.pack({"train": folder}, tmp_path / "x.h5", images=images, **words)
    sizes = [path.stat().st_size - 64 for path in sorted(tmp_path.glob("*.bin"))]
    assert len(sizes) == 5 and sum(sizes) == total
    assert max(sizes) - min(sizes) <= 2 * max(int(folder.sizes.max()), 960)


def test_many_shards_are_opened_for_each_read(tmp_path, monkeypatch):
    folder = photographs(tmp_path / "set")
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded", shards=9)
    monkeypatch.setattr(file_set, "MAX_OPEN", 4)
    store = PackedDatastore(tmp_path / "x.h5")
    assert np.array_equal(store.read(np.arange(9)), folder.read(np.arange(9)))
    assert open_shards(tmp_path) == 0
    monkeypatch.setattr(file_set, "MAX_OPEN", 9)
    other = PackedDatastore(tmp_path / "x.h5")  # negative control
    other.read(np.arange(9))
    assert open_shards(tmp_path) > 4


def open_shards(folder):
    """Return the number of shards in a folder that this process has open."""
    paths = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    return sum(path.suffix == ".bin" and path.parent == folder for path in paths)


# Interruptions and damage


@pytest.mark.parametrize("stops", [1, 2, 4])
def test_an_interrupted_packing_continues(tmp_path, monkeypatch, stops):
    monkeypatch.setattr(packing, "CHUNK", 1500)
    folder = photographs(tmp_path / "set")
    written = []

    def spy(write):
        def counted(descriptor, data, offset):
            written.append(offset)
            return write(descriptor, data, offset)

        return counted

    count = iter(range(100))
    options = {"images": "encoded", "shards": 3}
    assert not packing.pack(
        {"train": folder}, tmp_path / "x.h5", stop=lambda: next(count) >= stops - 1, **options
    )
    assert not (tmp_path / "x.h5").exists() and (tmp_path / ".x.h5.part").exists()
    with h5py.File(tmp_path / ".x.h5.part", locking=False) as file:
        flags = (file["train/checksums"][()] != 0).any(axis=1)
    monkeypatch.setattr(packing, "_write", spy(packing._write))
    assert packing.pack({"train": folder}, tmp_path / "x.h5", **options)
    assert len(written) == 2 * (len(flags) - flags.sum()) and flags.sum() >= stops
    assert_same_set(PackedDatastore(tmp_path / "x.h5"), folder)


def test_a_shard_that_was_lost_while_packing_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK", 1500)
    folder, options = photographs(tmp_path / "set"), {"images": "encoded", "shards": 3}
    packing.pack({"train": folder}, tmp_path / "x.h5", stop=lambda: True, **options)
    (tmp_path / "x-00001-of-00003.bin").unlink()
    assert packing.pack({"train": folder}, tmp_path / "x.h5", **options)
    assert_same_set(PackedDatastore(tmp_path / "x.h5"), folder)


def test_a_missing_or_foreign_shard_is_named(tmp_path):
    for name, count in (("x", 9), ("y", 12)):
        folder = photographs(tmp_path / name, count=count)
        packing.pack({"train": folder}, tmp_path / f"{name}.h5", images="encoded", shards=3)
    path = tmp_path / "x-00002-of-00003.bin"
    content = path.read_bytes()
    path.unlink()
    text = refusal(open_data, str(tmp_path / "x.h5"))
    assert text == f"{path}: no such file: expected this shard of the packed set"
    for name, description in (
        ("x-00001-of-00003.bin", "shard 1 of this or another set"),
        ("y-00002-of-00003.bin", "shard 2 of this or another set"),
    ):
        data = (tmp_path / name).read_bytes()[: len(content)]
        path.write_bytes(data + bytes(len(content) - len(data)))
        text = refusal(open_data, str(tmp_path / "x.h5"))
        assert text == f"{path}: expected shard 2 of this packed set, found {description}"
    path.write_bytes(bytes(len(content)))
    assert refusal(open_data, str(tmp_path / "x.h5")).endswith("found another file")
    path.write_bytes(content[:-1])
    text = refusal(open_data, str(tmp_path / "x.h5"))
    size = len(content)
    assert text.startswith(f"{path}: expected a shard of {size} bytes, found {size - 1}")
    path.write_bytes(content)
    store = PackedDatastore(tmp_path / "x.h5")
    path.write_bytes(content + b"x")
    assert "the file has changed since the run began" in refusal(store.read, np.arange(9))


def test_verify_finds_a_changed_byte_in_a_shard(tmp_path):
    photographs(tmp_path / "set")
    words = ["--images", "encoded", "--shards", "2"]
    run(tmp_path / "set", tmp_path / "x.h5", *words)
    assert run(tmp_path / "x.h5", "--verify") == 0
    path = tmp_path / "x-00002-of-00002.bin"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    text = refusal(PackedDatastore(tmp_path / "x.h5").verify)
    assert text.startswith(f"{tmp_path}/x.h5: images ") and "do not match their checksum" in text


def run(*words):
    return pack.run(pack.parse([str(word) for word in words]))


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    folder = photographs(tmp_path / "set")
    assert run(tmp_path / "set", tmp_path / "x.h5", "--images", "encoded", "--shards", 2) == 0
    total = sum(path.stat().st_size for path in tmp_path.glob("x*"))
    line = f"Packed: {tmp_path}/x.h5, 9 images, {total:,} bytes in 2 shard(s), in "
    assert line in capsys.readouterr().out
    assert total < int(folder.sizes.sum()) + 20_000


def test_an_image_that_cannot_be_decoded_is_not_packed(tmp_path):
    photographs(tmp_path / "set")
    path = tmp_path / "set" / "b" / "04.jpg"
    path.write_bytes(path.read_bytes()[:300])
    text = refusal(run, tmp_path / "set", tmp_path / "x.h5", "--images", "encoded")
    assert text.startswith(f"{path}: the image cannot be read")
    path.write_bytes(b"")
    text = refusal(run, tmp_path / "set", tmp_path / "x.h5", "--images", "encoded")
    assert text == f"{path}: expected an image, found 0 bytes"


def test_a_damaged_image_in_a_pack_is_named(tmp_path):
    folder = photographs(tmp_path / "set")
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded")
    with h5py.File(tmp_path / "x.h5") as file:
        offset = file["train/encoded"].id.get_offset() + int(file["train/ends"][3])
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[offset : offset + 4] = b"oops"
    (tmp_path / "x.h5").write_bytes(data)
    text = refusal(PackedDatastore(tmp_path / "x.h5").read, [4])
    expected = "expected a PNG, JPEG, BMP or TIFF image, found another format or a damaged file"
    assert text == f"{tmp_path}/x.h5: {PackedDatastore(tmp_path / 'x.h5').name(4)}: {expected}"


def test_refusals(tmp_path):
    grow(tmp_path / "set")
    target, encoded = tmp_path / "x.h5", ["--images", "encoded"]
    text = refusal(run, tmp_path / "set", target, *encoded, "--resize", 8)
    assert "--images encoded: expected image files as they are" in text
    arrays = {"train": ArrayDatastore(pixels_of(0, 4, 2, 2))}
    text = refusal(packing.pack, arrays, target, images="encoded")
    assert text.startswith("arrays: 4 images of 1x2x2: --images encoded: expected image files")
    text = refusal(run, tmp_path / "set", target, "--images", "jpeg")
    assert text == "--images must be decoded or encoded, found jpeg"
    text = refusal(run, tmp_path / "set", target, "--shards", 10)
    assert text == "--shards 10: expected from 1 to 9 shards of 9 images"
    text = refusal(run, tmp_path / "set", target, "--shards", 2, "--shard-mb", 1)
    assert text == "--shards and --shard-mb: expected at most one of them"
    text = refusal(run, tmp_path / "x.h5", "--verify", "--shards", 2)
    assert text == "--verify: expected only a packed file"
    assert sorted(os.listdir(tmp_path)) == ["set"]
    (tmp_path / "x-00001-of-00002.bin").write_bytes(b"mine")
    text = refusal(run, tmp_path / "set", target, "--shards", 2)
    assert text.endswith(
        "expected no file, or shard 1 of this packing, found another file: remove it"
    )
    assert (tmp_path / "x-00001-of-00002.bin").read_bytes() == b"mine"


# Forged descriptions


def forge(path, change):
    """Change a packed file and correct its checksum, as an attacker would."""
    with h5py.File(path, "r+") as file:
        change(file)
        file.attrs["sha256"] = pack_contents.content(file)


def replaced(name, values):
    def change(file):
        del file[name]
        file[name] = values

    return change


def attribute(group, name, value):
    return lambda file: file[group].attrs.__setitem__(name, value)


LARGE = 1 << 62
FORGED = {
    "a name in another folder": attribute("/", "shards", "../x"),
    "no name": attribute("/", "shards", ""),
    "identity": attribute("/", "shard_id", "zz"),
    "other identity": attribute("/", "shard_id", "0" * 64),
    "sizes": replaced("shard_sizes", np.array([LARGE, 5])),
    "no sizes": replaced("shard_sizes", np.zeros(0, np.int64)),
    "entries": attribute("train", "entries", "[1]"),
    "count": attribute("train", "entries", '{"count": 1000000000000}'),
    "shape": attribute(
        "train", "entries", '{"count": 9, "images": {"shape": [3, 99999, 99999], "dtype": "uint8"}}'
    ),
    "type": attribute(
        "train", "entries", '{"count": 9, "images": {"shape": [1], "dtype": "float64"}}'
    ),
    "places": replaced("train/shard_rows", np.array([[0, 64, 64], [4, LARGE, 64]])),
    "order": replaced("train/shard_rows", np.array([[0, 64, 64], [-4, 64, 64]])),
    "before": replaced("train/shard_rows", np.array([[0, 0, 0], [4, 64, 64]])),
    "one shard": replaced("train/shard_rows", np.array([[0, 64, 64]])),
    "ends": replaced("train/ends", np.arange(9) * LARGE),
    "empty images": replaced("train/ends", np.zeros(9, np.int64)),
    "fewer ends": replaced("train/ends", np.arange(1, 5)),
}


def test_forged_shards(tmp_path):
    folder = photographs(tmp_path / "set")
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded", shards=2)
    content = (tmp_path / "x.h5").read_bytes()
    for change in FORGED.values():
        (tmp_path / "x.h5").write_bytes(content)
        forge(tmp_path / "x.h5", change)
        text = refusal(PackedDatastore, tmp_path / "x.h5")
        assert str(tmp_path) in text and len(text) < 400


def test_forged_encoded_images(tmp_path):
    folder = photographs(tmp_path / "set")
    packing.pack({"train": folder}, tmp_path / "x.h5", images="encoded")
    content = (tmp_path / "x.h5").read_bytes()
    for change in (
        replaced("train/ends", np.arange(9) + 1),
        replaced("train/ends", np.array([LARGE])),
        replaced("train/encoded", np.zeros(5, np.uint8)),
        replaced("train/encoded", np.zeros(5)),
    ):
        (tmp_path / "x.h5").write_bytes(content)
        forge(tmp_path / "x.h5", change)
        assert str(tmp_path) in refusal(PackedDatastore, tmp_path / "x.h5")
