"""Convolution on tensor cores against float64 NumPy, on the emulated device."""

import numpy as np
import pytest

from mpidl import shapes
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.gpu import array, batchnorm, conv, conv_direct, fold, launching
from mpidl.blocks import LANES
from mpidl.fold import Tree

SAME = ((1, 1), (1, 1))
NONE = ((0, 0), (0, 0))
ONE = (1, 1)

# (C, H, W), (K, R, S), stride, padding, dilation, groups
SHAPES = {
    "digits 1": ((1, 8, 9), (20, 5, 5), ONE, NONE, ONE, 1),
    "digits 2": ((20, 5, 4), (20, 3, 3), ONE, SAME, ONE, 1),
    "cifar 1": ((3, 4, 5), (32, 3, 3), ONE, SAME, ONE, 1),
    "cifar 9": ((64, 2, 3), (64, 3, 3), ONE, SAME, ONE, 1),
    "alexnet 1": ((3, 19, 15), (20, 11, 11), (4, 4), ((2, 2), (2, 2)), ONE, 1),
    "two groups": ((8, 5, 4), (40, 3, 3), ONE, SAME, ONE, 2),
    "a group a channel": ((4, 5, 5), (8, 3, 3), ONE, SAME, ONE, 4),
    "1x1": ((5, 3, 4), (20, 1, 1), ONE, NONE, ONE, 1),
    "1x1 by 2": ((20, 6, 5), (24, 1, 1), (2, 2), NONE, ONE, 1),
    "3x3 by 2": ((3, 7, 6), (20, 3, 3), (2, 2), SAME, ONE, 1),
    "even filters": ((20, 4, 5), (24, 2, 4), ONE, ((0, 1), (2, 1)), ONE, 1),
    "each way its own": ((8, 8, 9), (40, 3, 2), (2, 3), ((2, 1), (0, 3)), (1, 2), 2),
    "wide padding": ((20, 3, 4), (20, 3, 3), ONE, ((3, 3), (4, 3)), (2, 2), 1),
    "pixels between filters": ((3, 4, 4), (21, 2, 2), (3, 3), ((4, 4), (4, 4)), ONE, 1),
    "several tiles": ((36, 3, 2), (72, 3, 3), ONE, SAME, ONE, 1),
    "odd several tiles": ((17, 3, 2), (65, 3, 2), ONE, ((0, 1), (1, 0)), ONE, 1),
}
EACH = pytest.mark.parametrize("name", SHAPES)
FEW = pytest.mark.parametrize("name", ["digits 2", "cifar 1", "each way its own"])
MORE = pytest.mark.slow("gpu")
LIMITS = {"fp32": 6e-7, "tf32": 6e-4}  # of the error's norm, as a part of the result's


def whole(blocks):
    return Tree(blocks, ((0, blocks),), 0)


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    monkeypatch.setattr(settings, "precision", "fp32")
    monkeypatch.setattr(settings, "direct", False)


