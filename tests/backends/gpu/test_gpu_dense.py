"""Fully connected layers on the emulated GPU: float64, and that every sum has one order."""

import math

import numpy as np
import pytest
from single_rank import numbers

from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array, dense, launching
from mpidl.backends.gpu.array import Array
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Counter, Tree

ALL = True, True, True

# outputs, image
SHAPES = [
    (1, (1,)),
    (10, (37,)),
    (3, (2, 3, 5)),
    (16, (64,)),
    (7, (400,)),  # of several chunks
    (17, (130,)),
    (20, (4, 2, 2)),
    (68, (5, 3, 3)),
    (130, (68,)),
]
EACH = pytest.mark.parametrize("outputs, image", SHAPES)


def whole(blocks):
    return Tree(blocks, ((0, blocks),), 0)


class Layer:
    """Arrays of a layer; of the last block `valid` images are used."""

    def __init__(self, outputs, image, blocks=2, valid=5, activation=False):
        def draw(what, *shape, **range):
            return numbers(f"{what} {outputs} {image}", *shape, dtype=np.float32, **range)

        features = math.prod(image)
        self.image, self.flat = image, (blocks, features, LANES)
        self.x = draw("x", blocks, *image, LANES)
        self.dy = draw("dy", blocks, outputs, LANES)
        if blocks:
            self.dy[-1, :, valid:] = 0
        self.weight, self.bias = draw("weight", outputs, features), draw("bias", outputs)
        self.vectors = None
        if activation:
            low_and_high = {"mean": (-0.5, 0.5), "scale": (0.5, 1.5), "beta": (-0.5, 0.5)}
            self.vectors = [
                draw(name, image[0], low=low, high=high)
                for name, (low, high) in low_and_high.items()
            ]

    def values(self):
        """x, or the activation, as (B, F, 16)."""
        if self.vectors is None:
            return self.x.reshape(self.flat)
        mean, scale, beta = self.vectors
        return np.maximum(reference.batchnorm(self.x, mean, scale, beta), 0).reshape(self.flat)

    def exact(self):
        """y, dx, dweight, dbias in float64."""
        x, dy, weight, bias = (
            a.astype(np.float64) for a in (self.values(), self.dy, self.weight, self.bias)
        )
        dx, dweight, dbias, _ = reference.dense_backward(dy, x, weight, whole(len(x)), ALL)
        return reference.dense(x, weight, bias), dx, *(p.terms[0].nodes for p in (dweight, dbias))

    def uploaded(self, blocks=slice(None)):
        """(x or DeferredInput, dy, weight, bias) on the device."""
        x = array.lanes(self.x[blocks])
        if self.vectors is None:
            x = x.reshape(x.dims[0], *self.flat[1:])
        else:
            x = DeferredInput(x, *map(array.plain, self.vectors))
        weight = array.filters(self.weight, self.image)
        return x, array.lanes(self.dy[blocks]), weight, array.plain(self.bias)

    def forward(self, blocks=slice(None)):
        x, _, weight, bias = self.uploaded(blocks)
        return dense.dense(x, weight, bias).numpy()

    def backward(self, tree, needs=ALL, blocks=slice(None)):
        x, dy, weight, _ = self.uploaded(blocks)
        return dense.dense_backward(dy, x, weight, tree, needs)

    def everything(self, tree):
        """Bytes of y, dx and the nodes of the Partials."""
        dx, *partials = self.backward(tree)
        found = [self.forward(), dx, *(n for p in partials if p is not None for n in nodes(p))]
        return [np.asarray(v).tobytes() for v in found]


def nodes(partial):
    (term,) = partial.terms
    for row, node in zip(term.nodes.matrix.numpy(), term.nodes, strict=True):
        assert row.tobytes() == node.numpy().tobytes() or node.dims != node.shape
    return [node.numpy() for node in term.nodes]


def close(found, expected, of=2e-6):
    assert found.shape == expected.shape and found.dtype == np.float32
    size = max(1, abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=of * size)


@EACH
def test_against_float64(device, outputs, image):
    layer = Layer(outputs, image)
    dx, dweight, dbias, sums = layer.backward(whole(2))
    y, exact_dx, (exact_dweight,), (exact_dbias,) = layer.exact()
    assert sums is None and dx.shape == layer.flat and dx.dims == (2, *image, LANES)
    close(layer.forward(), y)
    close(dx.numpy(), exact_dx)
    close(nodes(dweight)[0], exact_dweight)
    close(nodes(dbias)[0], exact_dbias)
    assert not dx.numpy()[-1, :, 5:].any()
    expected = layer.uploaded()[2]
    (node,) = dweight.terms[0].nodes
    assert (node.shape, node.dims, node.order) == (expected.shape, expected.dims, expected.order)


@pytest.mark.parametrize("outputs", [5, 20])
def test_runs_within_a_chunk(device, monkeypatch, outputs):
    monkeypatch.setattr(dense, "SHORTEST", 600)
    layer = Layer(outputs, (599,))
    assert dense.chunk_of(outputs, 599) == 608
    close(layer.forward(), layer.exact()[0])
    layer = Layer(300, (9,))  # which dx adds up
    close(layer.backward(whole(2), (1, 0, 0))[0].numpy(), layer.exact()[1])


