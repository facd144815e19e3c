"""The Winograd kernels of one block against float64 NumPy; their points."""

import functools
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from single_rank import numbers

from mpidl.backends.cpu import builds
from mpidl.blocks import LANES

ROOT = Path(__file__).parents[3]

# (inputs, outputs, P, Q)
SHAPES = [
    (1, 1, 1, 1),
    (1, 20, 8, 8),
    (3, 5, 5, 7),
    (3, 2, 4, 3),
    (2, 33, 6, 9),
    (20, 20, 24, 24),
    (33, 7, 13, 13),
    (16, 4, 2, 11),
    (16, 20, 13, 13),
    (32, 9, 10, 5),
    (48, 12, 5, 6),
    (64, 64, 8, 8),
    (64, 33, 3, 27),
    (5, 3, 40, 40),
]
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{}-{}@{}x{}".format(*s))


def extent(outputs, m):
    """Return the number of rows of padded input that the tiles of `rows` output rows read."""
    return -(-outputs // m) * m + 2


def padded(name, channels, rows, columns, m, border=2):
    """Draw (channels, rows + 2, columns + 2, 16), padded with zeros to whole tiles."""
    x = np.zeros((channels, extent(rows, m), extent(columns, m), LANES), np.float32)
    x[:, : rows + 2, : columns + 2] = numbers(name, channels, rows + 2, columns + 2, LANES)
    return x if border else x[:, :-2, :-2]


def conv_reference(x, w, bias, rows, columns):
    """float64; x (inputs, >= rows + 2, >= columns + 2, 16), w (outputs, inputs, 3, 3)."""
    x, w = x.astype(float), w.astype(float)
    y = np.zeros((len(w), rows, columns, LANES)) + bias.astype(float)[:, None, None, None]
    for r in range(3):
        for s in range(3):
            y += np.einsum("kc,cpql->kpql", w[:, :, r, s], x[:, r : r + rows, s : s + columns])
    return y


def weights(outputs, inputs):
    return numbers("w", outputs, inputs, 3, 3, dtype=np.float32)


def biases(outputs):
    return numbers("bias", outputs, dtype=np.float32)


@functools.cache
def exact_convolution(inputs, outputs, rows, columns):
    """Return what tiles of any size and both directions compute."""
    x = padded("x", inputs, rows, columns, 2)
    return conv_reference(x, weights(outputs, inputs), biases(outputs), rows, columns)


def dweight_reference(x, dy, rows, columns):
    x, dy = x.astype(float), dy[:, :rows, :columns].astype(float)
    dweight = np.empty((len(dy), len(x), 3, 3))
    for r in range(3):
        for s in range(3):
            part = x[:, r : r + rows, s : s + columns]
            dweight[:, :, r, s] = np.einsum("kpql,cpql->kc", dy, part)
    return dweight


def relative(actual, expected):
    """Return the root of the mean squared error, relative to the root mean square."""
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


@needs_kernels
@SHAPE
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("backward", [0, 1])
def test_convolutions_are_nearly_exact(shape, m, backward):
    inputs, outputs, rows, columns = shape
    sizes = np.array([*shape, m, backward], np.int64)
    x = padded("x", inputs, rows, columns, m)
    bias = biases(outputs)
    forward = weights(outputs, inputs)
    w = np.ascontiguousarray(forward[:, :, ::-1, ::-1].swapaxes(0, 1)) if backward else forward

    def fast(bias=bias):
        library = builds.kernels()
        u = np.full(library.winograd_weights_floats(sizes), np.nan, np.float32)
        y = np.full((outputs, rows, columns, LANES), np.nan, np.float32)
        library.winograd_conv(x, w, bias, u, y, sizes)
        return y

    expected = exact_convolution(*shape)
    for y in on_all_builds(fast).values():
        assert relative(y, expected) < (3e-7 if m == 2 else 8e-7)  # 1.3e-6 with points 0, ±1, ±2
    zero = np.zeros_like(bias)
    assert np.array_equal(fast(None), fast(zero))


@needs_kernels
@SHAPE
def test_weight_gradients_are_nearly_exact(shape):
    inputs, outputs, rows, columns = shape
    sizes = np.array([*shape, 4, 0], np.int64)
    x = padded("x", inputs, rows, columns, 4)
    dy = np.zeros((outputs, extent(rows, 4) - 2, extent(columns, 4) - 2, LANES), np.float32)
    dy[:, :rows, :columns] = numbers("dy", outputs, rows, columns, LANES)

    def fast():
        dweight = np.full((outputs, inputs, 3, 3), np.nan, np.float32)
        builds.kernels().winograd_dweight(x, dy, dweight, sizes)
        return dweight

    expected = dweight_reference(x, dy, rows, columns)
    for dweight in on_all_builds(fast).values():
        assert relative(dweight, expected) < 1.2e-6


# The points of F(4, 3): 0, +-a, +-b, infinity


def matrices(a, b):
    """Return B^T (6, 6), G (6, 3) and A^T (4, 6), exact."""
    finite = [Fraction(0), a, -a, b, -b]

    def product(roots):
        coefficients = [Fraction(1)]
        for root in roots:
            shifted = [Fraction(0), *coefficients]
            coefficients = [
                high - root * low
                for high, low in zip(shifted, [*coefficients, Fraction(0)], strict=True)
            ]
        return coefficients

    rows, filters = [], []
    for point in finite:
        roots = [other for other in finite if other != point]
        scale = np.prod([point - root for root in roots])
        rows.append([*product(roots), Fraction(0)])
        filters.append([point**j / scale for j in range(3)])
    rows.append(product(finite))
    filters.append([0, 0, 1])
    outputs = [[point**j for point in finite] + [int(j == 3)] for j in range(4)]
    return [np.array(matrix, float) for matrix in (rows, filters, outputs)]


def rounded(matrix, values):
    """Return matrix @ values @ matrix.T, rounded to float32 after each product."""
    matrix = matrix.astype(np.float32).astype(float)
    half = (matrix @ values.astype(float)).astype(np.float32)
    return (half.astype(float) @ matrix.T).astype(np.float32)


def accumulated(products):
    """Sum over the first axis, rounding to float32 after each addition."""
    total = np.zeros(products[0].shape, np.float32)
    for product in products:
        total = (total + product).astype(np.float32)
    return total


def by_winograd(a, b, x, w):
    """Return the result of F(4x4, 3x3) at these points.

    x (channels, tiles, 6, 6) and w (channels, 3, 3), float32.
    """
    transform, filters, outputs = matrices(a, b)
    u, v = rounded(filters, w).astype(float), rounded(transform, x).astype(float)
    return rounded(outputs, accumulated(u[:, None] * v))


def directly(x, w):
    """Return the convolution in float64, and by sums that are rounded to float32."""
    x, w = x.astype(float), w.astype(float)
    terms = [
        w[c, r, s] * x[c, :, r : r + 4, s : s + 4]
        for c in range(len(x))
        for r in range(3)
        for s in range(3)
    ]
    return sum(terms), accumulated(terms)


def kernel_points():
    """Return NEAR and FAR of the kernels, as fractions in text."""
    text = (ROOT / "kernels" / "cpu" / "winograd_tiles.h").read_text()
    matches = (re.search(rf"#define {name} ([0-9.]+)f$", text, re.M) for name in ("NEAR", "FAR"))
    return tuple(str(Fraction(match[1])) for match in matches)


def test_the_points_of_the_kernels_have_the_least_error():
    """0, +-5/8, +-3/2, compared with others."""
    points_used, classic = kernel_points(), ("1", "2")
    alternatives = [("1/2", "1"), ("3/5", "7/5"), ("1/2", "3/2"), ("5/8", "11/8"), ("11/16", "3/2")]
    rng = np.random.default_rng(1)
    for kind in ("signed", "positive"):
        x = rng.standard_normal((32, 1500, 6, 6)).astype(np.float32)
        x = x if kind == "signed" else np.maximum(x, 0)
        w = rng.standard_normal((32, 3, 3)).astype(np.float32)
        exact, direct = directly(x, w)
        rms_errors, direct_error = {}, relative(direct, exact)
        for points in (classic, *alternatives, points_used):
            rms_errors[points] = relative(by_winograd(*map(Fraction, points), x, w), exact)
            ratio = rms_errors[points] / direct_error
            name = f"{kind}, 0 ±{' ±'.join(points)}"
            print(f"{name}: {rms_errors[points]:.2e}, {ratio:.2f} of direct's")
        assert rms_errors[points_used] < 0.6 * rms_errors[classic]
        best = min(rms_errors.values())
        assert rms_errors[points_used] <= 1.02 * best
