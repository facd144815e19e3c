"""Test the words for what differs between a certificate's images and an auditor's."""

import numpy as np
import pytest

from mpidl.certificates import images
from mpidl.certificates.differences import differences
from mpidl.data import ArrayDatastore
from mpidl.data.loading.bad_images import BadImages
from mpidl.errors import UserError

CLASSES = ["ant", "bee", "cow", "dog"]
COUNT = 400


def digits_of(pixels, labels, salt, bad=()):
    store = Photos(pixels, labels, CLASSES)
    store.bad = bad
    return store, images.digests(store, None, salt, "train", bad_images=BadImages())


class Photos(ArrayDatastore):
    """Images with names of files, some of which cannot be read."""

    bad = ()

    def name(self, i):
        return f"{i:03}.png"

    def read(self, indices):
        if set(self.bad).intersection(np.asarray(indices).tolist()):
            raise UserError("cannot be read")
        return super().read(indices)


@pytest.fixture(params=[bytes(range(32)), None], ids=["salt", "no-salt"])
def salt(request):
    return request.param


@pytest.fixture
def arrays():
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 1, 4, 4), dtype=np.uint8)
    return pixels, np.arange(COUNT) % len(CLASSES)


def lines_of(before, after, salt, bad_before=(), bad_after=()):
    """Return the lines for arrays (pixels, labels) of a certificate and of an auditor."""
    _, expected = digits_of(*before, salt, bad_before)
    store, actual = digits_of(*after, salt, bad_after)
    return differences(expected, actual, store, salt, "train")


def changed(arrays, change):
    """Return copies of the arrays after the change, a function that changes lists."""
    pixels, labels = (list(array.copy()) for array in arrays)
    change(pixels, labels)
    return np.array(pixels), np.array(labels)


def test_nothing_differs_between_equal_sets(arrays, salt):
    assert lines_of(arrays, arrays, salt) == []
    empty = arrays[0][:0], arrays[1][:0]
    assert lines_of(empty, empty, salt) == []
    assert lines_of(arrays, arrays, salt, bad_before=[3], bad_after=[3]) == []


def repaint(*numbers):
    def change(pixels, labels):
        for number in numbers:
            pixels[number][0, 0, 0] ^= 1

    return change


def relabel(number, label):
    return lambda pixels, labels: labels.__setitem__(number, label)


def swap(first, second):
    def change(*lists):
        for items in lists:
            items[first], items[second] = items[second], items[first]

    return change


def move(source, target):
    def change(*lists):
        for items in lists:
            items.insert(target, items.pop(source))

    return change


def leave_out(*numbers):
    def change(*lists):
        for items in lists:
            for number in sorted(numbers, reverse=True):
                del items[number]

    return change


def add(number, value):
    def change(pixels, labels):
        pixels.insert(number, np.full((1, 4, 4), value, np.uint8))
        labels.insert(number, 0)

    return change


def repeat(number, target):
    def change(*lists):
        for items in lists:
            items.insert(target, items[number])

    return change


def both(*changes):
    def change(*lists):
        for part in changes:
            part(*lists)

    return change


