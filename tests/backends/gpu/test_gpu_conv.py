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
from mpidl.backends.gpu.recorder import Recorder
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

    def products(self):
        """Return the bytes of y, dx and the nodes of dweight and dbias."""
        dx, *sums, _ = self.backward(needs=(True, True, True))
        values = self.forward(), dx, *(node for total in sums for node in total.terms[0].nodes)
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
    monkeypatch.setattr(conv, "SHORTEST", 1000)  # no tile is shared by several thread blocks
    conv.gemm_tile.cache_clear()
    outputs = []
    for processors, height in ((132, 64), (1, 128)):
        with emulated(processors=processors) as device:
            layer = Layer(label, 3)
            assert {tile["BM"] for tile in tiles_of(layer, device)} == {height}
            outputs.append(layer.products()[:2])
    monkeypatch.setattr(conv, "_columns", lambda filters: 32)
    conv.gemm_tile.cache_clear()
    with emulated():
        outputs.append(Layer(label, 3).products()[:2])
    conv.gemm_tile.cache_clear()
    assert outputs[0] == outputs[1] == outputs[2]


def tiles_of(layer, device):
    """Yield the tiles of the forward pass and of the gradient of the input."""
    shape = conv.shape_of(layer.x.dims[1:-1], layer.weight.dims, layer.geometry)
    images = len(layer.x) * LANES
    for product in (shape, shape.turned()):
        rows = images * product.out_height * product.out_width
        yield conv.gemm_tile(product, rows, device.processors, device.shared, settings.precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_thread_blocks_that_share_a_tile_add_up_in_order(emulated, monkeypatch, precision, order):
    """The order in which they arrive does not matter; on a small GPU, no tile is shared."""
    monkeypatch.setattr(settings, "precision", precision)
    monkeypatch.setattr(conv, "SHORTEST", 1)
    outputs = []
    for processors, schedule in ((10_000, 0), (10_000, order), (1, 0)):
        conv.gemm_tile.cache_clear()
        with emulated(order=schedule, processors=processors) as device:
            layer = Layer("several tiles", 2)
            (forward, *_) = tiles_of(layer, device)
            assert (forward["SPLITS"] > 1) == (processors > 1)
            outputs.append(layer.forward().astype("f4").numpy())
            second = layer.forward().astype("f4").numpy()
            assert second.tobytes() == outputs[-1].tobytes()
    conv.gemm_tile.cache_clear()
    assert outputs[0].tobytes() == outputs[1].tobytes()
    assert relative(outputs[0], outputs[2]) < {"fp32": LIMITS["fp32"], "bf16": 2e-3}[precision]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moments_do_not_depend_on_the_order_of_threads(emulated, monkeypatch, precision):
    """A thread reads rows of the tile to which others have added the bias, and which they round."""
    monkeypatch.setattr(settings, "precision", precision)
    tile = set()
    for order in (0, 1, 2):
        with emulated(order=order):
            layer = Layer("3x3", 2)  # a tile has pixels of both blocks
            y, moments = conv.conv2d_moments(
                layer.x, layer.weight, layer.bias, layer.geometry, layer.counts, layer.tree
            )
            (root,) = moments.terms[0].nodes
            tile.add((y.astype("f4").numpy().tobytes(), root.numpy().tobytes()))
    assert layer.bias is not None and len(tile) == 1


def test_division_of_a_tile_does_not_depend_on_the_precision_before(emulated, monkeypatch):
    splits, outputs = [], []
    for precisions in (("bf16",), ("tf32", "bf16")):
        conv.gemm_tile.cache_clear()
        for precision in precisions:
            monkeypatch.setattr(settings, "precision", precision)
            with emulated() as device:
                layer = Layer("many steps", 2)
                outputs.append(layer.forward().astype("f4").numpy().tobytes())
                (forward, *_) = tiles_of(layer, device)
                splits.append(forward["SPLITS"])
    assert splits == [1, 2, 1] and outputs[0] == outputs[2]


@pytest.mark.parametrize("label", ["3x3", "unequal in both directions"])
def test_kernels_compiled_for_one_shape_give_the_same_bytes(emulated, label):
    """On a real GPU, kernels are compiled with the shape of each layer as constants."""
    with emulated() as device:
        layer = Layer(label)
        generic = layer.products()
        device.specialize = True
        assert layer.products() == generic
        assert any("CONV_SHAPE" in dict(unit.defines) for unit in launching.process.loaded)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_pixels_of_three_channels_are_copied_at_once(emulated, monkeypatch, precision):
    """Images outside a recorded step do not keep a copy in its memory."""
    monkeypatch.setattr(settings, "precision", precision)
    with emulated() as device:
        layer = Layer("3x3 of three channels", 2)
        with launching.through(Recorder(device)):
            layer.forward()
        assert not device.launched
        outputs = layer.products()
        assert device.launched.count("pad_channel") == 1  # forward and backward share the copy
        defines = [dict(unit.defines) for unit in launching.process.loaded]
        assert {4} == {d.get("VECTOR_X", d.get("VECTOR")) for d in defines if d.get("EXTRA")}
        assert layer.products() == outputs


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


@pytest.mark.parametrize("images", [1, 2, 4, 8, 16])
def test_dweight_from_leaves_of_any_size(device, monkeypatch, images):
    monkeypatch.setattr(conv, "images_per_leaf", lambda *_: images)
    *_, dweight_error, dbias_error = errors_of("3x3", 2)
    assert max(dweight_error, dbias_error) <= LIMITS["fp32"]


@pytest.mark.parametrize("processors", [1, 1000])
def test_dweight_from_leaves_of_any_size_without_tensor_cores(emulated, monkeypatch, processors):
    monkeypatch.setattr(settings, "direct", True)
    with emulated(processors=processors):
        layer = Layer("3x3", 2)
        shape = conv.shape_of(layer.x.dims[1:-1], layer.weight.dims, layer.geometry)
        arguments = layer.dy, layer.x, shape, layer.tree
        assert conv_direct.dweight_leaves(*arguments)[1] == (1 if processors == 1 else LANES)
        assert errors_of("3x3", 2)[2] <= LIMITS["fp32"]


@pytest.mark.parametrize("run", [(0, 16), (3, 14), (5, 6)])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("processors", [1, 132])
def test_a_thread_block_folds_leaves_by_the_tree(emulated, run, plain, processors):
    """How many leaves a thread block folds depends on the device, the bytes do not."""
    outputs = []
    for levels in (0, conv.LEVELS):
        with pytest.MonkeyPatch.context() as patch, emulated(processors=processors):
            patch.setattr(conv, "LEVELS", levels)
            patch.setattr(conv, "images_per_leaf", lambda *_: LANES)
            layer = Layer("3x3", run[1] - run[0])
            layer.tree = Tree(16, ((0, run[0]), run, (run[1], 16)), 1, plain)
            outputs.append(layer.products()[2:])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("architecture", "shared"), [("sm_80", 166912), ("sm_86", 101376)])
