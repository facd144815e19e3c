"""Packed sets: what is packed, going on after an interruption, checksums, damaged files."""

import fcntl
import hashlib
import os
import threading

import datafiles
import h5py
import numpy as np
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, save, write_idx
from PIL import Image

import mpidl as dl
from mpidl.cli import pack as command
from mpidl.data import (
    ArrayDatastore,
    ImageFolder,
    NodeCache,
    PackedDatastore,
    combined,
    open_data,
    open_test_data,
)
from mpidl.data.formats import packed, packing


def packed_of(store, path, **options):
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
    found = store.split(0.67, seed=3)[0]
    assert np.array_equal(found.indices, folder.split(0.67, seed=3)[0].indices)
    assert os.listdir(tmp_path) == ["x.h5", "set"] or sorted(os.listdir(tmp_path)) == [
        "set",
        "x.h5",
    ]
    store.verify()


def test_names_that_are_no_utf8_or_no_line(tmp_path):
    for name in (b"\xff", "é\n".encode()):
        path = save(tmp_path / "set" / "plain" / "0.png", pixels_of(0, 1, 4, 4))
        os.rename(path.parent, os.path.join(os.fsencode(tmp_path / "set"), name))
    folder = ImageFolder(tmp_path / "set")
    store = packed_of(folder, tmp_path / "x.h5")
    assert store.classes == folder.classes and store.fingerprint() == folder.fingerprint()
    assert [store.name(i) for i in (0, 1)] == ["é\\n/0.png", "\\xff/0.png"]
    text = refusal(PackedDatastore, tmp_path / "x.h5", classes=["a", "é\n"])
    assert text.endswith("class \\xff is none of the classes (a, é\\n)")


def test_images_lie_in_one_piece_that_any_program_can_read(tmp_path):
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


def test_the_same_content_gives_the_same_bytes(tmp_path):
    grow(tmp_path / "set")
    for name, threads in (("a.h5", 1), ("b.h5", 4)):
        packed_of(ImageFolder(tmp_path / "set"), tmp_path / name, threads=threads)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


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


def test_ranks_are_told_of_a_packed_set(tmp_path, world):
    folder = world.broadcast(tmp_path)
    if world.rank == 0:
        grow(folder / "set")
        packed_of(ImageFolder(folder / "set"), folder / "x.h5")
    world.barrier()
    store = NodeCache(PackedDatastore(folder / "x.h5", world), world, budget_bytes=120)
    assert store.capacity == 3
    assert np.array_equal(store.read([1, 8, 0]), ImageFolder(folder / "set").read([1, 8, 0]))
    assert len(set(world.broadcast(world.gather(store.fingerprint())))) == 1
    store.close()
    world.barrier()


# Going on


class Stopping:
    """stop() that says so after some chunks; how many images were read of which store."""

    def __init__(self, store, after):
        self.left, self.reads, read = after, [], store.read
        store.read = lambda indices: self.reads.append(indices[0]) or read(indices)

    def __call__(self):
        self.left -= 1
        return self.left <= 0


@pytest.fixture
def chunks_of_four(monkeypatch):
    monkeypatch.setattr(packing, "CHUNK", 4 * 30)


def test_an_interrupted_packing_goes_on(tmp_path, chunks_of_four):
    grow(tmp_path / "set", per_class=10)
    store = ImageFolder(tmp_path / "set")
    stop = Stopping(store, after=3)
    assert not packing.pack({"train": store}, tmp_path / "x.h5", stop=stop)
    assert not (tmp_path / "x.h5").exists() and (tmp_path / ".x.h5.part").exists()
    again = ImageFolder(tmp_path / "set")
    second = Stopping(again, after=99)
    told = []
    assert packing.pack({"train": again}, tmp_path / "x.h5", progress=told.append)
    done = set(stop.reads) & set(second.reads)
    assert len(stop.reads) >= 2 and not done  # no chunk was read twice
    assert sorted(stop.reads + second.reads) == list(range(0, 30, 4)) and sum(told) == 30
    packed_of(ImageFolder(tmp_path / "set"), tmp_path / "y.h5")
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "y.h5").read_bytes()


