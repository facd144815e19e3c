"""Compare GPU activations with NumPy in float64, for arguments of all magnitudes."""

import cases
import numpy as np
import pytest
from cpu_builds import BUILDS, on_all_builds

from mpidl.backends import CPU, REFERENCE
from mpidl.backends.gpu import array
from mpidl.backends.gpu.backend import GPU
from mpidl.core.blocks import LANES

needs_fma = pytest.mark.skipif(
    "x86-64-v3" not in BUILDS, reason="this CPU runs no kernels with fused multiply-adds (AVX2)"
)


def arguments(limit, count):
    """Return lanes with `count` numbers in -limit..limit, extreme numbers, infinities and NaN."""
    x = np.concatenate([np.linspace(-limit, limit, count), np.geomspace(1e-30, 80, 1000)])
    x = np.concatenate([x, -x, [np.inf, -np.inf, 0, -0.0]])
    x = np.pad(x, (0, 12 + -(len(x) + 12) % LANES), constant_values=np.nan)
    return x.astype(np.float32).reshape(1, -1, LANES)


@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_rounding_is_at_most_two_and_a_half_ulps(device, name):
    x = arguments(12, 2000)
    exact = REFERENCE.elementwise(name, x.astype(np.float64))
    y = GPU.elementwise(name, array.lanes(x)).numpy()
    assert np.array_equal(np.isnan(y), np.isnan(x))
    units = np.spacing(np.maximum(abs(exact), 2.0**-125).astype(np.float32))
    normal = ~((abs(exact) < 2.0**-125) & (name == "sigmoid"))
    assert np.nanmax((abs(y - exact) / units)[normal]) <= 2.5


@pytest.mark.parametrize("name, limit", [("gelu", 2.5), ("gelu_tanh", 3.0)])
def test_gelu_is_nearly_exact(device, name, limit):
    """Errors are at most `limit` ulps."""
    x = arguments(14, 4000)
    y = GPU.elementwise(name, array.lanes(x)).numpy()
    dx = GPU.elementwise_dx(name, array.lanes(np.ones_like(x)), array.lanes(x)).numpy()
    assert np.array_equal(np.isnan(y), np.isnan(x)) and np.array_equal(np.isnan(dx), np.isnan(x))
    exact = REFERENCE.elementwise(name, x.astype(np.float64))
    normal = (abs(exact) >= 2.0**-126) & np.isfinite(exact)
    units = np.spacing(abs(exact[normal]).astype(np.float32))
    assert (abs(y[normal] - exact[normal]) / units).max() <= limit
    assert y[x == np.inf].tolist() == [np.inf] and y[x == -np.inf].tolist() == [0]


@needs_fma
@pytest.mark.parametrize("name", cases.FUNCTIONS)
def test_results_have_the_bytes_of_cpus_with_fma(device, name):
    x, numbers = arguments(14, 4000), cases.FUNCTIONS[name][0]
    ones = np.ones_like(x)
    y = GPU.elementwise(name, array.lanes(x), *numbers).numpy()
    dx = GPU.elementwise_dx(name, array.lanes(ones), array.lanes(x), *numbers).numpy()
    with_fma = on_all_builds(
        lambda: (
            CPU.elementwise(name, x, *numbers),
            CPU.elementwise_dx(name, ones, x, *numbers),
        )
    )["x86-64-v3"]
    valid = ~np.isnan(x)
    for value, expected in zip((y, dx), with_fma, strict=True):
        assert value[valid].tobytes() == expected[valid].tobytes()


def test_relu_keeps_nan_and_has_no_negative_zero(device):
    x = np.zeros((1, 4, 1, 1, LANES), "f4")
    x[0, 0, 0, 0, :2] = np.nan, -0.0
    y = GPU.relu(array.lanes(x)).numpy()
    assert np.isnan(y[0, 0, 0, 0, 0]) and not np.signbit(y[0, 0, 0, 0, 1])
