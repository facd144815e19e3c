"""Test the CPU kernels of cross-channel normalization: powers, and fused max pooling."""

import numpy as np
import pytest
from cases import NORMALIZED_POOLS, NORMS
from cpu_builds import needs_kernels

from mpidl.backends import CPU as cpu
from mpidl.backends.shapes import ChannelNorm, Windows
from mpidl.core import fold
from mpidl.core.blocks import LANES


@needs_kernels
@pytest.mark.parametrize("beta", [0.75, 0.6, 2.0])
def test_powers_of_all_sizes_are_nearly_exact(beta):
    """The relative error is small. For one channel and alpha = 0, the result is x k^-beta."""
    x = np.ones((1, 1, LANES), np.float32)
    for k in np.exp(np.linspace(np.log(1e-8), np.log(1e12), 300)).astype(np.float32):
        exact = float(k) ** -beta
        y = cpu.cross_channel_norm(x, ChannelNorm(1, 0.0, beta, float(k)))
        assert abs(y - exact).max() <= 6e-7 * exact


@needs_kernels
@pytest.mark.parametrize("numbers", ["AlexNet's", "even", "wider than the image", "another power"])
@pytest.mark.parametrize("label", NORMALIZED_POOLS)
def test_fused_max_pooling_has_the_bytes_of_the_separate_functions(label, numbers):
    (shape, *pool), norm = NORMALIZED_POOLS[label], ChannelNorm(*NORMS[numbers])
    windows = Windows(*pool)
    tree, rng = fold.Tree(2, ((0, 2),), 0), np.random.default_rng(5)
    x = np.maximum(3 * rng.standard_normal((2, *shape, LANES), np.float32), 0)
    x.reshape(-1)[rng.permutation(x.size)[:3]] = np.nan, np.inf, 1e20
    y, argmax = cpu.max_pool2d(cpu.cross_channel_norm(x, norm), windows)
    dy = rng.standard_normal(y.shape, np.float32)
    dy[:, :, 0] = -0.0
    dnorm, _ = cpu.max_pool2d_dx(dy, argmax, x, windows, tree)
    dz = cpu.relu_dx(cpu.cross_channel_norm_dx(dnorm, x, norm), x)
    fused, places = cpu.norm_max_pool(x, norm, windows)
    for result, expected in (
        (fused, y),
        (places, argmax),
        (cpu.norm_max_pool_relu_dx(dy, argmax, x, norm, windows), dz),
    ):
        assert result.tobytes() == expected.tobytes()
