"""Test NumPy's .npz files of images and labels."""

import io
import os
import resource
import struct
import zipfile

import numpy as np
import pytest
from image_sets import on_ranks, pixels_of, refusal

from mpidl.data import npz_file, open_data, open_test_data


def write(path, **arrays):
    """Save arrays to an uncompressed .npz file; return its path."""
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float16, ">f8"])
@pytest.mark.parametrize("shape", [(7, 5, 6), (7, 3, 5, 6)])
def test_npz(tmp_path, save, dtype, shape):
    images, labels = pixels_of(0, *shape).astype(dtype), np.arange(7) % 3
    path = tmp_path / "x.npz"
    save(path, images=np.asfortranarray(images), labels=labels)
    store, test = open_data(str(path))
    assert test is None and store.image_shape == (shape[1:] if len(shape) == 4 else (1, 5, 6))
    assert store.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
    assert np.array_equal(store.read(np.arange(7)).reshape(shape), images)
    assert np.array_equal(store.labels, labels) and store.classes == ["0", "1", "2"]
    assert store.describe() == f"{path}: 7 images of {store.describe().split()[-4]} in 3 classes"
    # The ranks of two nodes read the file once per node.
    stores = on_ranks(4, lambda world: npz_file(path, world), list("aabb"))
    assert {s.fingerprint() for s in stores} == {store.fingerprint()}
    assert stores[0].images.base is stores[1].images.base


@pytest.mark.parametrize("dtype", ["U", "S"])
def test_npz_with_a_test_set_and_class_names(tmp_path, dtype):
    names = np.array(["ant", "bee", "cow"], dtype)
    images = pixels_of(0, 6, 4, 4)
    parts = {"images": images, "labels": np.arange(6.0) % 3}
    parts |= {"images_test": images[:2], "labels_test": [[2], [0]]}
    path = write(tmp_path / "x.npz", **parts, classes=names)
    train, test = open_data(str(path))
    assert train.classes == test.classes == ["ant", "bee", "cow"]
    assert train.labels.tolist() == [0, 1, 2] * 2 and test.labels.tolist() == [2, 0]
    assert test.describe().startswith(f"{path}, test: 2 images")
    assert open_test_data(str(path)).labels.tolist() == [2, 0]
    assert open_test_data(str(path), classes=["cow", "ant"]).labels.tolist() == [0, 1]
    text = refusal(npz_file, path, classes=["cow"])
    assert text == f"{path}: labels: class ant is not one of the classes (cow)"


def test_a_folder_of_two_npz_files(tmp_path):
    images = pixels_of(0, 6, 4, 4)
    write(tmp_path / "train.npz", images=images, labels=np.arange(6) % 2)
    write(tmp_path / "test.npz", images=images[:1], labels=[1])
    train, test = open_data(str(tmp_path))
    assert len(train) == 6 and test.labels.tolist() == [1] and test.classes == ["0", "1"]


def test_npz_with_targets(tmp_path):
    """Integers, booleans and floats are read as targets of training and test images."""
    images = pixels_of(0, 7, 5, 6)
    targets = np.arange(21).reshape(7, 3)
    arrays = {"images_test": images, "targets_test": targets > 9, "classes": ["a", "b", "c"]}
    path = write(tmp_path / "x.npz", images=images, targets=targets / 2, **arrays)
    train, test = open_data(str(path))
    assert train.targets_shape == (3,) and train.targets_dtype == np.float32
    assert np.array_equal(train.targets([5, 1]), targets[[5, 1]] / 2)
    assert test.targets_dtype == np.int32 and test.classes == ["a", "b", "c"]
    assert np.array_equal(test.targets(np.arange(7)), targets > 9)
    path = write(tmp_path / "y.npz", images=images, targets=targets / 4)
    assert npz_file(path).fingerprint() != train.fingerprint()
    for bad, text in (
        (targets[:6], "expected floats or whole numbers as targets of 7 images, found int64"),
        (targets + 2**31, "targets in the range of int32, found 0 to 21"),
        (np.array(["a"] * 7), "targets: expected numbers, found <U1"),
    ):
        assert text in refusal(npz_file, write(tmp_path / "bad.npz", images=images, targets=bad))


def test_npz_without_labels(tmp_path):
    path = write(tmp_path / "x.npz", images=pixels_of(0, 3, 4, 4))
    assert refusal(npz_file, path) == f"{path}: expected an array labels; found images"
    assert npz_file(path, labelled=False).labels is None
    assert open_test_data(str(path), labelled=False, classes=["a"]).classes == ["a"]


