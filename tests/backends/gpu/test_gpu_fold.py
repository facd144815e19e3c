"""Compare folds on the emulated GPU with folds on the host, byte for byte."""

import numpy as np
import pytest

from mpidl.backends.gpu import array, launching
from mpidl.backends.gpu import fold as gpu_fold
from mpidl.core import fold

KINDS = {
    "float": (fold.add, "f4"),
    "double": (fold.add, "f8"),
    "moments": (fold.merge_moments, "f8"),
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


def leaves_of(kind, count, width):
    """Draw leaves of many magnitudes, so bytes depend on the order. Some moments have count 0."""
    rng = np.random.default_rng(count * 1000 + width)
    if kind != "moments":
        values = rng.standard_normal((count, width)) * 10 ** rng.uniform(-3, 3, (count, width))
        return values.astype(KINDS[kind][1])
    channels = width // 2
    counts = rng.integers(0, 3, (count, 1)) * 7.0
    mean, m2 = rng.standard_normal((count, channels)), rng.uniform(0, 9, (count, channels))
    return np.hstack([counts, np.where(counts, mean, 0), np.where(counts, m2, 0)])


def trees(blocks, ranks, load=None):
    runs = fold.split_blocks(blocks, ranks, load)
    return [fold.Tree(blocks, runs, rank) for rank in range(ranks)]


def root_of(leaves, combine):
    """Fold all leaves on the host."""
    (tree,) = trees(len(leaves), 1)
    counter = fold.Counter(tree, combine)
    for leaf in leaves:
        counter.push(leaf.copy())
    return counter.values[0]


def nodes_by_gpu(leaves, tree, per_block, combine):
    """Return this rank's Partial of all leaves, computed on the GPU."""
    first, last = (edge * per_block for edge in tree.run)
    return gpu_fold.partial_of_leaves(array.plain(leaves[first:last]), tree, per_block, combine)


def roots_by_gpu(leaves, rank_trees, per_block, combine):
    """Fold the leaves of each rank on the GPU, then combine the nodes on the host and the GPU."""
    partials = [nodes_by_gpu(leaves, tree, per_block, combine) for tree in rank_trees]
    nodes = [node for rank_nodes in rank_trees[0].nodes for node in rank_nodes]
    values = [np.array(row) for p in partials for row in p.terms[0].nodes]
    root = gpu_fold.fold_all(array.plain(np.array(values)), rank_trees[0], combine)
    return fold.fold_nodes(rank_trees[0], nodes, values, combine), root.numpy()


@ALL_KINDS
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 11, 16, 21, 61, 64, 100, 129])
def test_a_fold_has_the_bytes_of_the_host(device, kind, count):
    combine, _ = KINDS[kind]
    leaves = leaves_of(kind, count, 21)
    root = gpu_fold.fold_rows(array.plain(leaves), [(0, count)], combine)
    assert root.numpy().tobytes() == root_of(leaves, combine).tobytes()


@ALL_KINDS
@pytest.mark.parametrize("blocks, per_block", [(1, 16), (5, 1), (6, 4), (13, 2), (8, 1)])
def test_any_number_of_ranks_gives_the_same_bytes(device, kind, blocks, per_block):
    combine, _ = KINDS[kind]
    leaves = leaves_of(kind, blocks * per_block, 13)
    expected = root_of(leaves, combine).tobytes()
    for ranks, load in ((1, None), (2, None), (3, (1, 0, 2)), (5, None)):
        for root in roots_by_gpu(leaves, trees(blocks, ranks, load), per_block, combine):
            assert root.tobytes() == expected


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_missing_leaves_are_not_added_as_zeros(device, dtype):
    """Adding 0 would turn -0 into 0."""
    root = gpu_fold.fold_rows(array.plain(np.full((21, 3), -0.0, dtype)), [(0, 21)])
    assert np.signbit(root.numpy()).all()


def test_negative_control_adding_in_turn_gives_other_bytes():
    leaves = leaves_of("float", 61, 21)
    in_turn = leaves[0].copy()
    for leaf in leaves[1:]:
        in_turn += leaf
    assert in_turn.tobytes() != root_of(leaves, fold.add).tobytes()


@ALL_KINDS
def test_the_spread_over_threads_does_not_change_a_byte(device, monkeypatch, kind):
    """Fold several nodes at once with different numbers of columns, rows and chunks."""
    combine, _ = KINDS[kind]
    leaves = leaves_of(kind, 61, 21)
    ranges = [(0, 32), (32, 1), (33, 28)]
    expected = b"".join(root_of(leaves[a : a + n], combine).tobytes() for a, n in ranges)
    spreads = [(4, 8, 4), (4, 16, 2), (8, 32, 1)]  # (columns, rows, chunk)
    spreads += [] if kind == "moments" else [(256, 1, 64), (32, 1, 32), (32, 4, 8), (8, 4, 16)]
    for spread in spreads:
        monkeypatch.setattr(gpu_fold, "spread", lambda *_, spread=spread: spread)
        nodes = gpu_fold.fold_rows(array.plain(leaves), ranges, combine)
        assert nodes.numpy().tobytes() == expected, spread


