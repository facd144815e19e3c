"""Test MATLAB's .mat files of versions 5 and 7.3: variables, labels, targets and types."""

import struct

import datafiles
import h5py
import numpy as np
import pytest
import scipy.io
from image_sets import on_ranks, pixels_of, refusal

import mpidl as dl
from mpidl.data import mat_file, open_data, open_test_data
from mpidl.data.checks import read_targets
from mpidl.data.formats import mat5

BOTH_VERSIONS = pytest.mark.parametrize("write", [datafiles.mat5, datafiles.mat73])


@BOTH_VERSIONS
def test_images_and_labels(tmp_path, write):
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


@BOTH_VERSIONS
def test_variables_named_as_in_matlab_s_examples(tmp_path, write):
    """XTrain, YTrain, XTest and TTest are read: gray images of type double, and labels from 0."""
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
    store = mat_file(path, images="XTrain", labels="YTrain", classes=["2", "1", "0"])
    assert store.labels.tolist() == [2, 1, 0, 2, 1, 0, 2]


@BOTH_VERSIONS
def test_targets(tmp_path, write):
    """Targets may be fractions, several numbers per image, or one image per image."""
    images = pixels_of(0, 7, 3, 4, 5)
    outputs = pixels_of(1, 7, 1, 2, 3) / 7
    angles = np.arange(7) / 4 - 1
    cases = (
        (angles[:, None], angles),
        (angles[None], angles),
        (np.arange(14.0).reshape(7, 2), np.arange(14).reshape(7, 2)),
        (np.arange(14, dtype=np.int32).reshape(7, 2), np.arange(14).reshape(7, 2)),
        (datafiles.matlab(outputs), outputs),
        (datafiles.matlab(outputs.astype(np.float32)), outputs),
    )
    for i, (targets, expected) in enumerate(cases):
        path = write(tmp_path / f"{i}.mat", XTrain=datafiles.matlab(images), YTrain=targets)
        store, test = open_data(str(path))
        assert test is None and store.labels is None and store.classes == []
        assert store.targets_shape == expected.shape[1:] and store.targets_dtype == np.float32
        assert np.array_equal(store.targets([6, 0, 3]), expected[[6, 0, 3]].astype(np.float32))
        assert np.array_equal(store.read([6, 2]), images[[6, 2]])
        assert store.describe().startswith(f"{path}: 7 images of 3x4x5 with ")
        stores = on_ranks(3, lambda world, path=path: mat_file(path, world), list("aab"))
        assert {s.fingerprint() for s in stores} == {store.fingerprint()}
    parts = {"XTest": datafiles.matlab(images), "YTest": np.arange(7.0)[:, None]}
    path = write(tmp_path / "y.mat", XTrain=parts["XTest"], YTrain=angles[:, None], **parts)
    test = open_data(str(path))[1]  # integers are targets, because the training set has targets
    assert test.targets_shape == () and test.targets([5, 2]).tolist() == [5, 2]
    angles[4] = np.nan
    store = mat_file(write(tmp_path / "z.mat", X=parts["XTest"], Y=angles[:, None]))
    assert "image 4: expected finite targets" in refusal(read_targets, store, [3, 4])


@pytest.mark.parametrize("compressed", [False, True])
def test_class_names(tmp_path, compressed):
    images = datafiles.matlab(pixels_of(0, 4, 3, 2, 2))
    names = ["cat", "dög", "a long name of an emu"]
    labels = np.array([1, 3, 2, 1], np.int32)
    variables = {"X": images, "Y": labels[:, None]}
    path5, path73, cells = tmp_path / "5.mat", tmp_path / "73.mat", datafiles.cells(*names)
    datafiles.mat5(path5, compressed, classes=cells, other="x", **variables)
    datafiles.mat73(path73, classes=names, **variables)
    for path in (path5, path73):
        store = mat_file(path)
        assert store.classes == names and store.labels.tolist() == [0, 2, 1, 0]
        turned = mat_file(path, classes=names[::-1])
        assert turned.labels.tolist() == [2, 0, 1, 2] and turned.classes == names[::-1]
    zero = datafiles.mat73(tmp_path / "0.mat", classes=names, X=images, Y=labels[:, None] - 1)
    assert mat_file(zero).labels.tolist() == [0, 2, 1, 0]
    text = refusal(mat_file, datafiles.mat73(path73, classes=names[:2], **variables))
    assert "expected labels from 1 to 2, one for each name in classes, found 1 to 3" in text
    odd = datafiles.cells("cat", np.ones(2), "emu")
    text = refusal(mat_file, datafiles.mat5(path5, compressed, classes=odd, **variables))
    assert "classes (1x3 cell): expected class names as a cell array of character vectors" in text


