"""Test sums over the ranks in replays of a recorded training step."""

import time

import numpy as np
import pytest
from cpu_builds import needs_kernels

from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.call import partial_of_rows
from mpidl.backends.cpu.program import Calls
from mpidl.backends.cpu.recorder import Recorder
from mpidl.comm.host_memory import HostMemory
from mpidl.core.blocks import share
from mpidl.ranks.world import World

pytestmark = needs_kernels
IMAGES, WIDTH = 60, 4  # 60 images are 4 blocks, so some ranks may have no block


@pytest.fixture(params=["memory", "messages"])
def ranks(request, world, monkeypatch):
    """The ranks, which share memory or exchange messages."""
    if request.param == "memory":
        yield world
        return
    monkeypatch.setattr(HostMemory, "allocate", lambda transport: None)
    separate = World(threads=None)
    yield separate
    separate.close()


def parts(world, rows):
    """Return a Partial whose nodes a kernel copies from `rows`, of shape (nodes, WIDTH)."""
    tree = share(IMAGES, world).tree
    nodes = arenas.empty(rows.shape)
    builds.kernels().copy(rows, nodes, rows.size)
    return partial_of_rows(nodes, tree)


def rows_of(world, factor):
    count = len(share(IMAGES, world).tree.nodes[world.rank])
    return np.full((count, WIDTH), (1 + world.rank) * factor, np.float32)


def test_replays_sum_the_new_values(ranks):
    result = np.zeros(WIDTH, np.float32)
    recorder = Recorder([result])
    values = rows_of(ranks, 1)
    recorder.constant(values)
    with recorder.recording():
        total = ranks.gplus(parts(ranks, values) * 0.5)
        builds.kernels().copy(total, result, WIDTH)
        recorder.output(ranks.gplus({"loss": parts(ranks, values)})["loss"])
    program = recorder.finish()
    assert recorder.problem is None and not result.any()
    (expected,) = [ranks.gplus(parts(ranks, values) * 0.5)]
    for factor in (1, 8):
        values[...] = rows_of(ranks, factor)
        program.run(0)
        assert expected.any() and result.tolist() == (factor * expected).tolist()
        (loss,) = program.results()
        assert loss.tolist() == (2 * factor * expected).tolist()


def test_a_total_that_nothing_reads_is_computed_after_the_replay(ranks):
    recorder, values = Recorder([]), rows_of(ranks, 1)
    recorder.constant(values)
    with recorder.recording():
        for factor in (0.5, 2.0):
            recorder.output(ranks.gplus(parts(ranks, values) * factor))
    program = recorder.finish()
    assert recorder.problem is None
    program.run(0)
    half, double = program.results()
    assert half.any() and double.tolist() == (4 * half).tolist()
    if ranks.size == 1 or not ranks.sends_messages():
        assert all(isinstance(step, Calls) for step in program.parts[0])


def test_replays_wait_for_late_ranks_and_for_ranks_that_run_eagerly(ranks):
    """Ranks that replay a step wait for late ranks, and a late rank may run the step eagerly."""
    recorder, values = Recorder([]), rows_of(ranks, 1)
    recorder.constant(values)

    def step():
        reducer = ranks.reducer()
        total = ranks.gplus(parts(ranks, values))
        for name in ("a", "b"):
            reducer.push(name, parts(ranks, values))
            reducer.progress()
        reducer.push("c", parts(ranks, values) * 0.5)
        ranks.gplus(parts(ranks, values))
        gradients = reducer.finish()
        return total, *(gradients[name] for name in "abc")

    with recorder.recording():
        places = [recorder.place(array) for array in step()]
    program = recorder.finish()
    assert recorder.problem is None
    totals = [place.view() for place in places]
    kinds = [isinstance(part, Calls) for part in program.parts[0]]
    if not ranks.sends_messages() and ranks.size > 1:
        assert kinds == [True, False]  # only the factor 0.5 needs Python
    factors = (1, 1, 1, 0.5)
    unit = ranks.gplus(parts(ranks, rows_of(ranks, 1)))
    for late in range(ranks.size):
        values[...] = rows_of(ranks, 2 + late)
        if ranks.rank == late:
            time.sleep(0.02)
            arrays = step()
        else:
            program.run(0)
            arrays = totals
        for array, factor in zip(arrays, factors, strict=True):
            assert array.tolist() == ((2 + late) * factor * unit).tolist()
        ranks.barrier()  # its messages need equal tags on all ranks


def test_other_values_make_a_step_unrecordable(world):
    recorder = Recorder([])
    with recorder.recording():
        assert world.gplus(1.0) == 1.0  # without communication
    assert recorder.problem is not None
