"""The direct convolution of GPUs against float64 NumPy, on the emulated device."""

import numpy as np
import pytest

from mpidl import shapes
from mpidl.backends import REFERENCE as reference
from mpidl.backends.gpu import array, conv_direct, fold
from mpidl.backends.reference.conv import conv2d_dweight, conv2d_dx
from mpidl.blocks import LANES
from mpidl.fold import Tree, add, fold_nodes, split_blocks

SAME = ((1, 1), (1, 1))
NONE = ((0, 0), (0, 0))
ONE = (1, 1)

# (C, H, W), (K, R, S), stride, padding, dilation, groups
SHAPES = {
    "one channel, 5x5": ((1, 9, 8), (5, 5, 5), ONE, NONE, ONE, 1),
    "1x1": ((5, 3, 4), (33, 1, 1), ONE, NONE, ONE, 1),
    "1x1 by 2": ((5, 6, 5), (9, 1, 1), (2, 2), NONE, ONE, 1),
    "3x3": ((6, 5, 4), (7, 3, 3), ONE, SAME, ONE, 1),
    "3x3 by 2": ((3, 7, 6), (4, 3, 3), (2, 2), SAME, ONE, 1),
    "several tiles": ((35, 2, 3), (67, 2, 1), ONE, ((0, 1), (0, 0)), ONE, 1),
    "each way its own": ((4, 8, 9), (6, 3, 2), (2, 3), ((2, 1), (0, 3)), (1, 2), 2),
    "wide padding": ((2, 5, 5), (4, 3, 3), ONE, ((3, 3), (4, 3)), (2, 2), 2),
    "pixels between filters": ((3, 4, 4), (2, 2, 2), (3, 3), ((4, 4), (4, 4)), ONE, 1),
    "filters apart": ((2, 7, 6), (3, 2, 2), (3, 3), NONE, ONE, 1),
    "one pixel": ((7, 3, 3), (5, 3, 3), ONE, NONE, ONE, 1),
    "a group a channel": ((4, 5, 5), (8, 3, 3), ONE, SAME, ONE, 4),
}
EACH = pytest.mark.parametrize("name", SHAPES)


def whole(blocks):
    return Tree(blocks, ((0, blocks),), 0)


class Case:
    """Random arrays of one shape; the last block is not full."""

    def __init__(self, name, blocks=2, shape=None):
        image, (k, r, s), *how = SHAPES[name] if shape is None else shape
        self.how = tuple(how)
        rng = np.random.default_rng(len(str(name)))
        self.x = rng.standard_normal((blocks, *image, LANES), np.float32)
        self.weight = rng.standard_normal((k, image[0] // self.how[3], r, s), np.float32)
        self.bias = rng.standard_normal(k, np.float32)
        output = shapes.conv2d_shape(image, self.weight.shape, *self.how[:3])
        self.dy = rng.standard_normal((blocks, *output, LANES), np.float32)
        self.dy[-1:, ..., 9:] = 0

    def exact(self):
        """y, dx and dweight in float64."""
        dy, x, weight, bias = (
            a.astype(np.float64) for a in (self.dy, self.x, self.weight, self.bias)
        )
        partial = conv2d_dweight(dy, x, weight, *self.how, whole(len(x)))
        return (
            reference.conv2d(x, weight, bias, *self.how),
            conv2d_dx(dy, x, weight, *self.how),
            partial.terms[0].nodes[0],
        )

    def leaves(self, tree, blocks=slice(None)):
        """(leaves of the weights' gradient as an Array, how many there are to a block)."""
        dy, x = array.lanes(self.dy[blocks]), array.lanes(self.x[blocks])
        return conv_direct.dweight_leaves(dy, x, array.filters(self.weight), self.how, tree)

    def found(self):
        """The same by the kernels, dweight from its leaves added up in float64; and the leaves."""
        dy, x = array.lanes(self.dy), array.lanes(self.x)
        weight, bias = array.filters(self.weight), array.plain(self.bias)
        y = conv_direct.forward(x, weight, bias, self.how)
        dx = conv_direct.dx(dy, x, weight, self.how)
        leaves = self.leaves(whole(len(self.x)))[0].numpy()
        k, c, r, s = self.weight.shape
        dweight = leaves.sum(axis=0, dtype=np.float64).reshape(k, r, s, c).transpose(0, 3, 1, 2)
        return y.numpy(), dx.numpy(), dweight, leaves


def error(found, expected):
    assert found.shape == expected.shape
    return abs(found - expected).max() / abs(expected).max()


@EACH
def test_against_float64(device, name):
    case = Case(name)
    *found, leaves = case.found()
    assert leaves.dtype == np.float32 and leaves.shape[1] == case.weight.size
    for one, exact in zip(found, case.exact(), strict=True):
        assert error(one, exact) <= 1e-6


@pytest.mark.parametrize("name", ["3x3", "several tiles", "each way its own"])
def test_any_schedule_gives_the_same_bytes(emulated, name):
    case, found = Case(name, 1), []
    for order in (0, 1, 2):
        with emulated(order):
            found += [[a.tobytes() for a in case.found()] for _ in range(2)]
    assert all(other == found[0] for other in found)


@EACH
def test_an_empty_share(device, name):
    case = Case(name, 0)
    y, dx, _, _ = case.found()
    assert y.shape == case.dy.shape and dx.shape == case.x.shape
    leaves, _ = case.leaves(Tree(3, ((0, 3), (3, 3)), 1))
    assert leaves.shape == (0, case.weight.size)


@pytest.mark.parametrize("images", [1, 2, 4, 8, 16])
def test_leaves_of_any_size(device, monkeypatch, images):
    case = Case("3x3 by 2")
    monkeypatch.setattr(conv_direct, "images_per_leaf", lambda *_: images)
    found, exact = case.found(), case.exact()
    assert len(found[3]) == len(case.x) * LANES // images
    assert error(found[2], exact[2]) <= 1e-6


def test_leaves_are_chosen_by_the_whole_mini_batch(device, monkeypatch):
    """Few where tiles or images fill the device already, and always as one rank has them."""
    monkeypatch.setattr(device, "processors", 100)
    sizes = [
        conv_direct.images_per_leaf(tiles, tree)
        for tiles in (1, 3, 10, 100)
        for tree in (whole(8), Tree(8, ((0, 5), (5, 8)), 1))
    ]
    assert sizes == [1, 1, 1, 1, 4, 4, 16, 16]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["3x3", "each way its own"])
def test_any_shares_give_the_same_root(device, name, ranks):
    blocks = 5
    case = Case(name, blocks)

    def nodes(tree):
        leaves, per_block = case.leaves(tree, slice(*tree.run))
        partial = fold.partial_of_leaves(leaves, tree, per_block)
        return list(np.array(partial.terms[0].nodes.matrix.numpy()))

    (root,) = nodes(whole(blocks))
    runs = split_blocks(blocks, ranks, (1, 0, 2)[:ranks])  # 2 ranks: one of them has nothing
    trees = [Tree(blocks, runs, rank) for rank in range(ranks)]
    shared = [values for tree in trees for values in nodes(tree)]
    edges = [node for of_rank in trees[0].nodes for node in of_rank]
    total = fold_nodes(trees[0], edges, shared, add)
    assert total.tobytes() == root.tobytes()


def test_what_is_too_large_is_refused():
    with pytest.raises(ValueError, match="too large"):
        conv_direct._geometry((1 << 11, 1 << 10, 1 << 10), (1, 1 << 11, 1, 1), ONE, NONE, ONE, 1)
