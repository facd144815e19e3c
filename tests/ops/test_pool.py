"""Compare pooling with loops in float64, and test ties, padding, NaN and invalid arguments."""

import numpy as np
import pytest
from op_references import Case, OpChecks, assert_zero_unused, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape
from mpidl.core.blocks import LANES
from mpidl.ops.check import as_pair

# {name: (shape (C, H, W) of an image, arguments of the op)}
WINDOWS = {
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
QUICK = ("2x2, pixels left over", "asymmetric padding", "same, gaps")
KINDS = {"max": dl.max_pool2d, "average": dl.average_pool2d}
LAYERS = {"max": dl.MaxPool2D, "average": dl.AveragePool2D}
each_kind = pytest.mark.parametrize("kind", KINDS)


def pads(image, size, stride, padding):
    """Return padding as ((top, bottom), (left, right)), where `padding` may be "same"."""
    if padding != "same":
        return tuple(as_pair(side) for side in as_pair(padding))
    sides = []
    for n, taps, step in zip(image, size, stride, strict=True):
        missing = max(0, ((n + step - 1) // step - 1) * step + taps - n)
        sides.append((missing // 2, (missing + 1) // 2))
    return tuple(sides)


def windows(shape, size, stride=None, padding=0):
    """Yield the index (n, c, p, q) of each window, and slices of its rows and columns."""
    (r, s), (down, across) = as_pair(size), as_pair(size if stride is None else stride)
    n, c, h, w = shape
    (top, bottom), (left, right) = pads((h, w), (r, s), (down, across), padding)
    p, q = (h + top + bottom - r) // down + 1, (w + left + right - s) // across + 1
    for output in np.ndindex(n, c, p, q):
        row, column = output[2] * down - top, output[3] * across - left
        yield output, slice(max(0, row), row + r), slice(max(0, column), column + s)


def reference(kind, x, size, stride=None, padding=0, count_padding=True):
    """Compute the pooling of one window after another."""
    pooled = {}
    for output, rows, columns in windows(x.shape, size, stride, padding):
        window = x[output[0], output[1], rows, columns].astype(np.float64)
        count = np.prod(as_pair(size)) if count_padding else window.size
        pooled[output] = window.max() if kind == "max" else window.sum() / count
    return np.array(list(pooled.values())).reshape([n + 1 for n in output])


def gradient(kind, x, dy, size, stride=None, padding=0, count_padding=True):
    """Compute the cotangent of x window by window. The first of equal pixels is the maximum."""
    dx = np.zeros(x.shape)
    for output, rows, columns in windows(x.shape, size, stride, padding):
        window, into = (
            x[output[0], output[1], rows, columns],
            dx[output[0], output[1], rows, columns],
        )
        if kind == "max":
            into[np.unravel_index(window.argmax(), window.shape)] += dy[output]
        else:
            into += dy[output] / (np.prod(as_pair(size)) if count_padding else window.size)
    return dx


def pooled(world, kind, x, options):
    """Return y and dx of all ranks' images, for the cotangent dy = `numbers("dy")`."""
    variable = dl.Var(blocked(world, x))
    y = KINDS[kind](variable, **options)
    dy = blocked(world, numbers("dy", *y.shape, dtype=x.dtype), batch=y.value.batch)
    result = all_images(world, y.value)
    dx = tape.backward(y, dy)[variable]
    assert_zero_unused(dx)
    return result, all_images(world, dx)


def assert_equals_loops(world, kind, x, options, tolerance):
    y, dx = pooled(world, kind, x, options)
    expected = reference(kind, x, **options)
    assert y.dtype == dx.dtype == x.dtype
    np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)
    dy = numbers("dy", *expected.shape, dtype=x.dtype)
    expected = gradient(kind, x, dy, **options)
    np.testing.assert_allclose(dx, expected, rtol=tolerance, atol=tolerance)


def window_case(kind, shape, options):
    return Case(
        lambda x: KINDS[kind](x, **options), lambda x: reference(kind, x, **options), [shape]
    )


class TestPool(OpChecks):
    cases = {
        f"{kind}, {name}": window_case(kind, *window)
        for kind in KINDS
        for name, window in WINDOWS.items()
    } | {
        "global_average_pool2d": Case(
            dl.global_average_pool2d,
            lambda x: np.array([[[[c.sum() / c.size]] for c in image] for image in x]),
            [(3, 4, 5)],
        )
    }
    # slow tests, because test_against_loops tests all windows in every run
    variants = [f"{kind}, {name}" for kind in KINDS for name in WINDOWS if name not in QUICK]
    last_block_sizes = (1, 7, 8, 15)  # few sizes, because the reference is slow
    errors = [
        (lambda x, f, i: dl.max_pool2d(np.zeros((5, 1, 9, 9)), 2), TypeError, "a value per image"),
        (lambda x, f, i: dl.average_pool2d(f, 2), ValueError, "expected x of shape"),
    ]


@pytest.mark.slow_on_ranks
@each_kind
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_against_loops(world, kind, window, dtype):
    shape, options = WINDOWS[window]
    x = numbers(window, 21, *shape, dtype=dtype)
    assert_equals_loops(world, kind, x, options, 1e-13 if dtype == "f8" else 1e-5)


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("window", ["padding", "asymmetric padding", "same, odd"])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_means_of_the_image_alone_against_loops(world, window, dtype):
    shape, options = WINDOWS[window]
    x = numbers(window, 21, *shape, dtype=dtype)
    options = options | {"count_padding": False}
    assert_equals_loops(world, "average", x, options, 1e-13 if dtype == "f8" else 1e-5)
    ones = np.ones_like(x)
    assert np.array_equal(pooled(world, "average", ones, options)[0][0].min(), 1)
    layers = [dl.AveragePool2D(**options)]
    net = dl.Network(layers, shape)
    assert dl.Network.from_spec(net.spec(), shape).layers[0].count_padding is False
    y = all_images(world, net(blocked(world, x)))
    assert np.array_equal(y, pooled(world, "average", x, options)[0])


@pytest.mark.slow_on_ranks
@each_kind
def test_last_blocks_of_every_size(world, kind):
    shape, options = WINDOWS["padding"]
    for size in range(1, LANES):
        assert_equals_loops(world, kind, numbers("x", LANES + size, *shape), options, 1e-13)


def test_the_first_of_equal_pixels_wins(world):
    x = np.zeros((1, 1, 4, 4), np.float32)
    x[0, 0, :2, 2:] = [[-1, 3], [3, 3]]
    x[0, 0, 2:, :2] = -np.inf  # padding is not larger than -inf
    x[0, 0, 2:, 2:] = [[0.0, -0.0], [-0.0, 0.0]]
    _, dx = pooled(world, "max", x, {"size": 2})
    dy = numbers("dy", 1, 1, 2, 2, dtype=np.float32).ravel()
    expected = np.zeros((4, 4), np.float32)
    expected[0, 0], expected[0, 3], expected[2, 0], expected[2, 2] = dy
    assert np.array_equal(dx[0, 0], expected)


def test_padding_never_wins(world):
    x = np.full((17, 1, 4, 4), -np.inf, np.float32)
    x[:16] = -5
    y, dx = pooled(world, "max", x, {"size": 3, "stride": 2, "padding": 1})
    assert np.array_equal(y, np.broadcast_to(x[:, :, :1, :1], y.shape))
    total = numbers("dy", *y.shape, dtype=np.float32).sum(axis=(2, 3))
    np.testing.assert_allclose(dx.sum(axis=(2, 3)), total, rtol=1e-5)


def test_nan_stays(world):
    """A NaN pixel must reach the loss, so that training can report it."""
    x = np.ones((17, 2, 4, 4), np.float32)
    x[3, 1, 0, 1] = x[16, 0, 3, 3] = np.nan
    for kind in KINDS:
        y, _ = pooled(world, kind, x, {"size": 2})
        assert np.argwhere(np.isnan(y)).tolist() == [[3, 1, 0, 0], [16, 0, 1, 1]]


@each_kind
@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 0}, "size must be one or two integers >= 1"),
        ({"size": (2, 2, 2)}, "size must be"),
        ({"size": 2, "stride": 0}, "stride must be one or two integers >= 1"),
        ({"size": 2, "padding": -1}, "padding must be an integer >= 0"),
        ({"size": 2, "padding": "valid"}, "padding must be an integer >= 0"),
        ({"size": (2, 3), "padding": (2, 0)}, r"padding must be smaller than size \(2, 3\)"),
        ({"size": 7}, r"windows of \(7, 7\) leave no output for images \(2, 6, 6\)"),
    ],
)
def test_impossible_windows_are_refused(world, kind, options, message):
    x = blocked(world, np.zeros((5, 2, 6, 6)))
    with pytest.raises(ValueError, match=f"{kind}_pool2d: {message}"):
        KINDS[kind](x, **options)
    with pytest.raises(ValueError, match=f"{kind}pool1: {message}"):
        dl.Network([LAYERS[kind](**options)], (2, 6, 6))


