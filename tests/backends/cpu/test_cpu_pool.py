"""The C kernels of pooling against plain loops in C, NumPy, and each other."""

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from single_rank import SingleRank, numbers

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends.cpu import builds
from mpidl.backends.cpu.pool import _geometry
from mpidl.blocks import LANES, DeferredInput
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


@EACH
def test_numpy_gives_the_same(case):
    """Its sums are added in the same order."""
    x, (_, *how) = images(case, 2), CASES[case]
    y, argmax = cpu.max_pool2d(x, *how)
    dy = numbers("dy", *y.shape, dtype=np.float32)
    found = [y, argmax, cpu.average_pool2d(x, *how)]
    found += [cpu.max_pool2d_dx(dy, argmax, x, *how, tree(2))[0]]
    found += [cpu.average_pool2d_dx(dy, x, *how, tree(2))[0]]
    expected = [*reference.max_pool2d(x, *how), reference.average_pool2d(x, *how)]
    expected += [reference.max_pool2d_dx(dy, argmax, x, *how, tree(2))[0]]
    expected += [reference.average_pool2d_dx(dy, x, *how, tree(2))[0]]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


@EACH
@pytest.mark.parametrize("blocks", [0, 3])
def test_an_activation_is_read_as_its_values(case, blocks):
    """With the sums that batch normalization asks for, of the bytes they have by themselves."""
    y, (shape, *how) = images(case, blocks), CASES[case]
    channels = [numbers(f"{case} {i}", shape[0], dtype=np.float32) for i in range(3)]
    source = DeferredInput(y, *channels)
    x = cpu.activation(source)
    assert blocks == 0 or 0.1 < (x > 0).mean() < 0.95

    def deferred():
        value, argmax = cpu.max_pool2d(source, *how)
        dy = numbers("dy", *value.shape, dtype=np.float32)
        mean = cpu.average_pool2d(source, *how)
        back = cpu.max_pool2d_dx(dy, argmax, source, *how, tree(blocks))
        return value, argmax, mean, back, cpu.average_pool2d_dx(dy, source, *how, tree(blocks))

    expected, argmax = cpu.max_pool2d(x, *how)
    dy = numbers("dy", *expected.shape, dtype=np.float32)
    dx, _ = cpu.max_pool2d_dx(dy, argmax, x, *how, tree(blocks))
    dx_of_mean, _ = cpu.average_pool2d_dx(dy, x, *how, tree(blocks))
    found = on_all_builds(deferred)[builds.running()]
    assert np.array_equal(found[0], expected) and np.array_equal(found[1], argmax)
    assert np.array_equal(found[2], cpu.average_pool2d(x, *how))
    for (gradient, sums), wanted in zip(found[3:], (dx, dx_of_mean), strict=True):
        assert np.array_equal(gradient, wanted)
        if blocks:
            summed = cpu.activation_sums(wanted, source, tree(blocks))
            assert SingleRank().gplus(sums).tobytes() == SingleRank().gplus(summed).tobytes()
            active = np.where(x > 0, wanted, 0).astype(np.float64)
            centred = active * (y - channels[0][:, None, None, None])
            exact = np.concatenate([v.sum(axis=(0, 2, 3, 4)) for v in (active, centred)])
            np.testing.assert_allclose(SingleRank().gplus(sums), exact, rtol=1e-4, atol=1e-3)
        else:
            assert sums.terms[0].nodes == [] and sums.shape == (2 * shape[0],)


def test_arrays_need_not_be_aligned_nor_c_ordered():
    x, (_, *how) = images("3x3/2", 2), CASES["3x3/2"]
    room = np.empty(x.size + 1, np.float32)
    unaligned = room[1:].reshape(x.shape)
    unaligned[...] = x
    strided = np.asfortranarray(x)
    expected = cpu.max_pool2d(x, *how)
    for other in (unaligned, strided):
        for one, wanted in zip(cpu.max_pool2d(other, *how), expected, strict=True):
            assert np.array_equal(one, wanted)


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
