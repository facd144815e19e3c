"""Run training steps on the host, where each op runs as soon as it is called.

All steps have the methods of `EagerStep`: `submit` starts the training step of a mini-batch and
returns the results that are ready. `drain` waits for all remaining results, and `close` moves the
network back to host memory. On the host, each step is complete when `submit` returns. On a GPU
(`gpu_step`), earlier steps may still be running when the next step is submitted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidl import losses, phases
from mpidl.core.grad import value_and_grad
from mpidl.data.parts import PartedBatch, parts_of
from mpidl.errors import NotFinite
from mpidl.training.optimizers.checks import checked_step


class StepInfo(NamedTuple):
    """Description of a submitted training step.

    Attributes
    ----------
    epoch, iteration : int
        Epoch and iteration of the step, from 1.
    images : int
        Number of images in the mini-batch, summed over all ranks.
    learning_rate : float
        Learning rate of the step.
    start : float
        time.monotonic() at the start of the step, in seconds.
    """

    epoch: int
    iteration: int
    images: int
    learning_rate: float
    start: float


class StepResult(NamedTuple):
    """The result of a completed training step.

    Attributes
    ----------
    info : StepInfo
        Description of the step.
    loss : float
        Loss of the mini-batch.
    correct : float or None
        Number of correctly classified images. An image with several labels counts as the
        fraction of its labels that are correct. None if the loss has no classes.
    images_per_second : float
        Number of images in the mini-batch divided by the seconds since the start of the step.
    """

    info: StepInfo
    loss: float
    correct: float | None
    images_per_second: float

    @property
    def accuracy(self) -> float | None:
        """Fraction of images that were classified correctly; None if the loss has no classes."""
        return None if self.correct is None else self.correct / self.info.images


class EagerStep:
    """A training step on the host, where each op runs as soon as it is called."""

    def __init__(self, net, optimizer, loss, world, labels_per_image, balancer, advice):
        self.net, self.optimizer, self.world = net, optimizer, world
        self.objective: Any = losses.loss_function(loss)
        self.gradient = value_and_grad(self.objective, reduce=world)
        self.labels_per_image, self.balancer, self.advice = labels_per_image, balancer, advice
        self.observers: list[Callable[[Mapping[str, np.ndarray]], None]] = []

    def compute_parts(self) -> None:
        """Prepare for mini-batches in parts; call this method before the first step."""
        from mpidl.training import accumulation

        self.objective = accumulation.PartObjective(self.objective)
        self.gradient = value_and_grad(self.objective, reduce=self.world)

    def observe_gradients(self, observer: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """Register a function that receives the gradients of each mini-batch before the update.

        The gradients are passed as {name: array}. The optimizer may overwrite the arrays, so the
        function must not keep references to them.
        """
        self.observers.append(observer)

    def submit(self, images, targets, info: StepInfo) -> list[StepResult]:
        """Compute the loss and gradients of a mini-batch, and update the network. Collective."""
        with phases.Phase(phases.COMPUTE, "training step"):
            sums = self._compute(images, targets, info)
        return [result_of(info, sums, self.labels_per_image)]

    def _compute(self, images, targets, info):
        if self.balancer:
            self.balancer.begin(info.start)
        value, gradients, state = self._gradient(images, targets)
        sums = [float(number) for number in value]
        if not math.isfinite(sums[0]):
            self._raise_fault(images, targets, sums[0], info)
        for observer in self.observers:
            observer(gradients)
        with phases.span("update"):
            self._update(gradients, state)
        if self.balancer:
            self.balancer.stop(time.monotonic(), images.batch.blocks)
        return sums

    def _gradient(self, images, targets):
        if isinstance(images.batch, PartedBatch):
            from mpidl.training import accumulation

            arguments = self.gradient, self.objective, self.net, images, targets
            return accumulation.accumulated(*arguments)
        return self.gradient(self.net, images, targets)

    def _update(self, gradients, state):
        self.net.state = state
        self.net.parameters = checked_step(self.optimizer, self.net.parameters, gradients)

    def drain(self) -> list[StepResult]:
        return []

    def close(self) -> None:
        pass

    def _raise_fault(self, images, targets, loss, info):
        """Raise a `NotFinite` that names the ranks whose images cause a NaN or infinite loss."""
        gradient = value_and_grad(self.objective)
        own_losses = [gradient(self.net, *part)[0][0] for part in parts_of(images, targets)]
        is_finite = all(np.isfinite(own_loss.local()).all() for own_loss in own_losses)
        flags = self.world.gather(not is_finite)
        ranks = [str(rank) for rank, flag in enumerate(self.world.broadcast(flags)) if flag]
        place = f", on rank {', '.join(ranks)}"
        if len(ranks) == self.world.size:
            place = ", on all ranks"
        elif not ranks:  # a faulty processor, or a layer whose output is random
            place = ", but finite when computed again"
        raise not_finite(loss, info, place, self.advice)


def result_of(info: StepInfo, sums: Sequence[float], labels_per_image: int) -> StepResult:
    """Return the StepResult for the sums that the loss returned (see `losses.base.Sums`)."""
    speed, correct = info.images / (time.monotonic() - info.start), None
    if len(sums) > 2:  # the loss ignores some labels
        correct = sums[1] / max(sums[2], 1.0) * info.images
    elif len(sums) == 2:
        correct = sums[1] / labels_per_image
    return StepResult(info, sums[0], correct, speed)


def not_finite(
    loss: float, info: StepInfo, place: str, advice: Callable[[float], str]
) -> NotFinite:
    """Return the error for a loss that is not finite; `place` names ranks."""
    problem = f"the loss is {loss} at epoch {info.epoch}, iteration {info.iteration}{place}"
    return NotFinite(problem, advice(info.learning_rate))
