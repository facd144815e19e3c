"""Test recorded training steps: recording, planning of memory, replays."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from mpidl import phases
from mpidl.backends.gpu import launching, program, sums
from mpidl.backends.gpu.array import plain
from mpidl.backends.gpu.recorder import Recorder
from mpidl.core.fold import Term, add


def copy(source):
    """Launch a kernel that copies a number, and return the copy."""
    out = launching.empty((1,), np.float64)
    launching.launch("program_end", 1, 32, launching.table([[source, 1, None]]), _zero(), out)
    return out


def _zero():
    return launching.constant(np.zeros(2, np.int32))


def record(device, step, graphs=True):
    """Record step(recorder); return (program, recorder). The result of step is named "out"."""
    recorder = Recorder(device)
    with launching.through(recorder):
        return recorder.finish({"out": step(recorder)}, graphs), recorder


def run(program, **numbers):
    return program.results(program.run(**numbers))["out"]


@pytest.mark.parametrize("graphs", [True, False])
def test_a_replay_reads_the_numbers_of_its_step(device, graphs):
    recorded, _ = record(
        device, lambda _: copy(copy(launching.scalar("rate", 1.0, np.float64))), graphs
    )
    started = [recorded.run(rate=float(i)) for i in range(program.ROWS)]
    assert [recorded.results(s)["out"] for s in started] == list(range(program.ROWS))
    assert run(recorded) == 1.0  # the recorded number
    for i in range(3 * program.ROWS):
        assert run(recorded, rate=i) == i
    with pytest.raises(ValueError, match="the results of step 0 were overwritten"):
        recorded.results(0)
    with pytest.raises(ValueError, match="has no input momentum"):
        recorded.run(momentum=1)


def lifetimes(recorder):
    """Return [(first, last, bytes, address)] of the planned buffers."""
    return [(b.first, b.last, b.nbytes, b.address) for b in recorder.planned if b.first is not None]


def test_buffers_share_memory_unless_they_are_needed_at_once(device):
    def chain(recorder):
        value = launching.scalar("rate", 7.0, np.float64)
        for _ in range(20):
            value = copy(value)
        return value

    recorded, recorder = record(device, chain)
    buffers = lifetimes(recorder)
    assert len(buffers) == 20
    for i, (first, last, nbytes, address) in enumerate(buffers):
        for other_first, other_last, other_bytes, other in buffers[i + 1 :]:
            if first <= other_last and other_first <= last:
                assert address + nbytes <= other or other + other_bytes <= address
    assert recorded.nbytes == 2 * launching.ALIGNED  # at most two buffers are needed at a time
    assert run(recorded, rate=3) == 3


def test_a_plan_of_different_sizes_is_near_the_lower_bound(device):
    rng = np.random.default_rng(0)
    recorder = Recorder(device)
    with launching.through(recorder):
        for i in range(60):
            buffer = launching.empty((int(rng.integers(1, 5000)),), np.float64).buffer
            buffer.first, buffer.last = i, i + int(rng.integers(0, 12))
    _, total = recorder._plan()
    live = [sum(b.nbytes for b in recorder.planned if b.first <= t <= b.last) for t in range(80)]
    assert max(live) <= total <= 1.25 * max(live)


def test_a_carried_value_is_read_by_the_next_step(device):
    total, addresses = plain(np.array([5.0])), []

    def step(recorder):
        new = copy(total)  # reads the old value and overwrites it
        recorder.store(new, total)
        addresses.append(new)
        return new

    recorded, _ = record(device, step)
    assert addresses[0].address == total.address
    launching.upload(total, np.array([6.0]))
    assert run(recorded) == 6


def test_an_old_value_is_not_overwritten_before_its_last_read(device):
    total = plain(np.array([5.0]))

    def step(recorder):
        new = copy(launching.scalar("rate", 0.0, np.float64))
        old = copy(total)
        recorder.store(new, total)
        return old

    recorded, recorder = record(device, step)
    assert sum(step.launch is None for step in recorder.steps) == 1  # a copy
    assert [run(recorded, rate=i) for i in (1, 2, 3)] == [5, 1, 2]


def copy_early(source):
    """Copy a number at the start of the step, and return the copy."""
    out = launching.empty((1,), np.float64)
    launching.before_step("copy_pieces", [source, out, 1, 4, 2, 2, 2], 1, 256)
    return out


def test_rows_before_a_step_go_out_in_one_launch(device):
    """A row whose source the step computes is launched on the spot, behind its source."""
    fixed = [plain(np.array([x])) for x in (5.0, 7.0)]

    def step(recorder):
        for _ in range(4):
            first = copy(copy(launching.scalar("rate", 0.0, np.float64)))
        early = [copy_early(x) for x in fixed]
        late = copy_early(copy_early(first))
        assert [len(rows.rows) for rows in recorder.early.values()] == [2]
        return early[0] + early[1] + late

    recorded, _ = record(device, step)
    names = [launch.name for launch in recorded.launches()]
    assert names[:2] == ["program_begin", "copy_pieces"]
    assert names.count("copy_pieces") == 3
    assert run(recorded, rate=100.0) == 112
    launching.upload(fixed[0], np.array([6.0]))
    assert run(recorded, rate=100.0) == 113


def test_a_weight_is_copied_before_its_step_overwrites_it(device):
    total = plain(np.array([5.0]))

    def step(recorder):
        early = copy_early(total)
        recorder.store(copy(launching.scalar("rate", 0.0, np.float64)), total)
        return copy(early)

    recorded, _ = record(device, step)
    assert [run(recorded, rate=i) for i in (1, 2, 3)] == [5, 1, 2]


class SummingWorld:
    """A world that stores the exchanged nodes. The root is the sum of this rank's nodes."""

    mover, is_exchanging = None, True

    def __init__(self):
        self.matrices, self.queries = [], 0

    def progress(self):
        self.queries += 1

    def start_sum(self, tree, pieces, combine, dtype, name, out):
        ((_, nodes),) = pieces
        self.matrices.append(np.array(nodes))
        return SimpleNamespace(root=self.matrices[-1].sum(axis=0))

    def wait(self, pending):
        pass


