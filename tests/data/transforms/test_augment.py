"""Test augmentation: the random numbers, the resulting images, and their keys."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import pixels_of, refusal

import mpidl as dl
from mpidl import backends
from mpidl.core import keyed
from mpidl.data.transforms.augmentation import channel_values
from mpidl.data.transforms.draws import SampleKeys, sine_cosine
from mpidl.data.transforms.movement import PURPOSE, affine_maps, draw
from mpidl.training import input_pipeline

FULL = {
    "reflect_x": True,
    "reflect_y": True,
    "rotation": (-20, 35),
    "scale": (0.8, 1.2),
    "scale_x": (0.9, 1.3),
    "shear_x": 8,
    "shear_y": (-3, 9),
    "translate_x": (-4, 2),
    "translate_y": 3,
}
SHAPE = (3, 19, 24)


def store_of(count, shape=SHAPE, kind=np.uint8):
    images = pixels_of(count, count, *shape).astype(kind)
    return dl.ArrayDatastore(images, np.arange(count) % 7)


def forward(augmenter, seed, epoch, i, shape):
    """Return the 3x3 matrix that maps (x, y, 1) in the image to (x, y, 1) in the result."""
    u = keyed.uniform(seed, PURPOSE, 12, epoch=epoch, sample=i)

    def between(low_high, u):
        return low_high[0] + (low_high[1] - low_high[0]) * u

    def matrix(a, b, c, d):
        return np.array([[a, b, 0], [c, d, 0], [0, 0, 1.0]])

    def shift(x, y):
        return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])

    a = augmenter
    angle = np.deg2rad(between(a.rotation, u[2]))
    scale = between(a.scale, u[3])
    shears, shifts = (a.shear_x, a.shear_y), (a.translate_x, a.translate_y)
    across, down = (np.tan(np.deg2rad(between(r, v))) for r, v in zip(shears, u[6:8], strict=True))
    tx, ty = (
        low + np.floor((high - low + 1) * v) for (low, high), v in zip(shifts, u[8:10], strict=True)
    )
    cx, cy = (shape[2] - 1) / 2, (shape[1] - 1) / 2
    signs = [-1 if a.reflect_x and u[0] < 0.5 else 1, -1 if a.reflect_y and u[1] < 0.5 else 1]
    reflected = np.diag([*signs, 1])
    rotated = matrix(np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle))
    scaled = matrix(scale * between(a.scale_x, u[4]), 0, 0, scale * between(a.scale_y, u[5]))
    sheared = matrix(1, across, down, 1)
    moved = shift(cx + tx, cy + ty) @ sheared @ scaled @ rotated @ reflected @ shift(-cx, -cy)
    _, p, q = a.image_shape(shape)
    top, left = np.floor((shape[1] - p + 1) * u[10]), np.floor((shape[2] - q + 1) * u[11])
    return shift(-left, -top) @ moved


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("crop", [None, (11, 16)])
def test_against_scipy(kind, crop):
    ndimage = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed")
    augmenter = dl.Augmenter(**FULL, crop=crop, fill=(9, 200, 31))
    images, indices = store_of(20, kind=kind).images, np.arange(3, 23)
    results = augmenter.apply(images, indices, epoch=5, seed=11)
    assert results.dtype == kind and results.shape == (20, *augmenter.image_shape(SHAPE))
    for image, i, result in zip(images, indices, results, strict=True):
        back = np.linalg.inv(forward(augmenter, 11, 5, i, SHAPE))
        swap = back[[1, 0, 2]][:, [1, 0, 2]]  # SciPy's order: rows, columns
        for c, fill in enumerate(augmenter.fill):
            options = {"output_shape": result.shape[1:], "mode": "grid-constant", "cval": fill}
            channel = image[c].astype(np.float64)
            expected = ndimage.affine_transform(
                channel, swap[:2, :2], swap[:2, 2], order=1, **options
            )
            assert abs(expected - result[c]).max() < (0.502 if kind == np.uint8 else 2e-3)


def test_each_transformation_by_itself():
    """Each transformation moves a bright pixel to the expected place."""
    image = np.zeros((1, 1, 21, 21), np.float32)
    image[0, 0, 8, 14] = 1  # x = 4, y = -2 from the centre

    def place(**ranges):
        pixels = dl.Augmenter(**ranges).apply(image, [0])[0, 0]
        row, column = np.unravel_index(pixels.argmax(), pixels.shape)
        return column - 10, row - 10

    assert place() == (4, -2)
    assert place(rotation=(90, 90)) == (2, 4)  # clockwise
    assert place(rotation=(-180, -180)) == (-4, 2)
    assert place(scale=(2, 2)) == (8, -4)
    assert place(scale_x=(0.5, 0.5)) == (2, -2) and place(scale_y=(2, 2)) == (4, -4)
    assert place(shear_x=(45, 45)) == (2, -2) and place(shear_y=(45, 45)) == (4, 2)
    assert place(translate_x=(3, 3), translate_y=(-5, -5)) == (7, -7)
    assert place(rotation=(90, 90), translate_x=(3, 3)) == (5, 4)  # rotated first
    assert place(rotation=(90, 90), scale_x=(2, 2)) == (4, 4)
    mirrored = {place(reflect_x=True, rotation=(k / 8, k / 8)) for k in (0, 1)}
    assert mirrored <= {(4, -2), (-4, -2)}


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_shifts_in_the_blocks_equal_the_affine_map(kind):
    """Reflections and whole-pixel shifts, done while blocks are filled, equal the affine map."""
    shifts = {"translate_x": 4, "translate_y": (-2, 6), "crop": (12, 20), "fill": 77}
    augmenter = dl.Augmenter(reflect_x=True, reflect_y=True, **shifts)
    assert not augmenter.warps
    store = store_of(75, kind=kind)
    queue = dl.MinibatchQueue(store, 40, seed=3, augmenter=augmenter)
    for images, _ in queue.epoch(2):
        indices = images.batch.indices
        pixels, fill = store.read(indices), channel_values("fill", 77, SHAPE, kind)
        maps = affine_maps(augmenter, SampleKeys(indices, 2, 3), SHAPE)
        mapped = backends.of_type(np.float32).warp(pixels, maps, augmenter.crop, fill)
        assert np.array_equal(augmenter.apply(pixels, indices, epoch=2, seed=3), mapped)
        expected = mapped / np.float32(255) if kind == np.uint8 else mapped
        assert np.array_equal(images.local(), expected)
        assert not images.lanes[-1, ..., (len(indices) - 1) % 16 + 1 :].any()


def test_drawn_numbers_are_uniform_and_keyed():
    n = 4000
    augmenter = dl.Augmenter(**FULL, crop=(17, 24))
    drawn = draw(augmenter, SampleKeys(np.arange(n), 2, 1), SHAPE)
    for name in ("reflect_x", "reflect_y"):
        assert abs(getattr(drawn, name).mean() - 0.5) < 0.04
    for name in ("rotation", "shear_x", "shear_y"):
        low, high = getattr(augmenter, name)
        values = np.sort(getattr(drawn, name))
        assert low <= values[0] and values[-1] < high
        uniform = low + (high - low) * np.linspace(0, 1, n)
        assert abs(values - uniform).max() < 0.05 * (high - low)  # Kolmogorov-Smirnov test
    ranges = {"translate_x": (-4, 2), "translate_y": (-3, 3), "top": (0, 2), "left": (0, 0)}
    for name, (low, high) in ranges.items():
        values, counts = np.unique(getattr(drawn, name), return_counts=True)
        assert values.tolist() == list(range(low, high + 1))
        assert (abs(counts - n / len(values)) < 5 * np.sqrt(n / len(values)) + 1).all()
    # an image's numbers do not depend on the other images, but on epoch and seed
    order = np.array([17, 3, 3999])
    for few, numbers in zip(draw(augmenter, SampleKeys(order, 2, 1), SHAPE), drawn, strict=True):
        assert np.array_equal(few, numbers[order])
    for seed, epoch in ((1, 3), (2, 2)):
        other = draw(augmenter, SampleKeys(np.arange(n), epoch, seed), SHAPE)
        assert abs(np.corrcoef(other.rotation, drawn.rotation)[0, 1]) < 0.06
    for name in ("rotation", "scale_x", "shear_x", "translate_x"):
        correlation = np.corrcoef(drawn.reflect_x, getattr(drawn, name))[0, 1]
        assert abs(correlation) < 0.06, name


def test_alternating_flips():
    """The orientation alternates between epochs. Its start is random, with equal chances."""
    indices = np.arange(3000)
    for directions in ("x", "y", "xy"):
        flips = {f"reflect_{direction}": True for direction in directions}
        augmenter = dl.Augmenter(**flips, alternating=True)
        drawn = [draw(augmenter, SampleKeys(indices, epoch, 4), SHAPE) for epoch in range(1, 9)]
        for direction in "xy":
            mirrored = np.array([getattr(d, f"reflect_{direction}") for d in drawn])
            if direction not in directions:
                assert not mirrored.any()
                continue
            assert abs(mirrored.mean(axis=1) - 0.5).max() < 5 * np.sqrt(0.25 / 3000)
            period = 2 if direction == "y" and "x" in directions else 1
            assert (mirrored[:-period] ^ mirrored[period:]).all()
        if directions == "xy":  # each orientation once in four epochs
            states = np.array([d.reflect_x + 2 * d.reflect_y for d in drawn])
            for start in (0, 4):
                four = np.sort(states[start : start + 4], axis=0)
                assert (four == np.arange(4)[:, None]).all()
    random = dl.Augmenter(reflect_x=True)
    drawn = [draw(random, SampleKeys(indices, epoch, 4), SHAPE).reflect_x for epoch in (1, 2)]
    assert 0.4 < (drawn[0] ^ drawn[1]).mean() < 0.6


def test_sine_and_cosine():
    degrees = np.concatenate([np.linspace(-720, 720, 2881), [1e-9, 44.999999, 45.000001]])
    for values, function in zip(sine_cosine(degrees), (np.sin, np.cos), strict=True):
        assert abs(values - function(np.deg2rad(degrees))).max() < 4e-15
    sine, cosine = sine_cosine(np.array([0.0, 90, 180, -90, 360]))
    assert sine.tolist() == [0, 1, 0, -1, 0] and cosine.tolist() == [1, 0, -1, 0, 1]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("workers, prefetch", [(1, 0), (1, 2), (4, 1), (3, 5)])
@pytest.mark.parametrize("ranges", [FULL, {"reflect_x": True, "translate_x": 4, "crop": (17, 20)}])
def test_the_same_on_any_number_of_ranks_and_workers(size, workers, prefetch, ranges):
    augmenter, store = dl.Augmenter(**ranges), store_of(150)
    on_one_rank = dl.MinibatchQueue(store, 80, 1, augmenter=augmenter, prefetch=0).epoch(3)
    options = {"augmenter": augmenter, "prefetch": prefetch, "workers": workers}
    worlds = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    shares = [dl.MinibatchQueue(store, 80, 1, world, **options).epoch(3) for world in worlds]
    for parts, (expected, _) in zip(zip(*shares, strict=True), on_one_rank, strict=True):
        images = np.concatenate([images.local() for images, _ in parts])
        assert images.tobytes() == expected.local().tobytes()


def test_negative_control_another_epoch_gives_other_images():
    augmenter, store = dl.Augmenter(**FULL), store_of(20)
    queue = dl.MinibatchQueue(store, 20, shuffle="never", augmenter=augmenter)
    (first, _), (second, _) = (next(queue.epoch(e)) for e in (1, 2))
    assert not np.array_equal(first.local(), second.local())


def test_ranks_augment_their_shares(world):
    augmenter, store = dl.Augmenter(**FULL), store_of(100)
    for images, _ in dl.MinibatchQueue(store, 64, 5, world, augmenter=augmenter).epoch(1):
        batch = images.batch
        expected = augmenter.apply(store.read(batch.indices), batch.indices, epoch=1, seed=5)
        assert np.array_equal(images.local(), expected / np.float32(255))


@pytest.mark.parametrize(
    "ranges, text",
    [
        ({"rotation": "wide"}, "rotation: expected (low, high) or a number, got 'wide'"),
        ({"rotation": (3, 1)}, "rotation: expected (low, high) or a number with low <= high"),
        ({"scale": (0, 1)}, "scale: expected positive factors"),
        ({"scale": 1}, "scale: expected (low, high), got 1"),
        ({"shear_x": 90}, "shear_x: expected degrees between -90 and 90"),
        ({"shear_x": 50, "shear_y": 40}, "shear_x and shear_y: expected less than 90 degrees"),
        ({"translate_x": 1.5}, "translate_x: expected whole pixels"),
        ({"crop": 5}, "crop: expected (height, width)"),
        ({"crop": (0, 5)}, "crop: expected a height and a width of at least 1"),
        ({"fill": float("nan")}, "fill: expected a number"),
        ({"RandXReflection": 1}, "unknown augmentation RandXReflection: did you mean reflect_x?"),
        ({"reflectx": True}, "unknown augmentation reflectx: did you mean reflect_x?"),
        ({"zzz": 1}, "unknown augmentation zzz"),
    ],
)
def test_ranges_are_checked(ranges, text):
    assert refusal(dl.Augmenter, **ranges).startswith(text)


def test_crop_and_fill_must_fit_the_images():
    store = store_of(4)
    for ranges, text in (
        ({"crop": (20, 3)}, "crop 20x3: expected at most the size of the images, found 19x24"),
        ({"fill": (1, 2)}, "fill: expected a number, or one for each of the 3 channels"),
        ({"fill": 0.5}, "fill: expected whole numbers from 0 to 255, got 0.5"),
        ({"fill": 256}, "fill: expected whole numbers from 0 to 255, got 256"),
    ):
        augmenter = dl.Augmenter(**ranges)
        assert refusal(dl.MinibatchQueue, store, augmenter=augmenter).startswith(text)


def test_errors_name_options_as_they_are_typed():
    text = refusal(dl.Augmenter.of_options, dl.TrainingOptions(scale=(1.5, 0.5)))
    assert text == "--scale: expected (low, high) with low <= high, got (1.5, 0.5)"
    text = refusal(dl.Augmenter.of_options, dl.TrainingOptions(erase_area=(0.5, 2)))
    assert text == "--erase-area: expected fractions above 0, at most 1, got (0.5, 2.0)"
    text = refusal(dl.Augmenter.of_options, dl.TrainingOptions(flip_mode="alternate"))
    assert text == "--flip-mode alternate: expected --flip x, y or xy, found none"
    both_crops = dl.TrainingOptions(random_crop=9, resized_crop=9)
    text = refusal(dl.Augmenter.of_options, both_crops)
    assert text == "--random-crop and --resized-crop: expected at most one of them"
    text = refusal(input_pipeline.image_shape, dl.TrainingOptions(resized_crop=(20, 3)), SHAPE)
    assert text.startswith("--resized-crop 20x3: expected at most the size of the images")
    text = refusal(input_pipeline.image_shape, dl.TrainingOptions(random_crop=(20, 3)), SHAPE)
    assert text == "--random-crop 20x3: expected at most the size of the images, found 19x24"
    both = [dl.TrainingOptions(random_crop=crop) for crop in ("9", (9, 9))]
    assert [input_pipeline.image_shape(options, SHAPE) for options in both] == [(3, 9, 9)] * 2


def test_errors_say_that_the_shape_is_that_of_the_window():
    net = dl.Network([dl.Dense(7)], (3, 8, 8))
    text = refusal(input_pipeline.check, net, store_of(4), dl.TrainingOptions(random_crop=9))
    assert text.endswith("network expects, found (3, 9, 9) after random_crop or resized_crop")
    text = refusal(input_pipeline.check, net, store_of(4), dl.TrainingOptions())
    assert text.endswith("network expects, found (3, 19, 24)")


def test_options_make_the_same_augmenter():
    options = dl.TrainingOptions(
        flip="xy",
        flip_mode="alternate",
        resized_crop=12,
        crop_area=(0.3, 1),
        crop_aspect=(0.5, 2),
        brightness=0.4,
        hue=0.1,
        erase=0.25,
        erase_area=(0.1, 0.2),
        erase_value=9,
    )
    assert dl.Augmenter.of_options(options) == dl.Augmenter(
        reflect_x=True,
        reflect_y=True,
        alternating=True,
        resized_crop=(12, 12),
        crop_area=(0.3, 1),
        crop_aspect=(0.5, 2),
        brightness=0.4,
        hue=0.1,
        erase=0.25,
        erase_area=(0.1, 0.2),
        erase_aspect=(0.3, 3.333333),
        erase_value=9,
    )


def test_spec_makes_the_same_augmenter():
    augmenter = dl.Augmenter(**FULL, crop=(3, 4), fill=(1, 2, 3))
    spec = {k: tuple(v) if isinstance(v, list) else v for k, v in augmenter.spec().items()}
    assert dl.Augmenter(**spec) == augmenter
    assert pickle.loads(pickle.dumps(augmenter)) == augmenter
    assert repr(dl.Augmenter(erase=0.5)) == "Augmenter(erase=0.5)"
    assert dl.Augmenter().spec() == {} and not dl.Augmenter(translate_x=3).warps
