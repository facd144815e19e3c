"""Test pooling in networks with fused layers; test_conformance.py tests the kernels."""

import numpy as np
import pytest
from cpu_builds import needs_kernels
from single_rank import blocked, numbers

import mpidl as dl

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
