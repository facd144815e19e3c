"""Test the CPU's convolution kernels with more threads than blocks, and with non-finite numbers."""

import numpy as np
import pytest
from cases import BY_WINOGRAD, WINOGRAD
from conformance import arguments, results, share
from cpu_builds import needs_kernels, on_all_builds
from test_conformance import BY_NAME, assert_near

from mpidl.backends import CPU as cpu
from mpidl.backends import settings

pytestmark = needs_kernels

LABELS = ["digits 1", "digits 2", "16 channels a group", *BY_WINOGRAD]


@pytest.mark.parametrize("algorithm", WINOGRAD, ids=lambda values: values["winograd"])
@pytest.mark.parametrize("function", ["conv2d", "conv2d_backward"])
@pytest.mark.parametrize("label", LABELS)
def test_threads_share_one_block(label, function, algorithm, monkeypatch):
    """All threads share one block. In test_conformance.py, each of two blocks has a thread team."""
    monkeypatch.setattr(settings, "winograd", algorithm["winograd"])
    case = BY_NAME[f"{function}, {label}"]
    for actual in on_all_builds(lambda: results(case, cpu, blocks=1)).values():
        assert_near(case, actual, blocks=1)


def test_nan_passes_convolutions_and_relu():
    """A NaN weight must make the loss NaN and must not vanish in a ReLU."""
    values = arguments(BY_NAME["conv2d_moments, large 1x1"], cpu, share(3))
    source = values["x"]
    source.x[0, 0, 0, 0, 3] = np.nan
    assert np.isnan(cpu.activation(source)[0, 0, 0, 0, 3])
    assert np.isnan(cpu.relu(source.x)[0, 0, 0, 0, 3])
    geometry = (values[name] for name in ("stride", "padding", "dilation", "groups"))
    y = cpu.conv2d(source, values["weight"], values["bias"], *geometry)
    assert np.isnan(y[0, :, 0, 0, 3]).all() and np.isfinite(y[1:]).all()
