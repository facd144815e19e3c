"""Any bytes of a data file give a datastore or a UserError of one line, in little memory.

Each format is fuzzed twice: with random bytes behind a valid beginning, and with valid files of
which a few places were changed, removed, doubled or cut off. What opens is read as well. The
examples are those of `fuzzing`.
"""

import datafiles
import h5py
import numpy as np
import pytest
from fuzzing import EXAMPLES, FUZZ, attempt, bounded
from hypothesis import given
from hypothesis import strategies as st
from image_sets import grow, pixels_of, save, write_idx

from mpidl.data import ArrayDatastore, ImageFolder, open_data, open_test_data, read_idx
from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.formats import hdf5_probe, packed, packing
from mpidl.errors import UserError

__all__ = ["bounded"]
TEXT = st.characters(min_codepoint=1, codec="utf-8")  # of an attribute of HDF5


def use(store):
    """Read images of a datastore and call all that describes it."""
    assert isinstance(store, Datastore)
    indices = np.unique([0, len(store) // 2, len(store) - 1])
    for read in (read_images, read_targets) if store.targets_shape is not None else (read_images,):
        attempt(read, store, indices)
    assert store.describe() and len(store.fingerprint()) == 64
    if store.labels is not None:
        assert len(store.labels) == len(store) and store.labels.max() < len(store.classes)
    for i in indices:
        attempt(store.name, int(i))


def open_and_use(path):
    """Open a path as --data and as --test-data and use the datastores; return if it opened."""
    stores = attempt(open_data, str(path))
    test = attempt(open_test_data, str(path), classes=["a", "b", "c"], labelled=False)
    for store in [*(stores or ()), test]:
        if store is not None:
            use(store)
    return stores is not None


def open_and_verify(path):
    """The same for a packed file, whose pixels are compared with their checksums too."""
    open_and_use(path)
    store = attempt(packed.PackedDatastore, path, labelled=False)
    if store is not None:
        attempt(store.verify)
    return store is not None


NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]  # sizes or offsets


@st.composite
def damaged(draw, content):
    """Bytes of a file with some of them changed, removed, doubled, or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, max(len(data) - 1, 0)))
        damage = draw(st.sampled_from(["set", "set", "bits", "number", "cut", "out", "twice"]))
        if damage == "set":
            data[i : i + 1] = bytes([draw(st.integers(0, 255))])
        elif damage == "bits" and data:
            data[i] ^= 1 << draw(st.integers(0, 7))
        elif damage == "number":
            number = draw(st.sampled_from(NUMBERS))
            data[i : i + 8] = number.to_bytes(8, draw(st.sampled_from(["little", "big"])))
        elif damage == "cut":
            del data[i:]
        elif damage == "out":
            del data[i : i + draw(st.integers(1, 64))]
        else:
            data[i:i] = data[i : i + draw(st.integers(1, 64))]
    return bytes(data)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """HDF5 does not finish reading some damaged files, so its helper process is ended soon.

    `fuzz` sets the shorter limit once the helper has started and has read a good file.
    """
    monkeypatch.setattr(hdf5_probe, "SECONDS", 60.0)


def fuzz(path, beginning, check=open_and_use):
    """Fuzz a valid file in both ways; random bytes follow its first `beginning` bytes."""
    content = path.read_bytes()

    @FUZZ
    @given(st.binary(max_size=600))
    def from_random_bytes(data):
        path.write_bytes(content[:beginning] + data)
        check(path)

    @FUZZ
    @given(damaged(content))
    def from_a_valid_file(data):
        path.write_bytes(data)
        check(path)

    assert check(path)  # which opens the undamaged file
    hdf5_probe.SECONDS = 1.0  # the fixture restores it
    from_random_bytes()
    from_a_valid_file()


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_idx(tmp_path, name):
    path = write_idx(tmp_path / name, pixels_of(0, 5, 4, 3))
    fuzz(path, 3, lambda path: attempt(read_idx, path) is not None)


@pytest.mark.parametrize("kind", ["images-idx3", "labels-idx1"])
def test_idx_folder(tmp_path, kind):
    write_idx(tmp_path / "train-images-idx3-ubyte", pixels_of(0, 5, 4, 3))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))
    fuzz(tmp_path / f"train-{kind}-ubyte", 2, lambda path: open_and_use(tmp_path))


@pytest.mark.parametrize(
    "name", ["data_batch_2.bin", "test_batch.bin", "batches.meta.txt", "train.bin"]
)
def test_cifar(tmp_path, name):
    write = datafiles.cifar100 if name == "train.bin" else datafiles.cifar10
    write(tmp_path)
    fuzz(tmp_path / name, 0, lambda path: open_and_use(tmp_path))


@pytest.mark.parametrize("kind", ["old", "new", "chunks"])
def test_hdf5(tmp_path, kind):
    """The oldest version of the format has no checksums, the newest has them everywhere."""
    path = tmp_path / "x.h5"
    version = {"old": "earliest", "new": "latest", "chunks": "earliest"}[kind]
    options = {"chunks": (2, 4, 3), "compression": "gzip"} if kind == "chunks" else {}
    with h5py.File(path, "w", libver=version) as file:
        file.create_dataset("images", data=pixels_of(0, 5, 4, 3), **options)
        file.attrs["layout"] = "NHW"
        file["labels"] = np.arange(5) % 3
        file["labels"].attrs["classes"] = ["a", "b", "c"]
    fuzz(path, 8)


@pytest.mark.parametrize("labelled", [True, False])
def test_packed(tmp_path, labelled):
    store = ArrayDatastore(pixels_of(0, 5, 4, 3))
    if labelled:
        grow(tmp_path / "set")
        store = ImageFolder(tmp_path / "set")
    packing.pack({"train": store}, tmp_path / "x.h5")
    fuzz(tmp_path / "x.h5", 8, open_and_verify)


CLASSES = [
    "[" * 5000,
    '["a"]',
    '["\\ud800", "\\udcff", "c"]',
    '["a", "b", 3]',
    '{"a": 1}',
    "[1e999]",
]

SIGNED = st.integers(-(2**63), 2**63 - 1)


@FUZZ
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "format_version": st.one_of(st.integers(-1, 2), st.text(TEXT, max_size=3)),
            "classes": st.one_of(st.text(TEXT, max_size=8), st.sampled_from(CLASSES)),
            "chunk_images": st.one_of(SIGNED, st.floats(), st.lists(st.integers(0, 9), max_size=2)),
            "fingerprint": st.one_of(st.text(TEXT, max_size=3), st.integers(0, 9)),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            name: st.tuples(
                st.lists(st.integers(0, 6), max_size=4),
                st.sampled_from(["u1", "<i8", "<f4", ">f4", "<u8", "S3", "?", "<c8"]),
                st.booleans(),
            )
            for name in ("images", "labels", "targets", "checksums", "names", "name_ends")
        },
    ),
)
def test_packed_headers(tmp_path_factory, attributes, arrays):
    """Files with valid checksums, but any shapes, types and attributes."""
    path = tmp_path_factory.mktemp("packed") / "x.h5"
    if EXAMPLES:
        path = tmp_path_factory.getbasetemp() / "packed.h5"
        path.unlink(missing_ok=True)
    packing.pack({"train": ArrayDatastore(pixels_of(0, 5, 4, 3), np.arange(5) % 3)}, path)
    with h5py.File(path, "r+") as file:
        group = file["train"]
        for name, (shape, dtype, chunked) in arrays.items():
            if name in group:
                del group[name]
            options = {"chunks": True} if chunked and shape and np.prod(shape) else {}
            group.create_dataset(name, shape, dtype, **options)
        for name, value in attributes.items():
            holder = group if name in group.attrs else file
            holder.attrs[name] = value
        try:
            file.attrs["sha256"] = packed.content(file)
        except (UserError, TypeError, ValueError, OverflowError):
            pass  # which the check of the sum will meet as well
    open_and_verify(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    images, labels = pixels_of(0, 5, 4, 3), np.arange(5) % 3
    arrays = {"images": images, "labels": labels, "images_test": images, "labels_test": labels}
    save(tmp_path / "x.npz", classes=["a", "b", "c"], **arrays)
    fuzz(tmp_path / "x.npz", 4)


@pytest.mark.parametrize("version", ["5", "5 compressed", "7.3"])
def test_mat(tmp_path, version):
    path, classes = tmp_path / "x.mat", ["a", "b", "c"]
    images = datafiles.matlab(pixels_of(0, 5, 3, 4, 2))
    variables = {"images": images, "labels": np.array([[1.0], [2], [3], [1], [2]])}
    if version == "7.3":
        datafiles.mat73(path, classes=classes, **variables)
        fuzz(path, 520)
    else:
        datafiles.mat5(path, version != "5", classes=datafiles.cells(*classes), **variables)
        fuzz(path, 128)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # about metadata that it ignores
@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif"])
def test_images(tmp_path, suffix):
    path = save(tmp_path / "c" / f"x.{suffix}", pixels_of(0, 3, 6, 5))
    fuzz(path, 8, lambda path: open_and_use(tmp_path))