CASES = {
    "pixel": (repaint(7), ["1 image with other pixels: 007.png"]),
    "pixels": (
        repaint(*range(0, 240, 20)),
        [
            "12 images with other pixels: "
            + ", ".join(f"{i:03}.png" for i in range(0, 200, 20))
            + " and 2 more"
        ],
    ),
    "label": (relabel(5, 3), ["1 image with another label: 005.png (was 1 (bee), is 3 (dog))"]),
    "pixel and label": (
        both(relabel(5, 3), repaint(5)),
        ["1 image with other pixels: 005.png"],
    ),
    "swapped": (swap(3, 390), ["1 pair of images swapped: 003.png and 390.png"]),
    "neighbours": (swap(3, 4), ["1 pair of images swapped: 003.png and 004.png"]),
    "two pairs": (
        both(swap(3, 300), swap(4, 20)),
        ["2 pairs of images swapped: 003.png and 300.png, 004.png and 020.png"],
    ),
    "moved far": (move(390, 10), ["1 image moved: 010.png (is image 390 of the certificate)"]),
    "moved": (
        move(10, 12),
        [
            "3 images moved: 010.png (is image 11 of the certificate), 011.png (is image 12 of the "
            "certificate), 012.png (is image 10 of the certificate)"
        ],
    ),
    "first left out": (leave_out(0), ["1 image missing: image 0 of the certificate"]),
    "left out": (leave_out(17), ["1 image missing: image 17 of the certificate"]),
    "last left out": (leave_out(399), ["1 image missing: image 399 of the certificate"]),
    "three left out": (
        leave_out(17, 18, 300),
        ["3 images missing: image 17, image 18, image 300 of the certificate"],
    ),
    "added": (add(17, 200), ["1 image added: 017.png"]),
    "appended": (add(400, 200), ["1 image added: 400.png"]),
    "repeated": (
        repeat(5, 100),
        ["1 image added: 100.png (a copy of image 5 of the certificate)"],
    ),
    "replaced": (
        both(leave_out(30), add(300, 9)),
        ["1 image missing: image 30 of the certificate", "1 image added: 300.png"],
    ),
    "several": (
        both(repaint(8), relabel(9, 0), swap(100, 200), leave_out(300)),
        [
            "1 pair of images swapped: 100.png and 200.png",
            "1 image with other pixels: 008.png",
            "1 image with another label: 009.png (was 1 (bee), is 0 (ant))",
            "1 image missing: image 300 of the certificate",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_changes_are_named(arrays, salt, case):
    change, lines = CASES[case]
    assert lines_of(arrays, changed(arrays, change), salt) == lines


def test_unreadable_images_are_named(arrays, salt):
    line = "1 image readable in only one of the sets: 003.png"
    assert lines_of(arrays, arrays, salt, bad_before=[3]) == [line]
    assert lines_of(arrays, arrays, salt, bad_after=[3]) == [line]


def test_another_order_is_found_by_looking_images_up(arrays, salt):
    order = np.roll(np.random.default_rng(1).permutation(COUNT), 1)
    lines = lines_of(arrays, (arrays[0][order], arrays[1][order]), salt)
    assert lines[0].endswith("of 400 images differ; 12 of them were looked up")
    assert lines[1].startswith("12 images elsewhere in the certificate (another order): ")
    number = int(lines[1].split(": ")[1][:3])
    assert f"{number:03}.png (is image {order[number]})" in lines[1]
    assert len(lines) == 2


def test_another_set_is_found_by_looking_images_up(arrays, salt):
    lines = lines_of(arrays, (arrays[0][:300] ^ 255, arrays[1][:300]), salt)
    assert lines[0] == (
        "300 of 300 images differ, and the certificate has 400 images; 12 of them were looked up"
    )
    assert lines[1].startswith("12 images not in the certificate: 000.png, 027.png")
    assert len(lines) == 2


def test_what_is_too_large_to_look_up_is_counted(arrays, salt, monkeypatch):
    monkeypatch.setattr("mpidl.certificates.differences.BUDGET", 100)
    order = np.random.default_rng(1).permutation(COUNT)
    (line,) = lines_of(arrays, (arrays[0][order], arrays[1][order]), salt)
    assert line.endswith("of 400 images differ")
    assert lines_of(arrays, changed(arrays, repaint(3, 9)), salt) == [
        "2 images changed: 003.png, 009.png"
    ]


def test_equal_images_do_not_confuse(salt):
    """Of many blank images, one is left out and one is changed."""
    pixels, labels = np.zeros((COUNT, 1, 4, 4), np.uint8), np.zeros(COUNT, np.int64)
    pixels[200:, 0, 0, 0] = 1
    lines = lines_of((pixels, labels), (pixels[1:], labels[1:]), salt)
    assert lines[-1].startswith("1 image missing: ") and "other pixels" not in "".join(lines)
    changed_pixels = pixels.copy()
    changed_pixels[7] = 9
    lines = lines_of((pixels, labels), (changed_pixels, labels), salt)
    assert lines == ["1 image with other pixels: 007.png"]


def test_targets_and_images_without_labels(arrays, salt):
    pixels, targets = arrays[0][:50], np.arange(100.0).reshape(50, 2)
    for keywords in ({"targets": targets}, {}):
        changed_pixels = pixels.copy()
        changed_pixels[20] ^= 1
        before, after = (ArrayDatastore(p, **keywords) for p in (pixels, changed_pixels))
        expected, actual = (images.digests(s, None, salt, "test") for s in (before, after))
        lines = differences(expected, actual, after, salt, "test")
        assert lines == ["1 image changed: image 20"]
