"""Test sums in shared memory, on simulated ranks, on threads and on the ranks of this session."""

import gc
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cpu_builds import needs_kernels
from test_exchange import leaves_of, partial_of, tree_sum, trees_of, wide

import mpidl as dl
from mpidl.backends.cpu import builds
from mpidl.comm import exchange, host_memory, messaging, sum_plans, sum_queue
from mpidl.comm.host_memory import HostMemory
from mpidl.comm.reducer import Reducer
from mpidl.comm.sum_plans import KINDS
from mpidl.comm.sum_queue import HostSum, SumQueue
from mpidl.core import fold
from mpidl.core.blocks import LANES, share
from mpidl.core.fold import Counter
from mpidl.ranks.world import World

pytestmark = needs_kernels
FLOATS, DOUBLES = np.dtype("f4"), np.dtype("f8")
SUM, MOMENTS = (fold.add, np.add), (fold.merge_moments, fold.merge_moments)


def queues_of(ranks):
    """Return the sum queues of simulated ranks, which share memory in this process."""
    nbytes = sum_queue.queue_bytes(ranks)
    memory = np.zeros(nbytes + sum_plans.LINE, np.uint8)
    start = -sum_queue.address_of(memory) % sum_plans.LINE
    memory = memory[start : start + nbytes]
    return [SumQueue(memory, rank, ranks, patience=0) for rank in range(ranks)]


def moments(name, blocks, channels):
    """Return counts, means and sums of squared deviations. Some blocks have no images."""
    values = wide(name, blocks, 1 + 2 * channels).astype("f8")
    values[:, 0] = np.arange(blocks) % 3
    return np.abs(values)


class Job:
    """A sum over all blocks, which provides the nodes of each rank and the expected result."""

    def __init__(self, values, operations=SUM):
        self.values, (self.combine, oracle) = values, operations
        self.expected = tree_sum(values, 0, len(values), oracle).tobytes()

    def pieces(self, tree):
        """Return a rank's nodes as two pieces (width, parts of the nodes), and the root's array."""
        counter = Counter(tree, self.combine)
        for block in range(*tree.run):
            counter.push(self.values[block].copy())
        width = self.values.shape[1]
        cut = width // 3 if self.combine is fold.add else width
        pieces = [(cut, [node[:cut].copy() for node in counter.values])]
        pieces += [(width - cut, [node[cut:].copy() for node in counter.values])]
        return pieces, np.full(width, np.nan, self.values.dtype)

    def of_rank(self, tree):
        """Return the HostSum of a rank and its root array. All ranks share memory."""
        pieces, root = self.pieces(tree)
        kind = KINDS[self.combine, root.dtype]
        plan = sum_plans.plan_of(tree, (0, len(tree.runs)), tree.rank, len(root), kind)
        return HostSum(plan, pieces, root), root


def run(jobs, trees, queues, seed):
    """Run sums on simulated ranks that advance in random order. Return each rank's roots."""
    draw = random.Random(seed)
    started = [[] for _ in trees]
    pending = set(range(len(trees)))
    while pending:
        rank = draw.choice(sorted(pending))
        sums = started[rank]
        if len(sums) < len(jobs) and draw.random() < 0.5:
            sums.append(jobs[len(sums)].of_rank(trees[rank]))
            queues[rank].start(sums[-1][0])
        queues[rank].advance()
        if len(sums) == len(jobs) and not queues[rank].is_busy:
            assert all(host_sum.is_complete for host_sum, _ in sums)
            pending.discard(rank)
    return [[root for _, root in sums] for sums in started]


def assert_sums(jobs, roots):
    for of_rank in roots:
        for number, (job, root) in enumerate(zip(jobs, of_rank, strict=True)):
            assert root.tobytes() == job.expected, f"sum {number}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8])
