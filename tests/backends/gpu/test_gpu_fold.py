"""Compare folds on the emulated GPU with folds on the host, byte for byte."""

import numpy as np
import pytest
from support.recorded import recorded

from mpidl.backends.gpu import array, batchnorm, launching, recorder
from mpidl.backends.gpu import fold as gpu_fold
from mpidl.backends.gpu.recorder import Recorder
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
    """Fold several nodes at once with different numbers of threads, columns and chunks."""
    combine, _ = KINDS[kind]
    leaves = leaves_of(kind, 61, 21)
    ranges = [(0, 32), (32, 1), (33, 28)]
    expected = b"".join(root_of(leaves[a : a + n], combine).tobytes() for a, n in ranges)
    spreads = [(128, 4, 4), (64, 2, 4), (32, 1, 4), (32, 4, 4)]  # (threads, columns, chunk)
    if kind != "moments":
        spreads = [(256, 4, 1), (512, 8, 1), (64, 4, 4), (256, 256, 64), (128, 32, 16)]
    for threads, *spread in spreads:
        monkeypatch.setattr(gpu_fold, "spread", lambda *_, spread=spread: spread)
        monkeypatch.setattr(gpu_fold, "THREADS", threads)
        nodes = gpu_fold.fold_rows(array.plain(leaves), ranges, combine)
        assert nodes.numpy().tobytes() == expected, spread


@pytest.mark.parametrize("width", [1, 700, 1025, 40000])
def test_sums_of_any_width(device, width):
    leaves = leaves_of("float", 9, width)
    root = gpu_fold.fold_rows(array.plain(leaves), [(0, 9)])
    assert root.numpy().tobytes() == root_of(leaves, fold.add).tobytes()


def test_every_spread_covers_its_leaves():
    threads = gpu_fold.THREADS
    for kind in KINDS:
        for width in (1, 20, 300, 1 << 10, 1 << 15):
            for leaves in (1, 3, 4, 5, 16, 17, 250, 1000, 1 << 20):
                columns, chunk = gpu_fold.spread(width, leaves, kind)
                assert threads % columns == 0 and chunk & (chunk - 1) == 0
                if kind == "moments":
                    assert columns <= 4 == chunk
                    assert gpu_fold.threads_of(leaves, columns) % (32 * columns) in (0, 32, 64)
                else:
                    assert threads // columns * chunk >= leaves


def test_many_leaves_take_one_launch(device):
    """More leaves than the threads of a block, and columns whose loop takes several rounds."""
    leaves = leaves_of("moments", 9000, 7)
    root = gpu_fold.fold_rows(array.plain(leaves), [(0, 9000)], fold.merge_moments)
    assert root.numpy().tobytes() == root_of(leaves, fold.merge_moments).tobytes()
    assert device.launched == ["fold_moments"]


def test_padding_of_moments_is_ignored(device):
    """Leaves with the count 0 change nothing, even if the rest of their row is not initialized."""
    leaves = leaves_of("moments", 45, 7)
    expected = root_of(leaves, fold.merge_moments).tobytes()
    leaves[leaves[:, 0] == 0, 1:] = np.nan
    padded = np.full((64, 7), np.nan)
    padded[:45], padded[45:, 0] = leaves, 0
    root = gpu_fold.fold_rows(array.plain(padded), [(0, 64)], fold.merge_moments)
    assert root.numpy().tobytes() == expected


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
def test_folds_of_a_recorded_step_go_out_together(device, kind):
    combine, _ = KINDS[kind]
    sums = [leaves_of(kind, count, width) for count, width in ((61, 21), (2, 999), (300, 3))]
    arrays = [array.plain(x) for x in sums]
    roots, names = recorded(
        device, lambda: [gpu_fold.fold_rows(x, [(0, len(x))], combine).row(0) for x in arrays]
    )
    assert names == ["program_begin", f"fold_{kind}", "program_end"]
    for root, leaves in zip(roots, sums, strict=True):
        assert root.tobytes() == root_of(leaves, combine).tobytes()


