"""Test exchanges between 1 to 64 simulated ranks and between the ranks of this session."""

import math
import weakref

import numpy as np
import pytest
import simulator

from mpidl.comm import exchange
from mpidl.comm.reducer import Reducer
from mpidl.comm.simulation import Simulation
from mpidl.core import fold, keyed
from mpidl.core.blocks import LANES, share
from mpidl.core.fold import Counter
from mpidl.ranks.world import World

WIDTH = 37
LAYOUTS = {
    "equal": lambda ranks: None,
    "rising": lambda ranks: tuple(range(ranks)),  # rank 0 has no blocks
    "one has most": lambda ranks: (1,) * (ranks - 1) + (9 * ranks,),
    "every other idles": lambda ranks: tuple((r + 1) % 2 for r in range(ranks)),
}


def wide(seed, *shape):
    """Return float32 values of many magnitudes, whose sum depends on the order of additions."""
    size = int(np.prod(shape))
    sign = 2 * keyed.uniform(seed, "value", size) - 1
    return (sign * 10.0 ** (6 * keyed.uniform(seed, "size", size) - 3)).reshape(shape).astype("f4")


def tree_sum(leaves, start, stop, combine=np.add):
    """Return the sum that the reduction tree defines, computed recursively."""
    if stop - start == 1:
        return leaves[start].copy()
    half = 1
    while 2 * half < stop - start:
        half *= 2
    left = tree_sum(leaves, start, start + half, combine)
    return combine(left, tree_sum(leaves, start + half, stop, combine))


def cases_of(ranks):
    """Yield (blocks, layout, values per block) of the test cases for a number of ranks."""
    if ranks > 24:  # fewer cases, because the cost grows with the square of the number of ranks
        for leaves, layout in ((ranks, "equal"), (2 * ranks, "equal"), (45, "rising")):
            yield leaves, layout, WIDTH
        yield 45, "one has most", WIDTH
        return
    few = {1, ranks - 1, ranks, ranks + 1, 3 * ranks + 2} if ranks % 4 == 1 else {ranks + 1}
    for leaves in sorted({*few, 2 * ranks, 45} - {0}):
        yield leaves, "equal", WIDTH
    yield 45, "one has most", WIDTH
    if ranks > 1:
        yield 29, "rising", WIDTH
        yield 3 * ranks, "every other idles", WIDTH
    if ranks in (2, 3, 7, 8):  # include cases with fewer values than ranks
        yield from ((21, "equal", width) for width in (0, 1, 2, 5, 64))


def trees_of(leaves, ranks, layout, plain=False):
    runs = fold.split_blocks(leaves, ranks, LAYOUTS[layout](ranks))
    return [fold.Tree(leaves, runs, rank, plain) for rank in range(ranks)]


def algorithms(tree):
    if len(tree.runs) == 1:
        return [exchange.single_rank]
    general = [exchange.gather_nodes, exchange.up_and_down, exchange.segmented]
    return general + ([exchange.pairwise] if exchange._pairs_up(tree) else [])