@BOTH_VERSIONS
def test_unclear_variables_are_refused(tmp_path, write):
    images = datafiles.matlab(pixels_of(0, 5, 3, 4, 4))
    path = tmp_path / "x.mat"

    def refusal_of(**variables):
        return refusal(open_data, str(write(path, **variables)))

    labels = np.ones((5, 1))
    assert "expected one variable of images" in refusal_of(a=images, b=images, labels=labels)
    text = refusal_of(images=images, a=labels, b=labels)
    assert "expected one variable of 5 labels for images" in text
    assert "expected one variable of 5 labels" in refusal_of(images=images)
    numbers = labels * [[3], [4], [5], [3], [4]]
    assert "start at 0 or 1, found 3 to 5" in refusal_of(images=images, labels=numbers)
    assert "start at 0 or 1, found -1" in refusal_of(images=images, labels=-labels)
    turned = np.ascontiguousarray(images.transpose(3, 0, 1, 2))  # in Python's order of dimensions
    text = refusal_of(images=turned, labels=labels)
    assert "one label per image, 3 as in the last dimension of images (5x4x4x3 uint8)" in text
    assert "is ambiguous" in refusal(mat_file, write(path, images=turned), labelled=False)
    for numbers in (np.ones((3, 5)), np.ones((4, 4, 3, 4)), np.ones((4, 4, 5)), images):
        text = refusal_of(images=images, labels=numbers)
        assert "or targets: 5 x R numbers, or H x W x C x 5 of single or double; found lab" in text
    text = refusal_of(images=images.astype(np.int32), labels=labels)
    assert "expected uint8, single or double H x W x C x N" in text
    text = refusal(mat_file, write(path, images=images), images="Z")
    assert "expected a variable Z, found images (4x4x3x5 uint8)" in text
    assert mat_file(path, labelled=False).labels is None
    with pytest.raises(dl.UserError, match="label 7 is not one of the classes"):
        mat_file(write(path, images=images, labels=labels * 7), classes=["cat", "dog"])


def test_categorical_labels_are_refused(tmp_path):
    path = datafiles.mat73(
        tmp_path / "x.mat",
        XTrain=datafiles.matlab(pixels_of(0, 5, 3, 4, 4)),
        YTrain=np.zeros((1, 6), np.uint32),
    )
    with h5py.File(path, "r+") as file:  # a reference into MATLAB's object system
        file["YTrain"].attrs["MATLAB_class"] = np.bytes_("categorical")
    text = refusal(open_data, str(path))
    assert text.startswith(f"{path}: YTrain (1x6 categorical): expected numbers as labels; in MAT")
    assert "save double(YTrain) and classes = categories(YTrain)" in text


def test_damaged_files(tmp_path):
    images = datafiles.matlab(pixels_of(0, 50, 3, 8, 8))
    for write in (datafiles.mat5, datafiles.mat73):
        path = write(tmp_path / "x.mat", images=images, labels=np.ones((50, 1)))
        content = path.read_bytes()
        for length in (100, len(content) // 2, len(content) - 3):
            path.write_bytes(content[:length])
            text = refusal(open_data, str(path))
            assert text.startswith(f"{path}: ") and len(text) < 400
    for head in (b"", b"MATLAB 4", bytes(200), b"MATLAB".ljust(124) + b"\0\3IM"):
        path.write_bytes(head)
        assert "expected a .mat file of version 5 or 7.3" in refusal(mat_file, path)


DTYPES = {"double": "float64", "single": "float32"}  # MATLAB's numeric classes
STORED = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("order", "<>")
def test_numbers_are_read_as_by_scipy(tmp_path, compressed, order):
    """Numbers of every stored type and of both byte orders have the same values as in SciPy."""
    drawn = {f"x{code}": pixels_of(0, 2, 3, 1, 4).astype(code) - 7 for code in STORED}
    drawn["tiny"] = np.uint8([[7]])
    drawn["none"] = np.zeros((0, 3))
    path = datafiles.mat5(tmp_path / "x.mat", compressed, **drawn)
    if order == ">":
        path.write_bytes(big_endian(drawn))
    file = mat5.Mat5(path)
    variables = {variable.name: variable for variable in file.variables}
    by_scipy = scipy.io.loadmat(path)
    for name, value in drawn.items():
        variable = variables[name]
        assert variable.shape == value.shape
        assert DTYPES.get(variable.kind, variable.kind) == value.dtype.name
        array = file.numbers(variable)
        assert array.dtype == value.dtype and np.array_equal(array, by_scipy[name])


def big_endian(variables):
    """Return a big-endian .mat file. Numbers that fit in a byte are stored as bytes."""
    types = {kind: number for number, kind in mat5.NUMBERS.items()}
    classes = {np.dtype(DTYPES.get(mat5.CLASSES[i], mat5.CLASSES[i])): i for i in range(6, 16)}

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
