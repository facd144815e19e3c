"""Images by affine maps: C against NumPy, and NumPy against SciPy."""

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from image_sets import pixels_of

from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference

SHAPES = [(1, 28, 28), (3, 9, 7), (2, 1, 1), (3, 2, 33)]


def maps(count, size, spread=0.4):
    """Draw affine maps near the identity; some see nothing of the image."""
    random = np.random.default_rng(count)
    matrices = random.normal(0, spread, (count, 6)) + [1, 0, 0, 0, 1, 0]
    matrices[:, [2, 5]] *= max(size)
    matrices[:1] = [1, 0, 1e300, 0, 1, -1e300]
    return matrices


@needs_kernels
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_has_the_bytes_of_numpy(shape, kind):
    pixels = pixels_of(1, 9, *shape).astype(kind)
    fill = np.array([3, 250, 0], kind)[: shape[0]]
    for size in (shape[1:], (5, 11), (0, 3)):
        m = maps(len(pixels), shape)
        expected = reference.warp(pixels, m, size, fill)
        for warped in on_all_builds(
            lambda m=m, size=size: cpu.warp(pixels, m, size, fill)
        ).values():
            assert warped.dtype == kind and warped.tobytes() == expected.tobytes()


def test_the_identity_and_whole_pixels_are_exact():
    for kind in (np.uint8, np.float32):
        pixels = pixels_of(2, 2, 3, 8, 6).astype(kind)
        m = np.array([[1, 0, 0, 0, 1, 0], [1, 0, 2, 0, 1, -1]], float)
        warped = reference.warp(pixels, m, (8, 6), np.array([9, 9, 9], kind))
        assert np.array_equal(warped[0], pixels[0])
        assert np.array_equal(warped[1, :, 1:, :4], pixels[1, :, :-1, 2:])
        assert (warped[1, :, 0] == 9).all() and (warped[1, :, :, 4:] == 9).all()


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_scipy_computes_the_same_images(kind):
    """Its mode "grid-constant" has the same value beyond the edges."""
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