def test_a_fold_waits_until_its_root_is_read_or_its_leaves_are_overwritten(device):
    values = [leaves_of("float", 5, width) for width in (7, 8, 9)]

    sources = [array.plain(x) for x in values]

    def step():
        leaves = [x + x for x in sources]
        roots = [gpu_fold.fold_rows(x, [(0, 5)]).row(0) for x in leaves[:2]]
        doubled = roots[0] + roots[0]  # reads a root
        last = gpu_fold.fold_rows(leaves[2], [(0, 5)]).row(0)
        words = array.Array(leaves[2].buffer, np.int32, (leaves[2].size,))
        launching.launch("zero_words", 1, 256, words, words.size)
        return [doubled, roots[1], last]

    roots, names = recorded(device, step)
    adds = ["add_value"] * 3
    folds = ["fold_float", "add_value", "fold_float", "zero_words"]
    assert names == ["program_begin", *adds, *folds, "program_end"]
    expected = [root_of(2 * x, fold.add) for x in values]
    expected[0] = expected[0] * 2
    for root, total in zip(roots, expected, strict=True):
        assert root.tobytes() == total.tobytes()


def test_waiting_folds_keep_a_limited_amount_of_memory(device, monkeypatch):
    monkeypatch.setattr(recorder, "WAITING", 10_000)
    values = [array.plain(leaves_of("float", 10, 100)) for _ in range(4)]

    def sums():
        return [gpu_fold.fold_rows(x + x, [(0, 10)]).row(0) for x in values]

    _, names = recorded(device, sums)
    assert names.count("fold_float") == 2


def test_the_results_of_a_step_are_folded_at_its_end(device):
    sums = {name: leaves_of("double", count, 1) for name, count in (("a", 45), ("b", 1), ("c", 9))}
    arrays = {name: array.plain(leaves) for name, leaves in sums.items()}
    folding = Recorder(device)
    with launching.through(folding):
        doubled = gpu_fold.fold_rows(arrays["c"], [(0, 9)]).row(0)
        doubled = doubled + doubled  # reads a root before the end
        roots = {k: gpu_fold.fold_rows(x, [(0, len(x))]).row(0) for k, x in arrays.items()}
        program = folding.finish({**roots, "d": doubled})
    names = [launch.name for launch in program.launches()]
    assert names == ["program_begin", "fold_double", "add_double", "program_end"]
    results = program.results(program.run())
    totals = {name: float(root_of(leaves, fold.add)[0]) for name, leaves in sums.items()}
    assert results == {**totals, "d": 2 * totals["c"]}


@pytest.mark.parametrize("count", [1, 13, 1500])
def test_statistics_and_factors_fold_waiting_sums(device, count):
    """The kernels that fold give the bytes of separate kernels, and store the roots."""
    channels = 9
    moments = array.plain(leaves_of("moments", count, 2 * channels + 1))
    sums = array.plain(leaves_of("double", count, 2 * channels))
    gamma = array.plain(np.linspace(-1, 2, channels, dtype="f4"))

    def step():
        of_moments = gpu_fold.fold_rows(moments, [(0, count)], fold.merge_moments).row(0)
        of_sums = gpu_fold.fold_rows(sums, [(0, count)]).row(0)
        statistics = batchnorm.statistics(of_moments, gamma, 1e-5)
        factors = batchnorm.batchnorm_factors(of_sums, gamma, statistics)
        return [*statistics, *factors, of_moments, of_sums]

    eager = [x.numpy() for x in step()]
    replayed, names = recorded(device, step)
    assert names == ["program_begin", "statistics", "batchnorm_factors", "program_end"]
    for expected, result in zip(eager, replayed, strict=True):
        assert np.isfinite(expected).all() and expected.tobytes() == result.tobytes()
    roots = root_of(moments.numpy(), fold.merge_moments), root_of(sums.numpy(), fold.add)
    assert [x.tobytes() for x in replayed[-2:]] == [x.tobytes() for x in roots]


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
