"""Test convolution on tensor cores: precision, tiles, algorithms and memory layouts.

tests/backends/test_conformance.py compares the results for all shapes with float64.
"""

import numpy as np
import pytest
from cases import CONVOLUTIONS
from conformance import LAST, arguments, expected, results, share
from test_conformance import BY_NAME

from mpidl.backends import settings
from mpidl.backends.gpu import array, conv, conv_direct, launching
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.shapes import Geometry
from mpidl.core.blocks import LANES
from mpidl.core.fold import Tree

SOME_LAYERS = "3x3", "3x3 of three channels", "unequal in both directions"
SLOW = pytest.mark.slow("gpu")
LIMITS = {"fp32": 6e-7, "tf32": 6e-4}  # bounds of (norm of the error) / (norm of the result)
NEEDS_DX = (True, False, False)


@pytest.fixture(autouse=True)
def _fp32_on_tensor_cores(monkeypatch):
    monkeypatch.setattr(settings, "precision", "fp32")
    monkeypatch.setattr(settings, "direct", False)


class Layer:
    """A convolution of the table with its arguments on the device. The last block is not full."""

    def __init__(self, label, blocks=1):
        values = arguments(BY_NAME[f"conv2d, {label}"], GPU, share(blocks))
        values |= arguments(BY_NAME[f"conv2d_backward, {label}"], GPU, share(blocks))
        names = "x", "weight", "bias", "dy", "counts", "tree"
        self.x, self.weight, self.bias, self.dy, self.counts, self.tree = map(values.get, names)
        self.geometry = values["geometry"]

    def forward(self, weight=None):
        weight = self.weight if weight is None else weight
        return conv.conv2d(self.x, weight, self.bias, self.geometry)

    def backward(self, weight=None, needs=NEEDS_DX):
        weight = self.weight if weight is None else weight
        return conv.conv2d_backward(
            self.dy, self.x, weight, self.geometry, self.counts, self.tree, needs
        )

    def leaves(self):
        return conv.leaves_of(self.dy, self.x, self.weight, self.geometry, self.tree)

    def products(self):
        """Return the bytes of y, dx and the leaves of dweight."""
        values = self.forward(), self.backward()[0], self.leaves()[0]
        return [value.numpy().tobytes() for value in values]


def errors_of(label, blocks=1):
    """Return the errors of y, dx, dweight and dbias against float64."""
    errors = []
    for name in (f"conv2d, {label}", f"conv2d_backward, {label}"):
        _, exact = expected(BY_NAME[name], blocks, LAST)
        errors += map(relative, results(BY_NAME[name], GPU, blocks), exact)
    return errors


