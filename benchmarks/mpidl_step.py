"""Run mpidl's training step (forward, backward, SGD with momentum), eagerly or recorded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks import subject
from mpidl import backends, losses, ops
from mpidl.backends.cpu import builds
from mpidl.comm.reducer import Reducer
from mpidl.core.blocks import from_images, share
from mpidl.core.grad import value_and_grad
from mpidl.data import ArrayDatastore
from mpidl.nn import Network
from mpidl.ranks.world import World
from mpidl.training import steps
from mpidl.training.optimizers import SGDM
from mpidl.training.replayed_step import ReplayedStep


def mean_loss(net, images, labels):
    """Return the mean cross-entropy that `dl.train` differentiates."""
    return ops.softmax_cross_entropy(net(images), labels)


def optimizer() -> SGDM:
    """Return the optimizer of all sides, SGD with momentum."""
    return SGDM(subject.RATE, subject.MOMENTUM)


@dataclass
class Times:
    """Seconds of the parts of each step.

    `wait` is the time within `backward` spent waiting for the exchange of gradients.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Delete the times of all steps so far."""
        for values in vars(self).values():
            values.clear()


class EagerStep:
    """The training step on a CPU: forward, backward with the exchange, SGD with momentum.

    Parameters
    ----------
    net : Network
        The network, which the steps update in place.
    arrays : sequence of np.ndarray or None
        Images and labels of the global mini-batch. The arrays stay in memory, so the step reads
        no images. If None, each call passes a mini-batch.
    world : World
        The ranks that share the mini-batch.
    batchnorm : str
        Kind of batch-norm statistics, "global" or "local".
    """

    def __init__(
        self,
        net: Network,
        arrays: Sequence[np.ndarray] | None,
        world: World,
        batchnorm: str = "global",
    ):
        self.net, self.world, self.times, self.batch = net, world, Times(), ()
        if arrays is not None:
            images, labels = arrays
            batch = share(len(images), world)
            part = slice(*batch.images)
            self.batch = (
                from_images(images[part], batch),
                from_images(labels[part], batch, np.int32),
            )
        self.initial = net.parameters, net.state
        self.reset(batchnorm)

    def reset(self, batchnorm: str = "global") -> None:
        """Restore the initial weights."""
        self.net.parameters, self.net.state = self.initial
        self.net.batchnorm = batchnorm
        self.sgdm = optimizer()

    def reducer(self) -> Reducer:
        """Return the world's reducer, which also records the wait at the end of backward."""
        times = self.times

        class TimedReducer(Reducer):
            def finish(self):
                start = time.perf_counter()
                sums = super().finish()
                times.wait.append(time.perf_counter() - start)
                return sums

        return TimedReducer(self.world, kernel_hook=self.world.advance)

    def gplus(self, value):
        """Add up a value over the ranks.

        `value_and_grad` requires its argument `reduce` to have this method and `reducer`.
        """
        return self.world.gplus(value)

    def __call__(self, *batch) -> float:
        """Run one step and return the loss.

        `batch` holds Blocked images and labels. If empty, the step uses the stored mini-batch.
        """
        forward_end = 0.0

        def timed_loss(net, images, labels):
            nonlocal forward_end
            loss = mean_loss(net, images, labels)
            forward_end = time.perf_counter()
            return loss

        start = time.perf_counter()
        gradient = value_and_grad(timed_loss, reduce=self)
        loss, gradients, state = gradient(self.net, *(batch or self.batch))
        backward_end = time.perf_counter()
        self.net.state = state
        self.net.parameters = self.sgdm(self.net.parameters, gradients)
        self.times.forward.append(forward_end - start)
        self.times.backward.append(backward_end - forward_end)
        self.times.update.append(time.perf_counter() - backward_end)
        return float(loss)


class TrainStep(EagerStep):
    """The step of `dl.train` on a CPU, recorded once and replayed. It has no `times`."""

    def reset(self, batchnorm: str = "global") -> None:
        """Restore the initial weights, and record the step again."""
        super().reset(batchnorm)
        step_class = steps.EagerStep if builds.kernels() is None else ReplayedStep
        loss_of_labels = "crossentropy", self.world, 1
        self.step = step_class(self.net, self.sgdm, *loss_of_labels, None, lambda rate: "")

    def __call__(self, *batch) -> float:
        """Run one step and return the loss."""
        images, labels = batch or self.batch
        info = steps.StepInfo(1, 1, images.batch.count, subject.RATE, time.monotonic())
        (result,) = self.step.submit(images, labels, info)
        return result.loss


class RecordedStep:
    """The step of `dl.train` on a GPU, recorded once, on random images.

    The data set is stored on the GPU as pixels. The step includes gathering the images of the
    mini-batch from the data set.

    Parameters
    ----------
    world : World
        A world of one rank on a GPU.
    network : str
        A value of `--network`.
    batch : int
        Number of images in the mini-batch and in the data set.
    precision : str
        "fp32" or "tf32".
    graphs : bool
        Whether the step runs as a CUDA graph.
    image : sequence of int or None
        Image shape (C, H, W). None means the default shape of the network.
    """

    def __init__(self, world, network, batch, precision="fp32", graphs=True, image=None):
        from mpidl.data.loading.device_queue import DeviceQueue
        from mpidl.training.gpu_step import GPUStep

        backends.configure(precision=precision)
        self.device = world.device
        self.net = subject.network(network, image, dropout=False)
        store = ArrayDatastore(*subject.mini_batch(self.net.input_shape, batch))
        queue = DeviceQueue(store, batch, 0, world, "never")
        self.step = GPUStep(
            self.net, optimizer(), losses.cross_entropy, world, 1, queue.reader(), str, graphs
        )
        ((self.feed, _),) = queue.epoch(0)

    @property
    def program(self):
        """The recorded program of the step."""
        return self.step.program

    def losses(self, count: int) -> list[float]:
        """Run `count` steps one after another and return their losses."""
        return [self.step.finish(self.step.start(self.feed))[0] for _ in range(count)]

    def run(self, count: int) -> float:
        """Run `count` consecutive steps and return the mean milliseconds per step."""
        first = self.device.mark(timed=True)
        for _ in range(count):
            self.step.start(self.feed)
        last = self.device.mark(timed=True)
        self.device.wait(last)
        return self.device.elapsed(first, last) / count
