"""Test pooling in fused layers and in bfloat16; test_conformance.py tests the kernels."""

import numpy as np
import pytest
from conformance import share
from cpu_builds import needs_kernels, on_all_builds
from single_rank import blocked, numbers

import mpidl as dl
from mpidl.backends import CPU, shapes
from mpidl.backends.reference import bf16

pytestmark = needs_kernels


@pytest.mark.parametrize("layer", [dl.MaxPool2D(3, 2), dl.AveragePool2D(2)])
def test_fused_and_separate_layers_give_the_same_bytes(world, layer):
    """In a network, pooling reads the output of a fused convolution."""
    layers = [dl.Conv2D(3, 5, padding=1), dl.BatchNorm(), dl.ReLU(), layer, dl.Dense(3)]
    images = blocked(world, numbers("images", 37, 2, 9, 9, dtype=np.float32))
    labels = blocked(world, np.arange(37) % 3, batch=images.batch)

    def results(fuse):
        net = dl.Network(layers, (2, 9, 9), seed=2)
        net.fuse = fuse
        loss = dl.value_and_grad(lambda n, x: dl.softmax_cross_entropy(n(x), labels), reduce=world)
        value, gradients, state = loss(net, images)
        return [v.tobytes() for v in (value, *gradients.values(), *state.values())]

    assert results(True) == results(False)


def test_gradients_of_means_are_rounded_to_bfloat16_once():
    """The root mean square of one rounding is below 2^-9, and that of two is above it."""
    windows, tree = shapes.Windows((3, 3), (1, 1), ((1, 1), (1, 1))), share(1).tree
    dy = bf16.narrowed(numbers("gradients of means", 1, 4, 12, 12, 16, low=-1, dtype=np.float32))
    x = np.zeros_like(dy)
    border = np.pad(bf16.widened(dy).astype(float), ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    exact = sum(border[:, :, i : i + 12, j : j + 12] for i in range(3) for j in range(3)) / 9

    def compare():
        dx = CPU.average_pool2d_dx(dy, x, windows, True, tree)[0]
        error = bf16.widened(dx) - exact
        assert np.linalg.norm(error) < 2**-9 * np.linalg.norm(exact)
        return dx

    on_all_builds(compare)
