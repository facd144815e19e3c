"""Pixels to blocks by C, against plain loops in C, NumPy, and each other."""

import functools
import threading

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from image_sets import pixels_of

from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.blocks import LANES, blocks_of

SHAPES = [(1, 28, 28), (3, 32, 32), (3, 5, 7), (1, 1, 1), (2, 3, 16), (1, 2, 17), (4, 2, 33)]
COUNTS = [0, 1, 5, 15, 16, 17, 40]


def moves(count, shape, far):
    """What is done to each image: also such that nothing of it is left."""
    random = np.random.default_rng(count)
    first = [random.integers(-n - far, n + far + 1, count, dtype=np.int32) for n in shape[1:]]
    mirrored = random.integers(0, 4, count, dtype=np.int32)
    return {"mirrored": mirrored, "top": first[0], "left": first[1]}


def crops(shape):
    c, h, w = shape
    return [(h, w), (max(1, h - 3), max(1, w // 2)), (h + 2, w + 9)]


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", COUNTS)
def test_whole_images(shape, count):
    pixels = pixels_of((count,), count, *shape)
    expected = reference.images(pixels)
    assert expected.shape == (blocks_of(count), *shape, LANES)
    for found in on_all_builds(lambda: cpu.images(pixels)).values():
        assert found.dtype == np.float32 and np.array_equal(found, expected)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", COUNTS)
def test_mirrored_shifted_and_cut(shape, count):
    pixels = pixels_of((count,), count, *shape)
    for size in crops(shape):
        options = moves(count, shape, far=2)
        expected = reference.images(pixels, size, **options)
        plain = np.empty_like(expected)
        builds.kernels().images_plain(
            pixels,
            count,
            np.array([*shape, *size, 0], np.int64),
            *options.values(),
            None,
            None,
            None,
            plain,
        )
        assert np.array_equal(plain, expected)
        fast = functools.partial(cpu.images, pixels, size, **options)
        for found in on_all_builds(fast).values():
            assert np.array_equal(found, expected)
        for name in options:  # one alone
            one = {name: options[name]}
            expected = reference.images(pixels, size, **one)
            assert np.array_equal(cpu.images(pixels, size, **one), expected)


@needs_kernels
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("of_pixels", [False, True])
@pytest.mark.parametrize("shape, size", [((3, 6, 5), (4, 7)), ((1, 20, 37), (20, 37))])
def test_filled_and_normalized(shape, size, of_pixels, kind):
    c, random = shape[0], np.random.default_rng(0)
    numbers = {
        name: random.uniform(1, 200, (c, *size) if of_pixels else c).astype(np.float32)
        for name in ("centre", "divisor")
    }
    for count in (0, 5, 40):
        pixels = pixels_of((count,), count, *shape).astype(kind)
        options = moves(count, shape, far=2) | {"fill": np.array([7, 0, 255][:c], kind)} | numbers
        expected = reference.images(pixels, size, **options)
        for n, (image, lane) in enumerate(zip(pixels, range(count), strict=True)):
            turned = image[:, :: -1 if options["mirrored"][n] & 2 else 1]
            turned = turned[..., :: -1 if options["mirrored"][n] & 1 else 1].astype(np.float64)
            wide = np.empty((c, 9 * shape[1] + 99, 9 * shape[2] + 99))  # float64, by hand
            wide[...] = options["fill"][:, None, None]
            h, w = 4 * shape[1], 4 * shape[2]
            wide[:, h : h + shape[1], w : w + shape[2]] = turned
            h, w = h + options["top"][n], w + options["left"][n]
            value = wide[:, h : h + size[0], w : w + size[1]]
            centre, divisor = (v if of_pixels else v[:, None, None] for v in numbers.values())
            value = (value - centre) / divisor
            assert np.allclose(expected[lane // 16, ..., lane % 16], value, rtol=1e-5, atol=1e-6)
        assert not expected[-1:, ..., (count - 1) % 16 + 1 :].any()
        fast = functools.partial(cpu.images, pixels, size, **options)
        for found in on_all_builds(fast).values():
            assert np.array_equal(found, expected)
        out = np.full_like(expected, np.nan)
        assert cpu.images(pixels, size, **options, out=out) is out
        assert np.array_equal(out, expected)


@needs_kernels
def test_floats_are_left_as_they_are():
    pixels = np.random.default_rng(1).normal(size=(20, 3, 4, 5)).astype(np.float32)
    expected = reference.images(pixels)
    for found in on_all_builds(lambda: cpu.images(pixels)).values():
        assert found.tobytes() == expected.tobytes()
    assert np.array_equal(expected[1, ..., 3], pixels[19])


@needs_kernels
@pytest.mark.parametrize("stride", [1, 3, 4])
@pytest.mark.parametrize("width", [1, 5, 227])
def test_planes_of_a_decoder(stride, width):
    rows = pixels_of((stride, width), 7, width, stride)
    channels = 1 if stride == 1 else 3
    expected = np.stack([rows[..., c] for c in range(channels)])
    assert np.array_equal(reference.planes(rows), expected)
    apart = pixels_of(0, 7, width + 3, stride)
    apart[:, :width] = rows
    for given in (rows, apart[:, :width]):
        for found in on_all_builds(lambda given=given: cpu.planes(given)).values():
            assert np.array_equal(found, expected)


def test_what_is_done_to_an_image():
    image = np.arange(12, dtype=np.uint8).reshape(1, 1, 3, 4)

    def seen(**options):
        lanes = reference.images(image, **{k: np.array([v]) for k, v in options.items()})
        return np.rint(lanes[0, 0, ..., 0] * 255).astype(int).tolist()

    assert seen(mirrored=1) == [[3, 2, 1, 0], [7, 6, 5, 4], [11, 10, 9, 8]]
    assert seen(top=1, left=-1) == [[0, 4, 5, 6], [0, 8, 9, 10], [0, 0, 0, 0]]
    assert seen(mirrored=2, top=1) == [[4, 5, 6, 7], [0, 1, 2, 3], [0] * 4]
    assert seen(mirrored=3) == [[11, 10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]
    assert seen(mirrored=1, left=1) == [[2, 1, 0, 0], [6, 5, 4, 0], [10, 9, 8, 0]]
    assert seen(top=3) == [[0] * 4] * 3


@needs_kernels
def test_every_pixel_has_the_bytes_of_numpy():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    for found in on_all_builds(lambda: cpu.images(pixels)).values():
        assert np.array_equal(found[0, 0, ..., 0], pixels[0, 0] / np.float32(255))


@needs_kernels
def test_another_thread_may_fill_while_a_pass_runs():
    """The one that reads ahead: it must not meet the threads of the pass."""
    pixels = pixels_of(0, 200, 3, 32, 32)
    expected = reference.images(pixels)
    x = reference.images(pixels_of(1, 64, 3, 32, 32))
    wrong, stop = [], threading.Event()

    def fill():
        while not stop.is_set():
            if not np.array_equal(cpu.images(pixels), expected):
                wrong.append("images")

    library = builds.kernels()
    library.set_threads(2)
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        pooled = cpu.average_pool2d(x, (2, 2), (2, 2), ((0, 0), (0, 0)))
        for _ in range(50):
            again = cpu.average_pool2d(x, (2, 2), (2, 2), ((0, 0), (0, 0)))
            assert np.array_equal(again, pooled)
    finally:
        stop.set()
        thread.join()
        library.set_threads(settings.threads)
    assert not wrong
