"""Image folders, IDX files, arrays, splits and the node's cache."""

import gzip
import os
import threading
import warnings

import numpy as np
import pytest
from PIL import Image

from mpidl.data import (
    ArrayDatastore,
    ImageFolder,
    NodeCache,
    idx_folder,
    open_data,
    open_test_data,
    read_idx,
)
from mpidl.errors import UserError


def pixels_of(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, pixels, **options):
    """Write (C, H, W) pixels as an image file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(
        path, **options
    )
    return path


def grow(folder, classes=("cat", "dog", "emu"), per_class=3, shape=(1, 6, 5)):
    """A tree of PNG files; returns {relative path: pixels}."""
    drawn = {}
    for c, name in enumerate(classes):
        for i in range(per_class):
            drawn[f"{name}/{i}.png"] = pixels_of((c, i), *shape)
            save(folder / name / f"{i}.png", drawn[f"{name}/{i}.png"])
    return drawn


def write_idx(path, values, code=0x08):
    header = bytes([0, 0, code, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(header + values.tobytes())
    return path


def refusal(function, *args, **kwargs):
    """The text of the UserError that the call ends with: one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def on_ranks(size, function, hosts=None):
    """function(world) on each rank of a pretended world, ranks being threads; their results."""
    meet = threading.Barrier(size, timeout=20)
    hosts = hosts or ["node0"] * size
    slots, results = [None] * size, [None] * size

    class World:
        def __init__(self, rank):
            self.rank, self.size, self.hosts, self.host = rank, size, hosts, hosts[rank]

        def exchange(self, value):
            slots[self.rank] = value
            meet.wait()
            values = list(slots)
            meet.wait()
            return values

        def broadcast(self, value, root=0):
            return self.exchange(value)[root]

        def together(self, error):
            errors = [e for e in self.exchange(error) if e is not None]
            if errors:
                raise UserError(str(errors[0]))

        def shared_array(self, shape, dtype):
            return self.exchange(np.zeros(shape, dtype))[hosts.index(self.host)]

    def run(rank):
        try:
            results[rank] = function(World(rank))
        except BaseException as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# Image folders


@pytest.mark.parametrize("channels", [1, 3])
def test_folder_gives_png_pixels_back(tmp_path, channels):
    drawn = grow(tmp_path, shape=(channels, 6, 5))
    store = ImageFolder(tmp_path)
    assert len(store) == 9 and store.image_shape == (channels, 6, 5)
    assert store.classes == ["cat", "dog", "emu"]
    assert store.labels.dtype == np.int64 and store.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    images = store.read([4, 0, 8])
    assert images.dtype == np.uint8
    for image, name in zip(images, ("dog/1.png", "cat/0.png", "emu/2.png"), strict=True):
        assert np.array_equal(image, drawn[name])
    assert store.name(4) == str(tmp_path / "dog" / "1.png")
    assert store.describe() == f"{tmp_path}: 9 images of {channels}x6x5 in 3 classes"
    assert store.read([]).shape == (0, channels, 6, 5)


def test_folder_reads_jpeg_subfolders_and_links_and_passes_over_the_rest(tmp_path):
    pixels = np.full((3, 8, 8), 200, np.uint8)
    kept = tmp_path / "kept"
    save(kept / "b" / "deep" / "er" / "1.JPG", pixels)
    save(kept / "a" / "2.jpeg", pixels)
    (kept / "a" / "0.png").symlink_to(save(tmp_path / "elsewhere.png", pixels))
    (kept / "a" / "up").symlink_to(kept)  # a loop
    for other in ("notes.txt", ".DS_Store", "a/._2.jpeg", "b/list.csv", ".hidden/1.png"):
        (kept / other).parent.mkdir(exist_ok=True)
        (kept / other).write_bytes(b"x")
    store = ImageFolder(kept)
    assert store.files == ["a/0.png", "a/2.jpeg", "b/deep/er/1.JPG"]
    assert store.labels.tolist() == [0, 0, 1]
    assert np.abs(store.read([0, 1, 2]).astype(int) - 200).max() <= 2


