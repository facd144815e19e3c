"""Test that targets that are images or pixel labels move with their images."""

from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import pixels_of, refusal

import mpidl as dl
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.movement import affine_maps

MOVED = {"reflect_x": True, "reflect_y": True, "translate_x": 3, "translate_y": (-2, 4)}
WARPED = {**MOVED, "rotation": 40, "scale": (0.7, 1.3), "shear_x": 10}
CROPPED = {**WARPED, "crop": (12, 15)}
RESIZED = {**MOVED, "resized_crop": (12, 15)}
COLOURED = {**WARPED, "brightness": 0.5, "erase": 1.0}
CASES = {
    "moved": MOVED,
    "warped": WARPED,
    "cropped": CROPPED,
    "resized": RESIZED,
    "coloured": COLOURED,
}
INDICES = np.arange(5, 25)


def smooth(n, height=18, width=21):
    """Draw gray images (n, 1, H, W) that vary slowly."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(0.4 * x + 0.3 * y * (1 + i % 3) + i) for i in range(n)]
    return (127.5 + 100 * np.array(waves)).astype(np.uint8)[:, None]


def geometric(ranges):
    return dl.Augmenter(**{k: v for k, v in ranges.items() if k not in ("brightness", "erase")})


@pytest.mark.parametrize("ranges", CASES.values(), ids=CASES)
def test_a_target_that_is_the_image_moves_like_the_image(ranges):
    images = smooth(20).astype(np.float32)
    targets = dl.Augmenter(**ranges).apply_to_targets(images, INDICES, epoch=3, seed=1)
    assert np.array_equal(targets, geometric(ranges).apply(images, INDICES, epoch=3, seed=1))
    flat = dl.Augmenter(**ranges).apply_to_targets(images[:, 0], INDICES, epoch=3, seed=1)
    assert np.array_equal(flat, targets[:, 0])


@pytest.mark.parametrize("ranges", CASES.values(), ids=CASES)
def test_labels_of_pixels_follow_the_image(ranges):
    """Moved pixel labels agree with an interpolated half-plane, except near the edge."""
    images = smooth(20)
    labels = (images[:, 0] > 127).astype(np.int32)
    moved = geometric(ranges).apply(255 * labels[:, None].astype(np.float32), INDICES, epoch=3)[
        :, 0
    ]
    targets = dl.Augmenter(**ranges).apply_to_targets(labels, INDICES, epoch=3)
    assert targets.dtype == np.int32 and targets.shape == moved.shape
    for side in (0, 1):
        sure = moved > 180 if side else moved < 75
        assert sure.any() and (targets[sure] == side).mean() > 0.995


def test_labels_of_a_pixel_type_are_not_interpolated():
    mask = np.zeros((1, 20, 20), np.uint8)
    mask[:, 5:15, 5:15] = 7
    moved = dl.Augmenter(rotation=(30, 30)).apply_to_targets(mask, [0])
    assert moved.dtype == np.uint8 and set(np.unique(moved)) == {0, 7}


def test_labels_against_a_plain_loop():
    labels = pixels_of(3, 6, 1, 18, 21)[:, 0].astype(np.int32)
    augmenter = dl.Augmenter(**CROPPED, target_fill=-7)
    targets = augmenter.apply_to_targets(labels, np.arange(6), epoch=2, seed=9)
    maps = affine_maps(augmenter, SampleKeys(np.arange(6), 2, 9), (1, 18, 21))
    outside = 0
    for label, m, target in zip(labels, maps, targets, strict=True):
        for p, q in np.ndindex(12, 15):
            column, row = m[0] * q + m[1] * p + m[2], m[3] * q + m[4] * p + m[5]
            j, i = int(np.floor(column + 0.5)), int(np.floor(row + 0.5))
            is_inside = 0 <= i < 18 and 0 <= j < 21
            outside += not is_inside
            assert target[p, q] == (label[i, j] if is_inside else -7)
    assert outside > 20


def pairs(labels=True, n=70):
    images = dl.ArrayDatastore(smooth(n))
    maps = (images.images[:, 0] > 127).astype(np.int64)
    return dl.data.combined(images, maps if labels else images)


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("ranges", [MOVED, RESIZED, COLOURED])
def test_a_queue_moves_both(labels, ranges):
    store, augmenter = pairs(labels), dl.Augmenter(**ranges, fill=51)
    queue = dl.MinibatchQueue(store, 40, seed=4, augmenter=augmenter, ignore_label=255, classes=2)
    if not labels:
        queue = dl.MinibatchQueue(store, 40, seed=4, augmenter=augmenter)
    for images, targets in queue.epoch(2):
        indices = images.batch.indices
        keys = {"epoch": 2, "seed": 4}
        pixels = augmenter.apply(store.read(indices), indices, **keys) / np.float32(255)
        fill = 255 if labels else 51 / 255
        expected = augmenter.apply_to_targets(store.targets(indices), indices, **keys, fill=fill)
        assert np.array_equal(images.local(), pixels)
        assert np.array_equal(targets.local(), expected)


@pytest.mark.parametrize("size, workers, prefetch", [(2, 1, 0), (3, 4, 2), (5, 2, 1)])
def test_the_same_on_any_number_of_ranks_and_workers(size, workers, prefetch):
    augmenter, store = dl.Augmenter(**COLOURED), pairs(n=150)
    on_one_rank = dl.MinibatchQueue(store, 80, 1, augmenter=augmenter, prefetch=0).epoch(3)
    options = {"augmenter": augmenter, "prefetch": prefetch, "workers": workers}
    worlds = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    shares = [dl.MinibatchQueue(store, 80, 1, world, **options).epoch(3) for world in worlds]
    for parts, expected in zip(zip(*shares, strict=True), on_one_rank, strict=True):
        for kind in (0, 1):
            values = np.concatenate([part[kind].local() for part in parts])
            assert values.tobytes() == expected[kind].local().tobytes()


def test_training_on_random_windows_with_their_masks(world):
    """Training uses random windows of images and masks. Validation uses their central windows."""
    store = pairs()
    layers = [dl.Conv2D(3, 4, padding=1), dl.ReLU(), dl.Conv2D(1, 2)]
    net = dl.Network(layers, (1, 12, 15), seed=0)
    options = dl.TrainingOptions(
        epochs=2, batch_size=32, random_crop=(12, 15), flip="xy", validation=store
    )
    dl.train(net, store, options, world=world)
    evaluation = dl.evaluate(net, store, world=world)
    centre = dl.data.combined(
        dl.ArrayDatastore(store.read(np.arange(70))[:, :, 3:15, 3:18]),
        store.targets(np.arange(70))[:, 3:15, 3:18].astype(np.int64),
    )
    net.crop = None
    assert dl.evaluate(net, centre, world=world) == evaluation
    assert evaluation.accuracy > 0.5


def test_targets_of_another_size_are_refused():
    store = dl.data.combined(dl.ArrayDatastore(smooth(8)), np.zeros((8, 9, 10), np.int64))
    text = refusal(dl.MinibatchQueue, store, augmenter=dl.Augmenter(reflect_x=True))
    assert "expected targets of the images' size (18, 21), which the augmentation moves" in text
