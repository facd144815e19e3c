"""The C kernels of activations, dropout, cross-channel normalization, concatenation and transposed
convolution against NumPy in float64, on all builds and threads."""

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from single_rank import SingleRank, numbers

from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends.reference.dropout import chances, philox
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Tree

pytestmark = needs_kernels

SHAPES = {"pixels": (5, 3, 7), "many": (3, 40, 30), "features": (21,)}
EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def lanes(name, shape, blocks=2, low=-3.0, high=3.0):
    return numbers(name, blocks, *shape, LANES, low=low, high=high, dtype=np.float32)


def tree(blocks):
    return Tree(blocks, ((0, blocks),), 0)


def each(call):
    """The result of every build, once per build."""
    return on_all_builds(call).values()


def near(found, exact, relative=3e-7):
    assert found.dtype == np.float32 and found.shape == exact.shape
    if exact.size:
        assert abs(found - exact).max() <= relative * max(abs(exact).max(), 1e-3)


def doubled(*arrays):
    return [a.astype(np.float64) for a in arrays]


@EACH
@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("name", ["leaky_relu", "tanh", "sigmoid"])
def test_activations(name, shape, blocks):
    x, dy = lanes("x", shape, blocks), lanes("dy", shape, blocks)
    how = (0.2,) if name == "leaky_relu" else ()
    forward, backward = (getattr(cpu, n) for n in (name, f"{name}_dx"))
    exact = getattr(reference, name)(x.astype(np.float64), *how)
    slope = getattr(reference, f"{name}_dx")(dy.astype(np.float64), exact, *how)

    def both():
        y = forward(x, *how)
        return y, backward(dy, y, *how)

    for y, dx in each(both):
        near(y, exact)
        near(dx, slope)


def ulps(found, exact):
    """How far off the results are, in units of the last place of float32."""
    size = np.maximum(abs(exact), np.finfo(np.float32).tiny)
    return abs(found - exact) / np.spacing(size.astype(np.float32)).astype(np.float64)


def wide(least=1e-30, most=100.0):
    """float32 numbers of all sizes and both signs."""
    sizes = np.exp(np.linspace(np.log(least), np.log(most), 1 << 19))
    near = np.linspace(-12, 12, 1 << 19)
    return np.concatenate([sizes, -sizes, near]).astype(np.float32).reshape(1, -1, LANES)


@pytest.mark.parametrize("name, most", [("tanh", 2.0), ("sigmoid", 2.5)])
def test_how_exact_they_are(name, most):
    """Relative to the result, wherever that is; the C library's functions are not asked."""
    x = wide()
    exact = getattr(reference, name)(x.astype(np.float64))
    normal = exact >= 2.0**-125 if name == "sigmoid" else np.full(x.shape, True)
    for found in each(lambda: getattr(cpu, name)(x)):
        assert ulps(found, exact)[normal].max() <= most
        assert (found[~normal] < 2.0**-124).all()
        assert not np.signbit(found[x > 0]).any()
        if name == "tanh":
            assert (np.signbit(found) == np.signbit(x)).all()


def test_what_is_not_finite():
    x = np.full((1, 2, LANES), np.nan, np.float32)
    x[0, 0, :4] = np.inf, -np.inf, 0.0, -0.0
    for tanh, sigmoid, leaky in each(lambda: (cpu.tanh(x), cpu.sigmoid(x), cpu.leaky_relu(x, 0.1))):
        assert tanh[0, 0, :4].tolist() == [1, -1, 0, 0]
        np.testing.assert_allclose(sigmoid[0, 0, :4], [1, 0, 0.5, 0.5], atol=1e-37)
        assert leaky[0, 0, :4].tolist() == [np.inf, -np.inf, 0, 0]
        for found in (tanh, sigmoid, leaky):
            assert np.isnan(found[np.isnan(x)]).all()


@pytest.mark.parametrize("classes", [1, 7])
def test_softmax_dx(classes):
    x, dy = lanes("scores", (classes,)), lanes("dy", (classes,))
    p = reference.softmax(x.astype(np.float64))
    for dx in each(lambda: cpu.softmax_dx(dy, p)):
        near(dx, reference.softmax_dx(dy.astype(np.float64), p))


def source(name, shape, blocks=2):
    vectors = [numbers(f"{name} {i}", shape[0], dtype=np.float32) for i in range(3)]
    return DeferredInput(lanes(name, shape, blocks), *vectors)


