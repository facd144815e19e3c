"""The state of a training run: its position, what hooks and output functions see, its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpidl.training.steps import StepResult

OUTPUT_FUNCTION, PATIENCE = "output_function", "validation_patience"  # reasons to end a run early


@dataclass
class Position:
    """How far a run has come. Checkpoints keep it."""

    epoch: int = 1  # the current epoch, from 1
    batch: int = 0  # its mini-batches that were submitted
    iteration: int = 0  # mini-batches of all epochs that were submitted
    loss: float = 0.0  # sum over the images of this epoch
    correct: float | None = None  # images of this epoch classified right; None without classes
    images: int = 0  # of this epoch
    seconds: float = 0.0  # of training, with those of resumed runs
    all_images: int = 0  # of all epochs
    epoch_loss: float | None = None  # mean over the images of the last complete epoch

    def add(self, result: StepResult) -> None:
        """Add the loss and the images of a step."""
        info = result.info
        self.loss += result.loss * info.images
        if result.correct is not None:
            self.correct = (self.correct or 0.0) + result.correct
        self.images += info.images
        self.all_images += info.images

    def end_epoch(self, learning_rate: float, images_per_second: float) -> EpochSummary:
        """Go to the start of the next epoch; return the summary of the one that has ended."""
        self.epoch_loss = self.loss / self.images
        means = self.epoch_loss, self.accuracy
        summary = EpochSummary(self.epoch, self.iteration, *means, learning_rate, images_per_second)
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss, self.correct, self.images = 0.0, None, 0
        return summary

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the current epoch; None if the loss has no classes."""
        return None if self.correct is None else self.correct / self.images

    @property
    def mean_loss(self) -> float:
        """Mean loss of the current epoch; before its first mini-batch, of the previous one."""
        if self.images:
            return self.loss / self.images
        return math.nan if self.epoch_loss is None else self.epoch_loss


class Progress(NamedTuple):
    """The argument of an output function.

    Attributes
    ----------
    state : str
        "start" before the first iteration, "iteration" after each, "epoch" after each epoch, "done"
        at the end.
    epoch, iteration : int
        From 1; iteration is 0 before the first.
    loss, accuracy : float or None
        Of the iteration's mini-batch, or means over the images of the epoch.
    learning_rate : float
        Of the iteration.
    seconds : float
        Since the start.
    validation_loss, validation_accuracy : float or None
        Of the last validation.
    """

    state: str
    epoch: int
    iteration: int
    loss: float | None
    accuracy: float | None
    learning_rate: float
    seconds: float
    validation_loss: float | None
    validation_accuracy: float | None


class EpochSummary(NamedTuple):
    """An epoch that has ended: means over its images, and their number per second."""

    epoch: int
    iteration: int  # its last one
    loss: float
    accuracy: float | None
    learning_rate: float  # of its last iteration
    images_per_second: float


@dataclass
class Result:
    """The result of a training run.

    Attributes
    ----------
    stopped : str or None
        What ended the run early: the name of a signal, "output_function" or "validation_patience".
    epochs : int
        Complete epochs.
    iterations : int
    loss : float
        Mean over the images of the last epoch that has begun.
    images_per_second, train_seconds : float
    best_iteration : int or None
        The iteration of the least validation loss.
    validation_loss, validation_accuracy : float or None
        Of the last validation, or of the best network if the run ends with that one.
    """

    stopped: str | None
    epochs: int
    iterations: int
    loss: float
    images_per_second: float
    train_seconds: float
    best_iteration: int | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
