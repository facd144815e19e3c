"""Test depthwise convolutions: every shape and type against float64, deferred operands, bytes."""

import numpy as np
import pytest

from mpidl.backends.gpu import array, conv, conv_depthwise, launching
from mpidl.backends.gpu.batchnorm import Read
from mpidl.backends.shapes import Geometry
from mpidl.core.blocks import LANES
from mpidl.core.fold import Tree
from mpidl.core.values import BF16, as_type

UNIT, PAD = (1, 1), ((1, 1), (1, 1))
# {name: ((channels, height, width), (taps down, taps across), stride, padding, dilation)}
LAYERS = {
    "3x3": ((8, 7, 7), (3, 3), UNIT, PAD, UNIT),
    "3x3 by 2": ((8, 14, 14), (3, 3), (2, 2), PAD, UNIT),
    "many channels": ((36, 5, 9), (3, 3), UNIT, PAD, UNIT),
    "channels one by one": ((6, 9, 11), (3, 3), (2, 2), ((0, 1), (0, 1)), UNIT),
    "5x5 of one channel": ((1, 9, 10), (5, 5), UNIT, ((2, 2), (1, 4)), UNIT),
    "unequal": ((4, 11, 13), (2, 5), (3, 2), ((1, 0), (2, 3)), (2, 1)),
    "spread": ((5, 12, 8), (3, 3), UNIT, ((2, 2), (2, 2)), (2, 2)),
    "one pixel": ((12, 3, 3), (3, 3), UNIT, ((0, 0), (0, 0)), UNIT),
    "7x7": ((4, 8, 6), (7, 7), UNIT, ((3, 3), (3, 3)), UNIT),
    "1x1 by 3": ((4, 7, 8), (1, 1), (3, 3), ((0, 0), (0, 0)), UNIT),
}
LIMIT = 4e-7  # bound of (norm of the error) / (norm of the result)
BF16_LIMIT = 3e-3  # rounding to 8 bits
LIMITS = 0.0, 6.0


class Layer:
    """A depthwise convolution with random operands on the device, and its results in float64.

    x is deferred if `deferred`: normalized by the operands of a batch normalization, and clipped.
    """

    def __init__(self, name, deferred=False, dtype=np.float32, blocks=2, offset=0):
        image, taps, stride, padding, dilation = LAYERS[name]
        channels = image[0]
        self.geometry = Geometry(stride, padding, dilation, channels)
        self.tree, rng = Tree(blocks, ((0, blocks),), 0), np.random.default_rng(0)
        x = rng.standard_normal((blocks, *image, LANES)).astype(np.float32)
        w = rng.standard_normal((channels, 1, *taps)).astype(np.float32)
        self.bias = rng.standard_normal(channels).astype(np.float32)
        mean, scale, beta = rng.standard_normal((3, channels)).astype(np.float32)
        self.weight, self.x = array.filters(w), placed(x, dtype, offset)
        values = floats(self.x.numpy()).astype(np.float64)
        if deferred:
            vectors = [array.plain(v) for v in (mean, scale, beta)]
            self.x = Read(self.x, *vectors, *LIMITS)
            by_channel = [v.reshape(-1, 1, 1, 1).astype(np.float64) for v in (mean, scale, beta)]
            values = np.clip((values - by_channel[0]) * by_channel[1] + by_channel[2], *LIMITS)
        self.shape = conv.shape_of(image, w.shape, self.geometry)
        dy = rng.standard_normal((blocks, channels, *self.shape[3:5], LANES)).astype(np.float32)
        self.dy = placed(dy, dtype, offset)
        self.exact = exact_results(
            values, w[:, 0].astype(np.float64), floats(self.dy.numpy()), self.geometry
        )

    def results(self):
        """Return y without a bias, dx and the leaves of the weights' gradient, as Arrays."""
        source = self.x.x if isinstance(self.x, Read) else self.x
        return (
            conv_depthwise.forward(self.x, self.weight, None, self.shape),
            conv_depthwise.dx(self.dy, source, self.weight, self.shape),
            conv_depthwise.dweight_leaves(self.dy, self.x, self.shape, self.tree)[0],
        )

    def errors(self):
        """Return the errors of y, dx and dweight relative to their norms."""
        y, dx, leaves = (floats(a.numpy()).astype(np.float64) for a in self.results())
        dweight = leaves.sum(0).reshape(self.exact[2].shape)
        pairs = zip((y, dx, dweight), self.exact, strict=True)
        return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs]


