"""The C kernels of convolution and batch normalization against float64 NumPy, on every build."""

import numpy as np
import pytest
from cpu_builds import bytes_of, needs_kernels, on_all_builds

from mpidl import shapes
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Tree, split_blocks

pytestmark = needs_kernels

SAME = ((1, 1), (1, 1))
NONE = ((0, 0), (0, 0))
ONE = (1, 1)

# (C, H, W), (K, R, S), stride, padding, dilation, groups
SHAPES = {
    "digits 1": ((1, 28, 28), (20, 5, 5), ONE, NONE, ONE, 1),
    "digits 2": ((20, 24, 24), (20, 3, 3), ONE, SAME, ONE, 1),
    "cifar 1": ((3, 32, 32), (32, 3, 3), ONE, SAME, ONE, 1),
    "cifar 9": ((64, 8, 8), (128, 3, 3), ONE, SAME, ONE, 1),
    "alexnet 1": ((3, 35, 35), (5, 11, 11), (4, 4), NONE, ONE, 1),
    "alexnet 2": ((6, 13, 13), (8, 5, 5), ONE, ((2, 2), (2, 2)), ONE, 2),
    "1x1": ((5, 6, 7), (9, 1, 1), ONE, NONE, ONE, 1),
    "1x1 by 2": ((5, 6, 7), (9, 1, 1), (2, 2), NONE, ONE, 1),
    "3x3 by 2": ((3, 15, 13), (7, 3, 3), (2, 2), SAME, ONE, 1),
    "each way its own": ((4, 11, 9), (6, 3, 2), (2, 3), ((2, 1), (0, 3)), (1, 2), 2),
    "wide padding": ((2, 9, 9), (4, 3, 3), ONE, ((3, 3), (4, 3)), (2, 2), 2),
    "pixels between filters": ((3, 6, 6), (2, 2, 2), (3, 3), ((4, 4), (4, 4)), ONE, 1),
    "filters apart": ((2, 8, 8), (3, 2, 2), (3, 3), NONE, ONE, 1),
    "one pixel": ((7, 3, 3), (5, 3, 3), ONE, NONE, ONE, 1),
    "odd channels": ((33, 13, 13), (35, 3, 3), ONE, SAME, ONE, 1),
    "a group a channel": ((8, 9, 9), (8, 3, 3), ONE, SAME, ONE, 8),
    "16 channels a group": ((32, 9, 9), (32, 3, 3), ONE, SAME, ONE, 2),
    "not padded": ((16, 10, 10), (16, 3, 3), ONE, NONE, ONE, 1),
    "padded by 2": ((16, 9, 9), (16, 3, 3), ONE, ((2, 2), (2, 1)), ONE, 1),
}