IMAGES = pixels_of(0, 5, 4, 4)
REFUSED = [
    ({"labels": [1]}, "expected an array images; found labels"),
    ({"images": np.array([None] * 5)}, "images: expected numbers or strings, found Python objects"),
    ({"images": IMAGES.astype(np.int32)}, "images: expected uint8 (pixels 0 to 255) or floats"),
    ({"images": IMAGES[0]}, "images: expected (n, C, H, W) or (n, H, W), found (4, 4)"),
    ({"images": np.zeros((5, 6, 7, 3))}, "images: expected images (n, C, H, W), found (5, 6, 7, 3"),
    ({"images": np.zeros((5, 6, 7, 4))}, "images: expected images (n, C, H, W), found (5, 6, 7, 4"),
    ({"images": IMAGES[:0]}, "images: expected images, found none (shape (0, 4, 4))"),
    ({"labels": np.array([None] * 5)}, "labels: expected numbers or strings, found Python objects"),
    ({"labels": [0, 1]}, "labels: expected one label per image, shape (5,), found shape (2,)"),
    (
        {"labels": list("abacd"), "classes": list("abc")},
        "labels: label d is not one of",
    ),
    ({"labels": [0, 1, 2, 3, 0.5]}, "labels: expected whole numbers as labels, found fractions"),
    ({"labels": [0, 1, 2, 3, -1]}, "labels: expected whole numbers from 0 as labels, got -1"),
    ({"classes": ["a"]}, "labels: expected labels below 1"),
    ({"classes": ["a", "a"]}, "expected different class names, found a twice"),
    ({"classes": [1, 2]}, "classes: expected strings, found int64"),
    ({"classes": np.array(["a", None])}, "classes: expected numbers or strings, found Python obj"),
]


@pytest.mark.parametrize(("arrays", "expected"), REFUSED)
def test_npz_errors(tmp_path, arrays, expected):
    arrays = {"images": IMAGES, "labels": np.arange(5) % 2} | arrays
    if "expected an array images" in expected:
        del arrays["images"]
    path = write(tmp_path / "x.npz", **arrays)
    text = refusal(open_data, str(path))
    assert text.startswith(f"{path}: {expected}") and "\n" not in text
    assert [str(e) for e in on_ranks(2, lambda world: open_data(str(path), world))] == [text] * 2


def test_a_file_without_images_is_refused_as_a_test_set(tmp_path):
    path = write(tmp_path / "x.npz", labels=np.arange(5))
    assert refusal(open_test_data, str(path)).startswith(f"{path}: expected an array images")


def test_damaged_npz(tmp_path):
    path = write(tmp_path / "x.npz", images=IMAGES, labels=np.arange(5))
    content = path.read_bytes()
    assert "no such file" in refusal(npz_file, tmp_path / "no.npz")
    assert 'part must be "train" or "test"' in refusal(npz_file, path, part="valid")
    path.write_bytes(content[:-30])
    assert refusal(open_data, str(path)).startswith(f"{path}: the file cannot be read: ")
    offset = content.index(IMAGES.tobytes())
    path.write_bytes(content[:offset] + b"?" + content[offset + 1 :])
    assert "Bad CRC-32" in refusal(open_data, str(path))
    buffer = io.BytesIO()
    np.save(buffer, IMAGES)
    for content in (b"", buffer.getvalue()):
        path.write_bytes(content)
        assert "expected an .npz file (a zip archive of arrays)" in refusal(open_data, str(path))


def test_npz_that_claims_more_than_it_holds(tmp_path):
    """Wrong sizes in a header or in the archive's table do not make mpidl allocate memory."""
    path, memory = tmp_path / "x.npz", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def write_header(*shape):
        header, buffer = {"descr": "|u1", "fortran_order": False, "shape": shape}, io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, header)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("images.npy", buffer.getvalue())
        return len(buffer.getvalue())

    write_header(1 << 40, 4, 4)
    assert "bytes for its shape (1099511627776, 4, 4), found" in refusal(npz_file, path)
    length = write_header(1 << 31, 1, 1)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02") + 24  # the array's size in the archive's table
    content[entry : entry + 4] = struct.pack("<I", length + (1 << 31))
    path.write_bytes(content)
    text = refusal(npz_file, path)
    assert "its shape (2147483648, 1, 1) needs 2147483776 bytes, but the file holds only" in text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 << 10


def test_npz_never_unpickles(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    objects = np.array([Evil(), None], object)
    for name in ("images", "labels", "classes"):
        arrays = {"images": IMAGES, "labels": np.arange(5)} | {name: objects}
        path = write(tmp_path / "x.npz", **arrays)
        assert "never read" in refusal(open_data, str(path))
    assert not (tmp_path / "ran").exists()


def test_labels_may_be_class_names(tmp_path):
    """The classes of the training images, or of the array `classes`, number all labels."""
    images, labels = IMAGES[:4], ["rose", "daisy", "rose", "tulip"]
    arrays = {"images": images, "labels": labels}
    test = {"images_test": images[:2], "labels_test": ["tulip", "rose"]}
    path = write(tmp_path / "x.npz", **arrays, **test)
    train, test = open_data(str(path))
    assert train.classes == test.classes == ["daisy", "rose", "tulip"]
    assert train.labels.tolist() == [1, 0, 1, 2] and test.labels.tolist() == [2, 1]
    path = write(tmp_path / "y.npz", **arrays, classes=["tulip", "rose", "daisy"])
    assert open_data(str(path))[0].labels.tolist() == [1, 2, 1, 0]