def start_sum(world, nodes):
    """Start to sum nodes, (n, width) Array, through the host; return the DeviceSum."""
    term = Term("tree", [], add, nodes.dtype)
    return sums.start(world, term, [SimpleNamespace(matrix=nodes)], is_awaited=True)


def total(world, nodes):
    """Return the sum of nodes through the host."""
    started = start_sum(world, nodes)
    while started.point is not None:
        started.advance()
    return started.root


def test_exchanges_split_a_program_into_segments(device):
    world = SummingWorld()

    def step(recorder):
        nodes = launching.scalar("nodes", np.zeros(6), np.float64).reshape(3, 2)
        root = total(world, nodes)
        return copy(root.part(1, (1,)))

    recorded, _ = record(device, step)
    are_kernels = [[s.launch is not None for s in segment] for segment in recorded.segments]
    # the download, then three operations of the host: a mark, the start of the sum, and its end
    assert are_kernels == [[True, False], *3 * [[False]], [True, True]]
    assert [graph is None for graph in recorded.graphs] == [False, *3 * [True], False]
    for base in (1.0, 10.0):
        nodes = base * np.arange(6)
        assert run(recorded, nodes=nodes) == base * (1 + 3 + 5)
        np.testing.assert_array_equal(world.matrices[-1], nodes.reshape(3, 2))


@pytest.mark.parametrize("graphs", [True, False])
def test_a_timeline_has_the_times_of_segments_or_layers(device, graphs):
    """A graph is one span. Without graphs, each layer is one span. Exchanges are on the host."""
    world = SummingWorld()

    def step(recorder):
        with phases.layer("conv1"):
            value = copy(launching.scalar("a", 1.0, np.float64))
        with phases.layer("dense1"):
            nodes = copy(value).reshape(1, 1)
        with phases.layer("loss"):
            root = total(world, nodes)
        with phases.span("update"):
            return copy(root)

    with phases.named_places():
        recorded, _ = record(device, step, graphs)
    run(recorded, a=1.0)  # spans are not stored yet
    phases.store_spans(100)
    begin = phases.now()
    handles = [recorded.run(a=float(i)) for i in range(3)]
    assert [recorded.results(handle)["out"] for handle in handles] == [0, 1, 2]
    stored = phases.take_spans()
    run(recorded, a=1.0)  # spans are not stored any more
    labels, spans = list(stored.labels), stored.array()
    on_gpu = [labels[span["label"]][0] == phases.GPU for span in spans]
    names = [labels[span["label"]][2] for span in spans[on_gpu]]
    expected = ["conv1 to loss", "update"]
    if not graphs:  # the download of the nodes is in "loss", and the last kernel stores the results
        expected = ["other", "conv1", "dense1", "loss", "update", "other"]
    assert names == 3 * expected
    starts, ends = spans[on_gpu]["start"], spans[on_gpu]["end"]
    assert (starts <= ends).all() and (ends[:-1] <= starts[1:]).all()
    assert begin <= starts[0]
    exchanges = [label for label in labels if label[0] == phases.MAIN]
    assert exchanges == [("main", "span", "loss")]


def test_values_cannot_be_read_while_a_step_is_recorded(device):
    with pytest.raises(RuntimeError, match="not available on the host while a step is recorded"):
        record(device, lambda _: float(copy(launching.scalar("a", 1.0, np.float64))))


@pytest.mark.parametrize("name", ["allocate", "synchronize", "upload"])
def test_a_capture_refuses_allocations_and_waits(device, name):
    memory = device.allocate(64)
    arguments = {"allocate": (16,), "synchronize": (), "upload": (memory.address, np.zeros(1))}
    with pytest.raises(RuntimeError, match="captur"):
        device.capture(lambda: getattr(device, name)(*arguments[name]))


def test_persistent_memory_starts_as_zeros(device, monkeypatch):
    """Large arrays, which a kernel sets to zero, are tested too."""
    monkeypatch.setattr(launching, "LARGE", 10)
    for shape, dtype in (((3, 3), np.int32), ((5, 1001), np.uint8), ((2, 700), np.float64)):
        zeros = launching.persistent(shape, dtype)
        assert zeros.shape == shape and zeros.dtype == dtype
        np.testing.assert_array_equal(zeros.numpy(), np.zeros(shape, dtype))


def test_graphs_are_released_before_their_memory(device):
    """For example, NCCL releases memory when the graph that contains its messages is deleted."""
    released = []
    recorded, _ = record(device, lambda _: copy(launching.scalar("rate", 1.0, np.float64)))
    slab, (graph,) = recorded.owners[0], recorded.graphs
    weakref.finalize(slab, released.append, "slab")
    weakref.finalize(graph, released.append, "graph")
    del slab, graph, _, recorded
    assert released == ["graph", "slab"]