def test_gpus_with_less_shared_memory_compute_the_same_sums(
    emulated, monkeypatch, architecture, shared, plain
):
    """A block folds only as many leaves as it has memory for."""
    monkeypatch.setattr(conv, "images_per_leaf", lambda *_: LANES)
    shape = conv.shape_of((128, 2, 2), (64, 128, 1, 1), Geometry((1, 1), ((0, 0), (0, 0))))
    rng = np.random.default_rng(5)
    x, dy = (rng.standard_normal((16, n, 2, 2, LANES)).astype("f4") for n in (128, 64))
    like, tree, sums = np.zeros((64, 128, 1, 1), "f4"), Tree(16, ((0, 16),), 0, plain), []
    for options in ({}, {"architecture": architecture, "shared": shared}):
        with emulated(processors=1, **options):
            arrays = array.lanes(dy), array.lanes(x), array.filters(like)
            total, _ = conv.dweight_of(*arrays, shape, tree)
            sums.append(total.terms[0].nodes[0].numpy())
    assert relative(*sums) < LIMITS["fp32"] and (plain or sums[0].tobytes() == sums[1].tobytes())


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


def test_leaves_of_dweight_leave_no_tail(device):
    """On a GPU with 132 processors, ResNet-50's tiles take at most 1.35 times as long as ideal."""
    for filters, width, size in (
        *((64, 576, 56), (256, 64, 56), (128, 256, 56), (128, 1152, 28)),
        *((512, 128, 28), (256, 512, 28), (256, 2304, 14), (1024, 256, 14), (512, 4608, 7)),
    ):
        blocks, slots, pixels = 16, 132 * 4, size * size
        tiles = -(-filters // 64) * -(-width // 64)
        images = conv.images_per_leaf(tiles, pixels, blocks, slots)
        waves = -(-blocks * LANES // images * tiles // slots)
        ideal = blocks * LANES * tiles * pixels / slots
        assert waves * images * pixels <= 1.35 * ideal, (filters, width, size)


def test_too_large_layers_are_refused():
    geometry = Geometry((1, 1), ((0, 0), (0, 0)))
    shape = conv.shape_of((1 << 11, 1 << 10, 1 << 10), (1, 1 << 11, 1, 1), geometry)
    with pytest.raises(ValueError, match="too large"):
        conv_direct._sizes(shape)
