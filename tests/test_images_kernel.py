"""Pixels to blocks by C, against plain loops in C, NumPy, and each other."""

import functools
import threading

import numpy as np
import pytest
from compiled import everywhere, needed
from images import pixels_of

from mpidl.backends import cpu, native, reference, settings
from mpidl.blocks import LANES, blocks_of

SHAPES = [(1, 28, 28), (3, 32, 32), (3, 5, 7), (1, 1, 1), (2, 3, 16), (1, 2, 17), (4, 2, 33)]
COUNTS = [0, 1, 5, 15, 16, 17, 40]


def moves(count, shape, far):
    """What is done to each image: also such that nothing of it is left."""
    random = np.random.default_rng(count)
    first = [random.integers(-n - far, n + far + 1, count, dtype=np.int32) for n in shape[1:]]
    mirrored = random.integers(0, 2, count, dtype=np.int32)
    return {"mirrored": mirrored, "top": first[0], "left": first[1]}


def crops(shape):
    c, h, w = shape
    return [(h, w), (max(1, h - 3), max(1, w // 2)), (h + 2, w + 9)]


@needed
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", COUNTS)
def test_whole_images(shape, count):
    pixels = pixels_of((count,), count, *shape)
    expected = reference.images(pixels)
    assert expected.shape == (blocks_of(count), *shape, LANES)
    for found in everywhere(lambda: cpu.images(pixels)).values():
        assert found.dtype == np.float32 and np.array_equal(found, expected)


@needed
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", COUNTS)
def test_mirrored_shifted_and_cut(shape, count):
    pixels = pixels_of((count,), count, *shape)
    for size in crops(shape):
        options = moves(count, shape, far=2)
        expected = reference.images(pixels, size, **options)
        plain = np.empty_like(expected)
        native.kernels().images_plain(
            pixels, count, np.array([*shape, *size], np.int64), *options.values(), plain
        )
        assert np.array_equal(plain, expected)
        fast = functools.partial(cpu.images, pixels, size, **options)
        for found in everywhere(fast).values():
            assert np.array_equal(found, expected)
        for name in options:  # one alone
            one = {name: options[name]}
            expected = reference.images(pixels, size, **one)
            assert np.array_equal(cpu.images(pixels, size, **one), expected)


def test_what_is_done_to_an_image():
    image = np.arange(12, dtype=np.uint8).reshape(1, 1, 3, 4)

    def seen(**options):
        lanes = reference.images(image, **{k: np.array([v]) for k, v in options.items()})
        return np.rint(lanes[0, 0, ..., 0] * 255).astype(int).tolist()

    assert seen(mirrored=1) == [[3, 2, 1, 0], [7, 6, 5, 4], [11, 10, 9, 8]]
    assert seen(top=1, left=-1) == [[0, 4, 5, 6], [0, 8, 9, 10], [0, 0, 0, 0]]
    assert seen(mirrored=1, left=1) == [[2, 1, 0, 0], [6, 5, 4, 0], [10, 9, 8, 0]]
    assert seen(top=3) == [[0] * 4] * 3


@needed
def test_every_pixel_has_the_bytes_of_numpy():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    for found in everywhere(lambda: cpu.images(pixels)).values():
        assert np.array_equal(found[0, 0, ..., 0], pixels[0, 0] / np.float32(255))


@needed
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

    library = native.kernels()
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
