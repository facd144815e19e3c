"""Recording a step, planning its memory, replaying it."""

import weakref

import numpy as np
import pytest

from mpidl.backends.gpu import launching, program
from mpidl.backends.gpu.array import plain
from mpidl.backends.gpu.recorder import Recorder


def scale(source, size=None):
    """A launch for these tests: out = source copied through the kernel that ends a program."""
    out = launching.empty((1,), np.float64)
    launching.launch("program_end", 1, 32, launching.table([[source]]), 1, _zero(), out)
    return out


def _zero():
    return launching.constant(np.zeros(2, np.int32))


def record(device, function, outputs, graphs=True):
    recorder = Recorder(device)
    with launching.through(recorder):
        made = function(recorder)
        return recorder.finish(outputs(made), graphs), recorder


@pytest.mark.parametrize("graphs", [True, False])
def test_a_replay_sees_the_numbers_of_its_step(device, graphs):
    made, _ = record(
        device,
        lambda r: scale(scale(launching.scalar("rate", 1.0, np.float64))),
        lambda out: {"rate": out},
        graphs,
    )
    started = [made.run(rate=float(i)) for i in range(program.ROWS)]
    assert [made.results(s)["rate"] for s in started] == list(range(program.ROWS))
    assert made.results(made.run())["rate"] == 1.0  # as recorded
    for i in range(3 * program.ROWS):
        assert made.results(made.run(rate=i))["rate"] == i
    with pytest.raises(ValueError, match="too long ago"):
        made.results(0)
    with pytest.raises(ValueError, match="reads no momentum"):
        made.run(momentum=1)


def lives(recorder):
    """[(first, last, bytes, address)] of what was planned."""
    return [(b.first, b.last, b.nbytes, b.address) for b in recorder.planned if b.first is not None]


def test_memory_is_shared_by_what_is_not_needed_at_once(device):
    def chain(recorder):
        value = launching.scalar("rate", 7.0, np.float64)
        for _ in range(20):
            value = scale(value)
        return value

    made, recorder = record(device, chain, lambda out: {"rate": out})
    found = lives(recorder)
    assert len(found) == 20
    for i, (first, last, nbytes, address) in enumerate(found):
        for other_first, other_last, other_bytes, other in found[i + 1 :]:
            if first <= other_last and other_first <= last:
                assert address + nbytes <= other or other + other_bytes <= address
    assert (
        made.nbytes == 2 * launching.ALIGNED
    )  # each but the last is needed by its successor alone
    assert made.results(made.run(rate=3))["rate"] == 3


def test_the_plan_is_as_small_as_can_be_where_sizes_differ(device):
    rng = np.random.default_rng(0)
    recorder = Recorder(device)
    with launching.through(recorder):
        for i in range(60):
            buffer = launching.empty((int(rng.integers(1, 5000)),), np.float64).buffer
            buffer.first, buffer.last = i, i + int(rng.integers(0, 12))
    _, total = recorder._plan()
    alive = [sum(b.nbytes for b in recorder.planned if b.first <= at <= b.last) for at in range(80)]
    assert max(alive) <= total <= 1.25 * max(alive)


def test_what_is_carried_is_found_by_the_next_step(device):
    total = plain(np.array([5.0]))
    plan = {}

    def step(recorder):
        new = scale(total)  # reads the old value, and takes its place
        recorder.carry(new, total)
        plan["new"] = new
        return new

    made, _ = record(device, step, lambda out: {"total": out})
    assert plan["new"].address == total.address
    launching.upload(total, np.array([6.0]))
    assert made.results(made.run())["total"] == 6


def test_an_old_value_that_is_read_later_is_not_overwritten_before(device):
    total = plain(np.array([5.0]))

    def step(recorder):
        new = scale(launching.scalar("rate", 0.0, np.float64))
        old = scale(total)
        recorder.carry(new, total)
        return old

    made, recorder = record(device, step, lambda out: {"old": out})
    assert [type(s).__name__ for s in recorder.steps].count("Copy") == 1
    assert [made.results(made.run(rate=i))["old"] for i in (1, 2, 3)] == [5, 1, 2]


class Adds:
    """A world whose exchange is seen: the root is the sum of this rank's nodes."""

    def __init__(self):
        self.seen = []

    def exchange(self, tree, matrix, combine):
        self.seen.append(matrix.copy())
        return matrix.sum(axis=0)


def test_segments_end_where_ranks_exchange(device):
    world = Adds()

    def step(recorder):
        nodes = launching.scalar("nodes", np.zeros(6), np.float64).reshape(3, 2)
        root = recorder.exchange(world, "tree", nodes, "add")
        return scale(root.part(1, (1,)))

    made, _ = record(device, step, lambda out: {"sum": out})
    kinds = [[type(s).__name__ for s in segment] for segment in made.segments]
    assert kinds == [["Kernel"], ["Exchange"], ["Kernel", "Kernel"]]
    assert [graph is None for graph in made.graphs] == [False, True, False]
    for base in (1.0, 10.0):
        nodes = base * np.arange(6)
        assert made.results(made.run(nodes=nodes))["sum"] == base * (1 + 3 + 5)
        np.testing.assert_array_equal(world.seen[-1], nodes.reshape(3, 2))


def test_a_value_is_not_known_while_a_step_is_recorded(device):
    with pytest.raises(RuntimeError, match="not known while a step is being recorded"):
        record(device, lambda r: float(scale(launching.scalar("a", 1.0, np.float64))), lambda _: {})


@pytest.mark.parametrize(
    "word, act",
    [
        ("allocates", lambda d: d.allocate(16)),
        ("waits", lambda d: d.synchronize()),
        ("uploads", lambda d: d.upload(d.kept.address, np.zeros(1))),
    ],
)
def test_nothing_is_allocated_or_waited_for_inside_of_a_capture(device, word, act):
    device.kept = device.allocate(64)
    with pytest.raises(RuntimeError, match="captur"):
        device.capture(lambda: act(device))


def test_memory_that_stays_begins_as_zeros(device, monkeypatch):
    """Also where a kernel makes them, because they are many."""
    monkeypatch.setattr(launching, "LARGE", 10)
    for shape, dtype in (((3, 3), np.int32), ((5, 1001), np.uint8), ((2, 700), np.float64)):
        found = launching.persistent(shape, dtype)
        assert found.shape == shape and found.dtype == dtype
        np.testing.assert_array_equal(found.numpy(), np.zeros(shape, dtype))


def test_graphs_go_before_the_memory_that_they_point_to(device):
    """NCCL, for one, lets go of registered memory with the graph that holds its messages."""
    gone = []
    made, _ = record(
        device,
        lambda r: scale(launching.scalar("rate", 1.0, np.float64)),
        lambda out: {"rate": out},
    )
    slab, (graph,) = made.owners[0], made.graphs
    weakref.finalize(slab, gone.append, "slab")
    weakref.finalize(graph, gone.append, "graph")
    del slab, graph, _, made
    assert gone == ["graph", "slab"]
