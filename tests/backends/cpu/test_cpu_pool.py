"""The plain loops of pooling in C, and pooling in fused networks."""

import numpy as np
import pytest
from cases import POOLS
from cpu_builds import needs_kernels
from single_rank import blocked, numbers

import mpidl as dl
from mpidl.backends import REFERENCE as reference
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.pool import _geometry
from mpidl.blocks import LANES
from mpidl.fold import Tree

pytestmark = needs_kernels


@pytest.mark.parametrize("count_padding", [True, False])
@pytest.mark.parametrize("label", POOLS)
def test_plain_loops_have_the_bytes_of_the_reference(label, count_padding):
    """test_conformance.py compares the fast loops with the reference."""
    shape, *window = POOLS[label]
    blocks, tree = 3, Tree(3, ((0, 3),), 0)
    x = numbers(label, blocks, *shape, LANES, low=-3, high=3, dtype=np.float32)
    x = np.where(x > 0, np.round(x), x)  # so that many values are equal
    geometry, output = _geometry(shape, *window, count_padding)
    y, argmax = (np.empty((blocks, *output, LANES), t) for t in (np.float32, np.uint8))
    mean, dy = np.empty_like(y), numbers("dy", *y.shape, dtype=np.float32)
    dx, dx_of_mean = np.empty_like(x), np.empty_like(x)
    library = builds.kernels()
    library.pool2d_plain(x, y, argmax, blocks, geometry)
    library.pool2d_plain(x, mean, None, blocks, geometry)
    library.pool2d_dx_plain(dy, argmax, dx, blocks, geometry)
    library.pool2d_dx_plain(dy, None, dx_of_mean, blocks, geometry)
    expected = (
        *reference.max_pool2d(x, *window),
        reference.average_pool2d(x, *window, count_padding),
        reference.max_pool2d_dx(dy, argmax, x, *window, tree)[0],
        reference.average_pool2d_dx(dy, x, *window, count_padding, tree)[0],
    )
    for value, exact in zip((y, argmax, mean, dx, dx_of_mean), expected, strict=True):
        assert value.dtype == exact.dtype and np.array_equal(value, exact)


@pytest.mark.parametrize("layer", [dl.MaxPool2D(3, 2), dl.AveragePool2D(2)])
def test_fused_and_separate_layers_give_the_same_bytes(world, layer):
    """In a network, the pooling reads the output of the fused convolution."""
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