@pytest.mark.parametrize("width", [1, 700, 1025, 40000])
def test_sums_of_any_width(device, width):
    leaves = leaves_of("float", 9, width)
    root = gpu_fold.fold_rows(array.plain(leaves), [(0, 9)])
    assert root.numpy().tobytes() == root_of(leaves, fold.add).tobytes()


def test_every_spread_covers_its_leaves():
    for kind, limit in gpu_fold.LEAVES.items():
        counts = [n for n in (1, 3, 4, 5, 16, 17, 250, 1000, limit) if n <= limit]
        for width in (1, 20, 1 << 10, 1 << 15):
            for leaves in counts:
                columns, rows, chunk = gpu_fold.spread(width, leaves, kind)
                assert rows * chunk >= leaves and chunk & (chunk - 1) == 0
                assert columns * rows % 32 == 0
                assert columns * rows <= (1024 if kind == "moments" else 512)
                assert kind != "moments" or chunk <= 4


@ALL_KINDS
def test_more_leaves_than_one_launch_takes(device, monkeypatch, kind):
    combine, _ = KINDS[kind]
    monkeypatch.setitem(gpu_fold.LEAVES, kind, 32)  # groups of 2
    leaves = leaves_of(kind, 201, 5)
    ranges = [(0, 128), (128, 64), (192, 9)]
    nodes = gpu_fold.fold_rows(array.plain(leaves), ranges, combine).numpy()
    for node, (first, count) in zip(nodes, ranges, strict=True):
        assert node.tobytes() == root_of(leaves[first : first + count], combine).tobytes()
    assert len(device.launched) == 3  # 128 leaves are folded into 64 rows, then 32, then 1


@ALL_KINDS
def test_any_schedule_gives_the_same_bytes(emulated, kind):
    combine, _ = KINDS[kind]
    leaves = leaves_of(kind, 45, 11)
    for order in (0, 1, 2):
        with emulated(order):
            for _ in range(2):
                root = gpu_fold.fold_rows(array.plain(leaves), [(0, 45)], combine)
                assert root.numpy().tobytes() == root_of(leaves, combine).tobytes()


@ALL_KINDS
def test_a_rank_without_blocks_has_no_node(device, kind):
    combine, dtype = KINDS[kind]
    tree = trees(2, 3)[2]
    partial = gpu_fold.partial_of_leaves(launching.empty((0, 9), dtype), tree, 4, combine)
    (term,) = partial.terms
    assert list(term.nodes) == [] and term.nodes.matrix.shape == (0, 9)
    assert partial.shape == (9,) and partial.dtype == dtype and device.launched == []


def test_a_gradient_has_the_memory_layout_of_its_learnable(device):
    """Rows of the matrix are in memory order, and the nodes have the shape of the learnable."""
    weight = np.arange(2 * 3 * 2 * 2, dtype="f4").reshape(2, 3, 2, 2)
    like = array.filters(weight)
    memory = array.in_memory(weight, like.dims, like.order).reshape(-1)
    leaves = np.stack([memory, 2 * memory, 4 * memory])
    (tree,) = trees(3, 1)
    partial = gpu_fold.partial_of_leaves(array.plain(leaves), tree, 1, like=like)
    (node,) = partial.terms[0].nodes
    assert partial.shape == node.shape == weight.shape and node.order == like.order
    assert np.array_equal(node.numpy(), 7 * weight)
    root = gpu_fold.fold_all(partial.terms[0].nodes.matrix, tree, like=like)
    assert np.array_equal(root.numpy(), 7 * weight)
    shaped = gpu_fold.partial_of_leaves(array.plain(leaves), tree, 1, shape=(4, 6))
    assert shaped.shape == shaped.terms[0].nodes[0].shape == (4, 6)


def test_unsuitable_leaves_are_refused(device):
    (tree,) = trees(2, 1)
    with pytest.raises(ValueError, match=r"of 2 blocks, got shape \(3, 4\), 1 rows per block"):
        gpu_fold.partial_of_leaves(launching.empty((3, 4)), tree, 1)
    with pytest.raises(ValueError, match="3 rows per block"):
        gpu_fold.partial_of_leaves(launching.empty((6, 4)), tree, 3)
    with pytest.raises(ValueError, match="by addition or by merging moments"):
        gpu_fold.partial_of_leaves(launching.empty((2, 4)), tree, 1, max)
    with pytest.raises(TypeError, match="cannot fold float32 by merge_moments"):
        gpu_fold.partial_of_leaves(launching.empty((2, 5)), tree, 1, fold.merge_moments)
    with pytest.raises(ValueError, match="expected the 1 nodes of all ranks, got 2"):
        gpu_fold.fold_all(launching.empty((2, 4)), tree)
    plain = fold.Tree(2, ((0, 1), (1, 2)), 0, plain=True)
    with pytest.raises(ValueError, match="a plain sum has no fold tree"):
        gpu_fold.fold_all(launching.empty((2, 4)), plain)
