"""Test fully connected layers on the emulated GPU: memory layouts, and the order of each sum.

tests/backends/test_conformance.py compares the numbers with float64.
"""

import math

import numpy as np
import pytest
from single_rank import numbers

from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array, conv, dense, launching
from mpidl.backends.gpu.array import Array
from mpidl.core.blocks import LANES
from mpidl.core.fold import Counter, Tree

ALL, ONLY_DX, ONLY_DWEIGHT = (True, True, True), (1, 0, 0), (0, 1, 0)


def single_rank_tree(blocks):
    return Tree(blocks, ((0, blocks),), 0)


class Layer:
    """Arrays of a dense layer. The last block has `valid` images."""

    def __init__(self, outputs, image, blocks=2, valid=5):
        def draw(name, *shape):
            return numbers(f"{name} {outputs} {image}", *shape, dtype=np.float32)

        features = math.prod(image)
        self.image, self.flat_shape = image, (blocks, features, LANES)
        self.x = draw("x", blocks, *image, LANES)
        self.dy = draw("dy", blocks, outputs, LANES)
        self.dy[-1:, :, valid:] = 0
        self.weight, self.bias = draw("weight", outputs, features), draw("bias", outputs)

    def exact(self):
        """Return y and dx in float64."""
        x, dy, weight, bias = (
            a.astype(np.float64)
            for a in (self.x.reshape(self.flat_shape), self.dy, self.weight, self.bias)
        )
        dx, *_ = reference.dense_backward(dy, x, weight, single_rank_tree(len(x)), ALL)
        return reference.dense(x, weight, bias), dx

    def uploaded(self, blocks=slice(None)):
        """Return (x, dy, weight, bias) on the device."""
        x = array.lanes(self.x[blocks])
        x = x.reshape(x.dims[0], *self.flat_shape[1:])
        weight = array.filters(self.weight, self.image)
        return x, array.lanes(self.dy[blocks]), weight, array.plain(self.bias)

    def forward(self):
        x, _, weight, bias = self.uploaded()
        return dense.dense(x, weight, bias).numpy()

    def backward(self, tree, needs=ALL, blocks=slice(None)):
        x, dy, weight, _ = self.uploaded(blocks)
        return dense.dense_backward(dy, x, weight, tree, needs)

    def dx(self):
        return self.backward(single_rank_tree(len(self.dy)), ONLY_DX)[0].numpy()

    def gradients(self):
        """Return the bytes of dx and of the nodes of dweight and dbias."""
        dx, *partials = self.backward(single_rank_tree(len(self.dy)))
        arrays = [dx.numpy(), *(n for p in partials if p is not None for n in nodes(p))]
        return [values.tobytes() for values in arrays]


def nodes(partial):
    """Return the nodes of a Partial, after checking that each node is a row of the matrix."""
    (term,) = partial.terms
    for row, node in zip(term.nodes.matrix.numpy(), term.nodes, strict=True):
        assert row.tobytes() == node.numpy().tobytes() or node.dims != node.shape
    return [node.numpy() for node in term.nodes]


def assert_near(value, exact):
    assert value.shape == exact.shape and value.dtype == np.float32
    size = max(1, abs(exact).max(initial=0))
    np.testing.assert_allclose(value, exact, rtol=0, atol=2e-6 * size)


@pytest.mark.parametrize("outputs, image", [(10, (37,)), (3, (2, 3, 5)), (68, (5, 3, 3))])
def test_gradients_have_the_memory_layout_of_their_values(device, outputs, image):
    layer = Layer(outputs, image)
    dx, dweight, dbias, sums = layer.backward(single_rank_tree(2))
    assert sums is None and dx.shape == layer.flat_shape and dx.dims == (2, *image, LANES)
    assert not dx.numpy()[-1, :, 5:].any()
    weight = layer.uploaded()[2]
    (node,) = dweight.terms[0].nodes
    assert (node.shape, node.dims, node.order) == (weight.shape, weight.dims, weight.order)
    assert len(nodes(dweight)) == len(nodes(dbias)) == 1