def test_folder_sorts_by_bytes(tmp_path):
    for name in ("b/10.png", "b/9.png", "B/x.png", "é/x.png", "z/x.png", "b/Ä.png"):
        save(tmp_path / name, pixels_of(0, 1, 2, 2))
    store = ImageFolder(tmp_path)
    assert store.classes == ["B", "b", "z", "é"]
    assert store.files == ["B/x.png", "b/10.png", "b/9.png", "b/Ä.png", "z/x.png", "é/x.png"]


def test_folder_takes_names_that_are_no_utf8(tmp_path):
    for name in (b"\xff.png", b"a.png"):
        path = save(tmp_path / "c" / "plain.png", pixels_of(0, 1, 2, 2))
        os.rename(os.fsencode(path), os.fsencode(path.parent) + b"/" + name)
    store = ImageFolder(tmp_path)
    assert store.name(1) == f"{tmp_path}/c/\\xff.png"
    assert store.read([0, 1]).shape == (2, 1, 2, 2) and store.fingerprint()


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("1", 1), ("L", 1), ("LA", 1), ("I;16", 1), ("P", 3), ("RGB", 3), ("RGBA", 3)],
)
def test_folder_converts_other_modes(tmp_path, mode, channels):
    gray = np.zeros((4, 4), np.uint8)
    gray[1:3] = 255
    (tmp_path / "c").mkdir()
    if mode == "I;16":
        image = Image.fromarray(gray.astype(np.uint16) << 8 | 17)
    else:
        image = Image.fromarray(gray).convert(mode)
    transparency = {"transparency": bytes([0, 128])} if mode == "P" else {}
    image.save(tmp_path / "c" / "x.png", **transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ImageFolder(tmp_path).read([0])[0]
    assert np.array_equal(found, np.repeat(gray[None], channels, axis=0))


def test_folder_reads_cmyk_jpeg_as_rgb(tmp_path):
    (tmp_path / "c").mkdir()
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(tmp_path / "c" / "x.jpg")
    assert ImageFolder(tmp_path).read([0]).shape == (1, 3, 8, 8)


def test_folder_names_what_it_cannot_use(tmp_path):
    assert refusal(ImageFolder, tmp_path / "no") == f"{tmp_path}/no: no such folder"
    (tmp_path / "pets").mkdir()
    pets = tmp_path / "pets"
    assert refusal(ImageFolder, tmp_path / "pest").endswith("no such folder; did you mean pets?")
    assert refusal(ImageFolder, pets).startswith(f"{pets}: expected sub-folders named by class")
    assert refusal(ImageFolder, pets).endswith("found an empty folder")
    (pets / "cat").mkdir()
    assert refusal(ImageFolder, pets).endswith("found no such file")
    path = save(tmp_path / "flat" / "1.png", pixels_of(0, 1, 4, 4))
    assert refusal(ImageFolder, path) == f"{path}: expected a folder, found a file"
    text = refusal(ImageFolder, tmp_path / "flat")
    assert str(tmp_path / "flat") in text and "found images (1.png) and no class sub-f" in text
    save(tmp_path / "flat" / "cat" / "1.png", pixels_of(0, 1, 4, 4))
    assert "1.png lies outside of the class sub-folders" in refusal(ImageFolder, tmp_path / "flat")
    save(pets / "dog" / "1.png", pixels_of(0, 1, 4, 4))
    assert f"{pets}: sub-folder cat has no images" in refusal(ImageFolder, pets)
    (pets / "cat" / "1.png").symlink_to(tmp_path / "gone.png")
    assert refusal(ImageFolder, pets) == f"{pets}/cat/1.png: a link to a missing file"


def test_folder_that_may_not_be_read(tmp_path, monkeypatch):
    grow(tmp_path)
    scandir = os.scandir

    def guarded(path):
        if os.path.basename(path) == "dog":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    expected = f"{tmp_path}/dog: the folder cannot be read: Permission denied"
    assert refusal(ImageFolder, tmp_path) == expected


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_folder_names_a_damaged_image_among_good_ones(tmp_path, suffix):
    grow(tmp_path, shape=(1, 40, 40))
    bad = save(tmp_path / "dog" / f"1x{suffix}", pixels_of(7, 1, 40, 40))
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) * 2 // 3])
    store = ImageFolder(tmp_path)
    at = store.files.index(f"dog/1x{suffix}")
    assert refusal(store.read, [0, at, 1]).startswith(f"{bad}: the image cannot be read: ")
    for content in (b"", b"no image at all", whole[:20]):
        bad.write_bytes(content)
        assert refusal(store.read, [at]).startswith(f"{bad}: ")
    bad.unlink()
    assert refusal(store.read, [at]) == f"{bad}: no such file any more"
    assert len(store.read([0, 1])) == 2  # the good ones stay good