def limits_of(algorithm, ranks, leaves, nodes, width):
    """Return a rank's maximum rounds, messages and values, from the table in exchange.py."""
    n, hops = len(nodes), math.ceil(math.log2(ranks))
    return {
        exchange.single_rank: (0, 0, 0),
        exchange.gather_nodes: (1, ranks - 1, (ranks - 1) * n * width),
        exchange.up_and_down: (
            math.ceil(math.log2(leaves)) + hops,
            n + hops,
            (n + hops) * width,
        ),
        exchange.pairwise: (hops, hops, hops * width),
        exchange.segmented: (  # a segment has floor or ceil(width / P) values
            2,
            2 * (ranks - 1),
            n * (width - width // ranks) + math.ceil(width / ranks) * (ranks - 1),
        ),
    }[algorithm]


@pytest.mark.parametrize("ranks", [*range(1, 13), 16, 17, 31, 33, 64])
def test_all_algorithms_give_the_same_bytes_within_their_limits(ranks):
    for leaves, layout, width in cases_of(ranks):
        values = wide(leaves, leaves, width)
        expected = tree_sum(values, 0, leaves).tobytes()
        trees = trees_of(leaves, ranks, layout)
        matrices, _ = simulator.folded(trees, values)
        for algorithm in algorithms(trees[0]):
            outcome = simulator.exchange(algorithm, trees, matrices)
            case = f"{algorithm.__name__}, {leaves} blocks, {layout}, width {width}"
            assert {root.tobytes() for root in outcome.roots} == {expected}, case
            for rank in range(ranks):
                nodes = trees[0].nodes[rank]
                rounds, messages, size = limits_of(algorithm, ranks, leaves, nodes, width)
                assert outcome.rounds <= rounds, case
                assert outcome.messages[rank] <= messages, case
                assert outcome.bytes[rank] <= 4 * size, case


def test_moments_are_exchanged_alike():
    counts = np.arange(1, 33, dtype="f8")
    all_values = np.column_stack([counts, wide(1, 32, 6).astype("f8"), abs(wide(2, 32, 6))])
    for leaves, ranks in ((29, 2), (29, 3), (32, 8), (31, 13)):
        values = all_values[:leaves]
        expected = tree_sum(values, 0, leaves, fold.merge_moments)
        trees = trees_of(leaves, ranks, "equal")
        matrices, _ = simulator.folded(trees, values, fold.merge_moments)
        for algorithm in set(algorithms(trees[0])) - {exchange.segmented}:
            outcome = simulator.exchange(algorithm, trees, matrices, fold.merge_moments)
            assert {root.tobytes() for root in outcome.roots} == {expected.tobytes()}
        choice = exchange.choose_algorithm(trees[0], expected.nbytes, fold.merge_moments)
        assert choice is not exchange.segmented  # segments would separate mean and M2


def test_two_pending_exchanges_do_not_mix():
    """Tags separate two exchanges, even if messages of the second exchange arrive first."""
    trees = trees_of(13, 5, "equal")
    first, second = wide(1, 13, WIDTH), wide(2, 13, WIDTH)
    simulation, exchanges = Simulation(5), []
    for tag, values in ((7, first), (8, second)):
        matrices, _ = simulator.folded(trees, values)
        exchanges += [
            (r, exchange.segmented(rank, tag, trees[r], matrices[r], fold.add))
            for r, rank in enumerate(simulation.ranks)
        ]
    roots = simulation.run(reversed(exchanges))[::-1]
    for values, group in ((first, roots[:5]), (second, roots[5:])):
        assert {root.tobytes() for root in group} == {tree_sum(values, 0, 13).tobytes()}


def test_the_algorithm_depends_on_layout_and_size_alone():
    small, large = exchange.SMALL_BYTES, exchange.SMALL_BYTES + 1
    table = [
        # blocks, ranks, bytes, combine, algorithm
        (8, 1, small, fold.add, exchange.single_rank),
        (8, 4, small, fold.add, exchange.pairwise),
        (8, 4, large, fold.add, exchange.pairwise),
        (32, 16, small, fold.add, exchange.pairwise),
        (32, 16, large, fold.add, exchange.segmented),
        (7, 3, small, fold.add, exchange.gather_nodes),
        (7, 3, large, fold.add, exchange.segmented),
        (7, 3, large, fold.merge_moments, exchange.gather_nodes),
        (100, 12, small, fold.add, exchange.up_and_down),
        (100, 12, large, fold.merge_moments, exchange.up_and_down),
    ]
    for leaves, ranks, nbytes, combine, algorithm in table:
        trees = trees_of(leaves, ranks, "equal")
        # All ranks choose the same algorithm, also in a second call.
        assert {exchange.choose_algorithm(t, nbytes, combine) for t in trees * 2} == {algorithm}


def test_plain_moments_never_go_up_the_tree():
    """Moments are also combined correctly if each rank sends a single node (`plain`)."""
    counts = np.ones((29, 1))
    values = np.hstack([counts, wide(1, 29, 2), np.zeros((29, 2))])
    for ranks in (3, 12):
        trees = trees_of(29, ranks, "equal", plain=True)
        matrices, _ = simulator.folded(trees, values, fold.merge_moments)
        algorithm = exchange.choose_algorithm(trees[0], 40, fold.merge_moments)
        root = simulator.exchange(algorithm, trees, matrices, fold.merge_moments).roots[0]
        assert root[0] == 29
        np.testing.assert_allclose(root[1:3], values[:, 1:3].mean(axis=0), rtol=1e-12)


# Exchanges between the ranks of this session


def leaves_of(count, name, shape):
    """Return all leaves of a mini-batch of `count` images, the same on every rank."""
    return wide(name, -(-count // LANES), *shape)


def partial_of(batch, leaves):
    counter = Counter(batch.tree)
    for b in range(*batch.tree.run):
        counter.push(leaves[b].copy())
    return counter.partial(leaves.shape[1:], leaves.dtype)


@pytest.mark.parametrize("shape", [(), (3,), (20, 1, 5, 5), (1000, 300)])
@pytest.mark.parametrize("blocks", [1, 2, 8, 13])
def test_real_ranks_fold_what_one_process_folds(world, blocks, shape):
    count = blocks * LANES - 3
    leaves = leaves_of(count, blocks, shape)
    total = world.gplus(partial_of(share(count, world), leaves))
    assert total.shape == shape and total.dtype == np.float32
    assert total.tobytes() == tree_sum(leaves, 0, blocks).tobytes()


def test_real_ranks_with_skewed_shares(world):
    leaves = leaves_of(17 * LANES, 5, (700, 11))
    expected = tree_sum(leaves, 0, 17).tobytes()
    rising, last = tuple(range(1, world.size + 1)), (0,) * (world.size - 1) + (1,)
    for load in (rising, last):
        batch = share(17 * LANES, world, load=load)
        assert world.gplus(partial_of(batch, leaves)).tobytes() == expected


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 20])
def test_many_sums_at_once(world, bucket_bytes):
    """The reducer sums values that are pushed one by one, as in the backward pass.

    Full buckets are sent immediately, and `finish` waits for all sums.
    """
    count, shapes = 7 * LANES - 1, [(9,), (1000, 300), (), (40, 25), (7,), (128, 64), (3,)]
    batch = share(count, world)
    leaves = [leaves_of(count, i, shape) for i, shape in enumerate(shapes)]
    reducer = Reducer(world, bucket_bytes)
    for i, values in enumerate(leaves):
        reducer.push(f"w{i}", partial_of(batch, values) * (i + 1))
        reducer.progress()
    reducer.push("all have it", np.arange(3))
    sums = reducer.finish()
    assert list(sums) == [f"w{i}" for i in range(len(shapes))] + ["all have it"]
    assert sums["all have it"].tolist() == [0, 1, 2]
    for i, values in enumerate(leaves):
        expected = tree_sum(values, 0, 7) * np.float32(i + 1)
        assert sums[f"w{i}"].tobytes() == expected.tobytes()
    assert not world.pending_exchanges


def test_nodes_are_released_early(world):
    """The reducer releases nodes once they are sent. On one rank, the root node becomes the sum."""
    count = 7 * LANES
    leaves, batch = leaves_of(count, 1, (50, 40)), share(count, world)
    partial, reducer = partial_of(batch, leaves), Reducer(world, 1)
    nodes = [weakref.ref(node) for term in partial.terms for node in term.nodes]
    address = nodes[0]().ctypes.data if nodes else None
    reducer.push("w", partial)
    del partial
    total = reducer.finish()["w"]
    assert total.tobytes() == tree_sum(leaves, 0, 7).tobytes()
    if world.size == 1:
        assert total.ctypes.data == address
    else:
        assert not any(node() is not None for node in nodes)


def test_terms_of_different_types_and_trees_in_one_sum(world):
    first, second = share(5 * LANES, world), share(3 * LANES, world)
    a, b = leaves_of(5 * LANES, 1, (6,)), leaves_of(3 * LANES, 2, (6,)).astype("f8")
    both = partial_of(first, a) + partial_of(second, b) + np.ones(6, "f4")
    expected = tree_sum(a, 0, 5) + tree_sum(b, 0, 3) + np.ones(6, "f4")
    assert world.gplus(both).tobytes() == expected.astype("f4").tobytes()


def test_plain_sums_depend_on_the_number_of_ranks(world):
    """Negative control: a plain sum has other bytes, because each rank adds its blocks in order."""
    plain = World(plain=True)
    leaves = leaves_of(17 * LANES, 3, (1000,))
    batch = share(17 * LANES, plain)
    assert batch.tree.plain
    total = plain.gplus(partial_of(batch, leaves))
    expected = tree_sum(leaves, 0, 17)
    np.testing.assert_allclose(total, expected, rtol=1e-3, atol=1e-2)
    if world.size >= 3:
        assert total.tobytes() != expected.tobytes()
