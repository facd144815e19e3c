"""Compare GPU activations with NumPy in float64, for arguments of all magnitudes."""

import numpy as np
import pytest
from cpu_builds import BUILDS, on_all_builds

from mpidl.backends import CPU, REFERENCE
from mpidl.backends.gpu import array
from mpidl.backends.gpu.backend import GPU
from mpidl.core.blocks import LANES


def arguments(limit, count):
    """Return lanes with `count` numbers in -limit..limit, extreme numbers, infinities and NaN."""
    x = np.concatenate([np.linspace(-limit, limit, count), np.geomspace(1e-30, 80, 1000)])
    x = np.concatenate([x, -x, [np.inf, -np.inf, 0, -0.0]])
    x = np.pad(x, (0, 12 + -(len(x) + 12) % LANES), constant_values=np.nan)
    return x.astype(np.float32).reshape(1, -1, LANES)


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_rounding_is_at_most_two_and_a_half_ulps(device, name):
    x = arguments(12, 2000)
    exact = getattr(REFERENCE, name)(x.astype(np.float64))
    y = getattr(GPU, name)(array.lanes(x)).numpy()
    assert np.array_equal(np.isnan(y), np.isnan(x))
    units = np.spacing(np.maximum(abs(exact), 2.0**-125).astype(np.float32))
    normal = ~((abs(exact) < 2.0**-125) & (name == "sigmoid"))
    assert np.nanmax((abs(y - exact) / units)[normal]) <= 2.5


@pytest.mark.parametrize("approximate, limit", [("none", 2.5), ("tanh", 3.0)])
def test_gelu_rounds_as_the_cpu_with_fma(device, approximate, limit):
    """Errors are at most `limit` ulps. All results have the bytes of the CPU kernels with FMA."""
    x = arguments(14, 4000)
    y = GPU.gelu(array.lanes(x), approximate).numpy()
    dx = GPU.gelu_dx(array.lanes(np.ones_like(x)), array.lanes(x), approximate).numpy()
    assert np.array_equal(np.isnan(y), np.isnan(x)) and np.array_equal(np.isnan(dx), np.isnan(x))
    exact = REFERENCE.gelu(x.astype(np.float64), approximate)
    normal = (abs(exact) >= 2.0**-126) & np.isfinite(exact)
    units = np.spacing(abs(exact[normal]).astype(np.float32))
    assert (abs(y[normal] - exact[normal]) / units).max() <= limit
    assert y[x == np.inf].tolist() == [np.inf] and y[x == -np.inf].tolist() == [0]
    if "x86-64-v3" in BUILDS:
        with_fma = on_all_builds(
            lambda: (CPU.gelu(x, approximate), CPU.gelu_dx(np.ones_like(x), x, approximate))
        )["x86-64-v3"]
        valid = ~np.isnan(x)
        for value, expected in zip((y, dx), with_fma, strict=True):
            assert value[valid].tobytes() == expected[valid].tobytes()


def test_relu_keeps_nan_and_has_no_negative_zero(device):
    x = np.zeros((1, 4, 1, 1, LANES), "f4")
    x[0, 0, 0, 0, :2] = np.nan, -0.0
    y = GPU.relu(array.lanes(x)).numpy()
    assert np.isnan(y[0, 0, 0, 0, 0]) and not np.signbit(y[0, 0, 0, 0, 1])
