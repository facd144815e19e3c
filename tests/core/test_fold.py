"""Test the fold tree, its counter, and Partials, with ranks that are simulated by loops."""

import numpy as np
import pytest
from folding import add_up

from mpidl.core import fold, keyed


def middle_of(start, stop):
    """Return where a node splits: `start` plus the largest power of two below its length."""
    half = 1
    while 2 * half < stop - start:
        half *= 2
    return start + half


def node_of(start, stop):
    """Return the tree over blocks start..stop-1 as nested pairs, following its definition."""
    if stop - start == 1:
        return (start,)
    middle = middle_of(start, stop)
    return (node_of(start, middle), node_of(middle, stop))


def ranges_of(start, stop):
    """Return all nodes (start, stop) of the tree over blocks start..stop-1."""
    if stop - start == 1:
        return {(start, stop)}
    middle = middle_of(start, stop)
    return {(start, stop)} | ranges_of(start, middle) | ranges_of(middle, stop)


def tree_sum(leaves, start, stop):
    """Return the sum of the leaves in the order that the tree defines."""
    if stop - start == 1:
        return leaves[start]
    middle = middle_of(start, stop)
    return tree_sum(leaves, start, middle) + tree_sum(leaves, middle, stop)


def pair(left, right):
    """Combine two nodes by recording them as a pair instead of adding them."""
    out = np.empty((), object)
    out[()] = (left[()], right[()])
    return out


def leaf(block):
    out = np.empty((), object)
    out[()] = (block,)
    return out


def shares(count, ranks, plain=False):
    """Return the Tree of each of `ranks` ranks."""
    runs = fold.split_blocks(count, ranks)
    return [fold.Tree(count, runs, rank, plain) for rank in range(ranks)]


def counted(tree, values, combine=fold.add):
    """Return a rank's counter after folding the values of the rank's blocks."""
    counter = fold.Counter(tree, combine)
    for block in range(*tree.run):
        counter.push(values[block].copy())
    return counter


def wide(seed, *shape):
    """Return float32 values of many magnitudes, so another order of addition changes the sum."""
    size = int(np.prod(shape))
    sign = 2 * keyed.uniform(seed, "value", size) - 1
    return (sign * 10.0 ** (6 * keyed.uniform(seed, "size", size) - 3)).reshape(shape).astype("f4")


@pytest.mark.parametrize("ranks", range(1, 13))
def test_the_counter_builds_the_tree_of_the_definition(ranks):
    blocks = [leaf(b) for b in range(70)]
    for leaves in range(1, 71):
        trees = shares(leaves, ranks)
        counters = [counted(tree, blocks, pair) for tree in trees]
        for tree, counter in zip(trees, counters, strict=True):
            # A rank's values are exactly its nodes, each combined in the order of the tree.
            assert [v[()] for v in counter.values] == [node_of(*n) for n in tree.nodes[tree.rank]]
        nodes = [node for rank_nodes in trees[0].nodes for node in rank_nodes]
        values = [value for counter in counters for value in counter.values]
        assert fold.fold_nodes(trees[0], nodes, values, pair)[()] == node_of(0, leaves)


def test_nodes_are_those_of_the_definition():
    for leaves in range(1, 71):
        nodes = ranges_of(0, leaves)
        for start in range(leaves):
            for stop in range(start + 1, leaves + 1):
                assert fold.is_node(start, stop, leaves) == ((start, stop) in nodes)


def test_maximal_nodes_are_the_fewest_that_cover_a_run():
    for leaves in (1, 2, 3, 7, 8, 13, 21, 32):
        nodes = ranges_of(0, leaves)
        for start in range(leaves + 1):
            for stop in range(start, leaves + 1):
                inside = [n for n in nodes if start <= n[0] and n[1] <= stop]
                outermost = [
                    n
                    for n in inside
                    if not any(m != n and m[0] <= n[0] and n[1] <= m[1] for m in inside)
                ]
                assert fold.maximal_nodes((start, stop), leaves) == tuple(sorted(outermost))


