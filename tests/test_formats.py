"""CIFAR, HDF5 and .mat files, image formats, combined and transformed sets, and bad input."""

import os
import struct
import subprocess
import warnings

import datafiles
import h5py
import numpy as np
import pytest
import scipy.io
from images import grow, on_ranks, pixels_of, refusal, save, write_idx
from PIL import Image

import mpidl as dl
from mpidl.data import (
    ArrayDatastore,
    HDF5Datastore,
    ImageFolder,
    MinibatchQueue,
    NodeCache,
    cifar_folder,
    combined,
    idx_folder,
    mat5,
    mat_file,
    open_data,
    open_test_data,
    probe,
)
from mpidl.data.datastore import check_classes

# Image files


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".TIFF"])
@pytest.mark.parametrize("channels", [1, 3])
def test_lossless_formats_give_their_pixels_back(tmp_path, suffix, channels):
    pixels = pixels_of(channels, channels, 7, 5)
    save(tmp_path / "c" / f"x{suffix}", pixels)
    store = ImageFolder(tmp_path)
    assert store.image_shape == pixels.shape and np.array_equal(store.read([0])[0], pixels)


def saved(folder, image, name="x.tif", **options):
    (folder / "c").mkdir(exist_ok=True)
    image.save(folder / "c" / name, **options)
    return ImageFolder(folder).read([0])[0]


def test_depths_and_kinds_of_images(tmp_path):
    deep = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4) + 77
    for name in ("x.tif", "y.png"):  # 16 bits: the high 8
        assert np.array_equal(saved(tmp_path, Image.fromarray(deep), name)[0], deep >> 8)
        os.unlink(tmp_path / "c" / name)
    gray = pixels_of(0, 4, 4)
    palette = Image.fromarray(gray).convert("P")  # a palette is RGB, were it of grays alone
    for name in ("x.bmp", "y.tif"):
        expected = 1 if name == "x.bmp" else 3  # a BMP of all 256 grays says that it is gray
        assert len(saved(tmp_path, palette, name)) == expected
        os.unlink(tmp_path / "c" / name)
    black = Image.fromarray(gray > 128)
    assert np.array_equal(saved(tmp_path, black, "x.bmp")[0] > 0, gray > 128)
    os.unlink(tmp_path / "c" / "x.bmp")
    cmyk = Image.new("CMYK", (3, 2), (0, 0, 0, 255))
    assert not saved(tmp_path, cmyk).any() and len(saved(tmp_path, cmyk)) == 3
    for odd in (np.ones((4, 4), np.float32), np.ones((4, 4), np.int32)):
        Image.fromarray(odd).save(tmp_path / "c" / "x.tif")
        text = refusal(ImageFolder, tmp_path)
        assert text.startswith(f"{tmp_path}/c/x.tif: the image cannot be read: expected 8 or 16 b")


