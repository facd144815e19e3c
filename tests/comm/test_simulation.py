"""Compare the times of simulated exchanges with known times and a plain event loop."""

import numpy as np
import pytest

from mpidl.comm import exchange, simulation
from mpidl.comm.simulation import Link, Network, Simulation
from mpidl.core import fold

OVERHEAD, LATENCY, PER_BYTE, COMBINED, FIXED = 2e-6, 5e-6, 1e-9, 3e-10, 4e-5
FLAT = Network(OVERHEAD, Link(LATENCY, PER_BYTE), Link(LATENCY, PER_BYTE), COMBINED, FIXED)


def seconds(leaves, ranks, width, network=FLAT, **keywords):
    runs = fold.split_blocks(leaves, ranks)
    return simulation.exchange_seconds(runs, width, 4, network, **keywords)


def test_pairwise_takes_one_message_and_one_sum_per_round():
    size = 4 * 1000
    for ranks, rounds in ((2, 1), (4, 2), (8, 3)):
        expected = FIXED + rounds * (
            OVERHEAD + LATENCY + PER_BYTE * size + OVERHEAD + COMBINED * size
        )
        assert seconds(ranks, ranks, 1000) == pytest.approx(expected, rel=1e-12)


def test_one_rank_takes_no_time():
    assert seconds(5, 1, 1000) == 0 and simulation.allgather_seconds(1, 100, FLAT) == 0


def test_messages_of_a_rank_follow_each_other():
    """Each of three ranks sends two messages. A rank's second message leaves after its first."""
    size = 100
    slow = Network(
        OVERHEAD, Link(LATENCY, 1e-6), Link(LATENCY, 1e-6)
    )  # a message occupies the ports for longer than its overhead
    # Both messages to rank 2 are their senders' second messages, and share rank 2's port.
    expected = OVERHEAD + 2 * 1e-6 * size + LATENCY + 1e-6 * size + OVERHEAD
    assert simulation.allgather_seconds(3, size, slow) == pytest.approx(expected)
    fast = Network(OVERHEAD, Link(LATENCY, 0.0), Link(LATENCY, 0.0))  # the processor is the limit
    expected = 2 * OVERHEAD + LATENCY + 2 * OVERHEAD
    assert simulation.allgather_seconds(3, size, fast) == pytest.approx(expected)


def test_links_between_nodes_cost_more():
    distant = Network(
        OVERHEAD, Link(LATENCY, PER_BYTE), Link(10 * LATENCY, PER_BYTE), ranks_per_node=2
    )
    assert seconds(2, 2, 10, distant) == seconds(2, 2, 10, distant._replace(ranks_per_node=8))
    near, spread = (seconds(4, 4, 10, distant._replace(ranks_per_node=n)) for n in (4, 2))
    assert spread - near == pytest.approx(9 * LATENCY)  # one of two rounds leaves the node


def test_ranks_of_a_node_share_memory():
    """Each rank copies its values to shared memory. Then it folds all values, or a segment."""
    node = FLAT._replace(ranks_per_node=4, shares_memory=True)
    small, large = 4 * 1000, 4 * 100_000
    expected = FIXED + PER_BYTE * small + LATENCY + 3 * COMBINED * small
    assert seconds(4, 4, 1000, node) == pytest.approx(expected, rel=1e-12)
    expected = FIXED + 2 * (PER_BYTE * large + LATENCY) + 3 * COMBINED * large / 4
    assert seconds(4, 4, 100_000, node) == pytest.approx(expected, rel=1e-12)
    assert seconds(4, 4, 1000, FLAT._replace(ranks_per_node=4)) == seconds(4, 4, 1000)


