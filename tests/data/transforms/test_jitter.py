"""Test changes of colour against float64 arithmetic, Python's colorsys and Pillow."""

import colorsys

import numpy as np
import pytest
from image_sets import pixels_of, refusal
from PIL import Image, ImageEnhance

import mpidl as dl
from mpidl.data.transforms import jitter
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.jitter import ColourChange, jittered

INDICES = np.arange(12)


def change(n, brightness=1.0, contrast=1.0, saturation=1.0, hue=0.0):
    return ColourChange(*(np.full(n, value) for value in (brightness, contrast, saturation, hue)))


def reference(image, brightness, contrast, saturation, hue):
    """Change an image (3, H, W) of floats from 0 to 1, pixel by pixel in float64."""
    x = np.clip(image.astype(np.float64) * brightness, 0, 1)
    weights = np.array([0.299, 0.587, 0.114])
    mean = np.tensordot(weights, x, 1).mean()
    x = np.clip(mean + contrast * (x - mean), 0, 1)
    gray = np.tensordot(weights, x, 1)
    x = np.clip(gray + saturation * (x - gray), 0, 1)
    out = np.empty_like(x)
    for row, column in np.ndindex(x.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*x[:, row, column])
        out[:, row, column] = colorsys.hsv_to_rgb((h + hue) % 1, s, v)
    return out


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_against_float64_and_colorsys(kind):
    augmenter = dl.Augmenter(brightness=0.5, contrast=(0.4, 1.9), saturation=0.8, hue=0.5)
    images = pixels_of(1, 12, 3, 7, 9)
    images[0] = images[0, :1]  # gray
    images[1] = 0
    images = images if kind == np.uint8 else images / np.float32(255)
    results = augmenter.apply(images, INDICES, epoch=3, seed=2)
    changes = jitter.draw(augmenter, SampleKeys(INDICES, 3, 2))
    scale = 255 if kind == np.uint8 else 1
    for i, result in enumerate(results):
        expected = scale * reference(images[i] / scale, *(values[i] for values in changes))
        assert result.dtype == kind
        assert abs(result - expected).max() < (0.51 if kind == np.uint8 else 2e-5)
    assert not np.array_equal(results, images)


@pytest.mark.parametrize(
    "name, enhance",
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ],
)
@pytest.mark.parametrize("factor", [0.0, 0.4, 1.7])
def test_against_pillow(name, enhance, factor):
    """Results match Pillow's, which rounds the mean and gray values, and truncates the result."""
    images = pixels_of(5, 3, 3, 16, 11)
    results = jittered(images, change(3, **{name: factor}))
    for image, result in zip(images, results, strict=True):
        picture = enhance(Image.fromarray(image.transpose(1, 2, 0).copy())).enhance(factor)
        expected = np.asarray(picture, np.int64).transpose(2, 0, 1)
        assert abs(result - expected).max() <= 1 + abs(factor - 1)


def test_no_change_is_exact():
    for images in (pixels_of(0, 4, 3, 8, 8), pixels_of(0, 4, 1, 8, 8)):
        assert np.array_equal(jittered(images, change(4)), images)
        turned = jittered(images, change(4, hue=0.25, saturation=0.5))
        assert np.array_equal(turned, images) == (images.shape[1] == 1)


def test_drawn_changes_are_uniform_and_keyed():
    augmenter = dl.Augmenter(brightness=0.4, contrast=3, saturation=(0.5, 0.7), hue=0.1)
    assert augmenter.contrast == (0, 4) and augmenter.hue == (-0.1, 0.1)
    drawn = jitter.draw(augmenter, SampleKeys(np.arange(4000), 2, 1))
    for values, (low, high) in zip(
        drawn, ((0.6, 1.4), (0, 4), (0.5, 0.7), (-0.1, 0.1)), strict=True
    ):
        uniform = low + (high - low) * np.linspace(0, 1, 4000)
        assert abs(np.sort(values) - uniform).max() < 0.05 * (high - low)
    single = jitter.draw(augmenter, SampleKeys(np.array([77]), 2, 1))
    assert [v[0] for v in single] == [v[77] for v in drawn]
    assert abs(np.corrcoef(np.array(drawn))[np.triu_indices(4, 1)]).max() < 0.06
    other = jitter.draw(augmenter, SampleKeys(np.arange(4000), 3, 1))
    assert abs(np.corrcoef(other.hue, drawn.hue)[0, 1]) < 0.06


def test_colours_are_checked():
    two = dl.ArrayDatastore(np.zeros((4, 2, 5, 5), np.uint8), np.arange(4) % 2)
    text = refusal(dl.MinibatchQueue, two, augmenter=dl.Augmenter(contrast=0.5))
    assert text.startswith("brightness, contrast, saturation and hue: expected images of 1 or 3")
    for ranges, text in (
        ({"brightness": (-1, 1)}, "brightness: expected factors of at least 0, got (-1, 1)"),
        ({"hue": 0.6}, "hue: expected fractions of a turn from -0.5 to 0.5"),
        ({"contrast": "x"}, "contrast: expected (low, high)"),
    ):
        assert refusal(dl.Augmenter, **ranges).startswith(text)
