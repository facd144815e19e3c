"""Convolution on tensor cores against NumPy in float64, on the emulated device."""

import numpy as np
import pytest
from cases import CONVOLUTIONS

from mpidl import shapes
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.backends.gpu import array, batchnorm, conv, conv_direct, fold, launching
from mpidl.blocks import LANES
from mpidl.fold import Tree

ALL_LAYERS = pytest.mark.parametrize("name", CONVOLUTIONS)
SOME_LAYERS = pytest.mark.parametrize(
    "name", ["3x3", "3x3 of three channels", "unequal in both directions"]
)
SLOW = pytest.mark.slow("gpu")
LIMITS = {"fp32": 6e-7, "tf32": 6e-4}  # norm of the error / norm of the result
NEEDS_ALL, NEEDS_DX = (True, True, True), (True, False, False)


def single_rank_tree(blocks):
    return Tree(blocks, ((0, blocks),), 0)


@pytest.fixture(autouse=True)
def _fp32_on_tensor_cores(monkeypatch):
    monkeypatch.setattr(settings, "precision", "fp32")
    monkeypatch.setattr(settings, "direct", False)


class Case:
    """Random arrays for one shape of convolution; the last block is not full."""

    def __init__(self, name, blocks=1):
        image, (k, r, s), *geometry = CONVOLUTIONS[name]
        self.geometry = tuple(geometry)
        rng = np.random.default_rng(len(name))
        self.x = rng.standard_normal((blocks, *image, LANES), np.float32)
        self.weight = rng.standard_normal((k, image[0] // self.geometry[3], r, s), np.float32)
        self.bias = rng.standard_normal(k, np.float32)
        output = shapes.conv2d_shape(image, self.weight.shape, *self.geometry[:3])
        self.dy = rng.standard_normal((blocks, *output, LANES), np.float32)
        self.dy[-1:, ..., 9:] = 0
        self.counts = np.full(blocks, LANES)
        self.counts[-1:] = 9

    def exact(self):
        """Return y, dx, dweight and dbias in float64."""
        dy, x, weight, bias = (
            a.astype(np.float64) for a in (self.dy, self.x, self.weight, self.bias)
        )
        tree = single_rank_tree(len(x))
        y = reference.conv2d(x, weight, bias, *self.geometry)
        dx, *partials, _ = reference.conv2d_backward(
            dy, x, weight, *self.geometry, self.counts, tree, NEEDS_ALL
        )
        return y, dx, *(p.terms[0].nodes[0] for p in partials)

    def on_device(self):
        """Upload dy, x, weight, bias and the number of used images."""
        count = np.array([self.counts.sum()], np.int32)
        return (
            array.lanes(self.dy),
            array.lanes(self.x),
            array.filters(self.weight),
            array.plain(self.bias),
            array.plain(count),
        )

    def computed(self):
        """Return y, dx, dweight and dbias of the kernels."""
        dy, x, weight, bias, count = self.on_device()
        tree = single_rank_tree(len(self.x))
        y, _ = conv.conv2d_moments(x, weight, bias, *self.geometry, count, tree)
        dx, *partials, _ = conv.conv2d_backward(
            dy, x, weight, *self.geometry, count, tree, NEEDS_ALL
        )
        return [v.numpy() for v in (y, dx, *(p.terms[0].nodes[0] for p in partials))]

    def products(self):
        """Return the bytes of y, dx and the leaves of dweight."""
        dy, x, weight, bias, _ = self.on_device()
        tree = single_rank_tree(len(self.x))
        y = conv.conv2d(x, weight, bias, *self.geometry)
        dx, *_ = conv.conv2d_backward(dy, x, weight, *self.geometry, None, tree, NEEDS_DX)
        leaves, _ = conv.leaves_of(dy, x, weight, self.geometry, tree)
        return [v.numpy().tobytes() for v in (y, dx, leaves)]


def error(value, exact):
    assert value.shape == exact.shape
    return np.linalg.norm(value - exact) / np.linalg.norm(exact)


def errors_of(case):
    """Return the errors of y, dx, dweight and dbias."""
    return [error(*pair) for pair in zip(case.computed(), case.exact(), strict=True)]


@pytest.mark.parametrize(
    "truncate", [False, pytest.param(True, marks=SLOW)], ids=["nearest", "truncating"]
)
@ALL_LAYERS
def test_fp32_products_match_float64(emulated, name, truncate):
    with emulated(truncate=truncate):
        errors = errors_of(Case(name))
    assert max(errors) <= LIMITS["fp32"], errors


@pytest.mark.parametrize("truncate", [False, True], ids=["nearest", "truncating"])
@SOME_LAYERS
def test_tf32_products_match_float64_to_three_digits(emulated, monkeypatch, name, truncate):
    monkeypatch.setattr(settings, "precision", "tf32")
    with emulated(truncate=truncate):
        *errors, dbias_error = errors_of(Case(name))
    assert 1e-5 <= min(errors) and max(errors) <= LIMITS["tf32"], errors
    assert dbias_error <= LIMITS["fp32"]


@pytest.mark.parametrize("name", ["3x3", "several tiles"])
def test_tile_size_does_not_change_a_byte(emulated, monkeypatch, name):
    case, outputs = Case(name, 2), []
    for processors in (132, 1):  # tiles of 64 rows, and of 128
        with emulated(processors=processors) as device:
            outputs.append(case.products()[:2])
            heights = {conv.gemm_tile(*key, device.processors)["BM"] for key in _products(case)}
            assert heights == ({64} if processors > 1 else {128})
    monkeypatch.setattr(conv, "_columns", lambda filters: 32)
    conv.gemm_tile.cache_clear()
    with emulated():
        outputs.append(case.products()[:2])
    conv.gemm_tile.cache_clear()
    assert outputs[0] == outputs[1] == outputs[2]


def _products(case):
    """Return (Shape, rows) of the forward and backward-data products."""
    shape = conv.shape_of(case.x.shape[1:-1], case.weight.shape, *case.geometry)
    images = len(case.x) * LANES
    return [(s, images * s.out_height * s.out_width) for s in (shape, shape.turned())]


@pytest.mark.parametrize("name", ["3x3", "unequal in both directions"])
def test_kernels_compiled_for_one_shape_give_the_same_bytes(emulated, name):
    """A real device compiles kernels with the shape of each layer as constants."""
    case = Case(name)
    with emulated() as device:
        expected = case.products()
        device.specialize = True
        assert case.products() == expected
        assert any("CONV_SHAPE" in dict(unit.defines) for unit in launching._loaded)


def test_unaligned_weights_give_the_same_bytes(device):
    case = Case("3x3")
    dy, x, weight, bias, _ = case.on_device()
    expected = conv.conv2d(x, weight, bias, *case.geometry).numpy().tobytes()
    moved = array.empty((weight.size + 1,)).part(1, (weight.size,))
    launching.upload(moved, launching.download(weight))
    moved = array.Array(moved.buffer, "f4", weight.shape, weight.dims, weight.order, moved.offset)
    assert moved.address % 16 == 4
    assert conv.conv2d(x, moved, bias, *case.geometry).numpy().tobytes() == expected
    dx = conv.conv2d_backward(dy, x, moved, *case.geometry, None, single_rank_tree(1), NEEDS_DX)[0]
    assert error(dx.numpy(), case.exact()[1]) <= LIMITS["fp32"]


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_nan_and_infinity_spread_to_their_windows_only(device, monkeypatch, precision, value):
    monkeypatch.setattr(settings, "precision", precision)
    case = Case("3x3")
    case.x[0, 3, 2, 2, 5] = value
    y = case.computed()[0]
    assert not np.isfinite(y[0, :, 1:4, 1:4, 5]).any()
    assert np.isfinite(y[..., :5]).all() and np.isfinite(y[..., 6:]).all()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("images", [1, 2, 4, 8, 16])
def test_dweight_from_leaves_of_any_size(device, monkeypatch, images, direct):
    monkeypatch.setattr(settings, "direct", direct)
    case = Case("3x3", 2)
    monkeypatch.setattr(conv_direct, "images_per_leaf", lambda *_: images)
    dy, x, weight, _, _ = case.on_device()
    leaves, per_block = conv.leaves_of(dy, x, weight, case.geometry, single_rank_tree(2))
    assert len(leaves) == 2 * per_block == 2 * LANES // images
    assert error(case.computed()[2], case.exact()[2]) <= LIMITS["fp32"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_backward_between_deferred_activations(device, overwrite):
    """The backward pass between the activations after and before the layer, with its sums."""
    case, tree = Case("3x3", 2), single_rank_tree(2)
    rng = np.random.default_rng(7)
    c, k = case.x.shape[1], case.dy.shape[1]
    before = [rng.uniform(-0.5, 0.5, c), rng.uniform(0.5, 2, c), rng.uniform(-1, 1, c)]
    after = [rng.uniform(-0.5, 0.5, k) for _ in range(6)]  # mean, scale, beta and factors
    before, after = ([v.astype(np.float32) for v in vectors] for vectors in (before, after))
    host_y = rng.standard_normal(case.dy.shape, np.float32)

    # in float64, by separate functions
    wide = [v.astype(np.float64) for v in (case.x, *before, host_y, *after, case.dy, case.weight)]
    x, y, dy, weight = wide[0], wide[4], *wide[-2:]
    active = np.maximum(reference.batchnorm(*wide[:4]), 0)
    dz = reference.relu_dx(dy, np.maximum(reference.batchnorm(*wide[4:8]), 0))
    dz = reference.batchnorm_dx(dz, y, wide[5], *wide[8:11], case.counts)
    exact_dx, *exact, _ = reference.conv2d_backward(
        dz, active, weight, *case.geometry, case.counts, tree, NEEDS_ALL
    )
    dx = reference.relu_dx(exact_dx, active)
    exact.append(reference.batchnorm_sums(dx, x, before[0], tree))

    dy, x, weight, _, count = case.on_device()
    source = batchnorm.source(x, *map(array.plain, before))
    source_after = batchnorm.source(array.lanes(host_y), *map(array.plain, after[:3]))
    activation_after = source_after, *map(array.plain, after[3:])
    dx, *partials = conv.conv2d_backward(
        *(dy, source, weight, *case.geometry, count, tree, NEEDS_ALL),
        *(activation_after, True, overwrite),
    )
    assert error(dx.numpy(), exact_dx) <= 1e-6
    for partial, expected in zip(partials, exact, strict=True):  # dweight, dbias, sums
        assert error(partial.terms[0].nodes[0].numpy(), expected.terms[0].nodes[0]) <= 2e-6
    unchanged = (
        launching.download(dy).tobytes() == launching.download(case.on_device()[0]).tobytes()
    )
    assert unchanged == (not overwrite)


@pytest.mark.parametrize("reason", ["architecture", "settings", "size"])
def test_direct_kernels_replace_tensor_cores(emulated, monkeypatch, reason):
    case = Case("3x3 by 2")
    monkeypatch.setattr(settings, "direct", reason == "settings")
    monkeypatch.setattr(conv, "LARGEST", 8 if reason == "size" else conv.LARGEST)
    with emulated(architecture="sm_75" if reason == "architecture" else "sm_90") as device:
        errors = errors_of(case)
        used = {name for name in device.launched if name.startswith("conv")}
    assert used == {"conv_direct_forward", "conv_direct_dx", "conv_direct_dweight"}
    assert max(errors) <= LIMITS["fp32"]


def test_other_memory_layouts_are_refused(device):
    case = Case("3x3")
    dy, x, weight, bias, _ = case.on_device()
    with pytest.raises(ValueError, match="NHWC"):
        conv.conv2d(x, array.plain(case.weight), bias, *case.geometry)
    flat = array.lanes(case.dy.reshape(1, -1, LANES))
    for needs in (NEEDS_DX, (False, True, False)):
        with pytest.raises(ValueError, match="gradients of images"):
            conv.conv2d_backward(flat, x, weight, *case.geometry, None, single_rank_tree(1), needs)


def test_nodes_of_dweight_have_the_memory_layout_of_the_weights(device):
    case = Case("two groups")
    dy, x, weight, _, _ = case.on_device()
    leaves, per_block = conv.leaves_of(dy, x, weight, case.geometry, single_rank_tree(1))
    partial = fold.partial_of_leaves(leaves, single_rank_tree(1), per_block, like=weight)
    (node,) = partial.terms[0].nodes
    assert node.order == weight.order and node.shape == weight.shape


def test_leaf_size_depends_on_the_mini_batch_not_on_the_share(device, monkeypatch):
    """Leaves are large if tiles or images alone already fill the device."""
    monkeypatch.setattr(device, "processors", 100)
    sizes = [
        conv_direct.images_per_leaf(tiles, tree)
        for tiles in (1, 3, 10, 100)
        for tree in (single_rank_tree(8), Tree(8, ((0, 5), (5, 8)), 1))
    ]
    assert sizes == [1, 1, 1, 1, 4, 4, 16, 16]


def test_too_large_layers_are_refused():
    geometry = (1, 1), ((0, 0), (0, 0)), (1, 1), 1
    with pytest.raises(ValueError, match="too large"):
        conv_direct._geometry((1 << 11, 1 << 10, 1 << 10), (1, 1 << 11, 1, 1), *geometry)
