"""Test ImageFolder: which files it reads, their order, and folders that it refuses."""

import os
import threading

import numpy as np
import pytest
from image_sets import grow, on_ranks, pixels_of, refusal, save

from mpidl.data import ImageFolder


@pytest.mark.parametrize("channels", [1, 3])
def test_folder_returns_the_pixels_of_png_files(tmp_path, channels):
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


def test_folder_reads_jpeg_subfolders_and_links_and_skips_the_rest(tmp_path):
    pixels = np.full((3, 8, 8), 200, np.uint8)
    folder = tmp_path / "set"
    save(folder / "b" / "deep" / "er" / "1.JPG", pixels)
    save(folder / "a" / "2.jpeg", pixels)
    (folder / "a" / "0.png").symlink_to(save(tmp_path / "elsewhere.png", pixels))
    (folder / "a" / "up").symlink_to(folder)  # a link that forms a loop
    for other in ("notes.txt", ".DS_Store", "a/._2.jpeg", "b/list.csv", ".hidden/1.png"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"x")
    store = ImageFolder(folder)
    assert store.files == ["a/0.png", "a/2.jpeg", "b/deep/er/1.JPG"]
    assert store.labels.tolist() == [0, 0, 1]
    assert np.abs(store.read([0, 1, 2]).astype(int) - 200).max() <= 2


def test_folder_sorts_by_bytes(tmp_path):
    for name in ("b/10.png", "b/9.png", "B/x.png", "é/x.png", "z/x.png", "b/Ä.png"):
        save(tmp_path / name, pixels_of(0, 1, 2, 2))
    store = ImageFolder(tmp_path)
    assert store.classes == ["B", "b", "z", "é"]
    assert store.files == ["B/x.png", "b/10.png", "b/9.png", "b/Ä.png", "z/x.png", "é/x.png"]


def test_folder_accepts_names_that_are_not_utf8(tmp_path):
    for name in (b"\xff.png", b"a.png"):
        path = save(tmp_path / "c" / "plain.png", pixels_of(0, 1, 2, 2))
        os.rename(os.fsencode(path), os.fsencode(path.parent) + b"/" + name)
    store = ImageFolder(tmp_path)
    assert store.name(1) == f"{tmp_path}/c/\\xff.png"
    assert store.read([0, 1]).shape == (2, 1, 2, 2) and store.fingerprint()


def test_folder_refuses_what_is_no_set_of_classes(tmp_path):
    assert refusal(ImageFolder, tmp_path / "no") == f"{tmp_path}/no: no such folder"
    pets = tmp_path / "pets"
    pets.mkdir()
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
    assert "1.png is outside the class sub-folders" in refusal(ImageFolder, tmp_path / "flat")
    save(pets / "dog" / "1.png", pixels_of(0, 1, 4, 4))
    assert f"{pets}: sub-folder cat has no images" in refusal(ImageFolder, pets)
    (pets / "cat" / "1.png").symlink_to(tmp_path / "gone.png")
    assert refusal(ImageFolder, pets) == f"{pets}/cat/1.png: a link to a missing file"


def test_a_folder_without_permission_to_read_is_named(tmp_path, monkeypatch):
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
    content = bad.read_bytes()
    bad.write_bytes(content[: len(content) * 2 // 3])
    store = ImageFolder(tmp_path)
    index = store.files.index(f"dog/1x{suffix}")
    assert refusal(store.read, [0, index, 1]).startswith(f"{bad}: the image cannot be read: ")
    for damaged in (b"", b"no image at all", content[:20]):
        bad.write_bytes(damaged)
        assert refusal(store.read, [index]).startswith(f"{bad}: ")
    bad.unlink()
    assert refusal(store.read, [index]) == f"{bad}: the file no longer exists"
    assert len(store.read([0, 1])) == 2  # the other images can still be read


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
    assert text.startswith(f"{wide}: expected a 6x5 gray image like the first one (cat/0.png), ")
    assert "found 6x9 gray; all images must have one size" in text and "resize" in text
    text = refusal(store.read, [store.files.index("dog/x.png")])
    assert text.startswith(f"{color}: ") and "found 6x5 RGB" in text


def test_folder_numbers_labels_by_given_classes(tmp_path):
    grow(tmp_path, classes=("dog", "emu"))
    store = ImageFolder(tmp_path, classes=["cat", "dog", "emu"])
    assert store.labels.tolist() == [1, 1, 1, 2, 2, 2] and store.classes == ["cat", "dog", "emu"]
    text = refusal(ImageFolder, tmp_path, classes=["dog", "emus"])
    assert "sub-folder emu is not one of the classes (dog, emus): did you mean emus?" in text
    assert ImageFolder(tmp_path, classes=["x"], labelled=False).labels is None
    class_names = [f"class {i}" for i in range(1000)]
    assert refusal(ImageFolder, tmp_path, classes=class_names).endswith("class 9 and 990 more)")


def test_folder_without_labels(tmp_path):
    save(tmp_path / "1.png", pixels_of(0, 1, 4, 4))
    store = ImageFolder(tmp_path, classes=["a", "b"], labelled=False)
    assert store.labels is None and store.classes == ["a", "b"] and len(store.read([0])) == 1
    assert ImageFolder(tmp_path, labelled=False).classes == []
    assert [len(part) for part in store.split(1.0)] == [1, 0]


def test_only_rank_0_lists_the_folder(tmp_path, monkeypatch):
    grow(tmp_path)
    listers, scandir = [], os.scandir

    def spy(path):
        listers.append(threading.get_ident())
        return scandir(path)

    monkeypatch.setattr(os, "scandir", spy)
    stores = on_ranks(3, lambda world: ImageFolder(tmp_path, world))
    assert len(set(listers)) == 1
    assert len({store.fingerprint() for store in stores}) == 1
    assert all(np.array_equal(store.read([5]), stores[0].read([5])) for store in stores)
    errors = on_ranks(3, lambda world: ImageFolder(tmp_path / "no", world))
    assert [str(e) for e in errors] == [f"{tmp_path}/no: no such folder"] * 3


def test_the_fingerprint_depends_on_the_files_but_not_on_the_place(tmp_path):
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
