"""The recorded step: how a training step runs without Python, on CPUs and on GPUs.

The Python code of a training step makes the same kernel calls for every mini-batch of a size.
Therefore, it runs once while a recorder takes the calls, and a program replays them:

    objective, network, optimizer           the Python code (`record`, below)
        |  launch(kernel, arguments)   empty(shape)   start_sum, wait
        v
    sink ---- eager ----> kernel            cpu/builds.py, gpu/launching.py
        |
        | Recorder: computes nothing        cpu/recorder.py, gpu/recorder.py, comm/recorded_sum.py
        v
    operations: kernel, start of a sum, wait for a sum, Python function
        |
        | first and last use of each array
        v
    plan: a place for each array in one slab                              memory_plan.py
        |
        v
    Program                                 cpu/program.py, gpu/program.py
        |  per mini-batch: addresses of images and targets, learning rate, ...
        v
    player: two calls of kernels/cpu/play.c, or one CUDA graph between sums through the host

On CPUs, the gradients of the second mini-batch of each size are computed both eagerly and by a
replay. Only if all ranks find the same bytes, later mini-batches are replayed (`replayed_step.py`).
The update is not compared: its Python code decides nothing by the values of arrays. On GPUs, the
program also computes the first mini-batch, because Python code cannot read values of a step there:
it cannot mix values that are recorded with values that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mpidl import phases
from mpidl.nn import Network

Results = tuple[tuple, Mapping[str, Any], Mapping[str, Any]]  # value, gradients, state


class StepRecorder(Protocol):
    """What `record` needs of a recorder."""

    def output(self, value: Any) -> None:
        """Let the program return a result of the step."""

    def store(self, new: Any, old: Any) -> None:
        """Let the program end with the contents of `new` in the array `old`."""


def record(
    recorder: StepRecorder,
    net: Network,
    optimizer: Any,
    gradient: Callable[..., Results],
    images: Any,
    targets: Any,
    at_update: Callable[[Results], bool] = lambda results: True,
) -> None:
    """Run the Python code of a training step once, while its kernel calls are recorded.

    The recorder must take the kernel calls of this thread. `gradient` is what `value_and_grad`
    returned for `reduce=world`. `at_update` receives its results, and returns whether to record the
    update, which changes the arrays of the network and the optimizer in place.
    """
    results = value, gradients, state = gradient(net, images, targets)
    for number in value:
        recorder.output(number)
    if not at_update(results):
        return
    with phases.span("update"):
        updated = optimizer.apply(net.parameters, gradients, optimizer.numbers())
    for news, olds in ((updated, net.parameters), (state, net.state)):
        for name, old in olds.items():
            if news[name] is not old:
                recorder.store(news[name], old)
