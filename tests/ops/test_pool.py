"""Pooling against loops in float64, its vjp along random directions, and what it refuses."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl.autodiff import tape
from mpidl.blocks import LANES, zero_unused

# (C, H, W) of an image and how it is pooled
CASES = {
    "2x2": ((3, 6, 8), {"size": 2}),
    "2x2, pixels left over": ((2, 5, 7), {"size": 2}),
    "overlapping": ((2, 7, 9), {"size": 3, "stride": 2}),
    "overlapping in one axis": ((2, 6, 6), {"size": (2, 3), "stride": (2, 1)}),
    "gaps": ((2, 8, 7), {"size": 2, "stride": 3}),
    "padding": ((2, 6, 5), {"size": 3, "stride": 2, "padding": 1}),
    "asymmetric padding": ((1, 4, 5), {"size": (3, 4), "stride": 1, "padding": ((2, 0), (1, 3))}),
    "same": ((2, 8, 7), {"size": 3, "stride": 2, "padding": "same"}),
    "same, odd": ((1, 5, 6), {"size": (2, 4), "stride": (1, 3), "padding": "same"}),
    "same, gaps": ((1, 7, 5), {"size": (1, 2), "stride": (3, 2), "padding": "same"}),
    "global": ((4, 5, 3), {"size": (5, 3)}),
    "one": ((2, 3, 4), {"size": 1}),
    "a byte of places": ((1, 17, 16), {"size": 16, "stride": 1}),
}
KINDS = {"max": dl.max_pool2d, "average": dl.average_pool2d}
BOTH = pytest.mark.parametrize("kind", KINDS)
EACH = pytest.mark.parametrize("case", CASES)


def pair(value):
    return (value, value) if isinstance(value, int) else value


def pads(image, size, stride, padding):
    """Padding as ((top, bottom), (left, right)); "same": what ceil(H / stride) windows need."""
    if padding != "same":
        return tuple(pair(side) for side in pair(padding))
    found = []
    for n, taps, step in zip(image, size, stride, strict=True):
        missing = max(0, ((n + step - 1) // step - 1) * step + taps - n)
        found.append((missing // 2, (missing + 1) // 2))
    return tuple(found)


def reference(kind, x, size, stride=None, padding=0):
    """One window after the other; of the largest, the places (n, C, P, Q, 2) in the image too."""
    (r, s), (down, across) = pair(size), pair(size if stride is None else stride)
    (top, bottom), (left, right) = pads(x.shape[2:], (r, s), (down, across), padding)
    n, c, h, w = x.shape
    p, q = (h + top + bottom - r) // down + 1, (w + left + right - s) // across + 1
    y, places = np.zeros((n, c, p, q)), np.zeros((n, c, p, q, 2), int)
    for at in np.ndindex(y.shape):
        rows = range(at[2] * down - top, at[2] * down - top + r)
        columns = range(at[3] * across - left, at[3] * across - left + s)
        inside = [(i, j) for i in rows for j in columns if 0 <= i < h and 0 <= j < w]
        values = [float(x[at[0], at[1], i, j]) for i, j in inside]
        largest = max(range(len(values)), key=values.__getitem__)  # the first of them
        y[at] = values[largest] if kind == "max" else sum(values) / (r * s)
        places[at] = inside[largest]
    return y, places


def gradient(kind, x, dy, size, stride=None, padding=0):
    """The cotangent of x, window by window."""
    dx, (r, s) = np.zeros(x.shape), pair(size)
    down, across = pair(size if stride is None else stride)
    (top, _), (left, _) = pads(x.shape[2:], (r, s), (down, across), padding)
    _, places = reference(kind, x, size, stride, padding)
    for n, c, p, q in np.ndindex(dy.shape):
        if kind == "max":
            dx[n, c, places[n, c, p, q, 0], places[n, c, p, q, 1]] += dy[n, c, p, q]
            continue
        rows = slice(max(0, p * down - top), p * down - top + r)
        columns = slice(max(0, q * across - left), q * across - left + s)
        dx[n, c, rows, columns] += dy[n, c, p, q] / (r * s)
    return dx


def pooled(world, kind, x, options):
    """The result and the cotangent of x, whole, for the cotangent `numbers("dy", ...)`."""
    variable = dl.Var(blocked(world, x))
    y = KINDS[kind](variable, **options)
    dy = blocked(world, numbers("dy", *y.shape, dtype=x.dtype), batch=y.value.batch)
    result = all_images(world, y.value)
    dx = tape.backward(y, dy)[variable]
    assert np.array_equal(zero_unused(dx.lanes.copy(), dx.batch), dx.lanes)
    return result, all_images(world, dx)


@BOTH
@EACH
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_against_loops(world, kind, case, dtype):
    shape, options = CASES[case]
    x = numbers(case, 21, *shape, dtype=dtype)
    found, dx = pooled(world, kind, x, options)
    expected, _ = reference(kind, x, **options)
    dy = numbers("dy", *expected.shape, dtype=dtype)
    tolerance = 1e-13 if dtype == "f8" else 1e-5
    assert found.dtype == dx.dtype == x.dtype
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(dx, gradient(kind, x, dy, **options), rtol=tolerance, atol=tolerance)


@BOTH
@EACH
def test_vjp_along_random_directions(world, kind, case):
    shape, options = CASES[case]
    pool = functools.partial(KINDS[kind], **options)
    for count in (5, 37):
        x = blocked(world, numbers(case, count, *shape))
        dl.check_vjp(pool, x, seed=count, tolerance=2e-7)


@BOTH
def test_last_blocks_of_every_size(world, kind):
    shape, options = CASES["padding"]
    for held in range(1, LANES):
        x = numbers("images", LANES + held, *shape)
        found, dx = pooled(world, kind, x, options)
        expected, _ = reference(kind, x, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-14)
        dy = numbers("dy", *expected.shape)
        np.testing.assert_allclose(dx, gradient(kind, x, dy, **options), atol=1e-14)


@BOTH
@EACH
@pytest.mark.parametrize("count", [5, 37])
def test_one_result_on_any_number_of_ranks(world, kind, case, count):
    shape, options = CASES[case]
    x = numbers(case, count, *shape, dtype=np.float32)
    expected, found = pooled(SingleRank(), kind, x, options), pooled(world, kind, x, options)
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


@BOTH
def test_unused_lanes_do_not_matter(world, kind):
    x = numbers("images", 21, 2, 6, 6, dtype=np.float32)
    clean = blocked(world, x)
    lanes = clean.lanes.copy()
    if clean.batch.blocks and clean.batch.images[1] == 21:
        lanes[-1, ..., 5:] = 1e30
    expected, found = (KINDS[kind](v, 3, stride=2) for v in (clean, clean.like(lanes)))
    assert found.local().tobytes() == expected.local().tobytes()


@BOTH
def test_a_share_without_blocks(kind):
    batch = dl.share(5, SimpleNamespace(rank=1, size=2))
    x = dl.Var(dl.from_images(np.zeros((0, 2, 6, 6), np.float32), batch))
    y = KINDS[kind](x, 2)
    assert y.shape == (5, 2, 3, 3) and y.value.lanes.shape == (0, 2, 3, 3, LANES)
    assert tape.backward(y, y.value)[x].lanes.shape == x.value.lanes.shape


def test_of_equal_pixels_the_first_is_chosen(world):
    x = np.zeros((1, 1, 4, 4), np.float32)
    x[0, 0, :2, 2:] = [[-1, 3], [3, 3]]
    x[0, 0, 2:, :2] = -np.inf  # larger than the padding, which is nothing
    x[0, 0, 2:, 2:] = [[0.0, -0.0], [-0.0, 0.0]]
    _, dx = pooled(world, "max", x, {"size": 2})
    dy = numbers("dy", 1, 1, 2, 2, dtype=np.float32).ravel()
    chosen = np.zeros((4, 4), np.float32)
    chosen[0, 0], chosen[0, 3], chosen[2, 0], chosen[2, 2] = dy
    assert np.array_equal(dx[0, 0], chosen)


def test_padding_is_never_chosen(world):
    x = np.full((17, 1, 4, 4), -np.inf, np.float32)
    x[:16] = -5
    found, dx = pooled(world, "max", x, {"size": 3, "stride": 2, "padding": 1})
    assert np.array_equal(found, np.broadcast_to(x[:, :, :1, :1], found.shape))
    total = numbers("dy", *found.shape, dtype=np.float32).sum(axis=(2, 3))
    np.testing.assert_allclose(dx.sum(axis=(2, 3)), total, rtol=1e-5)


def test_not_a_number_stays(world):
    """A pixel that is none makes the loss none, which training reports."""
    x = np.ones((17, 2, 4, 4), np.float32)
    x[3, 1, 0, 1] = x[16, 0, 3, 3] = np.nan
    for kind in KINDS:
        found, _ = pooled(world, kind, x, {"size": 2})
        assert np.argwhere(np.isnan(found)).tolist() == [[3, 1, 0, 0], [16, 0, 1, 1]]


@BOTH
@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 0}, "size must be an integer >= 1"),
        ({"size": (2, 2, 2)}, "size must be"),
        ({"size": 2, "stride": 0}, "stride must be an integer >= 1"),
        ({"size": 2, "padding": -1}, "padding must be an integer >= 0"),
        ({"size": 2, "padding": "valid"}, "padding must be an integer >= 0"),
        ({"size": (2, 3), "padding": (2, 0)}, r"padding must be smaller than size \(2, 3\)"),
        ({"size": 7}, r"windows of \(7, 7\) leave nothing of images \(2, 6, 6\)"),
    ],
)
def test_windows_that_cannot_be(world, kind, options, message):
    x = blocked(world, np.zeros((5, 2, 6, 6)))
    with pytest.raises(ValueError, match=f"{kind}_pool2d: {message}"):
        KINDS[kind](x, **options)
    layer = {"max": dl.MaxPool2D, "average": dl.AveragePool2D}[kind](**options)
    with pytest.raises(ValueError, match=f"{kind}pool1: {message}"):
        dl.Network([layer], (2, 6, 6))


def test_more_places_than_a_byte_counts(world):
    x = blocked(world, np.zeros((5, 1, 20, 20)))
    with pytest.raises(ValueError, match=r"a window has at most 256 pixels, got size \(17, 16\)"):
        dl.max_pool2d(x, (17, 16))
    assert dl.average_pool2d(x, (17, 16)).shape == (5, 1, 1, 1)
    with pytest.raises(TypeError, match="expected a value per image"):
        dl.max_pool2d(np.zeros((5, 1, 20, 20)), 2)
    with pytest.raises(ValueError, match="expected x of shape"):
        dl.average_pool2d(blocked(world, np.zeros((5, 3))), 2)
    with pytest.raises(ValueError, match=r"maxpool1: expected images \(C, H, W\), got \(3,\)"):
        dl.Network([dl.MaxPool2D(2)], (3,))


@BOTH
@pytest.mark.parametrize("size, stride", [(3, 2), (2, 2), (4, 3), ((5, 2), (1, 3)), (2, 4)])
def test_same_padding_against_pytorch(world, kind, size, stride):
    """The pixels that are missing in front, by PyTorch's own padding, and one more at the end."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = numbers("images", 18, 2, 7, 10)
    (top, bottom), (left, right) = pads((7, 10), pair(size), pair(stride), "same")
    variable = torch.from_numpy(x).requires_grad_()
    fill = -np.inf if kind == "max" else 0.0
    padded = torch.nn.functional.pad(variable, (left, right, top, bottom), value=fill)
    y = getattr(torch.nn.functional, {"max": "max_pool2d", "average": "avg_pool2d"}[kind])(
        padded, size, stride
    )
    down, across = pair(stride)
    assert tuple(y.shape[2:]) == (-(-7 // down), -(-10 // across))
    y.backward(torch.from_numpy(numbers("dy", *y.shape)))
    options = {"size": size, "stride": stride, "padding": "same"}
    found, dx = pooled(world, kind, x, options)
    np.testing.assert_allclose(found, y.detach().numpy(), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(dx, variable.grad.numpy(), rtol=1e-13, atol=1e-14)
    layer = {"max": dl.MaxPool2D, "average": dl.AveragePool2D}[kind](**options)
    net = dl.Network([layer], (2, 7, 10))
    again = dl.Network.from_spec(net.spec(), net.input_shape)
    assert again.output_shapes == [tuple(y.shape[1:])]
    assert np.array_equal(all_images(world, again(blocked(world, x))), found)


def test_layers(world):
    net = dl.Network(
        [dl.MaxPool2D(3, 2, 1), dl.AveragePool2D((2, 1)), dl.Dense(2)], (2, 8, 7), seed=1
    )
    assert net.output_shapes == [(2, 4, 4), (2, 2, 4), (2,)]
    assert [layer.name for layer in net.layers] == ["maxpool1", "averagepool1", "dense1"]
    again = dl.Network.from_spec(net.spec(), net.input_shape, seed=1)
    x = blocked(world, numbers("images", 20, 2, 8, 7, dtype=np.float32))
    y = dl.average_pool2d(dl.max_pool2d(x, 3, stride=2, padding=1), (2, 1))
    expected = dl.dense(dl.flatten(y), *net.parameters.values())
    for each in (net, again):
        assert each(x).local().tobytes() == expected.local().tobytes()
