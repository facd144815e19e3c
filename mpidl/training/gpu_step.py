"""Record the training step on a GPU once, and replay it for every mini-batch."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import losses, phases
from mpidl.backends.gpu import launching
from mpidl.backends.gpu.program import ROWS
from mpidl.backends.gpu.recorder import Recorder
from mpidl.backends.gpu.sums import Pending
from mpidl.core.grad import value_and_grad
from mpidl.training.recorded_step import record
from mpidl.training.steps import StepInfo, StepResult, not_finite, result_of

if TYPE_CHECKING:
    from mpidl.data.loading.device_queue import Reader
    from mpidl.nn import Network
    from mpidl.ranks.world import World

STEPS_AHEAD = 4  # largest number of steps that may be pending when a step is submitted


class GPUStep:
    """A training step on a GPU, recorded once as a program and replayed for every mini-batch.

    The constructor moves the network to the GPU of `world`. The program computes the gradients and
    the update, in place. `reader` provides the mini-batch for the recording, and then uploads each
    one. `graphs` is whether to capture the program as CUDA graphs.
    """

    def __init__(
        self,
        net: Network,
        optimizer: Any,
        loss: Any,
        world: World,
        labels_per_image: int,
        reader: Reader,
        advice: Callable[[float], str],
        graphs: bool = True,
    ) -> None:
        self.net, self.optimizer, self.reader = net, optimizer, reader
        self.labels_per_image, self.advice = labels_per_image, advice
        self.pending: collections.deque = collections.deque()  # (handle, StepInfo)
        gradient = value_and_grad(losses.loss_function(loss), reduce=world)
        net.to(world.device)
        try:
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
                self.program: Any = recorder.finish(outputs, graphs)
        except BaseException:
            net.to(None)  # so that the caller can retry, for example with smaller mini-batches
            raise

    def observe_gradients(self, observer: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """Do nothing: gradients of a recorded step share memory and are not copied to the host."""

    def submit(self, images, targets, info: StepInfo) -> Iterator[StepResult]:
        """Yield results of earlier steps, then start the training step of a mini-batch.

        `images` is a Feed of the `DeviceQueue` with images and labels. The method waits for all
        earlier steps except the last `STEPS_AHEAD`.
        """
        yield from self._results(STEPS_AHEAD)
        with phases.Phase(phases.COMPUTE, "start of the training step"):
            self.pending.append((self.start(images), info))

    def drain(self) -> Iterator[StepResult]:
        """Wait for all submitted steps and yield their results."""
        return self._results(0)

    def close(self) -> None:
        """Move the network back to host memory, and free the memory of the recorded step."""
        self.pending.clear()
        self.net.to(None)
        self.program = None

    def start(self, feed: Any) -> int:
        """Start the training step of a mini-batch, and immediately return a handle for `finish`."""
        row = self.program.ready() % ROWS
        values = self.reader.values(feed, row)
        if "per_image" not in self.program.slots:  # the loss is not a mean over images
            del values["per_image"]
        return self.program.run(**values | self.optimizer.advance())

    def finish(self, handle: int) -> tuple[float, ...]:
        """Wait for a started training step, and return the sums of the loss."""
        roots = self.program.results(handle)
        return tuple(
            pending.finish([roots[f"{i}.{j}"] for j in range(len(pending.roots))])
            for i, pending in enumerate(self.value)
        )

    def _results(self, max_pending: int) -> Iterator[StepResult]:
        while len(self.pending) > max_pending:
            handle, info = self.pending.popleft()
            with phases.Phase(phases.COMPUTE, "wait for the GPU"):
                sums = self.finish(handle)
            if not math.isfinite(sums[0]):
                raise not_finite(sums[0], info, "", self.advice)
            yield result_of(info, sums, self.labels_per_image)


def _roots(pending: Any) -> list[Any]:
    if not isinstance(pending, Pending):
        raise TypeError(f"expected sums over images as results of a step on a GPU, got {pending!r}")
    return pending.roots
