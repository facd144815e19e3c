"""Test IDX files and folders of IDX files."""

import struct

import numpy as np
import pytest
from image_sets import on_ranks, pixels_of, refusal, write_idx

from mpidl.data import idx_folder, open_data, open_test_data, read_idx


@pytest.mark.parametrize(("separator", "suffix"), [("-", ""), ("-", ".gz"), (".", "")])
def test_idx_folder(tmp_path, separator, suffix):
    parts = {}
    for prefix, n in (("train", 7), ("t10k", 4)):
        images, labels = pixels_of(n, n, 5, 6), (np.arange(n) % 3).astype(np.uint8)
        write_idx(tmp_path / f"{prefix}-images{separator}idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{prefix}-labels{separator}idx1-ubyte{suffix}", labels)
        parts[prefix] = images, labels
    train, test = open_data(str(tmp_path))
    for store, (images, labels) in ((train, parts["train"]), (test, parts["t10k"])):
        assert np.array_equal(store.read(np.arange(len(store)))[:, 0], images)
        assert np.array_equal(store.labels, labels) and store.classes == ["0", "1", "2"]
    assert np.array_equal(open_test_data(str(tmp_path)).images, test.images)
    assert test.describe().startswith(f"{tmp_path}/t10k-images{separator}idx3-ubyte{suffix}: 4 ")
    stores = on_ranks(4, lambda world: idx_folder(tmp_path, "train", world), list("aabb"))
    assert {store.fingerprint() for store in stores} == {train.fingerprint()}
    assert stores[0].images.base is stores[1].images.base
    for name in ("labels", "images"):
        file = tmp_path / f"t10k-{name}{separator}idx{3 if name == 'images' else 1}-ubyte{suffix}"
        file.unlink()
        text = refusal(idx_folder, tmp_path, "test")
        assert text.startswith(f"{tmp_path}: expected t10k-{name}-idx")
        if name == "labels":
            assert idx_folder(tmp_path, "test", labelled=False).labels is None
    assert open_data(str(tmp_path))[1] is None


def test_nodes_without_shared_memory_read_the_files_themselves(tmp_path):
    """Nodes with the same name, and a node with full shared memory, read the files themselves."""
    images = pixels_of(0, 3, 2, 2)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(3, np.uint8))

    def open_unshared(world):
        world.shared_array = np.zeros
        return idx_folder(tmp_path, "train", world)

    def open_without_room(world):
        world.available_shared_bytes, world.shared_array = lambda: 0, None
        return idx_folder(tmp_path, "train", world)

    for open_on_rank in (open_unshared, open_without_room):
        for store in on_ranks(2, open_on_rank):
            assert np.array_equal(store.images[:, 0], images)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(8, ">u1"), (9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")],
)
def test_read_idx_types(tmp_path, code, dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    array = read_idx(write_idx(tmp_path / "x", values, code))
    assert array.dtype == np.dtype(dtype).newbyteorder("=") and np.array_equal(array, values)


def test_damaged_files_and_wrong_labels(tmp_path):
    images = write_idx(tmp_path / "train-images-idx3-ubyte", pixels_of(0, 5, 4, 4))
    labels = write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(4, np.uint8))
    text = refusal(idx_folder, tmp_path)
    assert text.startswith(
        f"{labels}: expected one label per image, (5,), got labels of shape (4,)"
    )
    write_idx(labels, np.array([0, 1, 2, 3, 9], np.uint8))
    text = refusal(idx_folder, tmp_path, classes=["a", "b"])
    assert text.startswith(f"{labels}: expected labels below 2") and text.endswith("got 9")
    content = images.read_bytes()
    images.write_bytes(content[:-3])
    expected = f"{images}: expected 96 bytes for its sizes [5, 4, 4], found 93: the file is trunc"
    assert refusal(idx_folder, tmp_path).startswith(expected)
    texts = on_ranks(2, lambda world: refusal(idx_folder, tmp_path, "train", world))
    assert texts[1].startswith(expected)
    images.write_bytes(content + b"x")
    assert "found 97: the file is too long" in refusal(idx_folder, tmp_path)
    images.write_bytes(content[:9])
    assert "truncated" in refusal(idx_folder, tmp_path)
    images.write_bytes(b"\x89PNG....")
    assert refusal(idx_folder, tmp_path).startswith(f"{images}: expected an IDX file")
    write_idx(images, np.zeros((0, 4, 4), np.uint8))
    assert refusal(idx_folder, tmp_path).startswith(f"{images}: expected images, found none")
    write_idx(images, np.zeros(5, np.uint8))
    assert "expected (n, C, H, W) or (n, H, W), found (5,)" in refusal(idx_folder, tmp_path)
    assert refusal(read_idx, tmp_path / "no") == f"{tmp_path}/no: no such file"
    packed = write_idx(tmp_path / "x.gz", pixels_of(0, 50, 4, 4))
    content = packed.read_bytes()
    for damaged in (content[:-20], b"no gzip", content[:40] + b"0" * 700):
        packed.write_bytes(damaged)
        assert refusal(read_idx, packed).startswith(f"{packed}: the file cannot be read: ")
    assert 'must be "train" or "test"' in refusal(idx_folder, tmp_path, "valid")


def test_idx_that_claims_more_than_it_holds(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 1 << 31, 1 << 31, 1 << 31) + b"x")
    assert "found 17: the file is truncated" in refusal(idx_folder, tmp_path, labelled=False)
    path.write_bytes(bytes([0, 0, 8, 255]) + bytes(255 * 4))
    assert "8 dimensions at most, found 255" in refusal(idx_folder, tmp_path, labelled=False)
    images = write_idx(tmp_path / "t10k-images-idx3-ubyte", pixels_of(0, 2, 2, 2))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([0, 2**31 - 1], ">i4"), 0x0C)
    assert "expected labels below 1048576" in refusal(idx_folder, tmp_path, "test")
    assert images.exists()
