"""How exact activations, powers and random numbers of the kernels are, and special values."""

import math

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds

from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends.reference.dropout import chances, philox
from mpidl.blocks import LANES

pytestmark = needs_kernels


def on_builds(call):
    """Return the result of every build."""
    return on_all_builds(call).values()


def ulps(actual, exact):
    """Return the errors in units of the last place of float32."""
    size = np.maximum(abs(exact), np.finfo(np.float32).tiny)
    return abs(actual - exact) / np.spacing(size.astype(np.float32)).astype(np.float64)


def wide_range():
    """Return float32 numbers of all sizes and both signs."""
    sizes = np.exp(np.linspace(np.log(1e-30), np.log(100.0), 1 << 19))
    near = np.linspace(-12, 12, 1 << 19)
    return np.concatenate([sizes, -sizes, near]).astype(np.float32).reshape(1, -1, LANES)


@pytest.mark.parametrize("name, max_ulps", [("tanh", 2.0), ("sigmoid", 2.5)])
def test_tanh_and_sigmoid_are_nearly_exact(name, max_ulps):
    """Relative to the result, of every size."""
    x = wide_range()
    exact = getattr(reference, name)(x.astype(np.float64))
    normal = exact >= 2.0**-125 if name == "sigmoid" else np.full(x.shape, True)
    for y in on_builds(lambda: getattr(cpu, name)(x)):
        assert ulps(y, exact)[normal].max() <= max_ulps
        assert (y[~normal] < 2.0**-124).all()
        assert not np.signbit(y[x > 0]).any()
        if name == "tanh":
            assert (np.signbit(y) == np.signbit(x)).all()


APPROXIMATIONS = pytest.mark.parametrize("approximate", ["none", "tanh"])


def exact_gelu(x, approximate):
    """Compute by the C library's erfc; the approximation by sums that cancel nothing."""
    if approximate == "none":
        return x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2
    w = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
    e = np.exp(-np.abs(np.clip(w, -700, 700)))
    return np.where(x < 0, x * e, x) / (1 + e)


@pytest.mark.parametrize("approximate, max_ulps", [("none", 2.5), ("tanh", 3.0)])
def test_gelu_is_nearly_exact(approximate, max_ulps):
    """Relative to the result, also far in the left tail, wherever the result is normal."""
    x = wide_range()[:, ::4]
    exact = exact_gelu(x.astype(np.float64), approximate)
    normal = abs(exact) >= np.finfo(np.float32).tiny
    assert x[normal].min() < (-13 if approximate == "none" else -10)
    for y in on_builds(lambda: cpu.gelu(x, approximate)):
        assert ulps(y, exact)[normal].max() <= max_ulps
        assert (abs(y[~normal]) <= np.finfo(np.float32).tiny).all()
        assert (np.signbit(y) == np.signbit(x)).all()


@APPROXIMATIONS
def test_the_gradient_of_gelu_is_nearly_exact(approximate):
    """Against differences of the oracle in float64, and in the tail relative to the reference."""
    x, step = np.linspace(-20, 20, 1 << 16).astype(np.float32).reshape(1, -1, LANES), 1e-5
    ones, middle = np.ones_like(x), x.astype(np.float64)
    differences = exact_gelu(middle + step, approximate) - exact_gelu(middle - step, approximate)
    slope = reference.gelu_dx(ones.astype(np.float64), middle, approximate)
    assert abs(slope - differences / (2 * step)).max() < 1e-9
    tail = (x < -1.5) & (abs(slope) > 2.0**-120)
    for dx in on_builds(lambda: cpu.gelu_dx(ones, x, approximate)):
        assert abs(dx - slope).max() < 2.5e-7
        assert (abs(dx - slope) / abs(slope))[tail].max() < 1e-6


@APPROXIMATIONS
def test_gelu_of_infinities_and_nan(approximate):
    x = np.full((1, 2, LANES), np.nan, np.float32)
    x[0, 0, :6] = np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38
    ones = np.ones_like(x)
    for y, dx in on_builds(lambda: (cpu.gelu(x, approximate), cpu.gelu_dx(ones, x, approximate))):
        assert y[0, 0, :6].tolist() == [np.inf, 0, 0, 0, x[0, 0, 4], 0]
        assert np.signbit(y[0, 0, :6]).tolist() == [False, True, False, True, False, True]
        assert dx[0, 0, :6].tolist() == [1, 0, 0.5, 0.5, 1, 0]
        assert np.isnan(y[np.isnan(x)]).all() and np.isnan(dx[np.isnan(x)]).all()
    in_numpy = reference.gelu(x.astype(np.float64), approximate)[0, 0]
    assert in_numpy[:4].tolist() == [np.inf, 0, 0, 0] and np.isnan(in_numpy[6:]).all()


@APPROXIMATIONS
def test_the_reference_of_gelu_is_nearly_exact(approximate):
    x = np.linspace(-37, 40, 1001)
    expected = exact_gelu(x, approximate)
    np.testing.assert_allclose(reference.gelu(x, approximate), expected, rtol=3e-13, atol=1e-300)
    single = reference.gelu(x.astype(np.float32), approximate)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=1e-4, atol=1e-37)


def test_activations_of_infinities_and_nan():
    x = np.full((1, 2, LANES), np.nan, np.float32)
    x[0, 0, :4] = np.inf, -np.inf, 0.0, -0.0
    for tanh, sigmoid, leaky in on_builds(
        lambda: (cpu.tanh(x), cpu.sigmoid(x), cpu.leaky_relu(x, 0.1))
    ):
        assert tanh[0, 0, :4].tolist() == [1, -1, 0, 0]
        np.testing.assert_allclose(sigmoid[0, 0, :4], [1, 0, 0.5, 0.5], atol=1e-37)
        assert leaky[0, 0, :4].tolist() == [np.inf, -np.inf, 0, 0]
        for y in (tanh, sigmoid, leaky):
            assert np.isnan(y[np.isnan(x)]).all()


def test_philox_gives_the_known_answers():
    """The known answers of Random123 1.09, kat_vectors: philox4x32 10."""
    ones, zeros = (0xFFFFFFFF,) * 4, (0,) * 4
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    answers = {
        (zeros, zeros[:2]): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (ones, ones[:2]): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        pi: "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (counter, key), words in answers.items():
        assert [int(w) for w in philox(counter, key)] == [int(w, 16) for w in words.split()]


def test_random_numbers_of_dropout_are_uniform_and_uncorrelated():
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


@pytest.mark.parametrize("beta", [0.75, 0.6, 2.0])
def test_powers_of_all_sizes_are_nearly_exact(beta):
    """Relative to the result: x of one channel and no alpha is x k^-beta."""
    x = np.ones((1, 1, LANES), np.float32)
    for k in np.exp(np.linspace(np.log(1e-8), np.log(1e12), 300)).astype(np.float32):
        exact = float(k) ** -beta
        y = cpu.cross_channel_norm(x, 1, 0.0, beta, float(k))
        assert abs(y - exact).max() <= 6e-7 * exact
