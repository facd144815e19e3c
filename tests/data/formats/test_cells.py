"""Test the cell data set: its bytes are the same everywhere, and masks match the drawn ellipses."""

import hashlib
import importlib

import numpy as np
import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.core import keyed

module = importlib.import_module("mpidl.data.formats.cells")
# hash of images 0 to 9, each followed by its instances as little-endian int32
SHA256 = "5df69495ea732818bea2ab63c16e02aef6f4e21cc88758c6cda7e81a041cbb8a"


def test_every_machine_draws_the_same_bytes():
    digest = hashlib.sha256()
    for i in range(10):
        image, instances = module.draw(i)
        digest.update(image.tobytes() + instances.astype("<i4").tobytes())
    assert digest.hexdigest() == SHA256


def test_instances_are_the_ellipses():
    """A pixel belongs to the last drawn ellipse that contains the pixel's centre."""
    y, x = np.mgrid[:64, :64] - 31.5
    for i in range(5):
        numbers = keyed.uniform(0, "cells", 6 + 8 * 12, sample=i)
        expected = np.zeros((64, 64), int)
        for cell in range(4 + int(9 * numbers[0])):
            u = numbers[5 + 8 * cell : 13 + 8 * cell]
            angle = 2 * np.arctan(2 * u[4] - 1)
            dx, dy = x - 64 * (u[0] - 0.5), y - 64 * (u[1] - 0.5)
            along = (np.cos(angle) * dx + np.sin(angle) * dy) / (4 + 5 * u[2])
            across = (np.cos(angle) * dy - np.sin(angle) * dx) / (4 + 5 * u[3])
            expected[along**2 + across**2 <= 1] = cell + 1
        assert np.array_equal(module.draw(i)[1], expected)


def test_a_part_of_the_set():
    train, test = dl.data.cells(), dl.data.cells("test")
    assert (len(train), len(test)) == (800, 200)
    assert train.describe() == "cells/train: 800 images of 1x64x64 with targets of 64x64"
    images, masks, instances = (f([3, 17]) for f in (test.read, test.targets, test.instances))
    assert images.shape == (2, 1, 64, 64) and images.dtype == np.uint8
    assert np.array_equal(images[1, 0], module.draw(817)[0])
    assert masks.shape == (2, 64, 64) and masks.dtype == np.int32
    assert np.array_equal(masks, instances > 0) and 0.05 < masks.mean() < 0.6
    assert instances.max() > 3
    assert train.read([]).shape == (0, 1, 64, 64) and train.targets([]).shape == (0, 64, 64)
    assert train.fingerprint() != test.fingerprint() == dl.data.cells("test").fingerprint()


def test_cells_are_brighter_than_their_surroundings():
    train = dl.data.cells()
    images, masks = train.read(range(40))[:, 0].astype(float), train.targets(range(40)) > 0
    contrast = [
        image[mask].mean() - image[~mask].mean() for image, mask in zip(images, masks, strict=True)
    ]
    assert min(contrast) > 5 and np.median(contrast) > 20


def test_the_name_opens_both_parts(world):
    train, test = dl.data.open_data("cells", world)
    assert (len(train), len(test)) == (800, 200) and test.classes == ["background", "cell"]
    assert dl.data.open_test_data("cells", world).part == "test"
    text = refusal(dl.data.cells, "all")
    assert text.startswith('cells: part must be "train" or "test", got ')
    text = refusal(dl.data.open_test_data, "cells", world, classes=["a", "b"])
    assert text == "--test-data cells: expected the classes a, b, found background, cell"


@pytest.mark.parametrize("i", [0, 999, 4321, 9999])
def test_angles_of_digits(i):
    turn = -0.27 + 0.54 * keyed.uniform(0, "digits shape", 11, sample=i)[1]
    angles = dl.data.digit_angles()
    assert angles.shape == (10000,) and angles.dtype == np.float32
    assert abs(angles[i] - 2 * np.degrees(np.arctan(turn))) < 1e-5
