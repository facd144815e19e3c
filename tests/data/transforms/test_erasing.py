"""Test random erasing: the rectangles, and the pixels that replace them."""

import numpy as np
import pytest
from image_sets import pixels_of, refusal

import mpidl as dl
from mpidl.core import keyed
from mpidl.data.transforms import erasing
from mpidl.data.transforms.draws import SampleKeys

AREA, ASPECT = (0.1, 0.3), (0.5, 2.0)


def rectangles(n, epoch=2, probability=0.4):
    augmenter = dl.Augmenter(erase=probability, erase_area=AREA, erase_aspect=ASPECT)
    return erasing.rectangles(augmenter, SampleKeys(np.arange(n), epoch, 1), (30, 50))


def test_rectangles_have_the_probability_area_and_ratio():
    n = 4000
    drawn = rectangles(n)
    top, left, height, width = drawn[drawn[:, 2] > 0].T
    assert abs(len(top) / n - 0.4) < 5 * np.sqrt(0.24 / n)
    area = np.sort(height * width / 1500)
    uniform = np.linspace(*AREA, len(area))
    assert abs(area - uniform).max() < 0.05 * (AREA[1] - AREA[0]) + 0.02
    ratios = np.sort(np.log(width / height))
    assert abs(ratios - np.linspace(*np.log(ASPECT), len(area))).max() < 0.15
    assert top.min() == 0 and left.min() == 0
    assert (top + height).max() == 30 and (left + width).max() == 50
    assert np.array_equal(rectangles(200)[17:19], drawn[17:19])
    assert not np.array_equal(rectangles(200, epoch=3), drawn[:200])


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("value", ["noise", 7, (3, 0, 200)])
def test_rectangles_are_replaced(kind, value):
    images, indices = pixels_of(0, 9, 3, 30, 50).astype(kind), np.arange(4, 13)
    augmenter = dl.Augmenter(erase=1, erase_area=AREA, erase_aspect=ASPECT, erase_value=value)
    results = augmenter.apply(images, indices, epoch=5, seed=3)
    boxes = erasing.rectangles(augmenter, SampleKeys(indices, 5, 3), (30, 50))
    for i, (top, left, height, width) in enumerate(boxes.tolist()):
        inside = np.zeros((30, 50), bool)
        inside[top : top + height, left : left + width] = True
        assert np.array_equal(results[i][:, ~inside], images[i][:, ~inside])
        erased = results[i][:, top : top + height, left : left + width]
        if value == "noise":  # the bytes of the sample's words, in little-endian order
            words = keyed.words(
                3, "erase noise", -(-erased.size // 8), epoch=5, sample=int(indices[i])
            )
            noise = np.frombuffer(words.astype("<u8").tobytes(), np.uint8)[: erased.size]
            expected = noise if kind == np.uint8 else noise / np.float32(256)
            assert np.array_equal(erased.ravel(), expected)
        else:
            assert (erased == np.reshape(value, (-1, 1, 1))).all()


def test_values_are_checked():
    for ranges, text in (
        ({"erase": 1.5}, "erase: expected a probability from 0 to 1, got 1.5"),
        ({"erase_area": (0, 1)}, "erase_area: expected fractions above 0, at most 1"),
        ({"erase_aspect": (0, 1)}, "erase_aspect: expected numbers above 0"),
        ({"erase_value": "nois"}, "erase_value: expected numbers or 'noise', got 'nois'"),
        ({"erase_value": np.inf}, "erase_value: expected finite numbers"),
    ):
        assert refusal(dl.Augmenter, **ranges).startswith(text)
    store = dl.ArrayDatastore(pixels_of(0, 4, 3, 5, 5), np.arange(4) % 2)
    text = refusal(dl.MinibatchQueue, store, augmenter=dl.Augmenter(erase=1, erase_value=0.5))
    assert text.startswith("erase_value: expected whole numbers from 0 to 255, got 0.5")