def test_all_ranks_get_the_sum_that_the_tree_defines(ranks):
    """Sums of different sizes give the expected bytes on all ranks.

    The sums have no values, one value, several chunks, or more chunks than the queue has slots.
    """
    for blocks, layout in ((1, "equal"), (ranks, "equal"), (13, "equal"), (29, "one has most")):
        large = 700_000 // blocks
        jobs = [
            Job(wide(1, blocks, 1)),
            Job(wide(2, blocks, 0)),
            Job(moments(3, blocks, 20), MOMENTS),
            Job(wide(4, blocks, 40_000 // blocks)),
            Job(wide(5, blocks, 41).astype("f8")),
            Job(moments(6, blocks, 9000 // blocks), MOMENTS),
            Job(wide(7, blocks, large) if ranks == 3 else wide(7, blocks, 5)),
            Job(wide(8, blocks, 3)),
        ]
        trees = trees_of(blocks, ranks, layout)
        assert_sums(jobs, run(jobs, trees, queues_of(ranks), seed=blocks))


def test_small_sums_are_folded_by_every_rank_and_large_ones_in_segments():
    plans = [
        sum_plans.plan_of(trees_of(8, 4, "equal")[1], (0, 4), 1, width, sum_plans.FLOATS)
        for width in (82, 8192, 8193, 10**6)
    ]
    assert [int(plan[5]) for plan in plans] == [1, 1, 0, 0]
    assert int(plans[3][3]) * sum_plans.SLOT_BYTES >= 4 * 10**6  # each chunk fits into a slot


def test_another_order_of_additions_gives_other_bytes():
    """Negative control: a sum from left to right and the tree's sum have different bytes."""
    job, trees = Job(wide(1, 13, 1000)), trees_of(13, 3, "equal")
    plain = fold.Tree(13, trees[0].runs, 0, plain=True)
    joins_of = sum_plans._joins_of
    sum_plans.plan_of.cache_clear()
    try:
        sum_plans._joins_of = lambda tree, ranges: joins_of(plain, ranges)
        (root,), *_ = run([job], trees, queues_of(3), seed=1)
    finally:
        sum_plans._joins_of = joins_of
        sum_plans.plan_of.cache_clear()
    np.testing.assert_allclose(root, np.sum(job.values, 0, "f8"), rtol=1e-3, atol=1e-2)
    assert root.tobytes() != job.expected


def test_a_slot_is_used_again_only_when_all_ranks_have_taken_its_results():
    """Rank 0 can be ahead of rank 1 by as many sums as the queue has slots, but no further."""
    trees, queues = trees_of(2, 2, "equal"), queues_of(2)
    jobs = [Job(wide(n, 2, 6)) for n in range(sum_queue.SLOTS + 3)]
    first_sums = [job.of_rank(trees[0]) for job in jobs]
    for host_sum, _ in first_sums:
        queues[0].start(host_sum)
        queues[0].advance()
    placed = queues[0].words[7]
    assert placed == sum_queue.SLOTS and not any(s.is_complete for s, _ in first_sums)
    second_sums = [job.of_rank(trees[1]) for job in jobs]
    for host_sum, _ in second_sums:
        queues[1].start(host_sum)
    for _ in jobs:
        for queue in queues:
            queue.advance()
    assert_sums(jobs, [[root for _, root in sums] for sums in (first_sums, second_sums)])


def run_different_sums():
    """Run a sum on three ranks with a different shape on the last rank. Return job and roots."""
    jobs, trees = [Job(wide(1, 7, 1000)), Job(wide(1, 7, 1001))], trees_of(7, 3, "equal")
    queues = queues_of(3)
    sums = [jobs[rank == 2].of_rank(tree) for rank, tree in enumerate(trees)]
    for _ in range(3):
        for queue, (host_sum, _) in zip(queues, sums, strict=True):
            if not queue.is_busy and not host_sum.is_complete:
                queue.start(host_sum)
            queue.advance()
    return jobs[0], [root for _, root in sums]


DIFFERENT = (
    "the ranks sum different values at the same time: ranks 0, 1 1000 float32 values; rank 2 1001 "
    "float32 values: all ranks must call the same functions in the same order, with values of the "
    "same shapes"
)


def test_ranks_that_start_different_sums_raise_an_error(monkeypatch):
    with pytest.raises(dl.Fault) as error:
        run_different_sums()
    assert str(error.value) == DIFFERENT
    plan = sum_plans._plan

    def without_identity(*arguments):
        words = plan(*arguments)
        words[sum_plans.IDENTITY_WORD] = 0
        return words

    sum_plans.plan_of.cache_clear()
    monkeypatch.setattr(sum_plans, "_plan", without_identity)
    job, roots = run_different_sums()  # negative control: no error, but wrong sums
    sum_plans.plan_of.cache_clear()
    assert not np.isnan(roots[0]).any() and roots[2][:1000].tobytes() != job.expected


@pytest.mark.timeout(120)
def test_ranks_that_run_at_the_same_time():
    """Ranks that run concurrently get the expected sums.

    The ranks are threads, which share memory. Kernels run without the interpreter's lock.
    """
    ranks, blocks = 3, 7
    trees, queues = trees_of(blocks, ranks, "equal"), queues_of(ranks)
    jobs = [Job(wide(n, blocks, 1 + 4000 * (n % 5))) for n in range(40)]
    sums = [[job.of_rank(tree) for job in jobs] for tree in trees]
    barrier = threading.Barrier(ranks)

    def work(rank):
        barrier.wait()
        for host_sum, _ in sums[rank]:
            queues[rank].start(host_sum)
        while queues[rank].is_busy:
            builds.kernels().sums_wait(queues[rank].words, sums[rank][-1][0].words)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_sums(jobs, [[root for _, root in of_rank] for of_rank in sums])


class Mailbox:
    """A transport for simulated ranks, which stores messages until they are received."""

    def __init__(self, rank, size, letters):
        self.rank, self.size, self.letters = rank, size, letters
        self.oversubscribed = True

    def isend(self, array, dest, tag):
        self.letters.setdefault((self.rank, dest, tag), []).append(array.copy())
        return None

    def irecv(self, array, source, tag):
        return (source, self.rank, tag), array

    def receive(self, requests):
        """Receive the messages if all of them have been sent. Return whether they were received."""
        receives = [request for request in requests if request is not None]
        if not all(self.letters.get(key) for key, _ in receives):
            return False
        for key, array in receives:
            array[...] = self.letters[key].pop(0).reshape(array.shape)
        return True


def memories_of(sizes):
    """Return the HostMemory of each simulated rank, given the number of ranks per host."""
    stops, letters, memories = np.cumsum(sizes).tolist(), {}, []
    hosts = [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    for first, stop in hosts:
        up, down = (queues_of(stop - first)[0]._memory for _ in range(2))
        for rank in range(first, stop):
            memory = HostMemory(Mailbox(rank, stops[-1], letters), hosts, up, None)
            memory.down = SumQueue(down, rank - first, stop - first, patience=0)
            memories.append(memory)
    return memories


def exchange_all(jobs, trees, memories, draw):
    """Run all sums at once on ranks that advance in random order. Return each rank's roots."""
    pending, roots = [], [[None] * len(jobs) for _ in memories]

    def advance(rank, number, steps):
        try:
            pending.append((rank, number, steps, next(steps)))
        except StopIteration as end:
            roots[rank][number] = end.value

    for rank in draw.sample(range(len(trees)), len(trees)):
        for number, job in enumerate(jobs):
            pieces, root = job.pieces(trees[rank])
            arguments = number, trees[rank], pieces, job.combine, root
            advance(rank, number, memories[rank].exchange(*arguments))
    while pending:
        *entry, requests = pending.pop(draw.randrange(len(pending)))
        receive = memories[entry[0]]._transport.receive
        if requests() if callable(requests) else receive(requests):
            advance(*entry)
        else:
            pending.append((*entry, requests))
    return roots


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 2, 4), (4, 4), (2, 3, 2), (5,)])
def test_hosts_exchange_messages_and_their_ranks_share_memory(sizes):
    ranks = sum(sizes)
    for blocks, layout in ((1, "equal"), (13, "equal"), (2 * ranks, "rising")):
        trees, memories = trees_of(blocks, ranks, layout), memories_of(sizes)
        jobs = [
            Job(wide(1, blocks, 70_000)),
            Job(moments(2, blocks, 20), MOMENTS),
            Job(wide(3, blocks, 0)),
            Job(wide(4, blocks, 40_000)),
            Job(wide(5, blocks, 9)),
        ]
        assert_sums(jobs, exchange_all(jobs, trees, memories, random.Random(blocks)))
        count = host_memory.count_segments(memories[0].hosts, 280_000, fold.add)
        assert count == min(4, *sizes)


# The ranks of this session

HOSTS = {
    "one host": lambda rank: "a",
    "one rank alone": lambda rank: "a" if rank == 0 else "b",
    "two ranks per host": lambda rank: "abcdefgh"[rank // 2],
}


def world_on(hosts):
    """Return a World in which the ranks appear to be on the given hosts."""
    world = World(timeout=60)
    world.transport.hosts = [HOSTS[hosts](rank) for rank in range(world.size)]
    return world


def push_all(reducer, batch, leaves):
    for i, values in enumerate(leaves):
        reducer.push(f"w{i}", partial_of(batch, values))
        reducer.progress()


def expected_of(leaves):
    return [tree_sum(values, 0, len(values)).tobytes() for values in leaves]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("blocks", [1, 2, 8, 13])
def test_many_sums_at_once(world, blocks, hosts):
    count, shapes = blocks * LANES - 3, [(9,), (600, 90), (), (40, 25), (128, 64), (3,)]
    ranks = world_on(hosts)
    batch = share(count, ranks)
    leaves = [leaves_of(count, i, shape) for i, shape in enumerate(shapes)]
    reducer = Reducer(ranks, 4000)
    push_all(reducer, batch, leaves)
    statistics = moments(1, blocks, 20)
    counter = Counter(batch.tree, fold.merge_moments)
    for block in range(*batch.tree.run):
        counter.push(statistics[block].copy())
    total = ranks.gplus(counter.partial((41,), DOUBLES))
    assert total.tobytes() == tree_sum(statistics, 0, blocks, fold.merge_moments).tobytes()
    sums = reducer.finish()
    assert [sums[f"w{i}"].tobytes() for i in range(len(shapes))] == expected_of(leaves)
    memory, sizes = ranks.host_memory(), np.unique(ranks.transport.hosts, return_counts=True)[1]
    assert not ranks.is_exchanging
    if max(sizes) == 1:
        assert memory is None
    else:
        assert [stop - first for first, stop in memory.hosts] == sizes.tolist()
        assert memory.has_all_ranks == (len(sizes) == 1)
    ranks.close()


def test_two_worlds_at_once(world):
    worlds, count = [World(timeout=60), World(timeout=60)], 9 * LANES
    leaves = [leaves_of(count, i, (300 + i, 70)) for i in range(4)]
    reducers = [Reducer(member, 1000) for member in worlds]
    for i, values in enumerate(leaves):
        for member, reducer in zip(worlds, reducers, strict=True):
            reducer.push(f"w{i}", partial_of(share(count, member), values))
    for reducer in reversed(reducers):
        sums = reducer.finish()
        assert [sums[f"w{i}"].tobytes() for i in range(4)] == expected_of(leaves)
    for member in worlds:
        member.close()


def test_without_room_the_ranks_send_messages(world, monkeypatch):
    """If a host has too little free memory, all ranks send messages. The results are the same."""
    free_bytes = 0 if world.rank == world.size - 1 else 1 << 40
    monkeypatch.setattr(host_memory, "free_shared_bytes", lambda transport: free_bytes)
    ranks, count = World(timeout=60), 13 * LANES
    algorithms = []

    def choose(*arguments):
        algorithms.append(exchange.choose_algorithm(*arguments))
        return algorithms[-1]

    monkeypatch.setattr(messaging, "choose_algorithm", choose)
    leaves = leaves_of(count, 1, (500,))
    total = ranks.gplus(partial_of(share(count, ranks), leaves))
    assert total.tobytes() == tree_sum(leaves, 0, 13).tobytes()
    assert ranks.host_memory() is None and len(algorithms) == (world.size > 1)
    ranks.close()


def test_a_late_rank_is_waited_for(world):
    """The other ranks wait for a late rank, first in the C library, then in `wait_until`."""
    count = 5 * LANES
    leaves = leaves_of(count, 1, (20,))
    for late in range(world.size):
        partial = partial_of(share(count, world), leaves)
        if world.rank == late:
            time.sleep(0.02)
        assert world.gplus(partial).tobytes() == tree_sum(leaves, 0, 5).tobytes()


@pytest.mark.parametrize("width", [7, 100_000])
def test_ranks_of_a_job_that_sum_different_shapes(world, width):
    """Every rank raises the same error, and the ranks can still use another world."""
    count, ranks, other = 5 * LANES, World(timeout=60), World(timeout=60)
    shape = (width + (world.rank == world.size - 1),)
    partial = partial_of(share(count, ranks), leaves_of(count, 1, shape))
    if world.size == 1:
        ranks.gplus(partial)
    else:
        last = world.size - 1
        with pytest.raises(dl.Fault, match=f"rank {last} {width + 1} float32 values: all") as error:
            ranks.gplus(partial)
        assert len(set(world.allgather(str(error.value)))) == 1
    leaves = leaves_of(count, 1, (width,))
    total = other.gplus(partial_of(share(count, other), leaves))
    assert total.tobytes() == tree_sum(leaves, 0, 5).tobytes()
    ranks.close()
    other.close()


@dl.op
def unlearnable(x):
    def vjp(dy):
        raise ArithmeticError("no gradient")

    return x, vjp


def test_memory_of_worlds_that_end(world):
    """Evaluations free their shared memory. After an exception, no kernel advances sums."""

    def count_maps():
        return Path("/proc/self/maps").read_text().count("/dev/shm")

    count = 16 * world.size  # each rank has images, so each rank raises the exception below
    images = np.random.default_rng(0).integers(0, 200, (count, 1, 12, 12)).astype(np.uint8)
    store, net = dl.ArrayDatastore(images, np.arange(count) % 3), dl.nn.zoo.digits((1, 12, 12), 3)
    dl.evaluate(net, store)
    before = count_maps()
    for _ in range(3):
        dl.evaluate(net, store)
        dl.predict(net, store)
    assert count_maps() == before
    weights = {"w": np.ones((3, 144), np.float32), "v": np.ones((300_000, 3), np.float32)}

    def loss(p, pixels, labels):
        hidden = unlearnable(dl.dense(dl.flatten(pixels), p["w"], None))
        return dl.softmax_cross_entropy(dl.dense(hidden, p["v"], None), labels)

    for _ in range(2):
        other = dl.World()
        ((pixels, labels),) = dl.MinibatchQueue(store, count, 0, other, "never").epoch(1)
        with pytest.raises(ArithmeticError):
            dl.value_and_grad(loss, reduce=other)(weights, pixels, labels)
        other.close()
        del other
        gc.collect()
        options = dl.TrainingOptions(epochs=2, batch_size=count, verbose=False, plots="none")
        dl.train(dl.nn.zoo.digits((1, 12, 12), 3), store, options, world=world)
