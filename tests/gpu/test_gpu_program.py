"""Recording a step, planning its memory, replaying it."""

import numpy as np
import pytest

from mpidl.backends.gpu import program, run
from mpidl.backends.gpu.array import plain


def scale(source, size=None):
    """A launch for these tests: out = source copied through the kernel that ends a program."""
    out = run.empty((1,), np.float64)
    run.launch("program_end", 1, 32, run.table([[source]]), 1, _zero(), out)
    return out


def _zero():
    return run.constant(np.zeros(2, np.int32))


def record(device, function, outputs, graphs=True):
    recorder = program.Recorder(device)
    with run.through(recorder):
        made = function(recorder)
        return recorder.finish(outputs(made), graphs), recorder


@pytest.mark.parametrize("graphs", [True, False])
def test_a_replay_sees_the_numbers_of_its_step(device, graphs):
    made, _ = record(
        device,
        lambda r: scale(scale(run.scalar("rate", 1.0, np.float64))),
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
