"""Test which arrays a recorded training step on a CPU may read and write."""

import numpy as np
import pytest
from cpu_builds import needs_kernels

from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.arenas import address_of
from mpidl.backends.cpu.optimizer import step_number
from mpidl.backends.cpu.planned_arena import PLANNED
from mpidl.backends.cpu.recorder import Recorder
from mpidl.core.fold import Partial, Term, Tree, add

pytestmark = needs_kernels


@pytest.fixture
def owned():
    return np.arange(32, dtype=np.float32)


def relu(x):
    y = arenas.empty(x.shape)
    builds.kernels().relu(x, y, 1, 1, x.size // 16)
    return y


def test_results_of_kernels_and_owned_arrays_may_be_read(owned):
    recorder = Recorder([owned])
    before = owned.copy()
    with recorder.recording():
        y = relu(relu(owned))
        builds.kernels().copy(y, owned, owned.size)
        assert arenas.may_update([owned]) and not arenas.may_update([y])
    assert recorder.problem is None and owned.tolist() == before.tolist()  # nothing is computed


def test_what_numpy_computed_makes_a_step_unrecordable(owned):
    recorder = Recorder([owned])
    with recorder.recording():
        relu(relu(owned) + 1)
    assert recorder.problem == "relu reads an array that no kernel computed"
    recorder = Recorder([owned])
    with recorder.recording():
        zeros = arenas.empty(owned.shape)
        zeros[...] = 0
        relu(zeros)
    assert recorder.problem is not None


def test_memory_that_is_used_again_must_be_written_again(owned):
    recorder = Recorder([owned])
    with recorder.recording():
        y = relu(owned)
        address = address_of(y)
        del y
        z = arenas.empty(owned.shape)
        assert address_of(z) == address  # otherwise, no memory would be reused
        relu(z)
    assert recorder.problem is not None


def test_kernels_write_to_known_memory_only(owned):
    recorder = Recorder([owned])
    with recorder.recording():
        builds.kernels().relu(owned, np.empty(32, np.float32), 1, 1, 2)
    assert recorder.problem == "a kernel writes to an array of unknown origin"


def test_inputs_must_be_contiguous_and_are_not_written(owned):
    recorder = Recorder([owned])
    recorder.input("images", np.zeros((4, 4), np.float32)[:, ::2])
    assert recorder.problem == "the input images is not contiguous"
    recorder = Recorder([owned])
    images = np.zeros(32, np.float32)
    recorder.input("images", images)
    with recorder.recording():
        builds.kernels().copy(owned, images, 32)
    assert recorder.problem is not None


def test_arrays_that_kernels_cannot_use_are_errors(owned):
    with Recorder([owned]).recording(), pytest.raises(TypeError, match="C-ordered array"):
        relu(owned.astype(np.float64))


def test_large_arrays_share_memory_if_they_are_used_at_different_times():
    """A chain of three kernels needs two arrays of the plan, and gives the kernels' result."""
    x, result = np.linspace(-1, 1, PLANNED // 4, dtype=np.float32), np.zeros(PLANNED // 4, "f4")
    recorder = Recorder([x, result])
    with recorder.recording():
        y = relu(relu(relu(x)))
        builds.kernels().copy(y, result, y.size)
        del y
    program = recorder.finish()
    assert [size for size, _ in program.places] == [PLANNED] * 3
    assert sorted({offset for _, offset in program.places}) == [0, PLANNED]
    program.run(0)
    assert result.tolist() == np.maximum(x, 0).tolist()


def test_numbers_have_names_only_while_a_step_is_recorded(owned):
    assert type(step_number("rate", 0.5)) is float
    with Recorder([owned]).recording():
        rate, epoch = step_number("rate", 0.5), step_number("epoch", 3)
    assert (rate, rate.name, epoch, epoch.name) == (0.5, "rate", 3, "epoch")


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_replays_compute_the_total_of_a_sum(shape, dtype):
    """The total has the bytes of `Partial.finish`, for new values of its roots and its addend."""
    root, penalty = np.zeros(shape, dtype), np.full(shape, 0.5, dtype)
    term = Term(Tree(1, ((0, 1),), 0), [root], add, root.dtype)
    p = Partial([term], None, shape, dtype)
    for value in (p, p * 0.3, p / 7 + p, p * 0.3 + penalty, (p * 0.3).astype("f8")):
        recorder = Recorder([root, penalty])
        if value.addend is not None:
            value.addend = penalty
        roots = [root] * len(value.terms)
        with recorder.recording():
            recorder.output(recorder.total(value, roots))
        program = recorder.finish()
        assert recorder.problem is None
        for number in (0.1, -1 / 3, 1e20):
            root[...], penalty[...] = number, number / 2
            (total,) = map(np.asarray, program.results())
            assert total.dtype == value.dtype and total.shape == shape
            assert total.tobytes() == value.finish(roots).tobytes()


def test_nothing_is_recorded_after_an_error(owned):
    with pytest.raises(ZeroDivisionError), Recorder([owned]).recording():
        raise ZeroDivisionError
    assert builds.recorder() is None and not arenas.may_update([owned])
    assert relu(owned).tolist() == owned.tolist()
