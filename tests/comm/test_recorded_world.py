"""Test sums over the ranks in a recorded training step and in its replays."""

import time

import numpy as np
from cpu_builds import needs_kernels

from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.call import partial_of_rows
from mpidl.backends.cpu.program import Calls
from mpidl.backends.cpu.recording import Recorder
from mpidl.comm.recorded_world import RecordedWorld
from mpidl.core.blocks import share

pytestmark = needs_kernels
IMAGES, WIDTH = 60, 4  # 60 images are 4 blocks, so some ranks may have no block


def parts(world, rows):
    """Return a Partial whose nodes a kernel copies from `rows`, of shape (nodes, WIDTH)."""
    tree = share(IMAGES, world).tree
    nodes = arenas.empty(rows.shape)
    builds.kernels().copy(rows, nodes, rows.size)
    return partial_of_rows(nodes, tree)


def rows_of(world, factor):
    count = len(share(IMAGES, world).tree.nodes[world.rank])
    return np.full((count, WIDTH), (1 + world.rank) * factor, np.float32)


def test_replays_sum_the_new_values(world):
    result = np.zeros(WIDTH, np.float32)
    recorder = Recorder([result])
    ranks = RecordedWorld(world, recorder)
    values = rows_of(world, 1)
    recorder.constant(values)
    with recorder.recording():
        total = ranks.gplus(parts(world, values) * 0.5)
        builds.kernels().copy(total, result, WIDTH)
        ranks.gplus({"loss": parts(world, values)})
    program = recorder.finish()
    assert recorder.problem is None
    expected = result.copy()
    values[...] = rows_of(world, 8)
    program.run(0)
    assert expected.any() and result.tolist() == (8 * expected).tolist()
    assert ranks.results()["loss"].tolist() == (16 * expected).tolist()


def test_gradients_of_replays(world):
    result = np.zeros(WIDTH, np.float32)
    recorder = Recorder([result])
    ranks = RecordedWorld(world, recorder)
    values, names = rows_of(world, 1), ("a", "b")
    recorder.constant(values)
    with recorder.recording():
        reducer = ranks.reducer()
        for name in names:
            reducer.push(name, parts(world, values))
        reducer.progress()
        sums = reducer.finish()
        builds.kernels().copy(sums["b"], result, WIDTH)
    program = recorder.finish()
    assert recorder.problem is None
    expected = result.copy()
    values[...] = rows_of(world, 2)
    program.run(0)
    assert expected.any() and result.tolist() == (2 * expected).tolist()
    if world.size > 1:
        assert all(ranks.gradients[name].tolist() == result.tolist() for name in names)


def test_replays_wait_for_late_ranks_and_for_ranks_that_run_eagerly(world):
    """Ranks that replay a step wait for late ranks, and a late rank may run the step eagerly."""
    result = np.zeros(WIDTH, np.float32)
    recorder = Recorder([result])
    ranks = RecordedWorld(world, recorder)
    values = rows_of(world, 1)
    recorder.constant(values)

    def step(ranks):
        reducer = ranks.reducer()
        total = ranks.gplus(parts(world, values))
        for name in ("a", "b"):
            reducer.push(name, parts(world, values))
        reducer.push("c", parts(world, values) * 0.5)
        ranks.gplus(parts(world, values))
        gradients = reducer.finish()
        return total, [gradients[name] for name in "abc"]

    with recorder.recording():
        total, _ = step(ranks)
        builds.kernels().copy(total, result, WIDTH)
    program = recorder.finish()
    assert recorder.problem is None
    if world.size > 1 and ranks.memory is not None:  # only the factor 0.5 needs Python
        assert [type(part) is Calls for part in program.parts[0]] == [True, False, True]
    unit = result.copy()
    for late in range(world.size):
        values[...] = rows_of(world, 2 + late)
        if world.rank == late:
            time.sleep(0.02)
            total, gradients = step(world)
        else:
            program.run(0)
            total, gradients = result, [ranks.gradients[name] for name in "abc"]
        factors = (1, 1, 1, 0.5) if world.size > 1 else (1,)
        for array, factor in zip((total, *gradients), factors, strict=False):
            assert array.tolist() == ((2 + late) * factor * unit).tolist()
        world.barrier()  # its messages need equal tags on all ranks


def test_other_values_make_a_step_unrecordable(world):
    recorder = Recorder([])
    ranks = RecordedWorld(world, recorder)
    assert ranks.gplus(1.0) == world.size
    assert recorder.problem is not None