@pytest.mark.parametrize("outputs, image", [(20, (30,)), (70, (9, 3, 5)), (68, (300,))])
def test_large_tiles_give_the_same_bytes(device, monkeypatch, outputs, image):
    """Which few processors are enough for."""
    layer = Layer(outputs, image, 10)

    def found():
        return [layer.forward(), layer.backward(whole(10), (1, 0, 0))[0].numpy()]

    expected = found()
    assert {"dense_many", "dense_dx"} <= set(device.launched)
    monkeypatch.setattr(device, "processors", 1)
    assert [v.tobytes() for v in found()] == [v.tobytes() for v in expected]
    assert {"dense_large", "dense_dx_large"} <= set(device.launched)
    for one, exact in zip(expected, layer.exact(), strict=False):
        close(one, exact)


def test_runs_keep_rounding_small(device, monkeypatch):
    """Of 10^4 numbers of one sign, one sum after the other would be wrong by 1e-5 of them."""
    monkeypatch.setattr(dense, "SHORTEST", 20000)
    layer = Layer(1, (10000,), 1, LANES)
    layer.x, layer.weight = abs(layer.x), abs(layer.weight)
    exact = layer.exact()[0]
    assert abs(layer.forward() - exact).max() < 1e-6 * exact.max()


@pytest.mark.parametrize("outputs, features", [(10, 11520), (4096, 9216), (1000, 4096), (3, 5)])
def test_chunks_fill_a_gpu(outputs, features):
    chunk = dense.chunk_of(outputs, features)
    tiles = -(-outputs // (64 if outputs > 16 else 16)) * -(-features // chunk)
    assert chunk % 16 == 0 and tiles >= min(128, features // 128) // 2


def leaf_by_leaf(layer, tree):
    """The nodes of dweight by blocks that are alone, folded on the host."""
    counter = Counter(tree)
    for b in range(len(layer.dy)):
        own = slice(b, b + 1)
        (leaf,) = nodes(layer.backward(whole(1), (0, 1, 0), own)[1])
        counter.push(leaf)
    return counter.values


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize(
    "outputs, blocks, run",
    [(3, 13, (3, 12)), (3, 71, (0, 71)), (20, 16, (0, 16)), (20, 19, (0, 19)), (20, 19, (5, 6))],
)
@pytest.mark.parametrize("plain", [False, True])
def test_the_weights_gradient_is_folded_by_the_tree(
    device, monkeypatch, outputs, blocks, run, plain, processors
):
    """However the blocks are cut into ranges, of which there are more the more processors."""
    monkeypatch.setattr(device, "processors", processors)
    tree = Tree(blocks, ((0, run[0]), run, (run[1], blocks)), 1, plain)
    layer = Layer(outputs, (9,), run[1] - run[0], LANES)
    dweight = layer.backward(tree, (0, 1, 0))[1]
    expected = leaf_by_leaf(layer, tree)
    assert len(nodes(dweight)) == len(tree.nodes[1])
    for one, other in zip(nodes(dweight), expected, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_node_of_many_blocks_is_folded_by_parts(device, monkeypatch):
    kernels = dense.FOLDS | {"dense_dweight_long": (64, 32, 32)}
    monkeypatch.setattr(dense, "FOLDS", kernels)
    monkeypatch.setattr(device, "processors", 1)
    layer = Layer(17, (3,), 45, LANES)
    (found,) = nodes(layer.backward(whole(45), (0, 1, 0))[1])
    assert "dense_dweight_long" in device.launched and "fold_float" in device.launched
    assert found.tobytes() == leaf_by_leaf(layer, whole(45))[0].tobytes()


def test_unused_images_do_not_count(device):
    layer, tree = Layer(20, (50,), 2, 3), whole(2)
    y, before = layer.forward(), layer.everything(tree)[1:]
    layer.x[-1, ..., 3:] = 1e30
    assert layer.everything(tree)[1:] == before
    assert layer.forward()[:, :, :3].tobytes() == y[:, :, :3].tobytes()


def test_weights_need_not_be_aligned(device):
    layer = Layer(20, (8,))
    expected = layer.forward(), layer.backward(whole(2))[0].numpy()
    x, dy, weight, bias = layer.uploaded()
    flat = array.plain(np.concatenate([[0], layer.weight.ravel()]).astype(np.float32))
    weight = flat.part(1, weight.shape)
    found = dense.dense(x, weight, bias).numpy(), dense.dense_dx(dy, weight).numpy()
    assert [v.tobytes() for v in found] == [v.tobytes() for v in expected]


def test_features_in_another_order_are_refused(device):
    layer = Layer(5, (2, 3, 4))
    x, dy, weight, bias = layer.uploaded()
    with pytest.raises(ValueError, match=r"images \(2, 3, 4\)"):
        dense.dense(x, array.plain(layer.weight), bias)
    pixels = Array(dy.buffer, dy.dtype, dy.shape, (2, 5, 1, 1, LANES), array.IMAGES)
    assert dense.dense_dx(pixels, weight).shape == x.shape
    with pytest.raises(ValueError, match="expected .blocks, K, 16."):
        dense.dense_dx(launching.empty((2, 5, 2, 1, LANES)), weight)
