"""Test posterizing against Pillow."""

import numpy as np
import pytest
from image_sets import pixels_of, refusal
from PIL import Image, ImageOps

import mpidl as dl


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bits", range(1, 9))
def test_against_pillow(bits, channels):
    images = pixels_of(bits, 5, channels, 31, 17)
    augmenter = dl.Augmenter(posterize=1, posterize_bits=bits)
    for image, result in zip(images, augmenter.apply(images, np.arange(5)), strict=True):
        planes = [np.asarray(ImageOps.posterize(Image.fromarray(p), bits)) for p in image]
        assert result.dtype == np.uint8 and np.array_equal(result, planes)


def test_the_drawn_images_are_posterized():
    n = 4000
    images, augmenter = np.full((n, 1, 1, 1), 255, np.uint8), dl.Augmenter(posterize=0.3)

    def drawn(indices, epoch=2, seed=1):
        results = augmenter.apply(images[: len(indices)], indices, epoch=epoch, seed=seed)
        assert set(np.unique(results)) <= {0b11110000, 255}
        return results.ravel() < 255

    all_drawn = drawn(np.arange(n))
    assert abs(all_drawn.mean() - 0.3) < 5 * np.sqrt(0.21 / n)
    few = np.array([17, 3, 3999])
    assert np.array_equal(drawn(few), all_drawn[few])
    for other in (drawn(np.arange(n), epoch=3), drawn(np.arange(n), seed=2)):
        assert abs(np.corrcoef(other, all_drawn)[0, 1]) < 0.06


def test_colours_change_before_and_erased_rectangles_after():
    images, indices = pixels_of(3, 20, 3, 12, 12), np.arange(20)
    values = {"erase_value": 7, "erase_area": (0.5, 0.6), "erase_aspect": (0.9, 1.1)}
    all_parts = dl.Augmenter(brightness=0.5, posterize=1, posterize_bits=2, erase=1, **values)
    results = images
    for part in (
        dl.Augmenter(brightness=0.5),
        dl.Augmenter(posterize=1, posterize_bits=2),
        dl.Augmenter(erase=1, **values),
    ):
        results = part.apply(results, indices, epoch=4, seed=5)
    assert np.array_equal(all_parts.apply(images, indices, epoch=4, seed=5), results)
    assert (results == 7).any()


def test_values_are_checked():
    for ranges, text in (
        ({"posterize": 1.5}, "posterize: expected a probability from 0 to 1, got 1.5"),
        ({"posterize_bits": 0}, "posterize_bits: expected a number of bits from 1 to 8, got 0"),
        ({"posterize_bits": 2.5}, "posterize_bits: expected a number of bits from 1 to 8, got 2.5"),
    ):
        assert refusal(dl.Augmenter, **ranges) == text
    floats = dl.ArrayDatastore(np.zeros((4, 3, 5, 5), np.float32), np.arange(4) % 2)
    text = refusal(dl.MinibatchQueue, floats, augmenter=dl.Augmenter(posterize=0.5))
    assert text == "posterize: expected 8-bit images, found float32"


def test_options_make_the_same_augmenter():
    options = dl.TrainingOptions(posterize=0.5, posterize_bits=6)
    augmenter = dl.Augmenter.of_options(options)
    assert augmenter is not None and (augmenter.posterize, augmenter.posterize_bits) == (0.5, 6)
    assert dl.Augmenter(posterize=0.5).spec() == {"posterize": 0.5}