def relative(value, exact):
    assert value.shape == exact.shape
    return np.linalg.norm(value - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("truncate", [False, True], ids=["nearest", "truncating"])
@pytest.mark.parametrize(
    "label",
    [pytest.param(label, marks=[] if label in SOME_LAYERS else SLOW) for label in CONVOLUTIONS],
)
def test_fp32_products_match_float64(emulated, label, truncate):
    with emulated(truncate=truncate):
        errors = errors_of(label)
    assert max(errors) <= LIMITS["fp32"], errors


@pytest.mark.parametrize("truncate", [False, True], ids=["nearest", "truncating"])
@pytest.mark.parametrize("label", SOME_LAYERS)
def test_tf32_products_match_float64_to_three_digits(emulated, monkeypatch, label, truncate):
    monkeypatch.setattr(settings, "precision", "tf32")
    with emulated(truncate=truncate):
        *errors, dbias_error = errors_of(label)
    assert 1e-5 <= min(errors) and max(errors) <= LIMITS["tf32"], errors
    assert dbias_error <= LIMITS["fp32"]


@pytest.mark.parametrize(
    "label", ["3x3", pytest.param("several tiles", marks=pytest.mark.slow("gpu"))]
)
def test_tile_size_does_not_change_a_byte(emulated, monkeypatch, label):
    outputs = []
    for processors, height in ((132, 64), (1, 128)):
        with emulated(processors=processors):
            layer = Layer(label, 3)
            assert {tile["BM"] for tile in tiles_of(layer, processors)} == {height}
            outputs.append(layer.products()[:2])
    monkeypatch.setattr(conv, "_columns", lambda filters: 32)
    conv.gemm_tile.cache_clear()
    with emulated():
        outputs.append(Layer(label, 3).products()[:2])
    conv.gemm_tile.cache_clear()
    assert outputs[0] == outputs[1] == outputs[2]


def tiles_of(layer, processors):
    """Yield the tiles of the forward pass and of the gradient of the input."""
    shape = conv.shape_of(layer.x.dims[1:-1], layer.weight.dims, layer.geometry)
    images = len(layer.x) * LANES
    for product in (shape, shape.turned()):
        yield conv.gemm_tile(product, images * product.out_height * product.out_width, processors)


@pytest.mark.parametrize("label", ["3x3", "unequal in both directions"])
def test_kernels_compiled_for_one_shape_give_the_same_bytes(emulated, label):
    """On a real GPU, kernels are compiled with the shape of each layer as constants."""
    with emulated() as device:
        layer = Layer(label)
        generic = layer.products()
        device.specialize = True
        assert layer.products() == generic
        assert any("CONV_SHAPE" in dict(unit.defines) for unit in launching.process.loaded)


def test_unaligned_weights_give_the_same_bytes(device):
    layer = Layer("3x3")
    weight = layer.weight
    moved = array.empty((weight.size + 1,)).part(1, (weight.size,))
    launching.upload(moved, launching.download(weight))
    moved = array.Array(moved.buffer, "f4", weight.shape, weight.dims, weight.order, moved.offset)
    assert moved.address % 16 == 4
    assert layer.forward(moved).numpy().tobytes() == layer.forward().numpy().tobytes()
    dx = layer.backward(moved)[0].numpy()
    assert relative(dx, layer.backward()[0].numpy()) <= LIMITS["fp32"]


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_nan_and_infinity_spread_to_their_windows_only(device, monkeypatch, precision, value):
    monkeypatch.setattr(settings, "precision", precision)
    layer = Layer("3x3")
    x = layer.x.numpy()
    x[0, 3, 2, 1, 5] = value
    layer.x = array.lanes(x)
    y = layer.forward().numpy()
    assert not np.isfinite(y[0, :, 1:4, :3, 5]).any() and np.isfinite(y[0, :, 0]).all()
    assert np.isfinite(y[..., :5]).all() and np.isfinite(y[..., 6:]).all()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("images", [1, 2, 4, 8, 16])
def test_dweight_from_leaves_of_any_size(device, monkeypatch, images, direct):
    monkeypatch.setattr(settings, "direct", direct)
    monkeypatch.setattr(conv_direct, "images_per_leaf", lambda *_: images)
    leaves, per_block = Layer("3x3", 2).leaves()
    assert len(leaves) == 2 * per_block == 2 * LANES // images
    assert errors_of("3x3", 2)[2] <= LIMITS["fp32"]


@pytest.mark.parametrize("reason", ["architecture", "settings", "size"])
def test_direct_kernels_replace_tensor_cores(emulated, monkeypatch, reason):
    monkeypatch.setattr(settings, "direct", reason == "settings")
    monkeypatch.setattr(conv, "LARGEST", 8 if reason == "size" else conv.LARGEST)
    with emulated(architecture="sm_75" if reason == "architecture" else "sm_90") as device:
        errors = errors_of("3x3 by 2")
        used = {name for name in device.launched if name.startswith("conv")}
    assert used == {"conv_direct_forward", "conv_direct_dx", "conv_direct_dweight"}
    assert max(errors) <= LIMITS["fp32"]


def test_other_memory_layouts_are_refused(device):
    layer = Layer("3x3")
    with pytest.raises(ValueError, match="NHWC"):
        layer.forward(array.plain(layer.weight.numpy()))
    layer.dy = array.lanes(layer.dy.numpy().reshape(1, -1, LANES))
    for needs in (NEEDS_DX, (False, True, False)):
        with pytest.raises(ValueError, match="gradients of images"):
            layer.backward(needs=needs)


def test_leaf_size_depends_on_the_mini_batch_not_on_the_share(device, monkeypatch):
    """Leaves are larger if there are enough tiles or images to fill the device."""
    monkeypatch.setattr(device, "processors", 100)
    sizes = [
        conv_direct.images_per_leaf(tiles, tree)
        for tiles in (1, 3, 10, 100)
        for tree in (Tree(8, ((0, 8),), 0), Tree(8, ((0, 5), (5, 8)), 1))
    ]
    assert sizes == [1, 1, 1, 1, 4, 4, 16, 16]


def test_too_large_layers_are_refused():
    geometry = Geometry((1, 1), ((0, 0), (0, 0)))
    with pytest.raises(ValueError, match="too large"):
        conv_direct._sizes((1 << 11, 1 << 10, 1 << 10), (1, 1 << 11, 1, 1), geometry)
