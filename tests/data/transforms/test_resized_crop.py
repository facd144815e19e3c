"""Test random resized crops against a triangle filter in float64."""

import numpy as np
import pytest
from image_sets import pixels_of, refusal

import mpidl as dl
from mpidl.data.transforms import resized_crop
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.movement import draw

RANGES = {"resized_crop": (12, 9), "crop_area": (0.2, 1.0), "crop_aspect": (0.5, 2.0)}
SIZE = (12, 9)


def weights(extent, size):
    """Return the triangle filter (size, extent), which is wider if the image shrinks."""
    scale = extent / size
    width = max(scale, 1.0)
    centres = (np.arange(size) + 0.5) * scale
    distance = abs(np.arange(extent) + 0.5 - centres[:, None])
    triangle = np.maximum(0, 1 - distance / width)
    return triangle / triangle.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_against_a_triangle_filter(kind):
    images, indices = pixels_of(2, 15, 3, 31, 40).astype(kind), np.arange(7, 22)
    augmenter = dl.Augmenter(reflect_x=True, alternating=True, **RANGES)
    results = augmenter.apply(images, indices, epoch=4, seed=6)
    mirrored = draw(augmenter, SampleKeys(indices, 4, 6), (3, 31, 40)).reflect_x
    assert 0 < mirrored.sum() < 15
    areas = augmenter.crop_area, augmenter.crop_aspect
    places = resized_crop.windows(SampleKeys(indices, 4, 6), (31, 40), *areas)
    for image, is_mirrored, (top, left, height, width), result in zip(
        images, mirrored, places.tolist(), results, strict=True
    ):
        image = image[..., ::-1] if is_mirrored else image
        window = image[:, top : top + height, left : left + width].astype(np.float64)
        expected = weights(height, 12) @ window @ weights(width, 9).T
        assert abs(result - expected).max() < (1.01 if kind == np.uint8 else 1e-3)


def test_windows_have_the_area_and_ratio():
    places = resized_crop.windows(
        SampleKeys(np.arange(3000), 1, 0), (60, 80), (0.2, 0.5), (0.8, 1.25)
    )
    top, left, height, width = places.T
    area = np.sort(height * width / 4800)
    assert abs(area - np.linspace(0.2, 0.5, 3000)).max() < 0.03
    ratio = np.sort(np.log(width / height))
    assert abs(ratio - np.linspace(*np.log([0.8, 1.25]), 3000)).max() < 0.05
    assert top.min() == left.min() == 0
    assert (top + height).max() == 60 and (left + width).max() == 80


def test_the_central_window_if_none_fits():
    places = resized_crop.windows(SampleKeys(np.arange(4), 1, 0), (10, 90), (0.9, 1.0), (0.5, 2.0))
    assert places.tolist() == [[0, 35, 10, 20]] * 4  # the widest allowed ratio is 2


def test_rotation_comes_first():
    images = pixels_of(1, 5, 1, 20, 20)
    warped = dl.Augmenter(rotation=30).apply(images, np.arange(5), epoch=2)
    both = dl.Augmenter(rotation=30, **RANGES).apply(images, np.arange(5), epoch=2)
    places = resized_crop.windows(SampleKeys(np.arange(5), 2, 0), (20, 20), (0.2, 1.0), (0.5, 2.0))
    assert np.array_equal(both, resized_crop.resized(warped, places, SIZE))


def test_labels_take_the_pixel_below_the_centre():
    labels = np.arange(6 * 8, dtype=np.int32).reshape(1, 1, 6, 8)
    full = np.array([[0, 0, 6, 8]])
    small = resized_crop.resized(labels, full, (3, 4), nearest=True)
    assert np.array_equal(small, labels[..., 1::2, 1::2])
    large = resized_crop.resized(labels, full, (12, 16), nearest=True)
    assert np.array_equal(large, labels.repeat(2, axis=2).repeat(2, axis=3))


def test_training_and_validation_use_windows_of_one_size(world):
    images = dl.ArrayDatastore(pixels_of(3, 60, 1, 14, 16), np.arange(60) % 3)
    net = dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(3)], (1, 12, 9), seed=0)
    options = dl.TrainingOptions(
        epochs=1, batch_size=30, resized_crop=SIZE, flip="x", validation=images
    )
    dl.train(net, images, options, world=world)
    assert net.crop == SIZE and net.takes((1, 14, 16))
    centre = images.read(np.arange(60))[:, :, 1:13, 3:12]
    expected = dl.predict(net, centre, world=world)
    assert np.array_equal(dl.predict(net, images, world=world), expected)


def test_sizes_are_checked():
    text = refusal(dl.Augmenter, crop=(3, 3), resized_crop=(3, 3))
    assert text == "crop (3, 3) and resized_crop (3, 3): expected at most one of them"
    store = dl.ArrayDatastore(pixels_of(0, 4, 3, 11, 12), np.arange(4) % 2)
    text = refusal(dl.MinibatchQueue, store, augmenter=dl.Augmenter(**RANGES))
    assert text == "crop 12x9: expected at most the size of the images, found 11x12"
    text = refusal(dl.Augmenter, resized_crop=(3, 3), crop_aspect=(0, 1))
    assert text.startswith("crop_aspect: expected numbers above 0")
