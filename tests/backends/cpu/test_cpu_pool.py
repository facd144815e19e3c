"""The C kernels of pooling against plain loops in C, NumPy, and each other."""

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from single_rank import numbers

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.pool import _geometry
from mpidl.blocks import LANES
from mpidl.fold import Tree

pytestmark = needs_kernels

# (C, H, W), size, stride, padding: those with a path of their own, and others
CASES = {
    "2x2": ((3, 6, 8), (2, 2), (2, 2), ((0, 0), (0, 0))),
    "2x2, pixels left over": ((2, 5, 7), (2, 2), (2, 2), ((0, 0), (0, 0))),
    "2x2, padding": ((2, 4, 7), (2, 2), (2, 2), ((1, 0), (1, 1))),
    "2x2, gaps that padding hides": ((1, 4, 4), (2, 2), (3, 3), ((1, 0), (1, 0))),
    "3x3/2": ((2, 9, 7), (3, 3), (2, 2), ((0, 0), (0, 0))),
    "3x3/2, padding": ((2, 8, 6), (3, 3), (2, 2), ((1, 1), (1, 1))),
    "3x3/2, one more behind": ((2, 8, 6), (3, 3), (2, 2), ((0, 1), (0, 1))),
    "3x3/3": ((2, 6, 7), (3, 3), (3, 3), ((0, 0), (0, 0))),
    "overlapping": ((2, 6, 9), (3, 4), (1, 2), ((2, 1), (0, 3))),
    "overlapping downwards": ((2, 7, 6), (3, 2), (2, 2), ((0, 0), (0, 0))),
    "one row": ((2, 1, 9), (1, 2), (1, 3), ((0, 0), (1, 0))),
    "8x8, global": ((4, 8, 8), (8, 8), (8, 8), ((0, 0), (0, 0))),
    "a byte of places": ((1, 17, 16), (16, 16), (1, 1), ((0, 0), (0, 0))),
}
EACH = pytest.mark.parametrize("case", CASES)


def images(case, blocks, dtype=np.float32):
    """Values with many equal ones."""
    shape = CASES[case][0]
    x = numbers(case, blocks, *shape, LANES, low=-3, high=3)
    return np.where(numbers(f"{case} round", *x.shape) > 0, np.round(x), x).astype(dtype)


def tree(blocks):
    return Tree(blocks, ((0, blocks),), 0)


@EACH
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_fast_is_plain(case, blocks):
    x, (shape, *how) = images(case, blocks), CASES[case]
    geometry, output = _geometry(shape, *how)
    y, argmax = (np.empty((blocks, *output, LANES), t) for t in (np.float32, np.uint8))
    mean, dy = np.empty_like(y), numbers("dy", *y.shape, dtype=np.float32)
    dx, dx_of_mean = np.empty_like(x), np.empty_like(x)

    def fast():
        y, argmax = cpu.max_pool2d(x, *how)
        dx, none = cpu.max_pool2d_dx(dy, argmax, x, *how, tree(blocks))
        assert none is None
        mean = cpu.average_pool2d(x, *how)
        return y, argmax, dx, mean, cpu.average_pool2d_dx(dy, x, *how, tree(blocks))[0]

    library = builds.kernels()
    library.pool2d_plain(x, y, argmax, blocks, geometry)
    library.pool2d_plain(x, mean, None, blocks, geometry)
    library.pool2d_dx_plain(dy, argmax, dx, blocks, geometry)
    library.pool2d_dx_plain(dy, None, dx_of_mean, blocks, geometry)
    for found in on_all_builds(fast).values():
        for one, other in zip(found, (y, argmax, dx, mean, dx_of_mean), strict=True):
            assert one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize("layer", [dl.MaxPool2D(3, 2), dl.AveragePool2D(2)])
def test_fused_and_by_itself_give_the_same_bytes(world, layer):
    """In a network, where the pooling reads what the fused convolution stores."""
    from single_rank import blocked

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
