"""Test the CPU kernels that prepare images: values, decoded planes, threads and affine maps."""

import functools
import threading

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from image_sets import pixels_of

from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.cpu import builds, images
from mpidl.backends.shapes import Windows

SHAPES = [(1, 28, 28), (3, 32, 32), (3, 5, 7), (1, 1, 1), (2, 3, 16), (1, 2, 17), (4, 2, 33)]


def moves(count, shape):
    """Draw a mirroring and a shift for each image. Shifts exceed the size by up to 2 pixels."""
    random = np.random.default_rng(count)
    shifts = [random.integers(-n - 2, n + 3, count, dtype=np.int32) for n in shape[1:]]
    mirrored = random.integers(0, 4, count, dtype=np.int32)
    return {"mirrored": mirrored, "top": shifts[0], "left": shifts[1]}


@needs_kernels
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("per_pixel", [False, True])
@pytest.mark.parametrize("shape, size", [((3, 6, 5), (4, 7)), ((1, 20, 37), (20, 37))])
def test_filled_and_normalized_images_are_those_by_hand(shape, size, per_pixel, kind):
    c, random = shape[0], np.random.default_rng(0)
    numbers = {
        name: random.uniform(1, 200, (c, *size) if per_pixel else c).astype(np.float32)
        for name in ("centre", "divisor")
    }
    for count in (0, 5, 40):
        pixels = pixels_of((count,), count, *shape).astype(kind)
        options = moves(count, shape) | {"fill": np.array([7, 0, 255][:c], kind)} | numbers
        expected = reference.images(pixels, size, **options)
        for n, (image, lane) in enumerate(zip(pixels, range(count), strict=True)):
            flipped = image[:, :: -1 if options["mirrored"][n] & 2 else 1]
            flipped = flipped[..., :: -1 if options["mirrored"][n] & 1 else 1].astype(np.float64)
            canvas = np.empty((c, 9 * shape[1] + 99, 9 * shape[2] + 99))
            canvas[...] = options["fill"][:, None, None]
            h, w = 4 * shape[1], 4 * shape[2]
            canvas[:, h : h + shape[1], w : w + shape[2]] = flipped
            h, w = h + options["top"][n], w + options["left"][n]
            value = canvas[:, h : h + size[0], w : w + size[1]]
            centre, divisor = (v if per_pixel else v[:, None, None] for v in numbers.values())
            value = (value - centre) / divisor
            assert np.allclose(expected[lane // 16, ..., lane % 16], value, rtol=1e-5, atol=1e-6)
        assert not expected[-1:, ..., (count - 1) % 16 + 1 :].any()
        out = np.full_like(expected, np.nan)
        assert cpu.images(pixels, size, **options, out=out) is out
        assert np.array_equal(out, expected)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_floats_that_are_not_moved(shape):
    random = np.random.default_rng(3)
    for count in (0, 5, 16, 40):
        pixels = random.normal(size=(count, *shape)).astype(np.float32)
        for sizes in (None, shape[:1], shape):
            numbers = {}
            if sizes is not None:
                numbers = {
                    name: random.uniform(1, 200, sizes).astype(np.float32)
                    for name in ("centre", "divisor")
                }
            expected = reference.images(pixels, **numbers)
            images = functools.partial(cpu.images, pixels, **numbers)
            for build, result in on_all_builds(images).items():
                assert np.array_equal(result, expected), build


def test_floats_are_not_scaled_and_bytes_are():
    pixels = np.random.default_rng(1).normal(size=(20, 3, 4, 5)).astype(np.float32)
    assert np.array_equal(reference.images(pixels)[1, ..., 3], pixels[19])
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    lanes = reference.images(pixels)
    assert np.array_equal(lanes[0, 0, ..., 0], pixels[0, 0] / np.float32(255))


@pytest.mark.parametrize("stride, channels", [(1, 1), (3, 3), (4, 3)])
def test_planes_of_rows_of_a_decoder(stride, channels):
    """Check the reference against slices of the rows. test_conformance.py checks the kernels."""
    rows = pixels_of(stride, 7, 5, stride)
    expected = np.stack([rows[..., c] for c in range(channels)])
    assert np.array_equal(reference.planes(rows), expected)


def test_images_are_mirrored_and_shifted():
    image = np.arange(12, dtype=np.uint8).reshape(1, 1, 3, 4)

    def pixels(**options):
        lanes = reference.images(image, **{k: np.array([v]) for k, v in options.items()})
        return np.rint(lanes[0, 0, ..., 0] * 255).astype(int).tolist()

    assert pixels(mirrored=1) == [[3, 2, 1, 0], [7, 6, 5, 4], [11, 10, 9, 8]]
    assert pixels(top=1, left=-1) == [[0, 4, 5, 6], [0, 8, 9, 10], [0, 0, 0, 0]]
    assert pixels(mirrored=2, top=1) == [[4, 5, 6, 7], [0, 1, 2, 3], [0] * 4]
    assert pixels(mirrored=3) == [[11, 10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]
    assert pixels(mirrored=1, left=1) == [[2, 1, 0, 0], [6, 5, 4, 0], [10, 9, 8, 0]]
    assert pixels(top=3) == [[0] * 4] * 3


@needs_kernels
def test_another_thread_may_prepare_images_while_a_kernel_runs():
    """A thread that prepares images must not disturb the threads of a running kernel."""
    pixels = pixels_of(0, 200, 3, 32, 32)
    expected = reference.images(pixels)
    x = reference.images(pixels_of(1, 64, 3, 32, 32))
    differences, stop = [], threading.Event()

    def fill():
        while not stop.is_set():
            if not np.array_equal(cpu.images(pixels), expected):
                differences.append("images")

    def pool():
        return cpu.average_pool2d(x, Windows((2, 2), (2, 2), ((0, 0), (0, 0))), True)

    library = builds.kernels()
    library.set_threads(2)
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        pooled = pool()
        for _ in range(50):
            assert np.array_equal(pool(), pooled)
    finally:
        stop.set()
        thread.join()
        library.set_threads(settings.threads)
    assert not differences


# ---- affine maps ----


def maps(count, size, spread=0.4):
    """Draw affine maps near the identity. Some results contain no pixel of the image."""
    random = np.random.default_rng(count)
    matrices = random.normal(0, spread, (count, 6)) + [1, 0, 0, 0, 1, 0]
    matrices[:, [2, 5]] *= max(size)
    matrices[:1] = [1, 0, 1e300, 0, 1, -1e300]
    return matrices


@needs_kernels
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 7), (2, 1, 1), (3, 2, 33)])
def test_warped_images_have_the_bytes_of_numpy(shape, kind):
    pixels = pixels_of(1, 9, *shape).astype(kind)
    fill = np.array([3, 250, 0], kind)[: shape[0]]
    for size in (shape[1:], (5, 11), (0, 3)):
        m = maps(len(pixels), shape)
        expected = reference.warp(pixels, m, size, fill)
        for warped in on_all_builds(
            lambda m=m, size=size: cpu.warp(pixels, m, size, fill)
        ).values():
            assert warped.dtype == kind and warped.tobytes() == expected.tobytes()


