"""Compare the CPU kernels of dense layers with NumPy loops, BLAS and separate layers."""

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_builds import bytes_of, needs_kernels, on_all_builds
from single_rank import SingleRank, blocked, numbers

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import settings
from mpidl.backends.cpu import builds, dense
from mpidl.backends.deferred import DeferredActivation
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.fold import Counter, Tree
from mpidl.core.values import BF16, as_type

pytestmark = needs_kernels

ALL = True, True, True
SEGMENT, GROUP, BF16_GROUP = 256, 8, 32  # constants of dense.h


def tree_of_blocks(blocks):
    return Tree(blocks, ((0, blocks),), 0)


class Layer:
    """Arrays of a dense layer. The last block has `valid` images.

    If `channels` is given, the layer reads a deferred activation. `storage` is the dtype of x.
    """

    def __init__(self, outputs, features, blocks=2, valid=LANES, channels=None, storage=np.float32):
        def draw(name, *shape, **range):
            return numbers(f"{name} {outputs} {features}", *shape, dtype=np.float32, **range)

        x = draw("x", blocks, features, LANES)
        self.x = self.source = as_type(x, storage)
        self.dy = draw("dy", blocks, outputs, LANES)
        if blocks:
            self.dy[-1, :, valid:] = 0
        self.weight, self.bias = draw("weight", outputs, features), draw("bias", outputs)
        if channels:
            y = as_type(x.reshape(blocks, channels, features // channels, LANES), storage)
            mean, beta = (draw(v, channels, low=-0.5, high=0.5) for v in ("mean", "beta"))
            self.source = DeferredInput(y, mean, draw("scale", channels, low=0.5, high=1.5), beta)
            self.x = cpu.activation(self.source).reshape(self.x.shape)

    def forward(self):
        return cpu.dense(self.source, self.weight, self.bias)

    def backward(self, tree, needs=ALL):
        return cpu.dense_backward(self.dy, self.source, self.weight, tree, needs)

    def by_loops(self, tree):
        """Return y, dx and the nodes of dweight, with sums in the order that dense.h specifies."""
        features, outputs, x = self.x.shape[1], len(self.weight), self.x
        if self.source is not x:
            x = cpu.activation(self.source).reshape(x.shape)  # computed by the current build
        y = np.zeros_like(self.dy) + self.bias[:, None]
        for start in range(0, features, SEGMENT):
            sums = np.zeros_like(y)
            for f in range(start, min(start + SEGMENT, features)):
                sums = muladd(self.weight[:, f, None], x[:, f, None], sums)
            y += sums
        dx, groups = np.zeros_like(x), -(-outputs // GROUP)
        for group in range(groups):
            sums = np.zeros_like(dx)
            for k in range(outputs * group // groups, outputs * (group + 1) // groups):
                sums = muladd(self.weight[k, :, None], self.dy[:, k, None], sums)
            dx += sums
        leaves = np.zeros((len(y), outputs, features), np.float32)
        for lane in range(LANES):
            leaves = muladd(self.dy[:, :, None, lane], x[:, None, :, lane], leaves)
        counter = Counter(tree)
        for leaf in leaves:
            counter.push(leaf)
        return y, dx, nodes(counter.partial(leaves.shape[1:]))

    def by_loops_of_bf16(self, tree, first=1):
        """Return the same in bfloat16. The number `first` of a pair of products is added first.

        The products of bfloat16 numbers are exact in float32.
        """

        def pairs(start, stop):
            return [i for i in sorted(range(start, stop + 1), key=lambda i: i ^ first) if i < stop]

        source = self.source
        features, outputs, x = self.x.shape[1], len(self.weight), self.x
        if source is not x:
            x = cpu.activation(source).reshape(x.shape)
        x, dy, weight = as_type(x, np.float32), bf16(self.dy), bf16(self.weight)
        y = np.zeros_like(self.dy) + self.bias[:, None]
        for start in range(0, features, SEGMENT):
            sums = np.zeros_like(y)
            for f in pairs(start, min(start + SEGMENT, features)):
                sums += weight[:, f, None] * x[:, f, None]
            y += sums
        dx, groups, count = np.zeros_like(x), -(-outputs // BF16_GROUP), -(-outputs // 2)
        for group in range(groups):
            sums = np.zeros_like(dx)
            stop = min(count * (group + 1) // groups * 2, outputs)
            for k in pairs(count * group // groups * 2, stop):
                sums += weight[k, :, None] * dy[:, k, None]
            dx += sums
        leaves = np.zeros((len(y), outputs, features), np.float32)
        for lane in pairs(0, LANES):
            leaves += dy[:, :, None, lane] * x[:, None, :, lane]
        counter = Counter(tree)
        for leaf in leaves:
            counter.push(leaf)
        return y, as_type(dx, BF16), nodes(counter.partial(leaves.shape[1:]))


def bf16(x):
    """Round float32 numbers to the nearest bfloat16 number, as float32."""
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)).astype(np.uint32) & 0xFFFF0000
    return np.where(np.abs(x) < 2.0**-56, np.float32(0), nearest.view(np.float32))


def muladd(a, b, c):
    """Return a * b + c, computed in long double and rounded once if the build uses FMA."""
    if builds.running() == "generic" and platform.machine() == "x86_64":
        return a * b + c
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def nodes(partial):
    return [node for term in partial.terms for node in term.nodes]


def assert_same(actual, expected):
    """Compare bytes, without printing them if they differ."""
    equal = bytes_of(actual) == bytes_of(expected)
    assert equal


SIZES = [(1, None), (3, None), (31, None), (1000, None), (1, 1), (35, 7), (48, 48), (1260, 2)]


def check_bytes(layer, blocks, sums=Layer.by_loops):
    """Compare all passes, on all builds, with sums in the order that dense.h specifies."""
    tree = tree_of_blocks(blocks)
    by_loops = functools.cache(lambda build: sums(layer, tree))

    def fast():
        dx, dweight, *_ = layer.backward(tree)
        assert_same((layer.forward(), dx, nodes(dweight)), by_loops(builds.running()))
        return dx

    on_all_builds(fast)


@pytest.mark.parametrize("features, channels", SIZES)
@pytest.mark.parametrize("outputs", [1, 2, 7, 10, 16, 17, 67])
@pytest.mark.parametrize("blocks", [1, 3])
def test_sums_have_the_bytes_of_sums_in_order(outputs, features, channels, blocks):
    check_bytes(Layer(outputs, features, blocks, 3, channels), blocks)


@pytest.mark.parametrize("features, channels", [(1024, None), (3072, 256)])
@pytest.mark.parametrize("outputs, blocks", [(17, 1), (67, 3)])
def test_copies_of_weights_do_not_change_sums(features, channels, outputs, blocks):
    """Rows at multiples of 4 KiB are copied. A tile of 256 channels has 504 features."""
    check_bytes(Layer(outputs, features, blocks, 3, channels), blocks)


@pytest.fixture
def in_bf16(monkeypatch):
    monkeypatch.setattr(settings, "precision", "bf16")


@pytest.mark.parametrize("features, channels", [*SIZES, (1099, 157)])
@pytest.mark.parametrize("outputs", [1, 10, 33, 67])
@pytest.mark.parametrize("blocks", [1, 3])
def test_sums_of_bf16_have_the_bytes_of_sums_in_order(in_bf16, outputs, features, channels, blocks):
    layer = Layer(outputs, features, blocks, 3, channels, BF16)
    check_bytes(layer, blocks, Layer.by_loops_of_bf16)


def test_the_order_of_pairs_matters_in_bf16(in_bf16):
    """Rounding to bfloat16 hides most differences of dx, so its sums here cancel."""
    layer, tree = Layer(4, 300, 3, storage=BF16), tree_of_blocks(3)
    layer.weight[:, 0], layer.dy[..., 0] = 1, (2.0**24, 1, -(2.0**24), 1)
    results = layer.forward(), *layer.backward(tree)[:2]
    swapped = layer.by_loops_of_bf16(tree, first=0)
    for actual, other in zip(results, swapped, strict=True):
        assert bytes_of(actual) != bytes_of(other)


@pytest.mark.parametrize("outputs", [10, 40])
def test_an_empty_share_has_empty_results_in_bf16(in_bf16, outputs):
    layer = Layer(outputs, 35, 0, storage=BF16)
    tree = Tree(2, ((0, 2), (2, 2)), 1)
    dx, dweight, *_ = layer.backward(tree)
    assert layer.forward().shape == (0, outputs, LANES) and dx.shape == (0, 35, LANES)
    assert nodes(dweight) == []


def test_images_in_float32_are_rounded_in_bf16(in_bf16):
    """The layer after a dense layer reads float32, and its dx is float32."""
    layer, tree = Layer(40, 35, 2), tree_of_blocks(2)
    y, dx, dweight = layer.forward(), *layer.backward(tree)[:2]
    layer.x = layer.source = as_type(layer.x, BF16)
    expected = layer.by_loops_of_bf16(tree)
    assert dx.dtype == np.float32
    assert_same((y, dx, nodes(dweight)), (expected[0], as_type(expected[1], dx.dtype), expected[2]))
    assert_same(cpu.dense_dx(layer.dy, layer.weight), dx)


@pytest.mark.parametrize("channels", [None, 5])
@pytest.mark.parametrize("outputs", [1, 10, 16])
@pytest.mark.parametrize("precision, storage", [("fp32", np.float32), ("bf16", BF16)])
def test_one_pass_has_the_bytes_of_several(monkeypatch, outputs, channels, precision, storage):
    monkeypatch.setattr(settings, "precision", precision)
    layer, tree = Layer(outputs, 700, 5, 11, channels, storage), tree_of_blocks(5)
    one_pass = on_all_builds(lambda: layer.backward(tree))
    monkeypatch.setattr(dense, "FEW", 0)
    several = on_all_builds(lambda: layer.backward(tree))
    assert_same([*one_pass.values()], [*several.values()])


@pytest.mark.parametrize("blocks, run", [(1, (0, 1)), (8, (0, 8)), (13, (3, 12)), (19, (1, 2))])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("outputs", [10, 33])
def test_the_weights_gradient_is_folded_by_the_tree(outputs, plain, blocks, run):
    """The gradient equals the gradients of single blocks, added by the reduction tree."""
    tree = Tree(blocks, ((0, run[0]), run, (run[1], blocks)), 1, plain)
    layer = Layer(outputs, 77, run[1] - run[0])
    _, dweight, dbias, _ = layer.backward(tree)
    assert [len(nodes(v)) for v in (dweight, dbias)] == [len(tree.nodes[1])] * 2
    for gradient, part in ((dweight, 1), (dbias, 2)):
        counter = Counter(tree)
        for b in range(len(layer.dy)):
            x, dy = layer.x[b : b + 1], layer.dy[b : b + 1]
            leaf = cpu.dense_backward(dy, x, layer.weight, tree_of_blocks(1), ALL)[part]
            counter.push(nodes(leaf)[0].copy())
        assert_same(gradient, counter.partial(gradient.shape))


def test_unused_lanes_of_x_do_not_count():
    """The unused lanes of x may have any finite values, because the cotangent is zero there."""
    layer, tree = Layer(20, 50, 2, 3, channels=5), tree_of_blocks(2)
    y, dx, dweight, dbias, sums = layer.forward(), *layer.backward(tree)
    layer.source.x[-1, ..., 3:] = 1e30
    assert_same(layer.backward(tree), (dx, dweight, dbias, sums))
    assert_same(layer.forward()[:, :, :3], y[:, :, :3])
    assert not dx[-1, :, 3:].any()


def test_nan_passes():
    layer = Layer(12, 40, 1, channels=2)
    layer.source.x[0, 1, 3, 5] = np.nan
    y = layer.forward()
    assert np.isnan(y[0, :, 5]).all() and np.isnan(y).sum() == 12
    dweight = SingleRank().gplus(layer.backward(tree_of_blocks(1))[1])
    assert np.isnan(dweight[:, 23]).all() and np.isnan(dweight).sum() == 12


def test_sums_round_at_most_twice_as_much_as_blas():
    """Check the root mean square error against float64, for 11520 features and 4096 outputs."""

    def error(actual, exact):
        return np.sqrt(np.mean((actual - exact) ** 2))

    layer = Layer(40, 11520)
    exact = np.matmul(layer.weight.astype(np.float64), layer.x) + layer.bias[:, None]
    blas = [layer.weight @ block + layer.bias[:, None] for block in layer.x]
    assert error(layer.forward(), exact) < 2 * error(blas, exact)
    layer = Layer(4096, 48)
    exact = np.matmul(layer.weight.T.astype(np.float64), layer.dy)
    blas = [layer.weight.T @ block for block in layer.dy]
    assert error(cpu.dense_dx(layer.dy, layer.weight), exact) < 2 * error(blas, exact)


MEMORY = """
import sys
from pathlib import Path

import numpy as np

from mpidl.backends import CPU as cpu
from mpidl.core.fold import Tree

def megabytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) / 1024

folder, blocks, outputs, features = sys.argv[1], *map(int, sys.argv[2:])
x, dy = np.load(f"{folder}/x.npy"), np.load(f"{folder}/dy.npy")
tree = Tree(blocks, ((0, 1), (1, blocks)), 1)
cpu.dense_dweight(dy[:, :32].copy(), x[:, :32].copy(), tree)  # starts threads, allocates scratch
try:
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = megabytes("VmRSS")
    dweight = cpu.dense_dweight(dy, x, tree)
    print(megabytes("VmHWM") - before)
except (OSError, KeyError) as error:
    sys.exit(f"this system does not report peak memory: {error}")
np.save(f"{folder}/nodes.npy", [node for term in dweight.terms for node in term.nodes])
"""


@pytest.mark.slow("ranks")
def test_a_large_gradient_takes_two_buffers_more_than_it_has_nodes(tmp_path):
    """Measure the peak memory of a new process, which cannot reuse memory of other gradients."""
    outputs, features, tree = 1024, 4608, Tree(8, ((0, 1), (1, 8)), 1)
    size = outputs * features * 4 / 2**20
    x = numbers("x", 7, features, LANES, dtype=np.float32)
    dy = numbers("dy", 7, outputs, LANES, dtype=np.float32)
    for name, array in (("x", x), ("dy", dy)):
        np.save(tmp_path / f"{name}.npy", array)
    command = [sys.executable, "-c", MEMORY, *map(str, (tmp_path, 8, outputs, features))]
    env = os.environ | {"MPIDL_CPU": builds.running()}
    root = Path(__file__).parents[3]
    process = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    if "does not report peak memory" in process.stderr:
        pytest.skip(process.stderr.strip())
    assert process.returncode == 0, process.stderr
    nodes = np.load(tmp_path / "nodes.npy")
    assert len(nodes) == 3
    assert 2.5 * size < float(process.stdout) < (3 + 2) * size
    for node, blocks in zip(nodes, tree.nodes[1], strict=True):
        run = slice(blocks[0] - 1, blocks[1] - 1)
        doubles = (v[run].astype(np.float64) for v in (dy, x))
        expected = np.einsum("bkl,bfl->kf", *doubles, optimize=True)
        assert node.dtype == np.float32
        np.testing.assert_allclose(node, expected, rtol=0, atol=2e-6 * max(1, abs(expected).max()))


def test_flatten_leaves_an_activation_deferred(world):
    y = blocked(world, numbers("y", 40, 3, 2, 5, dtype=np.float32))
    vectors = (numbers(f"vector {i}", 3, dtype=np.float32) for i in range(3))
    x = DeferredActivation(DeferredInput(y.lanes, *vectors), y.batch, cpu.activation)
    flat = dl.flatten(x)
    assert isinstance(flat, DeferredActivation)
    assert flat.source is x.source and flat.shape == (40, 30)
    assert np.array_equal(flat.lanes, x.lanes.reshape(flat.lanes.shape))

    labels = blocked(world, np.arange(40) % 4, batch=y.batch)

    def loss(p, x):
        return dl.softmax_cross_entropy(dl.dense(dl.flatten(x), p["weight"], p["bias"]), labels)

    weights = {"weight": numbers("weight", 4, 30, dtype=np.float32), "bias": np.ones(4, np.float32)}
    _, gradients = dl.value_and_grad(loss, reduce=world)(weights, x)
    _, expected = dl.value_and_grad(loss, reduce=world)(weights, y.like(x.lanes))
    assert_same([*gradients.values()], [*expected.values()])


@pytest.mark.parametrize("outputs", [10, 20])
def test_fused_and_separate_layers_give_the_same_bytes(monkeypatch, world, outputs):
    """In a network, the layer reads a fused convolution's output and computes the sums of dx."""
    layers = [dl.Conv2D(3, 5, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Dense(outputs)]
    images = blocked(world, numbers("images", 37, 2, 9, 8, dtype=np.float32))
    labels = blocked(world, np.arange(37) % outputs, batch=images.batch)

    def results(fuse):
        net = dl.Network(layers, (2, 9, 8), seed=2)
        net.fuse = fuse
        loss = dl.value_and_grad(lambda n, x: dl.softmax_cross_entropy(n(x), labels), reduce=world)
        value, gradients, state = loss(net, images)
        return [value, *gradients.values(), *state.values()]

    expected = results(False)
    monkeypatch.delattr(cpu, "activation_sums")
    assert_same(results(True), expected)