def stored(value):
    return cpu.activation(value) if isinstance(value, DeferredInput) else value


@EACH
def test_add(shape):
    a, b = lanes("a", shape), lanes("b", shape)
    s, t = source("s", shape), source("t", shape)
    pairs = [(a, b), (s, b), (a, t), (s, t), (s, s)]

    def sums_and_expected():
        sums = [cpu.add(one, other) for one, other in pairs]
        return sums, [stored(one) + stored(other) for one, other in pairs]

    for found, expected in each(sums_and_expected):
        assert all(np.array_equal(*both) for both in zip(found, expected, strict=True))


@EACH
@pytest.mark.parametrize("blocks", [0, 2])
def test_concat_and_split(shape, blocks):
    channels = (shape[0], 1, 2 * shape[0], 3)
    parts = [lanes(f"part {i}", (c, *shape[1:]), blocks) for i, c in enumerate(channels)]
    parts[2] = source("part 2", (channels[2], *shape[1:]), blocks)

    def there_and_back():
        y = cpu.concat(parts)
        return y, cpu.split(y, channels), [stored(p) for p in parts]

    for y, apart, plain in each(there_and_back):
        assert np.array_equal(y, np.concatenate(plain, axis=1))
        assert all(np.array_equal(*pair) for pair in zip(apart, plain, strict=True))


def test_philox_is_that_of_the_paper():
    """The known answers of Random123 1.09, kat_vectors: philox4x32 10."""
    ones, zeros = (0xFFFFFFFF,) * 4, (0,) * 4
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    known = {
        (zeros, zeros[:2]): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (ones, ones[:2]): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        pi: "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (counter, key), words in known.items():
        assert [int(w) for w in philox(counter, key)] == [int(w, 16) for w in words.split()]


@EACH
@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.99])
def test_dropout(shape, blocks, probability):
    """To the last bit: NumPy's numbers are those of the kernel."""
    x = lanes("x", shape, blocks)
    threshold = round(probability * 65536)
    samples = np.arange(blocks * LANES, dtype=np.int64) * 12345678901
    how = threshold, 65536 / (65536 - threshold), (0x89ABCDEF, 0xFEDCBA98), 7, samples
    for y in each(lambda: cpu.dropout(x, *how)):
        assert np.array_equal(y, reference.dropout(x, *how))
        near(y, reference.dropout(x.astype(np.float64), *how))


def test_the_numbers_of_dropout_are_uniform_and_unlike_each_other():
    elements, samples = 4096, np.arange(64)
    drawn = chances(elements, samples, 3, (1, 2))
    assert drawn.shape == (elements, 64) and drawn.min() >= 0 and drawn.max() <= 65535
    counts = np.bincount((drawn >> np.uint64(8)).ravel().astype(int), minlength=256)
    expected = drawn.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)
    bits = (drawn >= 32768).astype(float) - 0.5
    for other in (
        np.roll(bits, 1, axis=0),
        np.roll(bits, 1, axis=1),
        (chances(elements, samples, 4, (1, 2)) >= 32768) - 0.5,
        (chances(elements, samples, 3, (1, 3)) >= 32768) - 0.5,
    ):
        assert abs((bits * other).mean()) * 4 < 5 / np.sqrt(bits.size)


# (window, alpha, beta, k)
NORMS = {
    "AlexNet's": (5, 1e-4, 0.75, 2.0),
    "strong": (5, 2.0, 0.75, 1.0),
    "even": (4, 1.5, 0.75, 0.5),
    "one": (1, 3.0, 0.75, 1.0),
    "wider than the image": (30, 1.0, 0.75, 2.0),
    "another power": (3, 1.0, 0.6, 1.5),
    "no power": (3, 1.0, 0.0, 1.5),
    "half": (3, 20.0, 0.5, 1e-3),
}


@EACH
@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("how", NORMS.values(), ids=NORMS)
def test_cross_channel_norm(shape, how, blocks):
    x, dy = lanes("x", shape, blocks), lanes("dy", shape, blocks)
    exact = reference.cross_channel_norm(x.astype(np.float64), *how)
    slope = reference.cross_channel_norm_dx(*doubled(dy, x), *how)

    def both():
        return cpu.cross_channel_norm(x, *how), cpu.cross_channel_norm_dx(dy, x, *how)

    for y, dx in each(both):
        near(y, exact, 1e-6)
        near(dx, slope, 3e-6)