def test_the_counter_keeps_few_values():
    tree = shares(1000, 1)[0]
    counter = fold.Counter(tree)
    for _ in range(1000):
        counter.push(np.zeros(1))
        assert len(counter.values) <= 10  # log2(1000) rounded up


def test_shares_follow_the_load_and_cover_all_blocks():
    assert fold.split_blocks(7, 3) == ((0, 3), (3, 5), (5, 7))
    assert fold.split_blocks(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))
    assert fold.split_blocks(8, 3, (1, 0, 3)) == ((0, 2), (2, 2), (2, 8))
    assert fold.split_blocks(10, 3, (1, 1, 2)) == ((0, 3), (3, 5), (5, 10))
    for leaves in range(1, 40):
        for load in ((1,), (3, 1), (0, 1, 0), (5, 0, 2, 2), (1, 2, 3, 4, 5, 6, 7)):
            runs = fold.split_blocks(leaves, len(load), load)
            assert [b for run in runs for b in range(*run)] == list(range(leaves))
            for (start, stop), weight in zip(runs, load, strict=True):
                assert abs((stop - start) - leaves * weight / sum(load)) < 1
                assert weight or start == stop


@pytest.mark.parametrize("leaves", (1, 2, 5, 13, 37, 64))
def test_sums_have_the_same_bytes_on_any_number_of_ranks(leaves):
    values = wide(leaves, leaves, 41)
    expected = tree_sum(values, 0, leaves)
    for ranks in range(1, 13):
        partials = [counted(t, values).partial((41,)) for t in shares(leaves, ranks)]
        assert add_up(partials).tobytes() == expected.tobytes()


def test_without_the_tree_the_bytes_depend_on_the_ranks():
    """Negative control: with plain addition from left to right, the bytes depend on the ranks."""
    values = wide(1, 37, 41)
    sums = {
        ranks: add_up([counted(t, values).partial((41,)) for t in shares(37, ranks, plain=True)])
        for ranks in (1, 2, 3)
    }
    assert len({s.tobytes() for s in sums.values()}) == 3
    for total in sums.values():
        np.testing.assert_allclose(total, values.astype("f8").sum(axis=0), rtol=1e-4, atol=1e-2)


def test_moments_merge_to_mean_and_variance_of_all_images():
    images = wide(2, 53, 6).astype("f8") + 1e4  # a mean far from 0: E[x^2] - E[x]^2 would cancel
    channels = images.reshape(53, 3, 2).transpose(1, 0, 2)
    leaves = []
    for start in range(0, 53, 4):  # the last leaf holds one image
        part = channels[:, start : start + 4].reshape(3, -1)
        mean = part.mean(axis=1)
        m2 = ((part - mean[:, None]) ** 2).sum(axis=1)
        leaves.append(np.concatenate([[part.shape[1]], mean, m2]))
    results = set()
    for ranks in range(1, 13):
        trees = shares(len(leaves), ranks)
        partials = [counted(t, leaves, fold.merge_moments).partial((7,), "f8") for t in trees]
        merged = add_up(partials)
        results.add(merged.tobytes())
        assert merged[0] == 106
        np.testing.assert_allclose(merged[1:4], channels.reshape(3, -1).mean(axis=1), rtol=1e-14)
        np.testing.assert_allclose(
            merged[4:] / merged[0], channels.reshape(3, -1).var(axis=1), rtol=1e-10
        )
    assert len(results) == 1


def test_moments_of_no_image_change_nothing():
    moments = np.array([3.0, 0.1, -2.0, 0.7, 5.0])
    empty, stale = np.zeros(5), np.array([0.0, 9.0, 9.0, 9.0, 9.0])
    for left, right, expected in (
        (moments, empty, moments),
        (empty, moments, moments),
        (empty, stale, empty),
    ):
        assert fold.merge_moments(left.copy(), right.copy()).tobytes() == expected.tobytes()


def two_sums(ranks, leaves=37):
    """Return, for each rank, the Partials of two sums over the same blocks."""
    a, b = wide(3, leaves, 41), wide(4, leaves, 41)
    trees = shares(leaves, ranks)
    return [(counted(t, a).partial((41,)), counted(t, b).partial((41,))) for t in trees]