def floats(values):
    return as_type(values, np.float32)


def placed(values, dtype, offset):
    """Upload lanes as `dtype`, `offset` elements after the start of their memory."""
    lanes = array.lanes(as_type(values, dtype))
    if offset:
        moved = array.empty((lanes.size + offset,), lanes.dtype).part(offset, lanes.dims)
        moved.order = lanes.order
        launching.upload(moved, launching.download(lanes))
        return moved
    return lanes


def exact_results(x, w, dy, geometry):
    """Return y, dx and dweight in float64, tap by tap on padded images."""
    (rows, columns), (top_bottom, left_right), (down, across), _ = geometry
    padded = np.pad(x, ((0, 0), (0, 0), top_bottom, left_right, (0, 0)))
    y, dx, dw = np.zeros(dy.shape), np.zeros(padded.shape), np.zeros(w.shape)
    for r in range(w.shape[1]):
        for s in range(w.shape[2]):
            first = r * down, s * across
            window = (
                slice(first[0], first[0] + rows * (dy.shape[2] - 1) + 1, rows),
                slice(first[1], first[1] + columns * (dy.shape[3] - 1) + 1, columns),
            )
            place, tap = (slice(None), slice(None), *window), w[:, r, s].reshape(-1, 1, 1, 1)
            y += padded[place] * tap
            dx[place] += dy * tap
            dw[:, r, s] = (padded[place] * dy).sum((0, 2, 3, 4))
    (top, _), (left, _) = top_bottom, left_right
    return y, dx[:, :, top : top + x.shape[2], left : left + x.shape[3]], dw


@pytest.mark.parametrize("specialize", [False, pytest.param(True, marks=pytest.mark.slow("gpu"))])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_float32_matches_float64(emulated, name, deferred, specialize):
    with emulated() as device:
        device.specialize = specialize
        errors = Layer(name, deferred).errors()
    assert max(errors) <= LIMIT, errors


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", ["3x3 by 2", "channels one by one"])
def test_bfloat16_matches_float64(device, name, deferred):
    y, dx, dweight = Layer(name, deferred, BF16).errors()
    assert 1e-4 < max(y, dx) <= BF16_LIMIT
    assert dweight <= (BF16_LIMIT if deferred else LIMIT)  # deferred numbers are rounded


@pytest.mark.parametrize("name", ["3x3", "3x3 by 2", "many channels"])
def test_a_deferred_operand_gives_the_bytes_of_its_activation(device, name):
    layer = Layer(name, deferred=True)
    fused = [a.numpy().tobytes() for a in layer.results()]
    layer.x = conv.batchnorm.read(layer.x)
    assert [a.numpy().tobytes() for a in layer.results()] == fused


def test_the_division_of_work_does_not_change_a_byte(emulated, monkeypatch):
    """Schedules, rows per thread, kernels of one shape, unaligned images, and a bias of zeros."""
    outputs = []
    for order, tall, specialize, offset in (
        *((order, 8, False, 0) for order in (0, 1, 2)),
        *((0, tall, True, 0) for tall in (1, 2)),
        (0, 8, False, 1),
    ):
        monkeypatch.setattr(conv_depthwise, "TALL", tall)
        with emulated(order, processors=1) as device:
            device.specialize = specialize
            layer = Layer("3x3 by 2", offset=offset)
            outputs.append([a.numpy().tobytes() for a in layer.results()])
    assert all(output == outputs[0] for output in outputs)


def test_a_bias_is_added(device):
    layer = Layer("many channels")
    y = conv_depthwise.forward(layer.x, layer.weight, array.plain(layer.bias), layer.shape)
    expected = layer.exact[0] + layer.bias.reshape(-1, 1, 1, 1)
    assert np.abs(y.numpy() - expected).max() < 1e-5


def test_layers_that_are_depthwise():
    def shape(channels, filters, groups):
        weight = filters, channels // groups, 3, 3
        return conv.shape_of((channels, 8, 8), weight, Geometry(UNIT, PAD, UNIT, groups))

    assert conv_depthwise.suits(shape(8, 8, 8)) and conv_depthwise.suits(shape(3, 3, 3))
    assert not conv_depthwise.suits(shape(8, 16, 8)) and not conv_depthwise.suits(shape(8, 8, 4))
    assert not conv_depthwise.suits(shape(1, 1, 1))
    large = shape(8, 8, 8)._replace(height=1 << 15, width=1 << 15)
    assert not conv_depthwise.suits(large)