def test_folder_notices_flipped_bits_in_png(tmp_path):
    path = save(tmp_path / "c" / "1.png", pixels_of(7, 1, 40, 40))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    store = ImageFolder(tmp_path)
    path.write_bytes(data)
    assert refusal(store.read, [0]).startswith(f"{path}: the image cannot be read: ")


def test_folder_refuses_another_size_or_kind(tmp_path):
    grow(tmp_path)
    wide = save(tmp_path / "dog" / "wide.png", pixels_of(0, 1, 6, 9))
    color = save(tmp_path / "dog" / "x.png", pixels_of(0, 3, 6, 5))
    store = ImageFolder(tmp_path)
    text = refusal(store.read, [store.files.index("dog/wide.png")])
    assert text.startswith(f"{wide}: expected a 5x6 gray image like the first one (cat/0.png), ")
    assert "found 9x6 gray; all images must have one size" in text and "resize" in text
    text = refusal(store.read, [store.files.index("dog/x.png")])
    assert text.startswith(f"{color}: ") and "found 5x6 RGB" in text


def test_folder_counts_labels_by_given_classes(tmp_path):
    grow(tmp_path, classes=("dog", "emu"))
    store = ImageFolder(tmp_path, classes=["cat", "dog", "emu"])
    assert store.labels.tolist() == [1, 1, 1, 2, 2, 2] and store.classes == ["cat", "dog", "emu"]
    text = refusal(ImageFolder, tmp_path, classes=["dog", "emus"])
    assert "sub-folder emu is none of the classes (dog, emus); did you mean emus?" in text
    assert ImageFolder(tmp_path, classes=["x"], labelled=False).labels is None


def test_folder_without_labels(tmp_path):
    save(tmp_path / "1.png", pixels_of(0, 1, 4, 4))
    store = ImageFolder(tmp_path, classes=["a", "b"], labelled=False)
    assert store.labels is None and store.classes == ["a", "b"] and len(store.read([0])) == 1
    assert ImageFolder(tmp_path, labelled=False).classes == []
    assert [len(part) for part in store.split(1.0)] == [1, 0]


def test_folder_is_listed_by_rank_0_alone(tmp_path, monkeypatch):
    grow(tmp_path)
    listers = []
    scandir = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda p: listers.append(threading.get_ident()) or scandir(p)
    )
    stores = on_ranks(3, lambda world: ImageFolder(tmp_path, world))
    assert len(set(listers)) == 1
    assert len({store.fingerprint() for store in stores}) == 1
    assert all(np.array_equal(store.read([5]), stores[0].read([5])) for store in stores)
    errors = on_ranks(3, lambda world: ImageFolder(tmp_path / "no", world))
    assert [str(e) for e in errors] == [f"{tmp_path}/no: no such folder"] * 3


def test_fingerprint_tells_sets_apart_but_not_places(tmp_path):
    for place in ("one", "two"):
        grow(tmp_path / place)
    first = ImageFolder(tmp_path / "one").fingerprint()
    assert ImageFolder(tmp_path / "two").fingerprint() == first
    moved = tmp_path / "two" / "cat" / "0.png"
    content = moved.read_bytes()
    moved.write_bytes(content + b"\0")
    assert ImageFolder(tmp_path / "two").fingerprint() != first
    moved.write_bytes(content)
    assert ImageFolder(tmp_path / "two").fingerprint() == first
    moved.rename(tmp_path / "two" / "dog" / "0b.png")
    assert ImageFolder(tmp_path / "two").fingerprint() != first
    images = pixels_of(0, 5, 2, 2)
    labels = np.array([0, 1, 0, 1, 1])
    sets = [
        ArrayDatastore(images, labels),
        ArrayDatastore(images),
        ArrayDatastore(images, labels[::-1]),
        ArrayDatastore(images[::-1], labels),
        ArrayDatastore(images, labels, ["a", "b"]),
        ArrayDatastore(images, labels).subset([0, 1]),
        ArrayDatastore(images, labels).subset([1, 0]),
    ]
    assert len({store.fingerprint() for store in sets}) == len(sets)
    assert sets[0].fingerprint() == ArrayDatastore(images.copy(), labels).fingerprint()