def test_the_orientation_of_a_camera_is_not_applied(tmp_path):
    pixels = pixels_of(0, 8, 16, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert saved(tmp_path, Image.fromarray(pixels), "x.jpg", exif=exif).shape == (3, 8, 16)


def test_of_several_pages_the_first(tmp_path):
    pages = [Image.fromarray(pixels_of(i, 4, 4)) for i in (0, 1)]
    found = saved(tmp_path, pages[0], save_all=True, append_images=pages[1:])
    assert np.array_equal(found[0], pixels_of(0, 4, 4))


def test_other_formats_are_refused_whatever_they_are_called(tmp_path):
    (tmp_path / "c").mkdir()
    Image.fromarray(pixels_of(0, 4, 4)).save(tmp_path / "c" / "x.png", format="GIF")
    text = refusal(ImageFolder, tmp_path)
    assert text.startswith(f"{tmp_path}/c/x.png: expected a PNG, JPEG, BMP or TIFF image")


def test_decompression_bombs(tmp_path, monkeypatch):
    """The first image of a set by Pillow's limit; another by its size, before it is decoded."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for side in (40, 60):  # 1.6 times the limit, and more than twice
        bomb = save(tmp_path / "set" / "a" / "0.png", np.zeros((1, side, side), np.uint8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = refusal(ImageFolder, tmp_path / "set")
        assert text.startswith(f"{bomb}: the image cannot be read: ") and "limit" in text
        assert "decompression bomb" in text
    bomb.unlink()
    bomb.parent.rmdir()
    grow(tmp_path / "set")
    bomb = save(tmp_path / "set" / "dog" / "1.png", np.zeros((1, 40, 40), np.uint8))
    store = ImageFolder(tmp_path / "set")
    decoded = []
    monkeypatch.setattr(Image.Image, "convert", lambda *a: decoded.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = refusal(store.read, [store.files.index("dog/1.png")])
    assert "found 40x40 gray" in text and str(bomb) in text and not decoded


def test_images_of_any_size_are_resized_and_converted(tmp_path):
    save(tmp_path / "a" / "0.png", pixels_of(0, 3, 20, 30))
    save(tmp_path / "b" / "1.png", pixels_of(1, 1, 9, 9))
    store = ImageFolder(tmp_path, size=(6, 8), colour="rgb")
    assert store.image_shape == (3, 6, 8) and store.read([0, 1]).shape == (2, 3, 6, 8)
    picture = Image.open(tmp_path / "a" / "0.png").resize((8, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(store.read([0])[0], np.asarray(picture).transpose(2, 0, 1))
    grays = ImageFolder(tmp_path, size=(6, 8), colour="gray")
    assert grays.image_shape == (1, 6, 8) and grays.read([1, 0]).shape == (2, 1, 6, 8)
    prints = {s.fingerprint() for s in (store, grays, ImageFolder(tmp_path, size=(8, 6)))}
    assert len(prints) == 3


def test_a_file_that_changes_or_vanishes_while_it_is_used(tmp_path):
    grow(tmp_path)
    store = ImageFolder(tmp_path)
    path = tmp_path / "cat" / "1.png"
    save(path, pixels_of(9, 1, 6, 5))
    text = refusal(store.read, [1])
    assert text.startswith(f"{path}: the file has changed since the run began (")
    path.unlink()
    assert refusal(store.read, [1]) == f"{path}: no such file any more"
    assert len(store.read([0, 2])) == 2


# CIFAR


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, inside):
    drawn = datafiles.cifar10(tmp_path / inside)
    train, test = open_data(str(tmp_path))
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    assert np.array_equal(train.labels, np.concatenate([drawn[n][0] for n in names]))
    assert np.array_equal(train.read(np.arange(15)), np.concatenate([drawn[n][1] for n in names]))
    assert train.classes == test.classes == datafiles.CIFAR_NAMES
    assert np.array_equal(test.read([2, 0]), drawn["test_batch.bin"][1][[2, 0]])
    assert test.describe().endswith("CIFAR-10 test: 3 images of 3x32x32 in 10 classes")
    assert np.array_equal(open_test_data(str(tmp_path)).labels, test.labels)
    stores = on_ranks(3, lambda world: cifar_folder(tmp_path, "train", world), list("aab"))
    assert {store.fingerprint() for store in stores} == {train.fingerprint()}
    assert stores[0].images.base is stores[1].images.base


def test_cifar100_has_two_kinds_of_labels(tmp_path):
    drawn = datafiles.cifar100(tmp_path / "cifar-100-binary")
    train, test = open_data(str(tmp_path))
    coarse, fine, pixels = drawn["train.bin"]
    assert np.array_equal(train.labels, fine) and train.classes[7] == "fine 7"
    assert np.array_equal(train.read([3])[0], pixels[3])
    rough = cifar_folder(tmp_path, "train", labels="coarse")
    assert np.array_equal(rough.labels, coarse) and len(rough.classes) == 20
    assert 'expected "coarse" or "fine", got' in refusal(cifar_folder, tmp_path, labels="rough")


def test_cifar_without_names_or_with_a_network_s(tmp_path):
    drawn = datafiles.cifar10(tmp_path, names=False)
    assert cifar_folder(tmp_path).classes == [str(i) for i in range(10)]
    datafiles.cifar10(tmp_path)
    turned = cifar_folder(tmp_path, classes=datafiles.CIFAR_NAMES[::-1])
    expected = np.concatenate([drawn[f"data_batch_{i}.bin"][0] for i in range(1, 6)])
    assert np.array_equal(turned.labels, 9 - expected.astype(int))
    assert "is none of the classes (cat, dog)" in refusal(
        cifar_folder, tmp_path, classes=["cat", "dog"]
    )


def test_cifar_says_what_it_expects(tmp_path):
    datafiles.cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    text = refusal(open_data, str(tmp_path))
    assert text.startswith(f"{path}: expected records of 3073 bytes (CIFAR-10), found 9214 bytes")
    path.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    assert refusal(open_data, str(tmp_path)).startswith(
        f"{path}: image 1: expected a fine label below 10, found 10"
    )
    path.unlink()
    assert "expected data_batch_3.bin beside the others; it is missing" in refusal(
        open_data, str(tmp_path)
    )
    path.write_bytes(whole)
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n")
    assert "expected 10 different class names, a line each, found 2" in refusal(
        open_data, str(tmp_path)
    )
    assert "expected data_batch_1.bin or train.bin" in refusal(cifar_folder, tmp_path / "no")


@pytest.mark.parametrize("names", [("data_batch_1", "batches.meta"), ("train", "test", "meta")])
def test_pickles_are_never_read(tmp_path, names):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    import pickle

    for name in names:
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
    text = refusal(open_data, str(tmp_path))
    assert text.startswith(f"--data {tmp_path}: found ") and "binary version" in text
    assert not (tmp_path / "sprung").exists()


# HDF5


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (1, 4, 5, 3)}, {"chunks": (4, 2, 5, 3), "compression": "gzip"}],
    ids=["contiguous", "one image a chunk", "compressed"],
)
def test_hdf5(tmp_path, options):
    images, labels = pixels_of(0, 11, 3, 4, 5), np.arange(11) % 3
    path = datafiles.hdf5(
        tmp_path / "x.h5", images.transpose(0, 2, 3, 1), labels, ["a", "b", "c"], **options
    )
    store, test = open_data(str(path))
    assert test is None and store.classes == ["a", "b", "c"] and store.image_shape == (3, 4, 5)
    assert store.labels.dtype == np.int64 and np.array_equal(store.labels, labels)
    for indices in ([10, 0, 3, 3, 9], np.arange(11), []):
        found = store.read(indices)
        assert found.dtype == np.uint8 and np.array_equal(found, images[indices])
    assert store.describe() == f"{path}: 11 images of 3x4x5 in 3 classes"
    assert store.located(2) == f"{path}: image 2"
    stores = on_ranks(3, lambda world: HDF5Datastore(path, world))
    assert {s.fingerprint() for s in stores} == {store.fingerprint()}
    assert all(np.array_equal(s.read([4]), images[[4]]) for s in stores)


@pytest.mark.parametrize(
    ("layout", "order"), [("NHWC", (0, 2, 3, 1)), ("NCHW", (0, 1, 2, 3)), (None, None)]
)
def test_hdf5_layouts(tmp_path, layout, order):
    images = pixels_of(0, 6, 3, 3, 3)
    stored = images.transpose(order) if order else images[:, 0]
    path = datafiles.hdf5(tmp_path / "x.h5", stored, np.zeros(6, int), layout=layout)
    assert np.array_equal(HDF5Datastore(path).read(np.arange(6))[:, 0], images[:, 0])
    if layout:
        path = datafiles.hdf5(tmp_path / "y.h5", stored, np.zeros(6, int))
        text = refusal(HDF5Datastore, path)
        assert "(6, 3, 3, 3) may be NHWC or NCHW: say which by the attribute layout" in text
        found = HDF5Datastore(path, layout=layout).read(np.arange(6))
        assert np.array_equal(found, images)
    assert "expected " in refusal(HDF5Datastore, path, layout="HWC")


def test_hdf5_reads_each_chunk_once_for_a_mini_batch(tmp_path, monkeypatch):
    path = datafiles.hdf5(
        tmp_path / "x.h5", pixels_of(0, 40, 2, 2), np.zeros(40, int), chunks=(10, 2, 2)
    )
    store = HDF5Datastore(path)
    reads = []
    get = h5py.Dataset.__getitem__
    monkeypatch.setattr(
        h5py.Dataset, "__getitem__", lambda self, key: reads.append(key) or get(self, key)
    )
    store.read([35, 2, 9, 31, 1, 0])
    assert reads == [slice(0, 10), slice(31, 36)]


def test_hdf5_floats_and_targets(tmp_path):
    images = np.random.default_rng(0).normal(size=(7, 2, 3, 4))
    targets = np.arange(14.0).reshape(7, 2)
    path = datafiles.hdf5(tmp_path / "x.h5", images, layout="NCHW", targets=targets)
    store = HDF5Datastore(path)
    assert store.dtype == np.float32 and store.targets_shape == (2,) and store.labels is None
    assert np.array_equal(store.read([5]), images[[5]].astype(np.float32))
    ((x, y),) = MinibatchQueue(store, shuffle="never").epoch(0)
    assert y.dtype == np.float32 and np.array_equal(y.local(), targets)
    path = datafiles.hdf5(
        tmp_path / "y.h5", images, layout="NCHW", targets=np.arange(42).reshape(7, 2, 3)
    )
    ((_, y),) = MinibatchQueue(HDF5Datastore(path), shuffle="never").epoch(0)
    assert y.dtype == np.int32 and np.array_equal(y.local()[6], [[36, 37, 38], [39, 40, 41]])
    path = datafiles.hdf5(tmp_path / "z.h5", images, layout="NCHW", targets=np.full((7, 1), 2**31))
    assert "targets that int32 holds" in refusal(HDF5Datastore(path).targets, [0])


def test_hdf5_labels(tmp_path):
    images = pixels_of(0, 4, 2, 2)
    for labels in (np.array([0.0, 1.0, 2.0, 1.0]), np.array([[0], [1], [2], [1]], np.uint8)):
        path = datafiles.hdf5(tmp_path / "x.h5", images, labels)
        assert HDF5Datastore(path).labels.tolist() == [0, 1, 2, 1]
    wrong = {
        "expected whole numbers as labels, found fractions": np.array([0.5, 1, 2, 3]),
        "expected one label an image, (4,), found shape (3,)": np.zeros(3, int),
        "expected whole numbers from 0": np.array([0, 1, -1, 0]),
        "expected labels below 1048576": np.array([0, 1, 2**40, 0]),
        "found shape (2, 2)": np.zeros((2, 2), int),
    }
    for text, labels in wrong.items():
        path = datafiles.hdf5(tmp_path / "x.h5", images, labels)
        assert text in refusal(HDF5Datastore, path)
    path = datafiles.hdf5(tmp_path / "x.h5", images, [0, 1, 1, 0], ["cat", "dog"])
    assert HDF5Datastore(path, classes=["dog", "emu", "cat"]).labels.tolist() == [2, 0, 0, 2]
    assert "class dog is none of the classes (cat)" in refusal(HDF5Datastore, path, classes=["cat"])
    path = datafiles.hdf5(tmp_path / "x.h5", images, [0, 1, 1, 0], ["cat", "cat"])
    assert "found cat twice" in refusal(HDF5Datastore, path)
    path = datafiles.hdf5(tmp_path / "x.h5", images)
    text = refusal(HDF5Datastore, path)
    assert text == f"{path}: expected a dataset labels, or targets, beside images; found images"
    assert HDF5Datastore(path, labelled=False).labels is None
    assert open_test_data(str(path), labelled=False, classes=["a"]).classes == ["a"]


def test_hdf5_that_leads_to_other_files_is_refused(tmp_path):
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


def test_hdf5_that_is_hostile_or_damaged(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:  # a petabyte of images that nobody wrote
        file.create_dataset("images", (1 << 40, 32, 32), np.uint8, chunks=(1, 32, 32))
    assert "bytes of numbers, found 0 stored" in refusal(open_data, str(path))
    with h5py.File(path, "w") as file:
        shape = 2, 1 << 15, 1 << 14
        held = file.create_dataset("images", shape, np.uint8, chunks=(1, *shape[1:]))
        held.id.write_direct_chunk((0, 0, 0), bytes(100), 1)
        file["labels"] = [0, 1]
    assert refusal(open_data, str(path)).startswith(f"{path}: images: expected ")
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "images", data=np.zeros((300, 1 << 10, 1 << 10), np.uint8), chunks=(300, 1024, 1024),
            compression="gzip"
        )  # fmt: skip
        file["labels"] = np.zeros(300, int)
    assert "expected chunks of 256 MB at most, found 300 MB" in refusal(open_data, str(path))
    with h5py.File(path, "w") as file:
        file["images"] = np.array([b"text", b"more"])
        file["labels"] = [0, 1]
    assert "images: expected numbers, found" in refusal(open_data, str(path))
    with h5py.File(path, "w") as file:
        file["images/inner"] = [1]
    assert "images: expected a dataset, found a group" in refusal(open_data, str(path))
    datafiles.hdf5(path, pixels_of(0, 4, 2, 2).astype(np.int16), [0, 1, 0, 1])
    assert "expected uint8 (pixels 0 to 255) or floats, found int16" in refusal(
        open_data, str(path)
    )
    datafiles.hdf5(path, pixels_of(0, 400, 16, 16), np.zeros(400, int))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal(open_data, str(path)).startswith(f"{path}: the file cannot be read: ")
    assert refusal(HDF5Datastore, tmp_path / "no.h5") == f"{tmp_path}/no.h5: no such file"


def test_hdf5_that_changes_while_it_is_read(tmp_path):
    path = datafiles.hdf5(tmp_path / "x.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    store, late = HDF5Datastore(path), HDF5Datastore(path)
    store.read([0])
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    for reader in (store, late):
        text = refusal(reader.read, [1])
        assert text.startswith(f"{path}: the file has changed since the run began (same size)")


HELPERS = {  # what they do with a request: code, and what is said of the file
    "crashes": ("import os, sys; sys.stdin.buffer.readline(); os.kill(os.getpid(), 11)", "SIGSEGV"),
    "hangs": ("import time; time.sleep(60)", "came to no end of it in 0.5 s"),
    "is not to be had": ("raise SystemExit(1)", None),
    "has ended": ("", None),
}


@pytest.mark.parametrize("kind", HELPERS)
def test_a_file_that_the_library_does_not_survive(tmp_path, monkeypatch, kind):
    """Another process meets it first."""
    path = datafiles.hdf5(tmp_path / "x.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    code, text = HELPERS[kind]
    start = subprocess.Popen
    monkeypatch.setattr(probe, "_helper", None)
    monkeypatch.setattr(probe, "SECONDS", 0.5 if kind == "hangs" else 60)
    monkeypatch.setattr(
        subprocess, "Popen", lambda words, **options: start([words[0], "-c", code], **options)
    )
    if text is None:
        assert len(HDF5Datastore(path)) == 4
    else:
        found = refusal(open_data, str(path))
        assert found.startswith(f"{path}: the file cannot be read: the HDF5 library ")
        assert text in found


def test_the_helper_that_tries_files_out(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_helper", None)
    paths = [tmp_path / name for name in ("a b\n.h5", "c.h5")]
    for path in paths:
        datafiles.hdf5(path, pixels_of(0, 4, 2, 2), [0, 1, 0, 1], ["x", "y"])
        HDF5Datastore(path)
    assert probe._helper.poll() is None  # one for both
    helper = probe._helper
    helper.kill()
    helper.wait()
    assert probe.problem_of(paths[0], 1) is None and probe._helper is not helper
    probe._end()


# .mat


@pytest.mark.parametrize("write", [datafiles.mat5, datafiles.mat73])
def test_mat(tmp_path, write):
    images, labels = pixels_of(0, 9, 3, 4, 5), np.arange(9) % 3 + 1.0
    path = write(tmp_path / "x.mat", images=datafiles.matlab(images), labels=labels[:, None])
    store, test = open_data(str(path))
    assert test is None and store.classes == ["1", "2", "3"]
    assert np.array_equal(store.labels, labels - 1) and store.image_shape == (3, 4, 5)
    assert np.array_equal(store.read([8, 0, 4]), images[[8, 0, 4]])
    assert store.describe() == f"{path}: 9 images of 3x4x5 in 3 classes"
    stores = on_ranks(3, lambda world: mat_file(path, world), list("aab"))
    assert {s.fingerprint() for s in stores} == {store.fingerprint()}
    assert all(np.array_equal(s.read([4]), images[[4]]) for s in stores)


@pytest.mark.parametrize("write", [datafiles.mat5, datafiles.mat73])
def test_mat_as_matlab_s_examples_have_it(tmp_path, write):
    """XTrain, YTrain, XTest, YTest; gray images of doubles; labels that begin with 0."""
    grays = pixels_of(0, 7, 1, 4, 5) / 255
    parts = {
        "XTrain": datafiles.matlab(grays),
        "YTrain": np.array([0, 1, 2, 0, 1, 2, 0.0])[:, None],
        "XTest": datafiles.matlab(grays[:2]),
        "TTest": np.array([2, 0.0])[None],
        "anglesTrain": np.arange(7.0)[:, None],
    }
    path = write(tmp_path / "x.mat", **parts)
    train, test = open_data(str(path))
    assert train.classes == test.classes == ["0", "1", "2"] and train.dtype == np.float32
    assert train.labels.tolist() == [0, 1, 2, 0, 1, 2, 0] and test.labels.tolist() == [2, 0]
    assert np.array_equal(test.read([1]), grays[[1]].astype(np.float32))
    assert open_test_data(str(path)).labels.tolist() == [2, 0]
    flat = write(tmp_path / "y.mat", X=datafiles.matlab(grays)[:, :, 0], Y=parts["YTrain"])
    assert np.array_equal(mat_file(flat).read([3]), train.read([3]))
    named = mat_file(path, images="XTrain", labels="YTrain", classes=["2", "1", "0"])
    assert named.labels.tolist() == [2, 1, 0, 2, 1, 0, 2]


@pytest.mark.parametrize("compressed", [False, True])
def test_mat_class_names(tmp_path, compressed):
    images = datafiles.matlab(pixels_of(0, 4, 3, 2, 2))
    names = ["cat", "dög", "a long name of an emu"]
    labels = np.array([1, 3, 2, 1], np.int32)
    known = {"X": images, "Y": labels[:, None]}
    paths = [
        datafiles.mat5(
            tmp_path / "5.mat", compressed, classes=datafiles.cells(*names), other="x", **known
        ),
        datafiles.mat73(tmp_path / "73.mat", classes=names, **known),
    ]
    for path in paths:
        store = mat_file(path)
        assert store.classes == names and store.labels.tolist() == [0, 2, 1, 0]
        turned = mat_file(path, classes=names[::-1])
        assert turned.labels.tolist() == [2, 0, 1, 2] and turned.classes == names[::-1]
    zero = datafiles.mat73(tmp_path / "0.mat", classes=names, X=images, Y=labels[:, None] - 1)
    assert mat_file(zero).labels.tolist() == [0, 2, 1, 0]
    few = datafiles.mat73(tmp_path / "few.mat", classes=names[:2], **known)
    assert "expected labels from 1 to 2, as many as classes has, found 1 to 3" in refusal(
        mat_file, few
    )
    odd = datafiles.cells("cat", np.ones(2), "emu")
    odd = datafiles.mat5(tmp_path / "odd.mat", compressed, classes=odd, **known)
    assert "classes (1x3 cell): expected class names as a cell array of texts" in refusal(
        mat_file, odd
    )


@pytest.mark.parametrize("write", [datafiles.mat5, datafiles.mat73])
def test_mat_refuses_what_is_unclear(tmp_path, write):
    images = datafiles.matlab(pixels_of(0, 5, 3, 4, 4))
    path = tmp_path / "x.mat"

    def told(**variables):
        return refusal(open_data, str(write(path, **variables)))

    labels = np.ones((5, 1))
    assert "expected one variable of images" in told(a=images, b=images, labels=labels)
    assert "expected one variable of 5 labels for images" in told(images=images, a=labels, b=labels)
    assert "expected one variable of 5 labels" in told(images=images)
    assert "begin with 0 or 1, found 3 to 5" in told(images=images, labels=labels * [[3], [4], [5],
                                                                      [3], [4]])  # fmt: skip
    assert "begin with 0 or 1, found -1" in told(images=images, labels=-labels)
    assert "found fractions" in told(images=images, labels=labels / 2)
    turned = np.ascontiguousarray(images.transpose(3, 0, 1, 2))  # as Python would write it
    text = told(images=turned, labels=labels)
    assert "expected one label an image, 3 as the last dimension of images (5x4x4x3 uint8)" in text
    assert "is unclear" in refusal(mat_file, write(path, images=turned), labelled=False)
    text = told(images=images.astype(np.int32), labels=labels)
    assert "expected uint8, single or double H x W x C x N" in text
    assert "expected a variable Z, found images (4x4x3x5 uint8)" in refusal(
        mat_file, write(path, images=images), images="Z"
    )
    assert mat_file(path, labelled=False).labels is None
    with pytest.raises(dl.UserError, match="label 7 is none of the classes"):
        mat_file(write(path, images=images, labels=labels * 7), classes=["cat", "dog"])


def test_mat_with_categorical_labels(tmp_path):
    path = datafiles.mat73(
        tmp_path / "x.mat",
        XTrain=datafiles.matlab(pixels_of(0, 5, 3, 4, 4)),
        YTrain=np.zeros((1, 6), np.uint32),
    )
    with h5py.File(path, "r+") as file:  # a reference into MATLAB's own objects
        file["YTrain"].attrs["MATLAB_class"] = np.bytes_("categorical")
    text = refusal(open_data, str(path))
    assert text.startswith(f"{path}: YTrain (1x6 categorical): expected numbers as labels; in MAT")
    assert "save double(YTrain) and classes = categories(YTrain)" in text


def test_mat_that_is_damaged(tmp_path):
    images = datafiles.matlab(pixels_of(0, 50, 3, 8, 8))
    for write in (datafiles.mat5, datafiles.mat73):
        path = write(tmp_path / "x.mat", images=images, labels=np.ones((50, 1)))
        whole = path.read_bytes()
        for length in (100, len(whole) // 2, len(whole) - 3):
            path.write_bytes(whole[:length])
            text = refusal(open_data, str(path))
            assert text.startswith(f"{path}: ") and len(text) < 400
    for head in (b"", b"MATLAB 4", bytes(200), b"MATLAB".ljust(124) + b"\0\3IM"):
        path.write_bytes(head)
        assert "expected a .mat file of version 5 or 7.3" in refusal(mat_file, path)


STORED = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("order", "<>")
def test_mat_numbers_as_scipy_reads_them(tmp_path, compressed, order):
    """Whatever type MATLAB stores them by, and in either byte order."""
    drawn = {f"x{code}": pixels_of(0, 2, 3, 1, 4).astype(code) - 7 for code in STORED}
    drawn["tiny"] = np.uint8([[7]])
    drawn["none"] = np.zeros((0, 3))
    path = datafiles.mat5(tmp_path / "x.mat", compressed, **drawn)
    if order == ">":
        path.write_bytes(turned(drawn))
    known = {variable.name: variable for variable in mat5.variables(path)}
    held = scipy.io.loadmat(path)
    for name, value in drawn.items():
        assert known[name].shape == value.shape and known[name].kind in (
            value.dtype.name, {"float64": "double", "float32": "single"}.get(value.dtype.name)
        )  # fmt: skip
        found = mat5.load(path, [known[name]])[name]
        assert found.dtype == value.dtype and np.array_equal(found, held[name])


def turned(variables):
    """A .mat file in the byte order of other machines; doubles that are bytes are stored so."""
    types = {kind: number for number, kind in mat5.NUMBERS.items()}
    names = {"double": "float64", "single": "float32"}
    classes = {
        np.dtype(names.get(c, c)): i for i, c in enumerate(mat5.CLASSES) if i in range(6, 16)
    }

    def element(kind, data):
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    content = b"MATLAB 5.0 MAT-file".ljust(124) + b"\1\0MI"
    for name, value in variables.items():
        stored = value.astype("u1") if (value == value.astype("u1")).all() else value
        parts = element(6, struct.pack(">II", classes[value.dtype], 0))
        parts += element(5, np.array(value.shape, ">i4").tobytes()) + element(1, name.encode())
        data = stored.astype(stored.dtype.newbyteorder(">")).tobytes(order="F")
        content += element(14, parts + element(types[stored.dtype.str[1:]], data))
    return content


# Combined and transformed sets, and sets of one's own


def test_combined_images(tmp_path):
    grow(tmp_path / "noisy")
    grow(tmp_path / "clean", classes=("x",), per_class=9)
    noisy, clean = ImageFolder(tmp_path / "noisy"), ImageFolder(tmp_path / "clean")
    store = combined(noisy, clean)
    assert store.targets_shape == (1, 6, 5) and store.targets_dtype == np.float32
    assert store.describe().endswith("9 images of 1x6x5 with targets of 1x6x5")
    order = MinibatchQueue(store).order(0)
    ((images, targets),) = MinibatchQueue(store).epoch(0)
    assert np.array_equal(targets.local(), clean.read(order) / np.float32(255))
    assert np.array_equal(images.local(), noisy.read(order) / np.float32(255))
    for world in range(3):  # shares of whole blocks, the last of them ragged or empty
        ((_, part),) = MinibatchQueue(store, world=_Rank(world, 3)).epoch(0)
        assert part.lanes.shape == (part.batch.blocks, 1, 6, 5, 16)
    masks = combined(noisy, clean, pixel_labels=True)
    ((_, codes),) = MinibatchQueue(masks, shuffle="never").epoch(0)
    assert codes.dtype == np.int32 and np.array_equal(codes.local(), clean.read(range(9))[:, 0])
    assert store.fingerprint() != masks.fingerprint() != noisy.fingerprint()
    part = store.subset([4, 2])
    assert np.array_equal(part.targets([1]), store.targets([2])) and part.targets_shape == (1, 6, 5)
    assert [len(half) for half in store.split(0.5)] == [6, 3]
    cache = NodeCache(store)
    assert cache.capacity == 9 and np.array_equal(cache.targets([3]), store.targets([3]))
    (tmp_path / "clean" / "x" / "3.png").unlink()
    assert np.array_equal(cache.targets([3, 2]), np.stack([cache.targets([3])[0],
                                                           store.targets([2])[0]]))  # fmt: skip
    assert "no such file" in refusal(store.targets, [3])


class _Rank:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_combined_numbers():
    images = ArrayDatastore(pixels_of(0, 20, 2, 2))
    angles = np.linspace(-1, 1, 20)
    ((_, y),) = MinibatchQueue(combined(images, angles), shuffle="never").epoch(0)
    assert y.image_shape == () and np.array_equal(y.local(), angles.astype(np.float32))
    boxes = np.arange(80).reshape(20, 4)
    ((_, y),) = MinibatchQueue(combined(images, boxes), shuffle="never").epoch(0)
    assert y.dtype == np.int32 and np.array_equal(y.local(), boxes)
    assert combined(images, angles).describe() == "arrays: 20 images of 1x2x2 with a number each"
    assert "as many numbers as images, found 19" in refusal(combined, images, angles[:19])
    other = ArrayDatastore(pixels_of(0, 3, 2, 2))
    assert "as many targets as images, found 3" in refusal(combined, images, other)
    assert "expected numbers as targets" in refusal(combined, images, np.array(["a"] * 20))
    colours = ArrayDatastore(pixels_of(0, 20, 3, 2, 2))
    assert "expected gray images of bytes as pixel labels" in refusal(
        combined, images, colours, pixel_labels=True
    )
    angles[7] = np.nan
    queue = MinibatchQueue(combined(images, angles))
    assert "image 7: expected finite targets, found nan (1 of 1)" in refusal(next, queue.epoch(0))


def test_transform():
    store = ArrayDatastore(pixels_of(0, 30, 4, 4), np.arange(30) % 2)
    seen = []

    def shrink(image, i):
        seen.append((i, image.shape))
        image[0, 0, 0] = 0  # its own copy
        return image[:, ::2, ::2] / 255 - i

    small = store.transform(shrink, include_index=True)
    assert small.image_shape == (1, 2, 2) and small.dtype == np.float32 and len(small) == 30
    assert small.labels is store.labels and small.describe().startswith("arrays, transformed: 30 ")
    found = small.read([4, 2])
    expected = store.read([4, 2])
    expected[:, 0, 0, 0] = 0
    assert np.array_equal(found, (expected[:, :, ::2, ::2] / 255 - [[[[4]]], [[[2]]]]).astype("f4"))
    assert seen[1:] == [(4, (1, 4, 4)), (2, (1, 4, 4))]  # an image at a time
    bright = store.transform(lambda image: 255 - image)
    assert bright.dtype == np.uint8 and np.array_equal(bright.read([3]), 255 - store.read([3]))
    assert len({s.fingerprint() for s in (store, small, bright)}) == 3
    odd = store.transform(lambda image, i: image[:, i:], include_index=True)
    assert "image 1: expected transform to return uint8 of shape (1, 4, 4) as for image 0" in (
        refusal(odd.read, [1])
    )
    assert "expected transform to return uint8 or floats (C, H, W)" in refusal(
        store.transform, lambda image: 3
    )
    empty = ArrayDatastore(np.zeros((0, 2, 2), np.uint8))
    assert "expected images to find the shape" in refusal(empty.transform, lambda image: image)
    assert len(empty.transform(np.copy, image_shape=(1, 2, 2), dtype=np.uint8)) == 0


class Own(dl.data.Datastore):
    """Three methods and two shapes."""

    image_shape, targets_shape, dtype = (1, 3, 3), (2,), np.dtype(np.float32)

    def __len__(self):
        return 37

    def read(self, indices):
        return np.stack([np.full((1, 3, 3), i / 4) for i in indices]) if len(indices) else (
            np.zeros((0, 1, 3, 3)))  # fmt: skip

    def targets(self, indices):
        return np.array([[i, -i] for i in indices], float).reshape(-1, 2)


def test_a_set_of_one_s_own_with_targets(world):
    queue = MinibatchQueue(Own(), batch_size=20, world=world)
    seen = []
    for images, targets in queue.epoch(1):
        assert images.dtype == targets.dtype == np.float32
        assert np.array_equal(images.local()[:, 0, 0, 0] * 4, targets.local()[:, 0])
        assert not targets.lanes[len(targets.lanes) :].any()
        seen += world.broadcast(world.gather(targets.local()[:, 1].tolist()))
    assert sorted(-i for part in seen for i in part) == list(range(37))


def test_a_set_of_one_s_own_that_breaks_its_word():
    class Wrong(Own):
        dtype = np.dtype(np.uint8)

    class Flat(Own):
        def targets(self, indices):
            return np.zeros(len(indices))

    assert "Wrong.read: expected uint8 of shape (37, 1, 3, 3), got float64" in refusal(
        next, MinibatchQueue(Wrong()).epoch(0)
    )
    assert "Flat.targets: expected float32 of shape (37, 2), got float64 of shape (37,)" in refusal(
        next, MinibatchQueue(Flat()).epoch(0)
    )


# What a network cannot be trained on


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_no_numbers(tmp_path, value):
    images = np.random.default_rng(0).random((20, 1, 3, 3)).astype(np.float32)
    images[13, 0, 1, 1:] = value
    labels = np.arange(20) % 2
    path = datafiles.hdf5(tmp_path / "x.h5", images, labels, layout="NCHW")
    mat = datafiles.mat73(
        tmp_path / "x.mat", X=datafiles.matlab(images), Y=labels[:, None].astype(float)
    )
    write_idx(tmp_path / "train-images-idx3-ubyte", images[:, 0].astype(">f4"), 0x0D)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels.astype(np.uint8))
    stores = {
        path: HDF5Datastore(path),
        mat: mat_file(mat),
        tmp_path / "train-images-idx3-ubyte": idx_folder(tmp_path),
        "arrays": ArrayDatastore(images, labels),
    }
    for where, store in stores.items():
        expected = f"{where}: image 13: expected finite pixels, found {value} (2 of 9)"
        for wrapped in (store, store.subset(np.arange(20)), NodeCache(store)):
            assert refusal(next, MinibatchQueue(wrapped).epoch(0)) == expected
    huge = np.full((4, 1, 2, 2), 3e38, np.float32)  # whose sum is infinite
    next(MinibatchQueue(ArrayDatastore(huge)).epoch(0))


def test_one_class_trains_no_classifier(world):
    store = ArrayDatastore(pixels_of(0, 4, 2, 2), [1, 1, 1, 1], ["cat", "dog"])
    text = "expected images of two classes at least to train a classifier, found those of one (dog)"
    assert text in refusal(check_classes, store)
    net = dl.Network([dl.Dense(2)], (1, 2, 2))
    options = dl.TrainingOptions(epochs=1)
    assert text in refusal(dl.train, net, store, options, world=world)
    bare = ArrayDatastore(pixels_of(0, 4, 2, 2))
    assert "expected labels to train a classifier" in refusal(
        dl.train, net, bare, options, world=world
    )
    check_classes(ArrayDatastore(pixels_of(0, 4, 2, 2), [1, 1, 0, 1]))


def test_idx_that_claims_more_than_it_holds(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 1 << 31, 1 << 31, 1 << 31) + b"x")
    assert "found 17: the file is cut short" in refusal(idx_folder, tmp_path, labelled=False)
    path.write_bytes(bytes([0, 0, 8, 255]) + bytes(255 * 4))
    assert "8 dimensions at most, found 255" in refusal(idx_folder, tmp_path, labelled=False)
    images = write_idx(tmp_path / "t10k-images-idx3-ubyte", pixels_of(0, 2, 2, 2))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([0, 2**31 - 1], ">i4"), 0x0C)
    assert "expected labels below 1048576" in refusal(idx_folder, tmp_path, "test")
    assert images.exists()


# Opening what --data names


def test_open_data_takes_a_folder_of_two_files(tmp_path):
    pixels = pixels_of(0, 6, 2, 2)
    datafiles.hdf5(tmp_path / "train.h5", pixels, [0, 1, 2] * 2, ["a", "b", "c"])
    datafiles.hdf5(tmp_path / "test.h5", pixels[:2], [1, 0], ["c", "a"])
    train, test = open_data(str(tmp_path))
    assert train.classes == test.classes == ["a", "b", "c"] and test.labels.tolist() == [0, 2]
    assert open_test_data(str(tmp_path), classes=["c", "a"]).labels.tolist() == [1, 0]
    (tmp_path / "test.h5").unlink()
    assert open_data(str(tmp_path))[1] is None


def test_open_data_names_files_it_cannot_use(tmp_path):
    for name, hint in (("x.txt", "another file"), ("cifar-10-binary.tar.gz", "unpack it first")):
        path = tmp_path / name
        path.write_bytes(b"no data")
        text = refusal(open_data, str(path))
        assert text.startswith(f"--data {path}: expected a folder, an HDF5 file or a .mat file")
        assert text.endswith(hint)