def test_identity_and_shifts_by_whole_pixels_are_exact():
    for kind in (np.uint8, np.float32):
        pixels = pixels_of(2, 2, 3, 8, 6).astype(kind)
        m = np.array([[1, 0, 0, 0, 1, 0], [1, 0, 2, 0, 1, -1]], float)
        warped = reference.warp(pixels, m, (8, 6), np.array([9, 9, 9], kind))
        assert np.array_equal(warped[0], pixels[0])
        assert np.array_equal(warped[1, :, 1:, :4], pixels[1, :, :-1, 2:])
        assert (warped[1, :, 0] == 9).all() and (warped[1, :, :, 4:] == 9).all()


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_scipy_warps_images_alike(kind):
    """SciPy computes the same images in the mode "grid-constant"."""
    ndimage = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed")
    pixels = pixels_of(3, 6, 1, 20, 31).astype(kind)
    m = maps(6, (4, 4), 0.3)[1:]
    warped = reference.warp(pixels[1:], m, (17, 25), np.array([77], kind))
    for image, affine, result in zip(pixels[1:, 0], m, warped[:, 0], strict=True):
        matrix = [[affine[4], affine[3]], [affine[1], affine[0]]]
        expected = ndimage.affine_transform(
            image.astype(np.float64),
            matrix,
            [affine[5], affine[2]],
            output_shape=(17, 25),
            order=1,
            mode="grid-constant",
            cval=77,
        )
        error = abs(expected - result).max()
        assert error < (0.5001 if kind == np.uint8 else 1e-3)