# Arrays, subsets and splits


def test_arrays():
    images = pixels_of(0, 4, 3, 2)
    store = ArrayDatastore(images, [1, 0, 2, 1])
    assert store.image_shape == (1, 3, 2) and store.classes == ["0", "1", "2"]
    assert np.array_equal(store.read([3, 1]), images[[3, 1], None])
    assert store.name(3) == "image 3"
    assert store.describe() == "arrays: 4 images of 1x3x2 in 3 classes"
    floats = ArrayDatastore(images[:, None] / 7.0)
    assert floats.labels is None and floats.dtype == np.float32
    assert np.array_equal(floats.read([2])[0, 0], (images[2] / 7.0).astype(np.float32))


def test_arrays_say_what_they_expect():
    images = pixels_of(0, 4, 3, 2)
    text = refusal(ArrayDatastore, images.astype(int))
    assert "expected uint8 or float images" in text and "got int64 of shape (4, 1, 3, 2)" in text
    assert "(4,), got labels of shape (3,)" in refusal(ArrayDatastore, images, [0, 1, 2])
    assert "labels below 2" in refusal(ArrayDatastore, images, [0, 1, 2, 0], ["a", "b"])
    assert "whole numbers from 0" in refusal(ArrayDatastore, images, [0, 1, -1, 0])
    assert "got float64" in refusal(ArrayDatastore, images, [0.0, 1.0, 1.0, 0.0])


def test_subset_of_a_subset():
    store = ArrayDatastore(pixels_of(0, 6, 2, 2), [0, 1, 2, 0, 1, 2])
    part = store.subset([5, 3, 1]).subset([2, 0])
    assert part.labels.tolist() == [1, 2] and [part.name(i) for i in (0, 1)] == [
        "image 1",
        "image 5",
    ]
    assert np.array_equal(part.read([1, 0]), store.read([5, 1]))
    assert part.describe() == "2 of arrays: 6 images of 1x2x2 in 3 classes"
    with pytest.raises(IndexError, match="0 to 5, got 0 to 6"):
        store.subset([0, 6])


def test_split_is_per_label_seeded_and_in_order():
    labels = np.array([0] * 50 + [1] * 5 + [2] * 1)[np.random.default_rng(0).permutation(56)]
    store = ArrayDatastore(np.arange(56, dtype=np.uint8).reshape(56, 1, 1), labels)
    first, second = store.split(0.29, seed=3)
    # 14.5, 1.45 and 0.29, rounded half up
    assert np.bincount(first.labels, minlength=3).tolist() == [15, 1, 0]
    assert np.bincount(second.labels, minlength=3).tolist() == [35, 4, 1]
    parts = [part.read(np.arange(len(part))).reshape(-1) for part in (first, second)]
    assert all((np.diff(part.astype(int)) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(56))
    again, _ = store.split(0.29, seed=3)
    other, _ = store.split(0.29, seed=4)
    assert np.array_equal(first.indices, again.indices)
    assert not np.array_equal(first.indices, other.indices)
    assert [len(part) for part in store.split(1)] == [56, 0]
    assert "between 0 and 1, got 1.5" in refusal(store.split, 1.5)


# IDX files


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
    # The ranks of two nodes; then two nodes of one host name, which share no memory.
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


def test_idx_is_read_again_by_a_node_that_shares_a_host_name(tmp_path):
    images = pixels_of(0, 3, 2, 2)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(3, np.uint8))

    def alone(world):
        world.shared_array = np.zeros
        return idx_folder(tmp_path, "train", world)

    assert all(np.array_equal(store.images[:, 0], images) for store in on_ranks(2, alone))


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(8, ">u1"), (9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")],
)
def test_read_idx_types(tmp_path, code, dtype):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    found = read_idx(write_idx(tmp_path / "x", values, code))
    assert found.dtype == np.dtype(dtype).newbyteorder("=") and np.array_equal(found, values)


