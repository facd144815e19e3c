"""Image folders, arrays and splits."""

import os
import threading
import warnings

import numpy as np
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, save
from PIL import Image

from mpidl.data import ArrayDatastore, ImageFolder, combined
from mpidl.data.checks import empty_classes_warning

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
    assert refusal(ImageFolder, tmp_path / "pest").endswith("no such folder: did you mean pets?")
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
    assert "sub-folder emu is none of the classes (dog, emus): did you mean emus?" in text
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


def test_classes_that_no_image_has():
    def told(labels, classes=None):
        images = np.zeros((len(labels), 2, 2), np.uint8)
        return empty_classes_warning(ArrayDatastore(images, labels, classes))

    assert told([0, 1, 2]) is told([1, 0], ["a", "b"]) is None
    assert told([1, 2, 10]).endswith(
        ": no image of classes 0, 3, 4 and 5 more (of 11): labels count from 0"
    )
    assert told([0, 1, 3]).endswith(": no image of class 2 (of 4)")
    assert told([1, 1], ["cat", "d\nog"]).endswith(" in 2 classes: no image of class cat (of 2)")
    assert told([0, 0], ["cat", "d\nog"]).endswith(": no image of class d\\nog (of 2)")
    bare = ArrayDatastore(np.zeros((3, 2, 2), np.uint8))
    assert empty_classes_warning(bare) is empty_classes_warning(combined(bare, np.zeros(3))) is None


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