def test_what_was_torn_is_written_again(tmp_path, chunks_of_four):
    grow(tmp_path / "set", per_class=10)
    store = ImageFolder(tmp_path / "set")
    assert not packing.pack({"train": store}, tmp_path / "x.h5", stop=Stopping(store, 6))
    part = tmp_path / ".x.h5.part"
    with h5py.File(part) as file:
        offset = file["train/images"].id.get_offset()
    with open(part, "r+b") as file:  # a chunk that a power failure left half on disk
        file.seek(offset + 130)
        file.write(bytes(50))
    again = ImageFolder(tmp_path / "set")
    stop = Stopping(again, 99)
    assert packing.pack({"train": again}, tmp_path / "x.h5")
    assert 4 in stop.reads and 0 not in stop.reads
    expected = ImageFolder(tmp_path / "set").read(np.arange(30))
    assert np.array_equal(PackedDatastore(tmp_path / "x.h5").read(np.arange(30)), expected)


@pytest.mark.parametrize("left", ["other set", "changed file", "no HDF5", "nothing"])
def test_what_is_of_another_packing_is_begun_anew(tmp_path, chunks_of_four, left):
    grow(tmp_path / "set", per_class=10)
    store = ImageFolder(tmp_path / "set")
    assert not packing.pack({"train": store}, tmp_path / "x.h5", stop=Stopping(store, 6))
    part = tmp_path / ".x.h5.part"
    if left == "other set":
        save(tmp_path / "set" / "cat" / "new.png", pixels_of(0, 1, 6, 5))
    elif left == "changed file":
        os.utime(tmp_path / "set" / "cat" / "0.png", ns=(1, 1))
    else:
        part.write_bytes(b"no HDF5" if left == "no HDF5" else b"")
    again = ImageFolder(tmp_path / "set")
    stop = Stopping(again, 99)
    assert packing.pack({"train": again}, tmp_path / "x.h5")
    assert sorted(stop.reads) == list(range(0, len(again), 4))
    assert PackedDatastore(tmp_path / "x.h5").fingerprint() == again.fingerprint()


def test_a_bad_image_ends_it_and_the_rest_is_kept(tmp_path, chunks_of_four):
    drawn = grow(tmp_path / "set", per_class=10)
    bad = tmp_path / "set" / "emu" / "5.png"
    bad.write_bytes(b"x" * 50)
    text = refusal(
        packing.pack, {"train": ImageFolder(tmp_path / "set")}, tmp_path / "x.h5", threads=2
    )
    assert text.startswith(f"{bad}: expected a PNG") and not (tmp_path / "x.h5").exists()
    save(bad, drawn["emu/5.png"])
    assert packing.pack({"train": ImageFolder(tmp_path / "set")}, tmp_path / "x.h5")


def test_two_do_not_pack_to_one_file(tmp_path):
    store = ArrayDatastore(pixels_of(0, 5, 4, 4), np.zeros(5, int))
    with open(tmp_path / ".x.h5.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        text = refusal(packing.pack, {"train": store}, tmp_path / "x.h5")
        assert text == f"{tmp_path}/.x.h5.part: another process is packing to this file"
    packed_of(store, tmp_path / "x.h5")
    text = refusal(packing.pack, {"train": store}, tmp_path / "x.h5")
    assert text.startswith(f"{tmp_path}/x.h5: there is a file of this name")


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    store = ArrayDatastore(pixels_of(0, 5, 4, 4), np.zeros(5, int))
    text = refusal(packing.pack, {"train": store}, tmp_path / "no" / "x.h5")
    assert text == f"{tmp_path}/no/x.h5: cannot be written: No such file or directory"
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda path: type("Room", (), {"free": 79}))
    assert "expected 0 MB free for it, found 0 MB" in refusal(
        packing.pack, {"train": store}, tmp_path / "x.h5"
    )
    monkeypatch.undo()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.os, "pwrite", full)
    assert refusal(packing.pack, {"train": store}, tmp_path / "x.h5") == (
        f"{tmp_path}/x.h5: cannot be written: No space left on device"
    )
    empty = ArrayDatastore(np.zeros((0, 2, 2), np.uint8))
    assert "found none" in refusal(packing.pack, {"train": empty}, tmp_path / "x.h5")


# The command


def run(*words):
    return command.run(command.parse([str(word) for word in words]))