@pytest.mark.parametrize("beta", [0.75, 0.6, 2.0])
def test_powers_of_all_sizes(beta):
    """Relative to the result: x of one channel and no alpha is x k^-beta."""
    x = np.ones((1, 1, LANES), np.float32)
    for k in np.exp(np.linspace(np.log(1e-8), np.log(1e12), 300)).astype(np.float32):
        exact = float(k) ** -beta
        found = cpu.cross_channel_norm(x, 1, 0.0, beta, float(k))
        assert abs(found - exact).max() <= 6e-7 * exact


# (C, H, W), (C, K, R, S), stride, cropping
TRANSPOSED = {
    "2x2/2": ((3, 4, 5), (3, 2, 2, 2), (2, 2), ((0, 0), (0, 0))),
    "4x4/2, same": ((4, 3, 4), (4, 5, 4, 4), (2, 2), ((1, 1), (1, 1))),
    "3x3, same": ((9, 8, 8), (9, 10, 3, 3), (1, 1), ((1, 1), (1, 1))),
    "3x3/2, odd cropping": ((2, 5, 4), (2, 3, 3, 3), (2, 2), ((0, 1), (0, 1))),
    "gaps": ((2, 3, 3), (2, 3, 2, 1), (3, 2), ((0, 0), (0, 0))),
    "one by one": ((5, 3, 3), (5, 4, 1, 1), (1, 1), ((0, 0), (0, 0))),
    "asymmetric": ((2, 4, 3), (2, 3, 5, 3), (2, 1), ((3, 1), (0, 2))),
}


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_conv2d(case, blocks):
    shape, size, *how = TRANSPOSED[case]
    x = lanes("x", shape, blocks)
    weight, bias = numbers("w", *size, dtype=np.float32), numbers("b", size[1], dtype=np.float32)
    exact = reference.transposed_conv2d(*doubled(x, weight, bias), *how)
    dy = lanes("dy", exact.shape[1:-1], blocks)
    counts = np.full(blocks, LANES, np.int32)
    last = (*how, counts, tree(max(blocks, 1)) if blocks else Tree(2, ((0, 0), (0, 2)), 0))
    needs = True, True, True
    dx, *partials = reference.transposed_conv2d_backward(*doubled(dy, x, weight), *last, needs)

    def all_of_them():
        y = cpu.transposed_conv2d(x, weight, bias, *how)
        return y, *cpu.transposed_conv2d_backward(dy, x, weight, *last, needs)

    for y, own, dweight, dbias in each(all_of_them):
        near(y, exact, 2e-5)
        near(own, dx, 2e-5)
        for partial, wanted in zip((dweight, dbias), partials, strict=True):
            assert partial.shape == wanted.shape
            if blocks:
                near(SingleRank().gplus(partial), SingleRank().gplus(wanted), 2e-5)
    nothing = cpu.transposed_conv2d_backward(dy, x, weight, *last, (False, False, False))
    assert nothing == (None, None, None)


def test_a_padded_average_of_all_pixels():
    """Global pooling is average pooling by a window as large as the image."""
    x = lanes("x", (3, 13, 11))
    for y in each(lambda: cpu.average_pool2d(x, (13, 11), (13, 11), ((0, 0), (0, 0)))):
        near(y, x.astype(np.float64).mean(axis=(2, 3), keepdims=True), 1e-6)


def test_arrays_need_not_be_aligned_nor_c_ordered():
    x = lanes("x", (5, 3, 7))
    room = np.empty(x.size + 1, np.float32)
    unaligned = room[1:].reshape(x.shape)
    unaligned[...] = x
    samples = np.arange(2 * LANES)
    calls = [
        cpu.tanh,
        lambda v: cpu.leaky_relu_dx(v, v, 0.1),
        lambda v: cpu.add(v, v),
        lambda v: cpu.concat([v, v]),
        lambda v: cpu.split(v, [2, 3])[1],
        lambda v: cpu.dropout(v, 100, 1.5, (1, 2), 3, samples),
        lambda v: cpu.cross_channel_norm_dx(v, v, *NORMS["AlexNet's"]),
    ]
    for call in calls:
        for other in (unaligned, np.asfortranarray(x)):
            assert np.array_equal(call(other), call(x))
