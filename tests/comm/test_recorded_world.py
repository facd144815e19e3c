"""Sums over the ranks in a recorded step, and in its replays."""

import numpy as np
from cpu_builds import needs_kernels

from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.call import partial_of_rows
from mpidl.backends.cpu.recording import Recorder
from mpidl.blocks import share
from mpidl.comm.recorded_world import RecordedWorld

pytestmark = needs_kernels
IMAGES, WIDTH = 60, 4  # 4 blocks; some ranks may hold none


def parts(world, rows):
    """Return this rank's nodes of a sum, computed by a kernel from `rows` (nodes, WIDTH)."""
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


def test_other_values_make_a_step_unrecordable(world):
    recorder = Recorder([])
    ranks = RecordedWorld(world, recorder)
    assert ranks.gplus(1.0) == world.size
    assert recorder.problem is not None