def test_idx_errors(tmp_path):
    images = write_idx(tmp_path / "train-images-idx3-ubyte", pixels_of(0, 5, 4, 4))
    labels = write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(4, np.uint8))
    text = refusal(idx_folder, tmp_path)
    assert text.startswith(f"{labels}: expected one label an image, (5,), got labels of shape (4,)")
    write_idx(labels, np.array([0, 1, 2, 3, 9], np.uint8))
    text = refusal(idx_folder, tmp_path, classes=["a", "b"])
    assert text.startswith(f"{labels}: expected labels below 2") and text.endswith("got 9")
    whole = images.read_bytes()
    images.write_bytes(whole[:-3])
    expected = f"{images}: expected 96 bytes for its sizes [5, 4, 4], found 93: the file is cut s"
    assert refusal(idx_folder, tmp_path).startswith(expected)
    assert on_ranks(2, lambda world: refusal(idx_folder, tmp_path, "train", world))[1].startswith(
        expected
    )
    images.write_bytes(whole + b"x")
    assert "found 97: the file is too long" in refusal(idx_folder, tmp_path)
    images.write_bytes(whole[:9])
    assert "cut short" in refusal(idx_folder, tmp_path)
    images.write_bytes(b"\x89PNG....")
    assert refusal(idx_folder, tmp_path).startswith(f"{images}: expected an IDX file")
    write_idx(images, np.zeros((0, 4, 4), np.uint8))
    assert refusal(idx_folder, tmp_path).startswith(f"{images}: expected images, found none")
    write_idx(images, np.zeros(5, np.uint8))
    assert "expected uint8 images in 3 dimensions" in refusal(idx_folder, tmp_path)
    assert refusal(read_idx, tmp_path / "no") == f"{tmp_path}/no: no such file"
    packed = write_idx(tmp_path / "x.gz", pixels_of(0, 50, 4, 4))
    for content in (packed.read_bytes()[:-20], b"no gzip", packed.read_bytes()[:40] + b"0" * 700):
        packed.write_bytes(content)
        assert refusal(read_idx, packed).startswith(f"{packed}: the file cannot be read: ")
    assert 'must be "train" or "test"' in refusal(idx_folder, tmp_path, "valid")


# Opening what --data names


def test_open_data_takes_train_and_test_folders(tmp_path):
    grow(tmp_path / "train")
    grow(tmp_path / "test", classes=("emu",), per_class=2)
    train, test = open_data(str(tmp_path))
    assert len(train) == 9 and test.classes == train.classes and test.labels.tolist() == [2, 2]
    assert open_test_data(str(tmp_path), classes=train.classes).labels.tolist() == [2, 2]
    whole = open_test_data(str(tmp_path / "train"), option="--data")
    assert len(whole) == 9
    save(tmp_path / "test" / "cow" / "1.png", pixels_of(0, 1, 6, 5))
    assert "sub-folder cow is none of the classes" in refusal(open_data, str(tmp_path))


def test_open_data_takes_classes_that_are_called_train(tmp_path):
    grow(tmp_path, classes=("train", "test"))
    store, test = open_data(str(tmp_path))
    assert store.classes == ["test", "train"] and test is None


def test_open_data_errors(tmp_path):
    assert refusal(open_data, "digist").startswith("--data digist: no such folder; did you mean d")
    text = refusal(open_test_data, str(tmp_path / "no"))
    assert text == f"--test-data {tmp_path}/no: no such folder"
    path = save(tmp_path / "1.png", pixels_of(0, 1, 4, 4))
    assert refusal(open_data, str(path)) == f"--data {path}: expected a folder, found a file"
    for part in ("train", "val"):
        grow(tmp_path / "set" / part)
    folder = tmp_path / "set"
    text = refusal(open_data, str(folder))
    assert text.startswith(f"--data {folder}: found train/ but no test/ beside it")
    assert text.endswith(f"--data {folder}/train and --test-data {folder}/val")
    errors = on_ranks(2, lambda world: open_data(str(folder), world))
    assert [str(e) for e in errors] == [text] * 2


# The node's cache