def test_the_first_ranks_of_nodes_exchange_messages():
    nodes = FLAT._replace(ranks_per_node=2, shares_memory=True)
    size = 4 * 1000
    inside = PER_BYTE * size + LATENCY + COMBINED * size  # one copy, one sum
    message = OVERHEAD + LATENCY + PER_BYTE * size + OVERHEAD + COMBINED * size
    root = PER_BYTE * size + LATENCY + PER_BYTE * size
    assert seconds(4, 4, 1000, nodes) == pytest.approx(FIXED + inside + message + root, rel=1e-12)
    assert seconds(4, 3, 1000, nodes) > 0  # the second node has one rank
    # large sums are split into segments, which the ranks of a node exchange in parallel
    size = 4 * 100_000
    inside = 2 * (PER_BYTE * size + LATENCY) + COMBINED * size / 2
    message = 2 * OVERHEAD + LATENCY + (PER_BYTE + COMBINED) * size / 2
    root = PER_BYTE * size / 2 + LATENCY + PER_BYTE * size / 2
    expected = FIXED + inside + message + root
    assert seconds(4, 4, 100_000, nodes) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [3, 7, 12])
def test_few_elements_stand_for_long_messages(ranks):
    """A long exchange uses small arrays, but must take the time of arrays of full size."""
    runs, width = fold.split_blocks(5 * ranks + 1, ranks), 200 * simulation.SEGMENT * ranks
    trees = [fold.Tree(5 * ranks + 1, runs, rank) for rank in range(ranks)]
    full = Simulation(ranks, FLAT, carries_data=False)

    def on(rank):
        def add(left, right):
            full.ranks[rank].spend(COMBINED * left.nbytes)
            return left

        matrix = np.zeros((len(trees[rank].nodes[rank]), width), "f4")
        return exchange.segmented(full.ranks[rank], 0, trees[rank], matrix, add)

    full.run((rank, on(rank)) for rank in range(ranks))
    expected = FIXED + max(rank.clock for rank in full.ranks)
    assert seconds(5 * ranks + 1, ranks, width) == pytest.approx(expected, rel=0.02)
    count = 2 * (ranks - 1)  # messages that the slowest rank sends and receives
    assert expected > FIXED + 2 * LATENCY + 2 * count * OVERHEAD


@pytest.mark.parametrize("width", [40, 100_000])
def test_time_grows_with_each_cost(width):
    """The size determines the algorithm. In each algorithm, every cost must contribute."""
    base = seconds(100, 12, width)
    costs = ("overhead", "inside", "per_combined_byte", "per_exchange")
    for name in costs:
        old = getattr(FLAT, name)
        new = Link(2 * LATENCY, 2 * PER_BYTE) if name == "inside" else 2 * old
        changed = FLAT._replace(**{name: new}, ranks_per_node=12)
        assert seconds(100, 12, width, changed) > base, name


def test_an_exchange_that_does_not_end_is_an_error():
    """Negative control: one message is never sent, another never received."""

    def receive(transport):
        yield [transport.irecv(np.empty(1), 1, 0)]

    def send(transport):
        yield [transport.isend(np.empty(1), 1, 0)]

    for steps, message in ((receive, "does not end on rank 0"), (send, "never received")):
        two = Simulation(2)
        with pytest.raises(RuntimeError, match=message):
            two.run([(0, steps(two.ranks[0]))])


def test_a_message_of_another_size_is_an_error():
    two = Simulation(2)

    def send(transport):
        yield [transport.isend(np.zeros(3), 1, 0)]

    def receive(transport):
        yield [transport.irecv(np.zeros(2), 0, 0)]

    with pytest.raises(ValueError, match="expected a message of 2 float64 values, got 3"):
        two.run([(0, send(two.ranks[0])), (1, receive(two.ranks[1]))])


@pytest.mark.slow("ranks")
@pytest.mark.timeout(120)
def test_1024_ranks():
    """On the largest number of ranks, both algorithms must stay within their tables' bounds."""
    ranks = 1024
    small = seconds(2 * ranks, ranks, 41, algorithm=exchange.up_and_down)
    assert (
        FIXED + 10 * (2 * OVERHEAD + LATENCY)
        < small
        < FIXED + 25 * (2 * OVERHEAD + LATENCY + 200 * (PER_BYTE + COMBINED))
    )
    large = seconds(2 * ranks, ranks, 65536)
    messages = 2 * (ranks - 1)
    assert (
        FIXED + messages * OVERHEAD
        < large
        < FIXED + 2 * messages * (2 * OVERHEAD) + 4 * 65536 * 4 * PER_BYTE + 4 * LATENCY
    )
