"""Compare replays of recorded kernel calls with the same functions in NumPy."""

import numpy as np
from cpu_builds import needs_kernels

from mpidl.backends.cpu import arenas, builds, optimizer
from mpidl.backends.cpu.arenas import address_of
from mpidl.backends.cpu.optimizer import step_number
from mpidl.backends.cpu.recorder import Recorder

pytestmark = needs_kernels
NO_NORM = None, None, None  # mean, scale and beta


def test_replays_read_new_inputs_and_numbers():
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    result = np.zeros(32, np.float32)
    recorder = Recorder([result])
    recorder.input("x", x)
    with recorder.recording():
        y = arenas.empty(x.shape)
        slope = step_number("slope", 0.25)
        builds.kernels().elementwise(b"leaky_relu", x, *NO_NORM, None, y, slope, 0.0, 1, 2, 1)
        builds.kernels().copy(y, result, 32)
    program = recorder.finish()
    program.run(0)
    np.testing.assert_array_equal(result, np.where(x > 0, x, x * np.float32(0.25)))
    other = np.linspace(-3, 5, 32, dtype=np.float32)
    program.inputs.set("x", address_of(other))
    program.inputs.set("slope", 0.1)
    program.run(0)
    np.testing.assert_array_equal(result, np.where(other > 0, other, other * np.float32(0.1)))
    program.inputs.set("momentum", 0.1)  # the program does not use it


def test_doubles_and_integers_are_passed_by_their_bits():
    old, value = np.zeros(3, np.float32), np.array([1.0, -2.0, 1e-3])
    recorder = Recorder([old])
    recorder.constant(value)
    with recorder.recording():
        new = arenas.empty((3,))
        builds.kernels().running(old, value, step_number("decay", 0.5), new, 3)
        builds.kernels().copy(new, old, step_number("count", 3))
    program = recorder.finish()
    program.inputs.set("decay", 1 / 3)
    program.inputs.set("count", 2)
    program.run(0)
    expected = (np.zeros(3) + 1 / 3 * value).astype(np.float32)
    assert old.tolist() == [*expected[:2].tolist(), 0]


def test_parts_and_python_calls_run_in_order():
    x, order = np.ones(16, np.float32), []
    recorder = Recorder([x])
    with recorder.recording():
        builds.kernels().zero(x, 8)
        recorder.call_python(lambda: order.append(float(x[0])))
        recorder.next_part()
        builds.kernels().zero(x, 16)
    program = recorder.finish()
    x[...] = 1
    program.run(0)
    assert order == [0.0] and x.sum() == 8
    program.run(1)
    assert x.sum() == 0


def test_a_program_ends_early_if_a_number_is_not_finite():
    x, number, order = np.ones(16, np.float32), np.ones(()), []
    recorder = Recorder([x, number])
    with recorder.recording():
        builds.kernels().zero(x, 8)
        assert recorder.need_finite(number)
        recorder.next_part()
        builds.kernels().zero(x, 16)
        recorder.call_python(lambda: order.append(float(x[15])))
    program = recorder.finish()
    for value, is_complete in ((np.nan, False), (-np.inf, False), (1e308, True)):
        x[...], number[...] = 1, value
        order.clear()
        assert program.run(0, 1) == is_complete
        assert (x.sum(), order) == ((0, [0.0]) if is_complete else (8, []))
    number[...], x[...] = np.nan, 1
    program.run(0)
    program.run(1)  # each part can also be run alone
    assert x.sum() == 0


def test_learnables_are_updated_in_place():
    w, velocity = np.ones(20, np.float32), np.zeros(20, np.float32)
    gradient = np.full(20, 2, np.float32)
    recorder = Recorder([w, velocity])
    recorder.input("gradient", gradient)

    def step(rate):
        return optimizer.optimizer_step("sgdm", [w], [gradient], [[velocity]], [rate, 0.5], [0.0])

    with recorder.recording():
        assert step(step_number("rate", 0.25))[0] is w
    program = recorder.finish()
    assert recorder.problem is None
    program.inputs.set("rate", 0.25)
    program.run(0)
    assert w[0] == 0.5 and velocity[0] == -0.5
    other = np.full(20, 4, np.float32)
    program.inputs.set("gradient", address_of(other))
    program.inputs.set("rate", 0.125)
    program.run(0)
    assert velocity.tolist() == [-0.75] * 20 and w.tolist() == [-0.25] * 20
    assert step(0.125)[0] is not w  # an eager step returns new arrays