SOURCES = {
    "folder": lambda place: grow(place),
    "train and test": lambda place: [grow(place / part) for part in ("train", "test")],
    "idx": lambda place: [
        write_idx(place / f"{prefix}-{kind}", values)
        for prefix in ("train", "t10k")
        for kind, values in (
            ("images-idx3-ubyte", pixels_of(len(prefix), 9, 6, 5)),
            ("labels-idx1-ubyte", (np.arange(9) % 3).astype(np.uint8)),
        )
    ],
    "cifar": datafiles.cifar10,
    "hdf5": lambda place: datafiles.hdf5(
        place / "data.h5", pixels_of(0, 9, 6, 5, 3), np.arange(9) % 3, ["a", "b", "c"]
    ),
    "mat": lambda place: datafiles.mat73(
        place / "data.mat",
        XTrain=datafiles.matlab(pixels_of(0, 9, 3, 6, 5)),
        YTrain=(np.arange(9) % 3 + 1.0)[:, None],
        XTest=datafiles.matlab(pixels_of(1, 2, 3, 6, 5)),
        YTest=np.array([[3.0], [1]]),
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_is_packed(tmp_path, kind, capsys):
    place = tmp_path / "source"
    place.mkdir()
    SOURCES[kind](place)
    (file,) = [*place.glob("data.*")] or [place]
    assert run(file, tmp_path / "x.h5", "--threads", 2) == 0
    text = capsys.readouterr().out
    assert f"Packed: {tmp_path}/x.h5, " in text
    for before, after in zip(open_data(str(file)), open_data(str(tmp_path / "x.h5")), strict=True):
        assert (before is None) == (after is None)
        if before is None:
            continue
        indices = np.arange(len(before))
        assert np.array_equal(after.read(indices), before.read(indices))
        assert np.array_equal(after.labels, before.labels) and after.classes == before.classes
        assert after.fingerprint() == before.fingerprint()
    test = open_test_data(str(tmp_path / "x.h5"), classes=before.classes if before else None)
    assert len(test) == len(open_test_data(str(file)))
    assert run(tmp_path / "x.h5", "--verify") == 0
    assert "images are what was packed" in capsys.readouterr().out
    # a packed file is a source too
    assert run(tmp_path / "x.h5", tmp_path / "y.h5") == 0
    again = open_data(str(tmp_path / "y.h5"))[0]
    assert again.fingerprint() == open_data(str(file))[0].fingerprint()


def test_pack_resizes_and_converts(tmp_path):
    save(tmp_path / "set" / "a" / "0.png", pixels_of(0, 3, 20, 30))
    save(tmp_path / "set" / "b" / "1.jpg", pixels_of(1, 1, 9, 9))
    words = ["--resize", "8x6", "--colour", "gray"]
    assert run(tmp_path / "set", tmp_path / "x.h5", *words) == 0
    store = PackedDatastore(tmp_path / "x.h5")
    assert store.preprocess == dl.Preprocess(size=(8, 6), colour="gray")
    assert dl.data.preprocessed(store, store.preprocess) is store
    wanted = ImageFolder(tmp_path / "set", preprocess=store.preprocess)
    assert store.image_shape == (1, 8, 6) and store.fingerprint() == wanted.fingerprint()
    assert np.array_equal(store.read([0, 1]), wanted.read([0, 1]))
    datafiles.cifar10(tmp_path / "cifar")
    assert run(tmp_path / "cifar", tmp_path / "y.h5", "--resize", "16x12") == 0
    train, test = open_data(str(tmp_path / "y.h5"))
    before = open_data(str(tmp_path / "cifar"))[0].read([4])[0]
    picture = Image.fromarray(before.transpose(1, 2, 0)).resize((12, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(train.read([4])[0], np.asarray(picture).transpose(2, 0, 1))
    assert test.image_shape == (3, 16, 12) and test.preprocess == train.preprocess
    words = ["--cover", "36", "--centre-crop", "30x20"]
    assert run(tmp_path / "cifar", tmp_path / "c.h5", *words) == 0
    store = PackedDatastore(tmp_path / "c.h5")
    assert store.image_shape == (3, 30, 20) and store.preprocess.cover
    line = f"{tmp_path}/c.h5: 15 images of 3x30x20 in 10 classes"
    assert store.describe() == line and store.split(0.5)[0].describe().endswith(f" of {line}")
    smaller = dl.data.preprocessed(store, dl.Preprocess(size=(9, 9)))
    assert (
        smaller.describe() == f"{tmp_path}/c.h5, resized to 9x9: 15 images of 3x9x9 in 10 classes"
    )
    floats = datafiles.hdf5(tmp_path / "f.h5", np.zeros((4, 2, 2)), [0, 1, 0, 1])
    assert "expected gray or RGB images of bytes to resize" in refusal(
        run, floats, tmp_path / "z.h5", "--colour", "rgb"
    )


def test_pack_refuses(tmp_path):
    grow(tmp_path / "set")
    source, target = tmp_path / "set", tmp_path / "x.h5"
    assert "expected the file to write, found none" in refusal(run, source)
    for size in ("0x5", "5x99999999", "-1x5"):
        text = refusal(run, source, target, f"--resize={size}")
        assert text.startswith("--resize must be HEIGHTxWIDTH such as 224x192, or 224")
        assert text.endswith(f"found {size}")
    assert "unknown option --grey" in refusal(run, source, target, "--grey")
    text = refusal(run, source, target, "--resize", 5, "--cover", 5)
    assert text == "--resize and --cover: expected one of them"
    text = refusal(run, source, target, "--colour", "grey")
    assert text == "--colour must be gray or rgb, found grey"
    text = refusal(run, source, target, "--centre-crop", 9)
    assert "centre crop 9x9 (--centre-crop, or crop= in Python): expected" in text
    for more in ([target], ["--resize", "8"]):
        text = refusal(run, source, *more, "--verify")
        assert "expected a packed file and nothing else" in text
    assert refusal(run, tmp_path / "no", target).startswith(f"SRC {tmp_path}/no: no such folder")
    datafiles.hdf5(tmp_path / "plain.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    assert "expected a file of python -m mpidl.pack" in refusal(
        run, tmp_path / "plain.h5", "--verify"
    )
    grow(tmp_path / "both" / "train")
    grow(tmp_path / "both" / "test", shape=(1, 7, 7))
    text = refusal(run, tmp_path / "both", target)
    assert "expected images of shape (1, 6, 5)" in text and "--resize makes them so" in text


# Damaged files


@pytest.fixture
def whole(tmp_path):
    grow(tmp_path / "set", per_class=4)
    packed_of(ImageFolder(tmp_path / "set"), tmp_path / "x.h5")
    return tmp_path / "x.h5"


def test_verify_finds_a_changed_pixel(whole, monkeypatch):
    with h5py.File(whole) as file:
        offset = file["train/images"].id.get_offset()
    data = bytearray(whole.read_bytes())
    data[offset + 100] ^= 1
    whole.write_bytes(data)
    text = refusal(PackedDatastore(whole).verify)
    assert text.startswith(f"{whole}: images 0 to 11 of train are not what was packed")
    assert refusal(run, whole, "--verify") == text


@pytest.mark.parametrize("name", ["labels", "checksums", "names", "name_ends"])
def test_what_is_small_is_checked_when_a_file_is_opened(whole, name):
    with h5py.File(whole, "r+") as file:
        file[f"train/{name}"][0] = 1 if name != "names" else 65
    text = refusal(PackedDatastore, whole)
    assert text == f"{whole}: expected what was packed, found another content: its checksum differs"


def test_attributes_are_checked_too(whole):
    for place, name, value in (
        ("/", "classes", '["x", "y", "z"]'),
        ("train", "fingerprint", "0" * 64),
        ("train", "chunk_images", 1),
    ):
        with h5py.File(whole, "r+") as file:
            kept = file[place].attrs[name]
            file[place].attrs[name] = value
        assert "its checksum differs" in refusal(PackedDatastore, whole)
        with h5py.File(whole, "r+") as file:
            file[place].attrs[name] = kept
    PackedDatastore(whole)
    with h5py.File(whole, "r+") as file:
        file.attrs["format_version"] = 2
    assert "its format_version is 2, this mpidl reads 1" in refusal(PackedDatastore, whole)


def forged(path, **changes):
    """Another file of the form, with right sums: what somebody made who wants to do harm."""
    with h5py.File(path, "r+") as file:
        for name, value in changes.items():
            if name in file["train"].attrs:
                file["train"].attrs[name] = value
                continue
            if name in file["train"]:
                del file["train"][name]
            if value is not None:
                value(file["train"], name)
        file.attrs["sha256"] = packed.content(file)


def test_forged_files(whole, tmp_path):
    content = whole.read_bytes()

    def told(**changes):
        whole.write_bytes(content)
        forged(whole, **changes)
        return refusal(PackedDatastore, whole)

    def holding(value, **options):
        return lambda group, name: group.create_dataset(name, data=value, **options)

    ends = np.arange(12) * 9 + 9
    assert "images: expected uint8 or float32 in one piece" in told(
        images=holding(np.zeros((12, 1, 6, 5), np.uint8), chunks=True)
    )
    assert "images: expected uint8 or float32" in told(images=holding(np.zeros((12, 1, 6, 5))))
    assert "expected images (n, C, H, W)" in told(images=None)
    assert "expected images (n, C, H, W)" in told(images=holding(np.zeros((12, 6), np.uint8)))
    assert "got labels of shape (12, 1)" in told(labels=holding(np.zeros((12, 1), int)))
    assert "expected checksums and labels of 12 images" in told(labels=holding(np.zeros(11, int)))
    assert "expected labels below 3" in told(labels=holding(np.full(12, 3)))
    assert "expected labels, found none" in told(labels=None)
    assert "expected the names of 12 images" in told(name_ends=holding(ends[::-1]))
    assert "expected the names of 12 images" in told(name_ends=holding(ends[:5]))
    assert "expected the names of 12 images" in told(name_ends=holding(ends + 100))
    assert "expected checksums and labels of 12 images" in told(chunk_images=5)
    assert "the file cannot be read" in told(chunk_images=0)
    far = [(str(tmp_path / "raw"), 0, 12 * 30)]
    (tmp_path / "raw").write_bytes(bytes(360))
    assert "expected the numbers in this file, found another's" in refusal(
        forged, whole, images=lambda group, name: group.create_dataset(
            name, (12, 1, 6, 5), np.uint8, external=far
        )
    )  # fmt: skip


def test_truncated_and_changed_files(whole):
    content = whole.read_bytes()
    for length in (0, 10, 100, len(content) // 2, len(content) - 1):
        whole.write_bytes(content[:length])
        text = refusal(open_data, str(whole))
        assert str(whole) in text and len(text) < 300
    whole.write_bytes(content)
    store = PackedDatastore(whole)
    store.read([0])
    with open(whole, "r+b") as file:
        file.truncate(len(content) - 200)
    assert "the file has changed since the run began" in refusal(store.read, [11])
    late = PackedDatastore(write(whole, content))
    whole.unlink()
    assert refusal(late.read, [0]) == f"{whole}: no such file"


def write(path, content):
    path.write_bytes(content)
    return path


def test_a_file_that_is_replaced_or_removed_is_read_on(whole):
    """Who has opened it keeps what was there: a name may go, the bytes stay."""
    store = PackedDatastore(whole)
    before = store.read([3])
    whole.unlink()
    whole.write_bytes(b"another")
    assert np.array_equal(store.read([3]), before)


def test_many_threads_read_one_set(whole):
    store, found = PackedDatastore(whole), []
    expected = store.read(np.arange(12))
    late = PackedDatastore(whole)

    def read():
        found.append(np.array_equal(late.read(np.arange(12)), expected))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_no_more_is_read_than_is_asked_for(tmp_path, monkeypatch):
    store = packed_of(ArrayDatastore(pixels_of(0, 50, 4, 4), np.zeros(50, int)), tmp_path / "x.h5")
    store.read([0])
    sizes = []
    read = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda h, b, at: sizes.append(sum(map(len, b))) or read(h, b, at)
    )
    store.read([40, 3, 4, 5])
    assert sizes == [16, 48]


def test_pretended_ranks_read_one_file(whole):
    stores = on_ranks(3, lambda world: PackedDatastore(whole, world))
    assert all(np.array_equal(s.read([5]), stores[0].read([5])) for s in stores)
    errors = on_ranks(2, lambda world: PackedDatastore(whole, world, "test"))
    assert {str(e) for e in errors} == {f"{whole}: expected a part test; found train"}
