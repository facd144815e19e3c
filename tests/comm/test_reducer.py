"""Test the reducer with values on emulated GPUs over the ranks of this session."""

import contextlib

import nccl_on_mpi
import numpy as np
import pytest
from emulator import compiler, opened
from test_exchange import tree_sum, wide

from mpidl.backends.gpu import array, launching, sums
from mpidl.backends.gpu.fold import partial_of_leaves
from mpidl.backends.gpu.recorder import Recorder
from mpidl.comm import nccl, reducer
from mpidl.core import fold
from mpidl.core.blocks import LANES, share

BLOCKS = 7  # so that ranks have different numbers of nodes
SHAPES = [(9,), (1000,), (), (40, 25), (7,), (128, 64), (3,)]
TRANSPORTS = "host", "mpi", "nccl"


@pytest.fixture
def on_gpus(world, monkeypatch):
    """Return a context manager: on_gpus(transport) gives each rank an emulated GPU."""
    monkeypatch.setattr(reducer, "GPU_BUCKET_BYTES", 5000)
    monkeypatch.setattr(sums, "GATHERED", 64)

    if compiler.find() is None:
        pytest.skip("no g++, which the emulated GPU compiles kernels with")

    @contextlib.contextmanager
    def open_gpus(transport):
        with contextlib.ExitStack() as stack:
            world.device = stack.enter_context(opened())
            if transport == "mpi":
                world.mover = nccl.MpiMover(world)
            elif transport == "nccl":
                stack.enter_context(nccl_on_mpi.installed())
                world.mover = nccl.NcclMover(world, ("these ranks",))
            try:
                yield world.device
            finally:
                world.device = world.mover = None

    return open_gpus


def all_leaves(seed):
    """Return the leaves of all blocks, (blocks, width), for each shape."""
    return [wide(100 * seed + i, BLOCKS, *shape) for i, shape in enumerate(SHAPES)]


def own_leaves(world, seed):
    """Return the leaves of this rank's blocks as Arrays on the GPU."""
    start, stop = share(BLOCKS * LANES, world).tree.run
    return [array.plain(a.reshape(BLOCKS, -1)[start:stop]) for a in all_leaves(seed)]


def start_sums(world, leaves):
    """Push the values to a reducer, with other kernels in between; return the reducer.

    The other kernels would overwrite the values if their memory were reused too early.
    """
    tree, started = share(BLOCKS * LANES, world).tree, world.reducer()
    for i, (rows, shape) in enumerate(zip(leaves, SHAPES, strict=True)):
        copy = rows.astype(np.float64).astype(np.float32)  # the fold may overwrite the leaves
        started.push(f"{i}", partial_of_leaves(copy, tree, 1, shape=shape))
        started.progress()
        for _ in range(3):
            copy = launching.empty((20000,)).zeros_like()
    return started


def expected_sums(seed):
    return [tree_sum(values, 0, BLOCKS) for values in all_leaves(seed)]


def replayed_sums(world, seeds):
    """Record the sums of the first seed; return the results of a replay for each seed."""
    leaves = own_leaves(world, seeds[0])
    ends = [array.plain(np.zeros(shape or (1,), np.float32)) for shape in SHAPES]
    recorder, results = Recorder(world.device), []
    with launching.through(recorder):
        totals = start_sums(world, leaves).finish().values()
        for total, end in zip(totals, ends, strict=True):
            root = total.roots[0] if isinstance(total, sums.Pending) else total
            recorder.store(root, end)
        program = recorder.finish({"end": launching.scalar("end", 0.0, np.float64)})
        for seed in seeds:
            for rows, values in zip(leaves, own_leaves_on_host(world, seed), strict=True):
                launching.upload(rows, values)
            program.results(program.run())
            results.append([np.asarray(end).copy() for end in ends])
    return results


def own_leaves_on_host(world, seed):
    start, stop = share(BLOCKS * LANES, world).tree.run
    return [a.reshape(BLOCKS, -1)[start:stop] for a in all_leaves(seed)]


def differing(results, seed):
    """Return the indices of the sums whose bytes are not those of the tree."""
    pairs = zip(results, expected_sums(seed), strict=True)
    return [i for i, (value, total) in enumerate(pairs) if value.tobytes() != total.tobytes()]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buckets_have_the_bytes_of_the_tree(world, on_gpus, transport):
    with on_gpus(transport):
        totals = start_sums(world, own_leaves(world, 1)).finish()
        assert list(totals) == [f"{i}" for i in range(len(SHAPES))]
        scalar = np.float32(float(totals["2"]))
        results = [scalar if i == 2 else total.numpy() for i, total in enumerate(totals.values())]
    assert differing(results, 1) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replays_sum_the_new_values(world, on_gpus, transport):
    with on_gpus(transport):
        for seed, results in zip((1, 2), replayed_sums(world, (1, 2)), strict=True):
            assert differing(results, seed) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_moments_of_ranks_are_merged_as_on_the_host(world, on_gpus, transport):
    channels, tree = 5, share(BLOCKS * LANES, world).tree
    leaves = np.abs(wide(1, BLOCKS, 1 + 2 * channels).astype(np.float64))
    start, stop = tree.run
    host = fold.Counter(tree, fold.merge_moments)
    for block in range(start, stop):
        host.push(leaves[block].copy())
    expected = world.gplus(host.partial(leaves.shape[1:], np.float64))
    with on_gpus(transport):
        partial = partial_of_leaves(array.plain(leaves[start:stop]), tree, 1, fold.merge_moments)
        assert world.gplus(partial).numpy().tobytes() == expected.tobytes()


def no_join(monkeypatch, world):
    """Let later kernels not wait for the stream for sums."""
    monkeypatch.setattr(type(world.device), "join", lambda device, token: None)
    monkeypatch.setattr(type(world.device), "capture", lambda device, play: Played(play))


class Played:
    """Stands for a graph whose streams are not joined, which a GPU would refuse to capture."""

    def __init__(self, play):
        self.launch = play


def early_reuse(monkeypatch, world):
    """Let memory be reused before the stream for sums has used it."""
    operate = Recorder.operate

    def forgetful(recorder, operation, arrays):
        operate(recorder, operation, arrays if len(arrays) < 3 else arrays[-1:])

    monkeypatch.setattr(Recorder, "operate", forgetful)


def no_wait_for_the_download(monkeypatch, world):
    monkeypatch.setattr(type(world.device), "reached", lambda device, token: True)
    monkeypatch.setattr(type(world.device), "wait", lambda device, token: None)


FAULTS = [("nccl", no_join), ("nccl", early_reuse), ("host", no_wait_for_the_download)]


@pytest.mark.parametrize(
    "transport, fault", FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_negative_control_a_fault_changes_bytes(world, on_gpus, monkeypatch, transport, fault):
    with on_gpus(transport):
        fault(monkeypatch, world)
        (results,) = replayed_sums(world, [1])
        assert (differing(results, 1) != []) == (world.size > 1)