def test_a_maximum_has_windows_of_at_most_256_pixels(world):
    x = blocked(world, np.zeros((5, 1, 20, 20)))
    with pytest.raises(ValueError, match=r"a window has at most 256 pixels, got size \(17, 16\)"):
        dl.max_pool2d(x, (17, 16))
    assert dl.average_pool2d(x, (17, 16)).shape == (5, 1, 1, 1)
    with pytest.raises(ValueError, match=r"maxpool1: expected images \(C, H, W\), got \(3,\)"):
        dl.Network([dl.MaxPool2D(2)], (3,))


@each_kind
@pytest.mark.parametrize("size, stride", [(3, 2), (2, 2), (4, 3), ((5, 2), (1, 3)), (2, 4)])
def test_same_padding_against_pytorch(world, kind, size, stride):
    """Compare with PyTorch on padded images. The end may have one more pixel than the start."""
    torch, functional = torch_functions()
    x = numbers("images", 18, 2, 7, 10)
    (top, bottom), (left, right) = pads((7, 10), as_pair(size), as_pair(stride), "same")
    variable = torch.from_numpy(x).requires_grad_()
    fill = -np.inf if kind == "max" else 0.0
    padded = functional.pad(variable, (left, right, top, bottom), value=fill)
    pool = {"max": functional.max_pool2d, "average": functional.avg_pool2d}[kind]
    expected = pool(padded, size, stride)
    down, across = as_pair(stride)
    assert tuple(expected.shape[2:]) == (-(-7 // down), -(-10 // across))
    expected.backward(torch.from_numpy(numbers("dy", *expected.shape)))
    options = {"size": size, "stride": stride, "padding": "same"}
    y, dx = pooled(world, kind, x, options)
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(dx, variable.grad.numpy(), rtol=1e-13, atol=1e-14)
    net = dl.Network([LAYERS[kind](**options)], (2, 7, 10))
    rebuilt = dl.Network.from_spec(net.spec(), net.input_shape)
    assert rebuilt.output_shapes == [tuple(expected.shape[1:])]
    assert np.array_equal(all_images(world, rebuilt(blocked(world, x))), y)


def test_layers(world):
    net = dl.Network(
        [dl.MaxPool2D(3, 2, 1), dl.AveragePool2D((2, 1)), dl.Dense(2)], (2, 8, 7), seed=1
    )
    assert net.output_shapes == [(2, 4, 4), (2, 2, 4), (2,)]
    assert [layer.name for layer in net.layers] == ["maxpool1", "averagepool1", "dense1"]
    rebuilt = dl.Network.from_spec(net.spec(), net.input_shape, seed=1)
    x = blocked(world, numbers("images", 20, 2, 8, 7, dtype=np.float32))
    y = dl.average_pool2d(dl.max_pool2d(x, 3, stride=2, padding=1), (2, 1))
    expected = dl.dense(dl.flatten(y), *net.parameters.values())
    for network in (net, rebuilt):
        assert network(x).local().tobytes() == expected.local().tobytes()
