"""Record the training step on a GPU once, and replay it for every mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpidl import phases
from mpidl.backends.gpu import launching
from mpidl.backends.gpu.program import ROWS
from mpidl.backends.gpu.recorder import Recorder
from mpidl.backends.gpu.sums import Counts, Pending
from mpidl.training.recorded_step import record

if TYPE_CHECKING:
    from mpidl.data.loading.device_queue import Reader
    from mpidl.nn import Network


class StepProgram:
    """A training step, recorded as one program on a GPU.

    The program computes the gradients and the optimizer's update. The network's learnables and
    state and the optimizer's arrays are on the current GPU, and the program updates them in place.

    Parameters
    ----------
    net : Network
        The network, on the GPU.
    optimizer : Optimizer
        The optimizer.
    gradient : callable
        A function returned by `value_and_grad` that sums over all ranks. The value that it
        differentiates is a tuple of scalars.
    reader : Reader
        Provides images and labels for the recording, and uploads the images and labels of each
        mini-batch.
    counts : Counts
        Receives the number of images in each mini-batch, by which kernels divide sums over images.
    graphs : bool
        Whether to capture the program as CUDA graphs.
    """

    def __init__(
        self,
        net: Network,
        optimizer: Any,
        gradient: Callable[..., Any],
        reader: Reader,
        counts: Counts,
        graphs: bool = True,
    ) -> None:
        self.optimizer, self.reader, self.counts = optimizer, reader, counts
        optimizer.prepare(net.parameters)
        recorder = Recorder(launching.device())
        with launching.through(recorder), phases.named_places():
            record(recorder, net, optimizer, gradient, *reader.read())
            self.value = recorder.values
            outputs = {
                f"{i}.{j}": root
                for i, pending in enumerate(self.value)
                for j, root in enumerate(_roots(pending))
            }
            self.program = recorder.finish(outputs, graphs)

    def start(self, feed: Any) -> tuple[int, int]:
        """Start the training step of a mini-batch, and immediately return a handle for `finish`."""
        row = self.program.ready() % ROWS
        values = self.reader.values(feed, row)
        if "per_image" not in self.program.slots:  # the loss is not a mean over images
            del values["per_image"]
        return self.program.run(**values | self.optimizer.advance()), feed.batch.count

    def finish(self, handle: tuple[int, int]) -> tuple:
        """Wait for a started training step, and return the value of `gradient` as floats."""
        number, count = handle
        roots = self.program.results(number)
        self.counts.count = count
        value = tuple(
            pending.finish([roots[f"{i}.{j}"] for j in range(len(pending.roots))])
            for i, pending in enumerate(self.value)
        )
        self.counts.count = None
        return value


def _roots(pending: Any) -> list[Any]:
    if not isinstance(pending, Pending):
        raise TypeError(f"expected sums over images as results of a step on a GPU, got {pending!r}")
    return pending.roots
