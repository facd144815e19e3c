"""Test which arrays a recorded training step on a CPU may read and write."""

import numpy as np
import pytest
from cpu_builds import needs_kernels

from mpidl.backends.cpu import arenas, builds, recording

pytestmark = needs_kernels


@pytest.fixture
def owned():
    return np.arange(32, dtype=np.float32)


def relu(x):
    y = arenas.empty(x.shape)
    builds.kernels().relu(x, y, 1, 1, x.size // 16)
    return y


def test_results_of_kernels_and_owned_arrays_may_be_read(owned):
    recorder = recording.Recorder([owned])
    with recorder.recording():
        y = relu(relu(owned))
        builds.kernels().copy(y, owned, owned.size)
    assert recorder.problem is None and recorder.owns(owned) and not recorder.owns(y)


def test_what_numpy_computed_makes_a_step_unrecordable(owned):
    recorder = recording.Recorder([owned])
    with recorder.recording():
        relu(relu(owned) + 1)
    assert recorder.problem == "relu reads an array that no kernel computed"
    recorder = recording.Recorder([owned])
    with recorder.recording():
        zeros = arenas.empty(owned.shape)
        zeros[...] = 0
        relu(zeros)
    assert recorder.problem is not None


def test_memory_that_is_used_again_must_be_written_again(owned):
    recorder = recording.Recorder([owned])
    with recorder.recording():
        y = relu(owned)
        address = recording.address_of(y)
        del y
        z = arenas.empty(owned.shape)
        assert recording.address_of(z) == address  # otherwise, no memory would be reused
        relu(z)
    assert recorder.problem is not None


def test_kernels_write_to_known_memory_only(owned):
    recorder = recording.Recorder([owned])
    with recorder.recording():
        builds.kernels().relu(owned, np.empty(32, np.float32), 1, 1, 2)
    assert recorder.problem == "a kernel writes to an array of unknown origin"


def test_inputs_must_be_contiguous_and_are_not_written(owned):
    recorder = recording.Recorder([owned])
    recorder.input("images", np.zeros((4, 4), np.float32)[:, ::2])
    assert recorder.problem == "the input images is not contiguous"
    recorder = recording.Recorder([owned])
    images = np.zeros(32, np.float32)
    recorder.input("images", images)
    with recorder.recording():
        builds.kernels().copy(owned, images, 32)
    assert recorder.problem is not None


def test_a_fixed_array_does_not_keep_its_memory():
    arena = arenas.Arena(smallest=0)
    array = arenas.empty((4,), arena=arena)
    array[...] = range(4)
    place = recording.fixed(array)
    assert place.tolist() == [0, 1, 2, 3]
    address = recording.address_of(array)
    del array
    assert recording.address_of(arenas.empty((4,), arena=arena)) == address
    assert recording.fixed(np.empty((0, 3))).shape == (0, 3)


def test_numbers_have_names_only_while_a_step_is_recorded(owned):
    assert type(recording.scalar("rate", 0.5)) is float
    with recording.Recorder([owned]).recording():
        rate, epoch = recording.scalar("rate", 0.5), recording.scalar("epoch", 3)
    assert (rate, rate.name, epoch, epoch.name) == (0.5, "rate", 3, "epoch")


def test_nothing_is_recorded_after_an_error(owned):
    with pytest.raises(ZeroDivisionError), recording.Recorder([owned]).recording():
        raise ZeroDivisionError
    assert builds.on_call is None and not recording.owns([owned])