def prepared(threads, source, samples, lanes, labels, **moves):
    """Prepare a mini-batch with a number of threads. Return the result of `prepare`."""
    builds.kernels().set_threads(threads)
    try:
        return source.prepare(samples, lanes, labels, **moves)
    finally:
        builds.kernels().set_threads(settings.threads)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("statistics", [None, "per channel", "per pixel"])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 40, 41)])
@pytest.mark.parametrize("count", [0, 1, 16, 37])
@pytest.mark.parametrize("kind", ["floats", "bytes", "moved bytes"])
def test_minibatches_in_memory_have_the_bytes_of_copied_images(
    kind, count, shape, statistics, threads
):
    random = np.random.default_rng(0)
    array = random.integers(0, 256, (20, *shape)).astype(np.uint8)
    array = array / np.float32(100) if kind == "floats" else array
    labels, samples = np.arange(20) % 10, random.integers(0, 60, count)  # images are repeated
    window, size = {}, shape[1:]
    if kind == "moved bytes":
        size = (max(shape[1] - 1, 1), shape[2] + 2)
        window = moves(count, shape) | {"fill": np.arange(1, shape[0] + 1, dtype=np.uint8)}
    numbers = {}
    if statistics:
        numbers_shape = (shape[0], *size) if statistics == "per pixel" else shape[:1]
        numbers["centre"] = random.uniform(0, 1, numbers_shape).astype(np.float32)
        numbers["divisor"] = random.uniform(1, 2, numbers_shape).astype(np.float32)
    expected = reference.images(array[samples % 20], size, **window, **numbers)
    lanes = np.full(expected.shape, np.nan, np.float32)
    rows = np.full((len(lanes), 16), -1, np.int32)
    source = images.MemoryImages(array, labels, 10, None, size, **numbers)
    assert prepared(threads, source, samples, lanes, rows, **window)
    assert lanes.tobytes() == np.asarray(expected).tobytes()
    assert (rows.ravel()[:count] == labels[samples % 20]).all() and not rows.ravel()[count:].any()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_floats_that_are_not_finite_are_noticed(value, threads):
    array = np.zeros((40, 1, 40, 41), np.float32)
    array[7, 0, 39, 40] = value
    source, samples = images.MemoryImages(array, None, None, None, (40, 41)), np.arange(40)
    lanes = np.empty((3, 1, 40, 41, 16), np.float32)
    assert prepared(threads, source, samples, lanes, None) == bool(np.isfinite(value))
    assert prepared(threads, source, samples[8:], lanes, None)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "label, classes, ignore_label, is_valid",
    [(-1, 3, None, False), (3, 3, None, False), (2, 3, None, True), (-1, None, None, True)]
    + [(255, 3, 255, True), (-1, 3, -1, True), (254, 3, 255, False)],
)
def test_labels_that_are_negative_or_too_large_are_noticed(
    label, classes, ignore_label, is_valid, threads
):
    labels, pixels = np.zeros(40, np.int64), np.zeros((40, 1, 2, 2), np.uint8)
    labels[7] = label
    source = images.MemoryImages(pixels, labels, classes, ignore_label, (2, 2))
    lanes, rows = np.empty((3, 1, 2, 2, 16), np.float32), np.empty((3, 16), np.int32)
    assert prepared(threads, source, np.arange(40), lanes, rows) == is_valid
    assert rows[0, 7] == label or not is_valid
    assert prepared(threads, source, np.arange(8, 40), lanes, rows)