def combined(ranks):
    return add_up([p * 0.3 - q / 7 + np.float32(2) for p, q in two_sums(ranks)])


def test_sums_and_multiples_of_partials_do_not_depend_on_the_ranks():
    """Each term is folded and scaled. Then the terms are added, and finally the plain number."""
    a, b = (tree_sum(wide(seed, 37, 41), 0, 37) for seed in (3, 4))
    expected = a * np.float32(0.3) + b * np.float32(-1 / 7) + np.float32(2)
    for ranks in (1, 2, 3, 5, 8, 12):
        assert combined(ranks).tobytes() == expected.tobytes()


def test_adding_node_by_node_would_depend_on_the_ranks():
    """Negative control: if nodes were added or scaled before folding, the bytes would differ.

    (a0 + b0) + (a1 + b1) is not (a0 + a1) + (b0 + b1) in floating point, and the number of ranks
    determines which nodes exist.
    """

    def node_by_node(ranks):
        partials = []
        for p, q in two_sums(ranks):
            (term,), (other,) = p.terms, q.terms
            nodes = [
                x * np.float32(0.3) + y * np.float32(-1 / 7)
                for x, y in zip(term.nodes, other.nodes, strict=True)
            ]
            mixed = fold.Term(term.tree, nodes, term.combine, term.dtype)
            partials.append(fold.Partial([mixed], np.float32(2), (41,), "f4"))
        return add_up(partials)

    assert node_by_node(1).tobytes() != node_by_node(3).tobytes()
    np.testing.assert_allclose(node_by_node(3), combined(3), rtol=1e-3, atol=1e-2)


def test_replicated_addends_count_once():
    for ranks in (1, 3, 5):
        ones = [counted(t, np.ones((9, 1), "f4")).partial((1,)) for t in shares(9, ranks)]
        penalty = np.array([0.5], "f4")
        assert add_up([penalty + p + 1.0 for p in ones]) == 10.5
        assert add_up([(p + 1.0) * 2 for p in ones]) == 20
        assert add_up([-p + penalty for p in ones]) == -8.5
    replicated = fold.replicated(np.float32(3)) + fold.replicated(np.float32(4))
    assert replicated.finish([]) == 7 and replicated.terms == []


def test_addends_of_other_shapes_are_refused():
    (tree,) = shares(2, 1)
    p = counted(tree, np.ones((2, 3), "f4")).partial((3,))
    with pytest.raises(ValueError, match=r"array of shape \(2,\) to a Partial of shape \(3,\)"):
        p + np.ones(2)
    with pytest.raises(ValueError, match=r"Partials of shapes \(3,\) and \(\)"):
        p + fold.replicated(1.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p * p,
        lambda p: p / p,
        lambda p: 1 / p,
        lambda p: p**2,
        lambda p: p * np.ones(3),
        lambda p: np.asarray(p),
        lambda p: float(p),
        lambda p: bool(p),
        lambda p: abs(p),
        lambda p: len(p),
        lambda p: p < 1,
        lambda p: p >= 1,
        lambda p: f"{p:.3f}",
    ],
)
def test_the_error_of_a_nonlinear_use_names_gplus(use):
    with pytest.raises(TypeError, match="gplus"):
        use(fold.replicated(np.float32(3)))


def test_arrays_leave_arithmetic_to_the_partial():
    p = fold.replicated(np.ones(3, "f4"))
    assert isinstance(np.ones(3, "f4") + p, fold.Partial)
    assert isinstance(np.float64(2) * p, fold.Partial)
    with pytest.raises(TypeError):
        np.exp(p)


def test_the_counter_refuses_missing_blocks_and_values_of_another_type():
    (tree,) = shares(3, 1)
    counter = fold.Counter(tree)
    counter.push(np.ones(2, "f4"))
    with pytest.raises(ValueError, match="folded blocks up to 1"):
        counter.partial((2,))
    doubles = counted(tree, np.ones((3, 2), "f8"))
    with pytest.raises(ValueError, match="type float32, got shape .* type float64"):
        doubles.partial((2,), np.float32)
