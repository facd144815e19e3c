"""Test the accuracy of the CPU's activation kernels, and results for infinities and NaN."""

import math

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds

from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.core.blocks import LANES

pytestmark = needs_kernels


def on_builds(call):
    """Return the results of call() on every build."""
    return on_all_builds(call).values()


def ulps(actual, exact):
    """Return the errors in units of the last place of float32."""
    size = np.maximum(abs(exact), np.finfo(np.float32).tiny)
    return abs(actual - exact) / np.spacing(size.astype(np.float32)).astype(np.float64)


def wide_range():
    """Return float32 numbers of all magnitudes and both signs."""
    sizes = np.exp(np.linspace(np.log(1e-30), np.log(100.0), 1 << 19))
    near = np.linspace(-12, 12, 1 << 19)
    return np.concatenate([sizes, -sizes, near]).astype(np.float32).reshape(1, -1, LANES)


@pytest.mark.parametrize("name, max_ulps", [("tanh", 2.0), ("sigmoid", 2.5)])
def test_tanh_and_sigmoid_are_nearly_exact(name, max_ulps):
    """The error relative to the result is small for results of all magnitudes."""
    x = wide_range()
    exact = reference.elementwise(name, x.astype(np.float64))
    normal = exact >= 2.0**-125 if name == "sigmoid" else np.full(x.shape, True)
    for y in on_builds(lambda: cpu.elementwise(name, x)):
        assert ulps(y, exact)[normal].max() <= max_ulps
        assert (y[~normal] < 2.0**-124).all()
        assert not np.signbit(y[x > 0]).any()
        if name == "tanh":
            assert (np.signbit(y) == np.signbit(x)).all()


BOTH = pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])


def exact_gelu(x, name):
    """Return accurate values of GELU, from the C library's erfc, or of its tanh approximation."""
    if name == "gelu":
        return x * np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2
    w = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
    e = np.exp(-np.abs(np.clip(w, -700, 700)))
    return np.where(x < 0, x * e, x) / (1 + e)


@pytest.mark.parametrize("name, max_ulps", [("gelu", 2.5), ("gelu_tanh", 3.0)])
def test_gelu_is_nearly_exact(name, max_ulps):
    """The relative error is small even far in the left tail, if the result is a normal number."""
    x = wide_range()[:, ::4]
    exact = exact_gelu(x.astype(np.float64), name)
    normal = abs(exact) >= np.finfo(np.float32).tiny
    assert x[normal].min() < (-13 if name == "gelu" else -10)
    for y in on_builds(lambda: cpu.elementwise(name, x)):
        assert ulps(y, exact)[normal].max() <= max_ulps
        assert (abs(y[~normal]) <= np.finfo(np.float32).tiny).all()
        assert (np.signbit(y) == np.signbit(x)).all()


@BOTH
def test_the_gradient_of_gelu_is_nearly_exact(name):
    """Compare with finite differences in float64, but in the tails with the reference backend."""
    x, step = np.linspace(-20, 20, 1 << 16).astype(np.float32).reshape(1, -1, LANES), 1e-5
    ones, middle = np.ones_like(x), x.astype(np.float64)
    differences = exact_gelu(middle + step, name) - exact_gelu(middle - step, name)
    slope = reference.elementwise_dx(name, ones.astype(np.float64), middle)
    assert abs(slope - differences / (2 * step)).max() < 1e-9
    tail = (x < -1.5) & (abs(slope) > 2.0**-120)
    for dx in on_builds(lambda: cpu.elementwise_dx(name, ones, x)):
        assert abs(dx - slope).max() < 2.5e-7
        assert (abs(dx - slope) / abs(slope))[tail].max() < 1e-6


@BOTH
def test_gelu_of_infinities_and_nan(name):
    x = np.full((1, 2, LANES), np.nan, np.float32)
    x[0, 0, :6] = np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38
    ones = np.ones_like(x)
    for y, dx in on_builds(lambda: (cpu.elementwise(name, x), cpu.elementwise_dx(name, ones, x))):
        assert y[0, 0, :6].tolist() == [np.inf, 0, 0, 0, x[0, 0, 4], 0]
        assert np.signbit(y[0, 0, :6]).tolist() == [False, True, False, True, False, True]
        assert dx[0, 0, :6].tolist() == [1, 0, 0.5, 0.5, 1, 0]
        assert np.isnan(y[np.isnan(x)]).all() and np.isnan(dx[np.isnan(x)]).all()
    in_numpy = reference.elementwise(name, x.astype(np.float64))[0, 0]
    assert in_numpy[:4].tolist() == [np.inf, 0, 0, 0] and np.isnan(in_numpy[6:]).all()


@BOTH
def test_the_reference_of_gelu_is_nearly_exact(name):
    x = np.linspace(-37, 40, 1001)
    expected = exact_gelu(x, name)
    np.testing.assert_allclose(reference.elementwise(name, x), expected, rtol=3e-13, atol=1e-300)
    single = reference.elementwise(name, x.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=1e-4, atol=1e-37)


def test_activations_of_infinities_and_nan():
    x = np.full((1, 2, LANES), np.nan, np.float32)
    x[0, 0, :4] = np.inf, -np.inf, 0.0, -0.0
    for tanh, sigmoid, leaky in on_builds(
        lambda: (
            cpu.elementwise("tanh", x),
            cpu.elementwise("sigmoid", x),
            cpu.elementwise("leaky_relu", x, 0.1),
        )
    ):
        assert tanh[0, 0, :4].tolist() == [1, -1, 0, 0]
        np.testing.assert_allclose(sigmoid[0, 0, :4], [1, 0, 0.5, 0.5], atol=1e-37)
        assert leaky[0, 0, :4].tolist() == [np.inf, -np.inf, 0, 0]
        for y in (tanh, sigmoid, leaky):
            assert np.isnan(y[np.isnan(x)]).all()