def test_cache_does_not_touch_the_files_again(tmp_path):
    grow(tmp_path)
    store = ImageFolder(tmp_path)
    cache = NodeCache(store, budget_bytes=1000)
    assert cache.capacity == len(cache) == 9
    images = cache.read([7, 2, 7])
    assert np.array_equal(images, store.read([7, 2, 7]))
    os.unlink(tmp_path / store.files[7])
    os.unlink(tmp_path / store.files[2])
    assert np.array_equal(cache.read([2, 7, 7]), images[[1, 0, 0]])
    assert np.array_equal(cache.read([1, 7]), np.stack([store.read([1])[0], images[0]]))
    assert cache.name(7) == store.name(7) and cache.fingerprint() == store.fingerprint()
    assert cache.describe() == store.describe() and cache.read([]).shape == (0, 1, 6, 5)
    part, _ = cache.split(0.5)
    assert len(part) == 6 and np.array_equal(part.read([0]), cache.read(part.indices[:1]))


def test_cache_keeps_what_its_budget_allows(tmp_path):
    grow(tmp_path)
    store = ImageFolder(tmp_path)
    cache = NodeCache(store, budget_bytes=4 * 31 + 30)  # 30 pixels and a flag each
    assert cache.capacity == 4
    whole = cache.read(np.arange(9))
    assert np.array_equal(whole, store.read(np.arange(9)))
    for i in (3, 4):
        os.unlink(tmp_path / store.files[i])
    assert np.array_equal(cache.read([8, 3]), whole[[8, 3]])
    assert "no such file" in refusal(cache.read, [3, 4])
    assert NodeCache(store, budget_bytes=0).capacity == 0
    assert np.array_equal(NodeCache(store, budget_bytes=0).read([1]), whole[[1]])
    assert NodeCache(ArrayDatastore(pixels_of(0, 4, 2, 2))).capacity == 0


def test_cache_is_shared_by_the_ranks_of_a_node(tmp_path):
    drawn = grow(tmp_path)
    reads = []

    def fill(world):
        store = ImageFolder(tmp_path, world)
        read = store.read
        store.read = lambda indices: reads.append((world.rank, *indices)) or read(indices)
        cache = NodeCache(store, world)
        if world.rank == 1:
            cache.read([5])
        world.broadcast(None)
        return cache.read([5])[0]

    images = on_ranks(3, fill, list("aab"))
    assert all(np.array_equal(image, drawn["dog/2.png"]) for image in images)
    assert sorted(reads) == [(1, 5), (2, 5)]


def test_cache_keeps_nothing_of_a_failed_read(tmp_path):
    grow(tmp_path)
    cache = NodeCache(ImageFolder(tmp_path))
    good = (tmp_path / "cat" / "1.png").read_bytes()
    (tmp_path / "cat" / "1.png").write_bytes(b"")
    assert refusal(cache.read, [0, 1]).startswith(f"{tmp_path}/cat/1.png: ")
    (tmp_path / "cat" / "1.png").write_bytes(good)
    assert np.array_equal(cache.read([0, 1]), cache.datastore.read([0, 1]))
    assert cache.there.tolist() == [1, 1] + [0] * 7


# Real ranks


def test_real_ranks_agree_on_a_set_and_share_a_cache(tmp_path, world):
    folder = world.broadcast(tmp_path)
    if world.rank == 0:
        drawn = world.broadcast(grow(folder / "set"))
        write_idx(folder / "t10k-images-idx3-ubyte.gz", pixels_of(0, 5, 4, 4))
    else:
        drawn = world.broadcast(None)
    cache = NodeCache(ImageFolder(folder / "set", world), world)
    assert np.array_equal(cache.read([4, 0]), [drawn["dog/1.png"], drawn["cat/0.png"]])
    world.barrier()
    if world.rank == 0:
        os.unlink(folder / "set" / "dog" / "1.png")
    world.barrier()
    assert np.array_equal(cache.read([4]), [drawn["dog/1.png"]])
    store = idx_folder(folder, "test", world, labelled=False)
    assert np.array_equal(store.images[:, 0], pixels_of(0, 5, 4, 4))
    text = refusal(idx_folder, folder, "train", world)
    assert text.startswith(f"{folder}: expected train-images-idx3-ubyte")
