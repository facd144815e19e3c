"""Whatever bytes a data file holds: a datastore or a UserError of one line, in little memory.

Each form is fuzzed twice: bytes from nothing behind a right beginning, and whole files of which a
few places were changed, cut out, doubled or cut off. What opens is read as well. The examples are
the same in each run (`derandomize`); MPIDL_FUZZ=100000 tries as many, and others each time, as the
slow part `fuzz` does.
"""

import os
import resource

import datafiles
import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_sets import grow, pixels_of, write_idx

from mpidl.data import ArrayDatastore, ImageFolder, open_data, open_test_data, read_idx
from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.formats import hdf5_probe, packed, packing
from mpidl.errors import UserError

MORE = int(os.environ.get("MPIDL_FUZZ", 0))
FUZZ = settings(
    max_examples=MORE or 20,
    derandomize=not MORE,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TEXT = st.characters(min_codepoint=1, codec="utf-8")  # of an attribute of HDF5
MEMORY = 600 << 20  # bytes that reading hostile files may add to the peak


@pytest.fixture(autouse=True, scope="module")
def bounded():
    """No file had gigabytes of memory taken."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert taken < MEMORY, f"{taken >> 20} MB"


def attempt(function, *args, **keywords):
    """The call's result, or None after a UserError of one short line."""
    try:
        return function(*args, **keywords)
    except UserError as error:
        text = str(error)
        assert "\n" not in text and 0 < len(text) < 2000, text
        return None


def use(store):
    """Read the first and the last images of a datastore, and ask it for all it can say."""
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
    """Open it as --data and as --test-data, and use what that gives; whether it opened."""
    found = attempt(open_data, str(path))
    for store in found or ():
        if store is not None:
            use(store)
    test = attempt(open_test_data, str(path), classes=["a", "b", "c"], labelled=False)
    if test is not None:
        use(test)
    return found is not None


@st.composite
def damaged(draw, whole):
    """Bytes of `whole` with some of them changed, cut out, doubled, or cut off."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        how = draw(st.sampled_from(["set", "set", "bits", "number", "cut", "out", "twice"]))
        if how == "set":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif how == "bits" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "number":  # a size or an offset
            number = draw(
                st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
            )
            data[at : at + 8] = number.to_bytes(8, draw(st.sampled_from(["little", "big"])))
        elif how == "cut":
            del data[at:]
        elif how == "out":
            del data[at : at + draw(st.integers(1, 64))]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
    return bytes(data)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """HDF5 comes to no end of some damaged files: the helper that tries them out may be ended
    sooner. `fuzzed` does so once the helper has been started and a good file has been read."""
    monkeypatch.setattr(hdf5_probe, "SECONDS", 60.0)


def fuzzed(tmp_path, name, beginning, whole, check=open_and_use):
    """Both ways of fuzzing a file of this name."""
    path = tmp_path / name

    @FUZZ
    @given(st.binary(max_size=600))
    def from_nothing(data):
        path.write_bytes(beginning + data)
        check(path)

    @FUZZ
    @given(damaged(whole))
    def from_a_whole_file(data):
        path.write_bytes(data)
        check(path)

    path.write_bytes(whole)
    assert check(path)  # which opens the undamaged file
    hdf5_probe.SECONDS = 1.0  # the fixture sets it back
    from_nothing()
    from_a_whole_file()


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_idx(tmp_path, name):
    whole = write_idx(tmp_path / f"whole{name}", pixels_of(0, 5, 4, 3)).read_bytes()
    begins = b"\x1f\x8b\x08" if name.endswith("gz") else b"\0\0\x08"
    fuzzed(tmp_path, name, begins, whole, lambda path: attempt(read_idx, path) is not None)


@pytest.mark.parametrize("kind", ["images-idx3", "labels-idx1"])
def test_idx_folder(tmp_path, kind):
    folder = tmp_path / "set"
    folder.mkdir()
    write_idx(folder / "train-images-idx3-ubyte", pixels_of(0, 5, 4, 3))
    write_idx(folder / "train-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))
    path = folder / f"train-{kind}-ubyte"
    whole = path.read_bytes()
    fuzzed(folder, path.name, b"\0\0", whole, lambda path: open_and_use(folder))


@pytest.mark.parametrize(
    "name", ["data_batch_2.bin", "test_batch.bin", "batches.meta.txt", "train.bin"]
)
def test_cifar(tmp_path, name):
    write = datafiles.cifar100 if name == "train.bin" else datafiles.cifar10
    write(tmp_path)
    whole = (tmp_path / name).read_bytes()
    fuzzed(tmp_path, name, b"", whole, lambda path: open_and_use(tmp_path))


@pytest.mark.parametrize("kind", ["old", "new", "chunks"])
def test_hdf5(tmp_path, kind):
    """The oldest form has no checksums of its own, the newest has them everywhere."""
    path = tmp_path / "whole.h5"
    version = {"old": "earliest", "new": "latest", "chunks": "earliest"}[kind]
    options = {"chunks": (2, 4, 3), "compression": "gzip"} if kind == "chunks" else {}
    with h5py.File(path, "w", libver=version) as file:
        file.create_dataset("images", data=pixels_of(0, 5, 4, 3), **options)
        file.attrs["layout"] = "NHW"
        file["labels"] = np.arange(5) % 3
        file["labels"].attrs["classes"] = ["a", "b", "c"]
    fuzzed(tmp_path, "x.h5", b"\x89HDF\r\n\x1a\n", path.read_bytes())


@pytest.mark.parametrize("labelled", [True, False])
def test_packed(tmp_path, labelled):
    store = ArrayDatastore(pixels_of(0, 5, 4, 3), np.arange(5) % 3 if labelled else None)
    if labelled:
        grow(tmp_path / "set")
        store = ImageFolder(tmp_path / "set")
    packing.pack({"train": store}, tmp_path / "whole.h5")
    whole = (tmp_path / "whole.h5").read_bytes()

    def check(path):
        open_and_use(path)
        found = attempt(packed.PackedDatastore, path, labelled=False)
        if found is not None:
            attempt(found.verify)
        return found is not None

    fuzzed(tmp_path, "x.h5", b"\x89HDF\r\n\x1a\n", whole, check)


@FUZZ
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "format_version": st.one_of(st.integers(-1, 2), st.text(TEXT, max_size=3)),
            "classes": st.one_of(
                st.text(TEXT, max_size=8),
                st.sampled_from(
                    [
                        "[" * 5000,
                        '["a"]',
                        '["\\ud800", "\\udcff", "c"]',
                        '["a", "b", 3]',
                        '{"a": 1}',
                        "[1e999]",
                    ]
                ),
            ),
            "chunk_images": st.one_of(
                st.integers(-(2**63), 2**63 - 1),
                st.floats(),
                st.lists(st.integers(0, 9), max_size=2),
            ),
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
    """Files of right sums, but of any shapes, types and attributes."""
    path = tmp_path_factory.mktemp("packed") / "x.h5"
    if os.environ.get("MPIDL_FUZZ"):
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
    open_and_use(path)
    found = attempt(packed.PackedDatastore, path, labelled=False)
    if found is not None:
        attempt(found.verify)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, save):
    labels = np.arange(5) % 3
    images = pixels_of(0, 5, 4, 3)
    arrays = {"images": images, "labels": labels, "images_test": images, "labels_test": labels}
    save(tmp_path / "whole.npz", classes=["a", "b", "c"], **arrays)
    fuzzed(tmp_path, "x.npz", b"PK\x03\x04", (tmp_path / "whole.npz").read_bytes())


@pytest.mark.parametrize("compressed", [True, False])
def test_mat5(tmp_path, compressed):
    path = datafiles.mat5(
        tmp_path / "whole.mat",
        compressed,
        images=datafiles.matlab(pixels_of(0, 5, 3, 4, 2)),
        labels=np.array([[1.0], [2], [3], [1], [2]]),
        classes=datafiles.cells("a", "b", "c"),
    )
    whole = path.read_bytes()
    fuzzed(tmp_path, "x.mat", whole[:128], whole)


def test_mat73(tmp_path):
    path = datafiles.mat73(
        tmp_path / "whole.mat",
        images=datafiles.matlab(pixels_of(0, 5, 3, 4, 2)),
        labels=np.array([[1.0], [2], [3], [1], [2]]),
        classes=["a", "b", "c"],
    )
    whole = path.read_bytes()
    fuzzed(tmp_path, "x.mat", whole[:512] + b"\x89HDF\r\n\x1a\n", whole)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of metadata that it does without
@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif"])
def test_images(tmp_path, suffix):
    from PIL import Image

    path = tmp_path / "set" / "c" / f"x.{suffix}"
    path.parent.mkdir(parents=True)
    Image.fromarray(pixels_of(0, 6, 5, 3)).save(path)
    whole = path.read_bytes()
    fuzzed(path.parent, path.name, whole[:8], whole, lambda path: open_and_use(tmp_path / "set"))
