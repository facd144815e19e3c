"""Test the accuracy of powers in the CPU kernel of cross-channel normalization."""

import numpy as np
import pytest
from cpu_builds import needs_kernels

from mpidl.backends import CPU as cpu
from mpidl.blocks import LANES


@needs_kernels
@pytest.mark.parametrize("beta", [0.75, 0.6, 2.0])
def test_powers_of_all_sizes_are_nearly_exact(beta):
    """The relative error is small. For one channel and alpha = 0, the result is x k^-beta."""
    x = np.ones((1, 1, LANES), np.float32)
    for k in np.exp(np.linspace(np.log(1e-8), np.log(1e12), 300)).astype(np.float32):
        exact = float(k) ** -beta
        y = cpu.cross_channel_norm(x, 1, 0.0, beta, float(k))
        assert abs(y - exact).max() <= 6e-7 * exact