class Case:
    """Random arrays of one shape; the last block is not full."""

    def __init__(self, name, blocks=1):
        image, (k, r, s), *how = SHAPES[name]
        self.how = tuple(how)
        rng = np.random.default_rng(len(name))
        self.x = rng.standard_normal((blocks, *image, LANES), np.float32)
        self.weight = rng.standard_normal((k, image[0] // self.how[3], r, s), np.float32)
        self.bias = rng.standard_normal(k, np.float32)
        output = shapes.conv2d_shape(image, self.weight.shape, *self.how[:3])
        self.dy = rng.standard_normal((blocks, *output, LANES), np.float32)
        self.dy[-1:, ..., 9:] = 0
        self.counts = np.full(blocks, LANES)
        self.counts[-1:] = 9

    def exact(self):
        """y, dx, dweight and dbias in float64."""
        dy, x, weight, bias = (
            a.astype(np.float64) for a in (self.dy, self.x, self.weight, self.bias)
        )
        tree = whole(len(x))
        y = reference.conv2d(x, weight, bias, *self.how)
        dx, *partials, _ = reference.conv2d_backward(
            dy, x, weight, *self.how, self.counts, tree, (True, True, True)
        )
        return y, dx, *(p.terms[0].nodes[0] for p in partials)

    def on_device(self, blocks=slice(None)):
        """dy, x, weight, bias of some blocks, and how many of their images are valid."""
        count = np.array([self.counts[blocks].sum()], np.int32)
        return (
            array.lanes(self.dy[blocks]),
            array.lanes(self.x[blocks]),
            array.filters(self.weight),
            array.plain(self.bias),
            array.plain(count),
        )

    def found(self):
        """The same by the kernels, of one rank."""
        dy, x, weight, bias, count = self.on_device()
        tree = whole(len(self.x))
        y, _ = conv.conv2d_moments(x, weight, bias, *self.how, count, tree)
        dx, *partials, _ = conv.conv2d_backward(
            dy, x, weight, *self.how, count, tree, (True, True, True)
        )
        return [v.numpy() for v in (y, dx, *(p.terms[0].nodes[0] for p in partials))]

    def products(self):
        """y, dx and the leaves of dweight, as bytes."""
        dy, x, weight, bias, _ = self.on_device()
        tree = whole(len(self.x))
        y = conv.conv2d(x, weight, bias, *self.how)
        dx, *_ = conv.conv2d_backward(dy, x, weight, *self.how, None, tree, (True, False, False))
        leaves, _ = conv.leaves_of(dy, x, weight, self.how, tree)
        return [v.numpy().tobytes() for v in (y, dx, leaves)]


def error(found, expected):
    assert found.shape == expected.shape
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    "truncate", [False, pytest.param(True, marks=MORE)], ids=["nearest", "truncating"]
)
@EACH
def test_against_float64(emulated, name, truncate):
    case = Case(name)
    with emulated(truncate=truncate):
        found = case.found()
    errors = [error(*pair) for pair in zip(found, case.exact(), strict=True)]
    assert max(errors) <= LIMITS["fp32"], errors
    assert found[0].dtype == np.float32


@pytest.mark.parametrize("truncate", [False, True], ids=["nearest", "truncating"])
@FEW
def test_tf32(emulated, monkeypatch, name, truncate):
    monkeypatch.setattr(settings, "precision", "tf32")
    case = Case(name)
    with emulated(truncate=truncate):
        found = case.found()
    *errors, of_bias = (error(*pair) for pair in zip(found, case.exact(), strict=True))
    assert 1e-5 <= min(errors) and max(errors) <= LIMITS["tf32"], errors
    assert of_bias <= LIMITS["fp32"]


@pytest.mark.parametrize("name", ["digits 2", "several tiles"])
def test_no_byte_depends_on_the_tile(emulated, monkeypatch, name):
    case, found = Case(name, 2), []
    for processors in (132, 1):  # tiles of 64 rows, and of 128
        with emulated(processors=processors) as device:
            found.append(case.products()[:2])
            heights = {conv.gemm_tile(*key, device.processors)["BM"] for key in _products(case)}
            assert heights == ({64} if processors > 1 else {128})
    monkeypatch.setattr(conv, "_columns", lambda filters: 32)
    conv.gemm_tile.cache_clear()
    with emulated():
        found.append(case.products()[:2])
    conv.gemm_tile.cache_clear()
    assert found[0] == found[1] == found[2]


def _products(case):
    """(Shape, rows) of the forward and backward-data products."""
    shape = conv.shape_of(case.x.shape[1:-1], case.weight.shape, *case.how)
    images = len(case.x) * LANES
    return [(s, images * s.out_height * s.out_width) for s in (shape, shape.turned())]


@pytest.mark.parametrize("name", ["digits 2", "each way its own"])
def test_shapes_as_constants_give_the_same_bytes(emulated, name):
    """What a real device compiles for each layer."""
    case = Case(name)
    with emulated() as device:
        found = case.products()
        device.specialize = True
        assert case.products() == found
        assert any("CONV_SHAPE" in dict(unit.defines) for unit in launching._loaded)


def test_what_is_not_aligned_is_read_by_fours_of_bytes(device):
    case = Case("digits 2")
    dy, x, weight, bias, _ = case.on_device()
    expected = conv.conv2d(x, weight, bias, *case.how).numpy().tobytes()
    room = array.empty((weight.size + 1,))
    moved = room.part(1, (weight.size,))
    launching.upload(moved, launching.download(weight))
    moved = array.Array(moved.buffer, "f4", weight.shape, weight.dims, weight.order, moved.offset)
    assert moved.address % 16 == 4
    assert conv.conv2d(x, moved, bias, *case.how).numpy().tobytes() == expected
    dx = conv.conv2d_backward(dy, x, moved, *case.how, None, whole(1), (True, False, False))[0]
    assert error(dx.numpy(), case.exact()[1]) <= LIMITS["fp32"]


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_what_is_no_number_stays_none(device, monkeypatch, precision, value):
    monkeypatch.setattr(settings, "precision", precision)
    case = Case("digits 2")
    case.x[0, 3, 2, 2, 5] = value
    y = case.found()[0]
    assert not np.isfinite(y[0, :, 1:4, 1:4, 5]).any()
    assert np.isfinite(y[..., :5]).all() and np.isfinite(y[..., 6:]).all()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("images", [1, 2, 4, 8, 16])
def test_leaves_of_any_size(device, monkeypatch, images, direct):
    monkeypatch.setattr(settings, "direct", direct)
    case = Case("digits 2", 2)
    monkeypatch.setattr(conv_direct, "images_per_leaf", lambda *_: images)
    dy, x, weight, _, _ = case.on_device()
    leaves, per_block = conv.leaves_of(dy, x, weight, case.how, whole(2))
    assert len(leaves) == 2 * per_block == 2 * LANES // images
    assert error(case.found()[2], case.exact()[2]) <= LIMITS["fp32"]


@pytest.mark.parametrize("reuse", [False, True])
def test_between_activations(device, reuse):
    """Reading a DeferredInput, and backward through the activation behind and to the one before."""
    case = Case("digits 2", 2)
    rng = np.random.default_rng(7)
    c, k = case.x.shape[1], case.dy.shape[1]
    before = [rng.uniform(-0.5, 0.5, c), rng.uniform(0.5, 2, c), rng.uniform(-1, 1, c)]
    behind = [rng.uniform(-0.5, 0.5, k) for _ in range(6)]
    stored = rng.standard_normal(case.dy.shape, np.float32)

    def vectors(values, dtype=np.float32):
        return [np.asarray(v, np.float32).astype(dtype) for v in values]

    def activation(x, mean, scale, beta):
        return np.maximum(reference.batchnorm(x, mean, scale, beta), 0)

    # in float64, by the separate functions
    tree, double = whole(2), np.float64
    x = activation(case.x.astype(double), *vectors(before, double))
    mean, scale, beta, a, b, c_ = vectors(behind, double)
    y = stored.astype(double)
    dz = reference.relu_dx(case.dy.astype(double), activation(y, mean, scale, beta))
    dz = reference.batchnorm_dx(dz, y, mean, a, b, c_, case.counts)
    weight = case.weight.astype(double)
    needs = True, True, True
    exact = reference.conv2d_backward(dz, x, weight, *case.how, case.counts, tree, needs)
    exact_y = reference.conv2d(x, weight, case.bias.astype(double), *case.how)
    dx = reference.relu_dx(exact[0], x)
    exact_sums = reference.batchnorm_sums(dx, case.x.astype(double), vectors(before)[0], tree)

    dy, _, w, bias, count = case.on_device()
    source = batchnorm.source(array.lanes(case.x), *map(array.plain, vectors(before)))
    after = batchnorm.source(array.lanes(stored), *map(array.plain, vectors(behind[:3])))
    found_y, moments = conv.conv2d_moments(source, w, bias, *case.how, count, tree)
    assert error(found_y.numpy(), exact_y) <= LIMITS["fp32"]
    expected = reference.moments(exact_y, case.counts, tree).terms[0].nodes[0]
    assert error(moments.terms[0].nodes[0].numpy(), expected) <= LIMITS["fp32"]

    rest = [array.plain(v) for v in vectors(behind[3:])]
    dx, dweight, dbias, sums = conv.conv2d_backward(
        dy, source, w, *case.how, count, tree, needs, (after, *rest), True, reuse
    )
    assert error(dx.numpy(), exact[0]) <= 1e-6
    partials = zip((dweight, dbias, sums), (*exact[1:3], exact_sums), strict=True)
    for one, other in partials:
        assert error(one.terms[0].nodes[0].numpy(), other.terms[0].nodes[0]) <= 2e-6
    given = launching.download(dy).tobytes()
    assert (given == launching.download(array.lanes(case.dy)).tobytes()) == (not reuse)


@pytest.mark.parametrize("why", ["architecture", "settings", "size"])
def test_where_tensor_cores_do_not_serve(emulated, monkeypatch, why):
    case = Case("3x3 by 2")
    monkeypatch.setattr(settings, "direct", why == "settings")
    monkeypatch.setattr(conv, "LARGEST", 8 if why == "size" else conv.LARGEST)
    with emulated(architecture="sm_75" if why == "architecture" else "sm_90") as device:
        found = case.found()
        used = {name for name in device.launched if name.startswith("conv")}
    assert used == {"conv_direct_forward", "conv_direct_dx", "conv_direct_dweight"}
    for one, exact in zip(found, case.exact(), strict=True):
        assert error(one, exact) <= LIMITS["fp32"]


def test_what_lies_otherwise_in_memory_is_refused(device):
    case = Case("digits 2")
    dy, x, weight, bias, _ = case.on_device()
    with pytest.raises(ValueError, match="NHWC"):
        conv.conv2d(x, array.plain(case.weight), bias, *case.how)
    flat = array.lanes(case.dy.reshape(1, -1, LANES))
    for needs in ((True, False, False), (False, True, False)):
        with pytest.raises(ValueError, match="gradients of images"):
            conv.conv2d_backward(flat, x, weight, *case.how, None, whole(1), needs)


def test_leaves_fold_in_the_order_of_the_weights(device):
    """The nodes of a gradient lie as the learnable does."""
    case = Case("two groups")
    dy, x, weight, _, _ = case.on_device()
    leaves, per_block = conv.leaves_of(dy, x, weight, case.how, whole(1))
    partial = fold.partial_of_leaves(leaves, whole(1), per_block, like=weight)
    (node,) = partial.terms[0].nodes
    assert node.order == weight.order and node.shape == weight.shape


def test_leaves_are_chosen_by_the_whole_mini_batch(device, monkeypatch):
    """Few where tiles or images fill the device already, and always as one rank has them."""
    monkeypatch.setattr(device, "processors", 100)
    sizes = [
        conv_direct.images_per_leaf(tiles, tree)
        for tiles in (1, 3, 10, 100)
        for tree in (whole(8), Tree(8, ((0, 5), (5, 8)), 1))
    ]
    assert sizes == [1, 1, 1, 1, 4, 4, 16, 16]


def test_what_is_too_large_is_refused():
    with pytest.raises(ValueError, match="too large"):
        conv_direct._geometry((1 << 11, 1 << 10, 1 << 10), (1, 1 << 11, 1, 1), ONE, NONE, ONE, 1)
