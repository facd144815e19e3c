"""Compare the CPU's Winograd kernels with float64 NumPy, and check their interpolation points."""

import functools
import itertools
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from single_rank import numbers

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.backends.shapes import Geometry
from mpidl.core.blocks import LANES
from mpidl.core.values import BF16

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


def extent(outputs, m, side):
    """Return the number of rows of padded input that the tiles of `outputs` output rows read."""
    return -(-outputs // m) * m + side - 1


def padded(name, channels, rows, columns, tile, side):
    """Draw the input for (rows, columns) outputs, padded with zeros to whole tiles."""
    extents = extent(rows, tile[0], side), extent(columns, tile[1], side)
    x = np.zeros((channels, *extents, LANES), np.float32)
    rows, columns = rows + side - 1, columns + side - 1
    x[:, :rows, :columns] = numbers(name, channels, rows, columns, LANES)
    return x


def taps(side):
    return itertools.product(range(side), repeat=2)


def conv_reference(x, w, bias, rows, columns):
    """Return the convolution in float64.

    x is the padded input (inputs, rows, columns, 16), and w is (outputs, inputs, side, side).
    """
    x, w = x.astype(float), w.astype(float)
    y = np.zeros((len(w), rows, columns, LANES)) + bias.astype(float)[:, None, None, None]
    for r, s in taps(w.shape[2]):
        y += np.einsum("kc,cpql->kpql", w[:, :, r, s], x[:, r : r + rows, s : s + columns])
    return y


def weights(outputs, inputs, side):
    return numbers("w", outputs, inputs, side, side, dtype=np.float32)


def biases(outputs):
    return numbers("bias", outputs, dtype=np.float32)


@functools.cache
def exact_convolution(inputs, outputs, rows, columns, side):
    """Return the result that tiles of any size must compute, forward and backward."""
    x = padded("x", inputs, rows, columns, (2, 2), side)
    return conv_reference(x, weights(outputs, inputs, side), biases(outputs), rows, columns)


def dweight_reference(x, dy, rows, columns, side):
    x, dy = x.astype(float), dy[:, :rows, :columns].astype(float)
    dweight = np.empty((len(dy), len(x), side, side))
    for r, s in taps(side):
        part = x[:, r : r + rows, s : s + columns]
        dweight[:, :, r, s] = np.einsum("kpql,cpql->kc", dy, part)
    return dweight


def relative(actual, expected):
    """Return the root mean square error, relative to the root mean square of `expected`."""
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


# {(rows and columns of a tile, side of the filter): bound of the relative error}, about 1.5 times
# the largest measured error
CONV_ERRORS = {
    (2, 2, 2): 2e-7,
    (4, 4, 2): 5e-7,
    (2, 2, 3): 3e-7,
    (2, 4, 3): 5e-7,
    (4, 4, 3): 8e-7,
    (2, 2, 4): 5e-7,
    (4, 4, 4): 1.5e-6,
    (2, 2, 5): 7e-7,
    (4, 4, 5): 3.5e-6,
}
DWEIGHT_ERRORS = {2: 8e-7, 3: 1.2e-6, 4: 3e-6, 5: 8e-6}


@needs_kernels
@SHAPE
@pytest.mark.parametrize("tile", CONV_ERRORS, ids=lambda tile: "F({}x{},{})".format(*tile))
@pytest.mark.parametrize("backward", [0, 1])
def test_convolutions_are_nearly_exact(shape, tile, backward):
    inputs, outputs, rows, columns = shape
    side = tile[2]
    sizes = np.array([*shape, *tile, backward], np.int64)
    x = padded("x", inputs, rows, columns, tile, side)
    bias = biases(outputs)
    forward = weights(outputs, inputs, side)
    w = np.ascontiguousarray(forward[:, :, ::-1, ::-1].swapaxes(0, 1)) if backward else forward

    def fast(bias=bias):
        library = builds.kernels()
        u = np.full(library.winograd_weights_floats(sizes), np.nan, np.float32)
        y = np.full((outputs, rows, columns, LANES), np.nan, np.float32)
        library.winograd_conv(x, w, bias, u, y, sizes)
        return y

    expected = exact_convolution(*shape, side)
    for y in on_all_builds(fast).values():
        assert relative(y, expected) < CONV_ERRORS[tile]
    zero = np.zeros_like(bias)
    assert np.array_equal(fast(None), fast(zero))


@needs_kernels
@SHAPE
@pytest.mark.parametrize("side", DWEIGHT_ERRORS)
def test_weight_gradients_are_nearly_exact(shape, side):
    inputs, outputs, rows, columns = shape
    sizes = np.array([*shape, 4, 4, side], np.int64)
    x = padded("x", inputs, rows, columns, (4, 4), side)
    dy_shape = [extent(size, 4, side) - side + 1 for size in (rows, columns)]
    dy = np.zeros((outputs, *dy_shape, LANES), np.float32)
    dy[:, :rows, :columns] = numbers("dy", outputs, rows, columns, LANES)

    def fast():
        dweight = np.full((outputs, inputs, side, side), np.nan, np.float32)
        builds.kernels().winograd_dweight(x, dy, dweight, sizes)
        return dweight

    expected = dweight_reference(x, dy, rows, columns, side)
    for dweight in on_all_builds(fast).values():
        assert relative(dweight, expected) < DWEIGHT_ERRORS[side]


# The bounds hold for the tile of each range of inputs: 2x2, 2x4 and 4x4
@needs_kernels
@pytest.mark.parametrize("inputs", [16, 31, 32, 127, 128, 512])
def test_forward_errors_are_similar_to_the_errors_of_direct_sums(inputs, monkeypatch):
    outputs, size = 16, 8
    x = np.maximum(numbers("x", inputs, size, size, LANES, dtype=np.float32), 0)
    w, bias = weights(outputs, inputs, 3), np.zeros(outputs, np.float32)
    border = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = conv_reference(border, w, bias, size, size)
    errors = {}
    for policy in ("auto", "off", "fast"):
        monkeypatch.setattr(settings, "winograd", policy)
        (y,) = cpu.conv2d(x[None], w, bias, Geometry((1, 1), ((1, 1), (1, 1))))
        errors[policy] = relative(y, expected)
    print({policy: f"{error / errors['off']:.2f}" for policy, error in errors.items()})
    assert errors["auto"] < 1.5 * errors["off"]
    if inputs <= 32:  # tiles of 4x4 would not satisfy this bound
        assert errors["fast"] > 1.5 * errors["off"]


# The same for strides: 3x3 and 4x4 filters have tiles of 4x4, 7x7 filters tiles of 2x2
@needs_kernels
@pytest.mark.parametrize("side, inputs", [(3, 32), (3, 128), (4, 16), (7, 3), (7, 64)])
def test_forward_errors_with_stride_2_are_similar(side, inputs, monkeypatch):
    outputs, size = 16, 16
    x = numbers("x", inputs, 2 * size, 2 * size, LANES, dtype=np.float32)
    x = np.maximum(x, 0) if inputs > 3 else x
    w, bias = weights(outputs, inputs, side), np.zeros(outputs, np.float32)
    before = (side - 1) // 2
    geometry = Geometry((2, 2), ((before, before), (before, before)))
    expected = reference.conv2d(x[None].astype(float), w.astype(float), bias, geometry)
    errors = {}
    for policy in ("auto", "off", "fast"):
        monkeypatch.setattr(settings, "winograd", policy)
        errors[policy] = relative(cpu.conv2d(x[None], w, bias, geometry), expected)
    print({policy: f"{error / errors['off']:.2f}" for policy, error in errors.items()})
    assert errors["auto"] < 1.5 * errors["off"] and errors["auto"] != errors["off"]
    if inputs == 3:  # tiles of 4x4 would not satisfy this bound
        assert errors["fast"] > 1.5 * errors["off"]


# The interpolation points of F(m, side) are 0 if their number is even, pairs of +-p, and infinity.


def matrices(m, side, pairs):
    """Return the exact matrices B^T (n, n), G (n, side) and A^T (m, n), with n = m + side - 1."""
    zero = [] if (m + side) % 2 == 0 else [Fraction(0)]
    finite = [*zero, *(sign * p for p in pairs for sign in (1, -1))]

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
        filters.append([point**j / scale for j in range(side)])
    rows.append(product(finite))
    filters.append([0] * (side - 1) + [1])
    outputs = [[point**j for point in finite] + [int(j == m - 1)] for j in range(m)]
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


def by_winograd(m, pairs, x, w):
    """Return the result of F(m x m, side x side) with the points of `pairs`.

    x (channels, tiles, n, n) and w (channels, side, side) are float32.
    """
    transform, filters, outputs = matrices(m, w.shape[1], pairs)
    u, v = rounded(filters, w).astype(float), rounded(transform, x).astype(float)
    return rounded(outputs, accumulated(u[:, None] * v))


def directly(m, x, w):
    """Return the convolution computed in float64, and computed with sums rounded to float32."""
    x, w = x.astype(float), w.astype(float)
    terms = [
        w[c, r, s] * x[c, :, r : r + m, s : s + m]
        for c in range(len(x))
        for r, s in taps(w.shape[1])
    ]
    return sum(terms), accumulated(terms)


def kernel_points(n):
    """Return the positive points that the kernels use for n inputs, as strings of fractions."""
    text = (ROOT / "kernels" / "cpu" / "winograd_tiles.h").read_text()
    (line,) = re.findall(rf"#define POINT_OF_{n}\(pair\) (.*)", text)
    return tuple(str(Fraction(number)) for number in re.findall(r"([0-9.]+)f", line))


# In bfloat16, backward passes round the transformed numbers and add products of pairs.

# (C, K, H, W, side)
NARROW_SHAPES = [
    (17, 9, 13, 11, 3),
    (9, 17, 5, 6, 3),
    (20, 20, 12, 24, 3),
    (8, 33, 4, 33, 3),
    (33, 15, 9, 10, 5),
    (8, 48, 7, 4, 5),
]
NARROW_SHAPE = pytest.mark.parametrize("shape", NARROW_SHAPES, ids=lambda s: "-".join(map(str, s)))


def to_bf16(values):
    """Round to the nearest bfloat16 number, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def wide(values):
    """Return an array that the library stores in bfloat16 as float32; others unchanged."""
    if values.dtype != BF16:
        return values
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """Return an array as the library stores it in bfloat16."""
    return (to_bf16(values).view(np.uint32) >> 16).astype(np.uint16).view(BF16)


def stored_example(shape):
    """Draw (x, w, dy) of one block; x and dy are bfloat16 numbers."""
    inputs, outputs, rows, columns, side = shape
    x = to_bf16(numbers("x", inputs, rows, columns, LANES))
    dy = to_bf16(numbers("dy", outputs, rows, columns, LANES))
    return x, weights(outputs, inputs, side), dy


def gradients(x, w, dy):
    """Return dx and dweight as the library computes them in bfloat16."""
    batch = dl.share(LANES, dl.OneRank())
    geometry = Geometry((1, 1), ((len(w[0, 0]) // 2,) * 2,) * 2)
    values = narrow(dy[None]), narrow(x[None]), w, geometry, batch.counts(), batch.tree
    dx, dweight, *_ = cpu.conv2d_backward(*values, (True, True, False))
    ((node,),) = (term.nodes for term in dweight.terms)
    return wide(dx)[0], np.array(node)


def tiles_of(x, m, n, before):
    """Return tiles (channels, rows, columns, n, n, 16) of x, m pixels apart, from a border on."""
    count = [-(-size // m) for size in x.shape[1:3]]
    after = [
        (size - 1) * m + n - before - old for size, old in zip(count, x.shape[1:3], strict=True)
    ]
    x = np.pad(x, ((0, 0), (before, after[0]), (before, after[1]), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (n, n), axis=(1, 2))
    return np.moveaxis(windows[:, ::m, ::m], 3, -1)


def sum_of_pairs(first, second, swap=False):
    """Return the sum over axis 0 of first * second, each addition rounded to float32.

    The second number of a pair is added first, or with `swap`, the first one.
    """
    total = np.zeros(np.broadcast_shapes(first.shape[1:], second.shape[1:]), np.float32)
    for i in range(0, len(first), 2):
        pair = [j for j in (i + 1, i) if j < len(first)]
        for j in pair[::-1] if swap else pair:
            total = (total + first[j].astype(float) * second[j]).astype(np.float32)
    return total


def narrow_tile(side):
    """Return m, n and the matrices of the tiles of backward passes in bfloat16."""
    m = {3: 4, 5: 2}[side]
    n = m + side - 1
    return m, n, matrices(m, side, [Fraction(point) for point in kernel_points(n)])


def emulated_dx(x, w, dy, swap=False):
    side, (_, rows, columns, _) = w.shape[2], x.shape
    m, n, (transform, filters, outputs) = narrow_tile(side)
    flipped = w[:, :, ::-1, ::-1].astype(float)
    u = to_bf16(np.einsum("ai,kcij,bj->kcab", filters, flipped, filters))
    tiles = tiles_of(dy.astype(float), m, n, side // 2)
    v = to_bf16(np.einsum("ai,kpqijl,bj->kpqabl", transform, tiles, transform))
    products = sum_of_pairs(u[:, :, None, None, :, :, None], v[:, None], swap)
    y = np.einsum("ia,cpqabl,jb->cpiqjl", outputs, products.astype(float), outputs)
    y = y.reshape(len(x), y.shape[1] * m, y.shape[3] * m, LANES)
    return y[:, :rows, :columns]


def emulated_dweight(x, w, dy, swap=False):
    side = w.shape[2]
    m, n, (transform, filters, outputs) = narrow_tile(side)
    tiles = tiles_of(x.astype(float), m, n, side // 2)
    v = to_bf16(np.einsum("ai,cpqijl,bj->pqlcab", transform, tiles, transform))
    tiles = tiles_of(dy.astype(float), m, m, 0)
    d = to_bf16(np.einsum("ia,kpqijl,jb->pqlkab", outputs, tiles, outputs))
    v, d = (a.reshape(-1, *a.shape[3:]) for a in (v, d))
    sums = sum_of_pairs(d[:, :, None], v[:, None], swap)
    return np.einsum("ai,kcab,bj->kcij", filters, sums.astype(float), filters)


# Bounds of the error relative to an emulation that rounds the same numbers (dx is rounded once
# more), and the least error relative to direct sums, which do not round transformed numbers.
DX_ERROR, DWEIGHT_ERROR, ROUNDING = 1.9e-3, 2e-4, 7e-3


@needs_kernels
@NARROW_SHAPE
def test_gradients_in_bf16_round_the_transformed_numbers(shape):
    x, w, dy = stored_example(shape)
    results = on_all_builds(lambda: gradients(x, w, dy))
    side, before = shape[4], shape[4] // 2
    border = np.pad(dy, ((0, 0), (before, before), (before, before), (0, 0)))
    flipped = w[:, :, ::-1, ::-1].swapaxes(0, 1)
    exact_dx = conv_reference(border, flipped, np.zeros(len(x)), *shape[2:4])
    border = np.pad(x, ((0, 0), (before, before), (before, before), (0, 0)))
    exact_dweight = dweight_reference(border, dy, *shape[2:4], side)
    expected = emulated_dx(x, w, dy), emulated_dweight(x, w, dy)
    for dx, dweight in results.values():
        assert relative(dx, expected[0]) < DX_ERROR
        assert relative(dx, exact_dx) > ROUNDING
        assert relative(dweight, expected[1]) < DWEIGHT_ERROR
        assert relative(dweight, exact_dweight) > ROUNDING


@needs_kernels
@NARROW_SHAPE
def test_the_order_of_pairs_decides_the_bytes_of_gradients_in_bf16(shape):
    x, w, dy = stored_example(shape)
    outputs = len(dy) // 2 * 2  # in pairs
    order = np.r_[np.arange(outputs).reshape(-1, 2)[:, ::-1].ravel(), outputs : len(dy)]
    images = np.arange(LANES).reshape(-1, 2)[:, ::-1].ravel()
    # large numbers that cancel leave rounding errors that the rounding of dx does not hide
    dy[1] *= 2**12
    dy[outputs - 1], w[outputs - 1] = -dy[1], w[1]
    dx, dweight = gradients(x, w, dy)
    swapped_dx, _ = gradients(x, w[order], dy[order])
    _, swapped_dweight = gradients(x[..., images], w, dy[..., images])
    assert not np.array_equal(dx, swapped_dx)
    assert not np.array_equal(dweight, swapped_dweight)
    assert relative(dx, swapped_dx) < DX_ERROR
    assert relative(dweight, swapped_dweight) < 1e-6


# {(m, side): (classic points, other points, largest error relative to the classic points)}
POINTS = {
    (4, 2): (
        ("1", "2"),
        [("1/2", "1"), ("1/2", "3/2"), ("3/8", "5/4"), ("1/2", "11/8"), ("7/16", "3/2")],
        0.6,
    ),
    (4, 3): (
        ("1", "2"),
        [("1/2", "1"), ("3/5", "7/5"), ("1/2", "3/2"), ("5/8", "11/8"), ("11/16", "3/2")],
        0.6,
    ),
    (2, 5): (("1", "2"), [("3/5", "7/5"), ("1/2", "3/2"), ("5/8", "11/8"), ("3/4", "3/2")], 0.6),
    (4, 4): (
        ("1", "2", "3"),
        [("1/2", "1", "2"), ("3/8", "1", "2"), ("3/8", "7/8", "2"), ("3/8", "1", "7/4")],
        0.1,
    ),
    (4, 5): (
        ("1", "2", "3"),
        [("1/2", "1", "7/4"), ("1/2", "9/8", "2"), ("5/8", "1", "3/2"), ("3/8", "1", "2")],
        0.1,
    ),
}


@pytest.mark.parametrize("tile", POINTS, ids=lambda tile: "F({},{})".format(*tile))
def test_the_points_of_the_kernels_have_the_least_error(tile):
    m, side = tile
    classic, alternatives, bound = POINTS[tile]
    n = m + side - 1
    points_used = kernel_points(n)
    rng = np.random.default_rng(1)
    channels = 32 if side == 3 else 12
    for kind in ("signed", "positive"):
        x = rng.standard_normal((channels, 1500, n, n)).astype(np.float32)
        x = x if kind == "signed" else np.maximum(x, 0)
        w = rng.standard_normal((channels, side, side)).astype(np.float32)
        exact, direct = directly(m, x, w)
        rms_errors, direct_error = {}, relative(direct, exact)
        for points in (classic, *alternatives, points_used):
            result = by_winograd(m, tuple(map(Fraction, points)), x, w)
            rms_errors[points] = relative(result, exact)
            ratio = rms_errors[points] / direct_error
            name = f"{kind}, ±{' ±'.join(points)}"
            print(f"{name}: {rms_errors[points]:.2e}, {ratio:.2f} of direct's")
        assert rms_errors[points_used] < bound * rms_errors[classic]
        best = min(rms_errors.values())
        assert rms_errors[points_used] <= 1.02 * best