@pytest.mark.parametrize("outputs", [5, 300])
def test_long_sums_are_added_in_runs(device, outputs):
    """Adding 10^4 numbers of equal sign one by one would give a relative error of 1e-5."""
    layer = Layer(outputs, (10000,), 1, LANES)
    layer.x, layer.weight = abs(layer.x), abs(layer.weight)
    exact = layer.exact()[0]
    assert abs(layer.forward() - exact).max() < 1e-6 * exact.max()


def nodes_of_single_blocks(layer, tree):
    """Return the nodes of dweight, computed block by block and folded on the host."""
    counter = Counter(tree)
    for b in range(len(layer.dy)):
        (leaf,) = nodes(layer.backward(single_rank_tree(1), ONLY_DWEIGHT, slice(b, b + 1))[1])
        counter.push(leaf)
    return counter.values


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize(
    "outputs, blocks, run",
    [(3, 13, (3, 12)), (3, 71, (0, 71)), (20, 16, (0, 16)), (20, 19, (0, 19)), (20, 19, (5, 6))],
)
@pytest.mark.parametrize("plain", [False, True])
def test_dweight_is_folded_by_the_tree(
    device, monkeypatch, outputs, blocks, run, plain, processors
):
    """The device's number of processors determines how sums are split, but not their bytes."""
    monkeypatch.setattr(device, "processors", processors)
    monkeypatch.setattr(conv, "images_per_leaf", lambda *_: LANES)  # one block has other leaves
    tree = Tree(blocks, ((0, run[0]), run, (run[1], blocks)), 1, plain)
    layer = Layer(outputs, (9,), run[1] - run[0], LANES)
    dweight = nodes(layer.backward(tree, ONLY_DWEIGHT)[1])
    assert len(dweight) == len(tree.nodes[1])
    expected = nodes_of_single_blocks(layer, tree)
    assert [node.tobytes() for node in dweight] == [node.tobytes() for node in expected]


def test_a_node_of_many_blocks_is_folded_in_parts(device, monkeypatch):
    monkeypatch.setattr(device, "processors", 1)
    monkeypatch.setattr(conv, "images_per_leaf", lambda *_: LANES)
    layer = Layer(17, (3,), 45, LANES)
    tree = single_rank_tree(45)
    (node,) = nodes(layer.backward(tree, ONLY_DWEIGHT)[1])
    assert {"conv_dweight", "fold_float"} <= set(device.launched)
    assert node.tobytes() == nodes_of_single_blocks(layer, tree)[0].tobytes()


def test_values_in_unused_lanes_do_not_matter(device):
    layer = Layer(20, (50,), 2, 3)
    y, gradients = layer.forward(), layer.gradients()
    layer.x[-1, ..., 3:] = 1e30
    assert layer.gradients() == gradients
    assert layer.forward()[:, :, :3].tobytes() == y[:, :, :3].tobytes()


def test_weights_need_not_be_aligned(device):
    layer = Layer(20, (8,))
    x, dy, weight, bias = layer.uploaded()
    flat = array.plain(np.concatenate([[0], layer.weight.ravel()]).astype(np.float32))
    weight = flat.part(1, weight.shape)
    assert dense.dense(x, weight, bias).numpy().tobytes() == layer.forward().tobytes()
    assert dense.dense_dx(dy, weight).numpy().tobytes() == layer.dx().tobytes()


def test_other_memory_layouts_are_refused(device):
    layer = Layer(5, (2, 3, 4))
    x, dy, weight, bias = layer.uploaded()
    with pytest.raises(ValueError, match=r"images \(2, 3, 4\)"):
        dense.dense(x, array.plain(layer.weight), bias)
    pixels = Array(dy.buffer, dy.dtype, dy.shape, (2, 5, 1, 1, LANES), array.IMAGES)
    assert dense.dense_dx(pixels, weight).shape == x.shape
    with pytest.raises(ValueError, match="expected .blocks, K, 16."):
        dense.dense_dx(launching.empty((2, 5, 2, 1, LANES)), weight)