class Case:
    """Random arrays of one shape for a share of a mini-batch whose last block is not full."""

    def __init__(self, name, run=(0, 3), leaves=3, seed=0):
        image, filters, *how = SHAPES[name]
        self.how = tuple(how)
        blocks = run[1] - run[0]
        rng = np.random.default_rng(seed)
        k, r, s = filters
        self.x = rng.standard_normal((blocks, *image, LANES), np.float32)
        self.weight = rng.standard_normal((k, image[0] // self.how[3], r, s), np.float32)
        self.bias = rng.standard_normal(k, np.float32)
        output = shapes.conv2d_shape(image, self.weight.shape, *self.how[:3])
        self.dy = rng.standard_normal((blocks, *output, LANES), np.float32)
        self.counts = np.full(blocks, LANES, np.int32)
        if blocks:
            self.counts[-1] = 9
            self.dy[-1, ..., 9:] = 0
        others = ((0, run[0]), run, (run[1], leaves))
        self.tree = Tree(leaves, others, 1)
        c = image[0]
        self.before = [rng.uniform(-0.5, 0.5, c), rng.uniform(0.5, 2, c), rng.uniform(-1, 1, c)]
        self.behind = [rng.uniform(-0.5, 0.5, k) for _ in range(6)]

    def source(self, x, vectors):
        return DeferredInput(x, *(np.asarray(v, np.float32) for v in vectors))

    def backward(self, backend, dtype=np.float32, **options):
        arrays = (a.astype(dtype) for a in (self.dy, self.x, self.weight))
        needs = (True, True, True)
        return backend.conv2d_backward(
            *arrays, *self.how, self.counts, self.tree, needs, **options
        )[:3]


def value(partial):
    """This rank's nodes, added up in float64."""
    return np.sum([np.asarray(n, np.float64) for n in partial.terms[0].nodes], axis=0)


def error(found, expected):
    found = value(found) if hasattr(found, "terms") else found
    expected = value(expected) if hasattr(expected, "terms") else expected
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.fixture(params=["off", "auto", "fast"])
def policy(request):
    before, settings.winograd = settings.winograd, request.param
    yield request.param
    settings.winograd = before


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", ["digits 1", "digits 2", "16 channels a group"])
def test_blocks_shared_by_teams(name, blocks, policy):
    """5 threads: a team of all for one block, of 3 and of 2 for two (and 2, 2, 1 for Case's 3)."""
    case = Case(name, (0, blocks), blocks)
    tall = [a.astype(np.float64) for a in (case.x, case.weight, case.bias)]
    exact = reference.conv2d(*tall, *case.how), *case.backward(reference, np.float64)
    for found in on_all_builds(
        lambda: (cpu.conv2d(case.x, case.weight, case.bias, *case.how), *case.backward(cpu))
    ).values():
        for a, b in zip(found, exact, strict=True):
            assert error(a, b) < 2e-6


@pytest.mark.parametrize(
    "name", ["digits 2", "cifar 9", "3x3 by 2", "1x1", "odd channels", "16 channels a group"]
)
def test_the_fused_pass_has_the_bytes_of_the_separate_ones(name, policy):
    case = Case(name)
    source = case.source(case.x, case.before)
    mean, scale, beta, a, b, c = case.behind

    def fused():
        y, moments = cpu.conv2d_moments(
            source, case.weight, case.bias, *case.how, case.counts, case.tree
        )
        behind = case.source(y, (mean, scale, beta))
        needs = (True, True, True)
        return (
            y,
            moments,
            *cpu.conv2d_backward(
                *(case.dy, source, case.weight, *case.how, case.counts, case.tree, needs),
                activation_after=(behind, a, b, c),
                sums=True,
            ),
        )

    def separate():
        x = cpu.relu(cpu.batchnorm(case.x, *case.before))
        y = cpu.conv2d(x, case.weight, case.bias, *case.how)
        moments = cpu.moments(y, case.counts, case.tree)
        dz = cpu.relu_dx(case.dy, cpu.relu(cpu.batchnorm(y, mean, scale, beta)))
        dy = cpu.batchnorm_dx(dz, y, mean, a, b, c, case.counts)
        needs = (True, True, True)
        dx, dweight, dbias, _ = cpu.conv2d_backward(
            dy, x, case.weight, *case.how, case.counts, case.tree, needs
        )
        assert bytes_of(dbias) == bytes_of(cpu.channel_sums(dy, case.tree))
        sums = cpu.batchnorm_sums(cpu.relu_dx(dx, x), case.x, case.before[0], case.tree)
        return y, moments, dx, dweight, dbias, sums

    one, other = on_all_builds(fused), on_all_builds(separate)
    for build in one:
        names = ("y", "moments", "dx", "dweight", "dbias", "sums")
        for part, a_, b_ in zip(names, one[build], other[build], strict=True):
            assert bytes_of(a_) == bytes_of(b_), f"{part} on {build}"


def test_not_a_number_stays_one():
    """A weight that is not a number must show in the loss, not vanish in a ReLU."""
    case = Case("1x1")
    case.x[0, 0, 0, 0, 3] = np.nan
    source = case.source(case.x, case.before)
    assert np.isnan(cpu.activation(source)[0, 0, 0, 0, 3])
    assert np.isnan(cpu.relu(case.x)[0, 0, 0, 0, 3])
    y = cpu.conv2d(source, case.weight, case.bias, *case.how)
    assert np.isnan(y[0, :, 0, 0, 3]).all() and np.isfinite(y[1:]).all()


@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (1, 1, 1)])
@pytest.mark.parametrize("valid", [1, 9, 16])
def test_batchnorm_and_relu(shape, valid):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, *shape, LANES), np.float32) + 100  # far off: E[x^2] would cancel
    dy = rng.standard_normal(x.shape, np.float32)
    dy[-1, ..., valid:] = 0
    counts, tree = np.array([16, valid], np.int32), Tree(2, split_blocks(2, 1), 0)
    mean, scale, beta, b, c = rng.uniform(-1, 1, (5, shape[0]))
    tall, dtall = x.astype(np.float64), dy.astype(np.float64)

    def call(backend, x, dy):
        return (
            backend.batchnorm(x, mean + 100, scale, beta),
            backend.relu(x - 100),
            backend.relu_dx(dy, x - 100),
            backend.batchnorm_dx(dy, x, mean + 100, scale, b, c, counts),
            backend.moments(x, counts, tree).terms[0].nodes[0],
            backend.batchnorm_sums(dy, x, mean + 100, tree).terms[0].nodes[0],
            backend.channel_sums(dy, tree).terms[0].nodes[0],
        )

    expected = call(reference, tall, dtall)
    for found in on_all_builds(lambda: call(cpu, x, dy)).values():
        for a, e in zip(found, expected, strict=True):
            assert np.abs(a - e).max() <= 3e-5 * max(1, np.abs(e).max())
    used = [tall[b][..., : counts[b]].reshape(shape[0], -1) for b in range(2)]
    values = np.concatenate(used, axis=1)
    moments = found[4]
    channels = shape[0]
    np.testing.assert_allclose(moments[1 : 1 + channels], values.mean(axis=1), rtol=1e-7)
    m2 = ((values - values.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    np.testing.assert_allclose(moments[1 + channels :], m2, rtol=1e-5, atol=1e-4)
