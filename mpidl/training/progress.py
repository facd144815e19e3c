"""Define the position and the result of a run, and the argument of output functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mpidl.report.history import History

if TYPE_CHECKING:
    from mpidl.training.steps import StepResult

OUTPUT_FUNCTION, PATIENCE = "output_function", "validation_patience"  # reasons to end a run early
RATE_FACTOR = 0.5  # each rollback multiplies learning rates by this power of two, without rounding


@dataclass
class Position:
    """The progress of a run, as stored in checkpoints.

    Attributes
    ----------
    epoch : int
        Current epoch, from 1.
    batch, iteration : int
        Number of mini-batches submitted in the current epoch, and in all epochs.
    loss : float
        Sum of the losses over the images of the current epoch so far.
    correct : float or None
        Number of correctly classified images in the current epoch. None if the loss has no classes.
    images, all_images : int
        Number of images in completed steps of the current epoch, and of all epochs.
    seconds : float
        Training time, including the time before a resume.
    epoch_loss : float or None
        Mean loss over the images of the last complete epoch.
    rollbacks : int
        Number of rollbacks so far; see the option `on_nan`.
    statistics_updates : int
        Number of updates of the moving statistics of batch normalization: one per mini-batch, or
        per part of a mini-batch.
    """

    epoch: int = 1
    batch: int = 0
    iteration: int = 0
    loss: float = 0.0
    correct: float | None = None
    images: int = 0
    seconds: float = 0.0
    all_images: int = 0
    epoch_loss: float | None = None
    rollbacks: int = 0
    statistics_updates: int = 0

    def add(self, result: StepResult) -> None:
        """Add the loss, the images and the correct images of a completed training step.

        Parameters
        ----------
        result : StepResult
            The result of the step.
        """
        info = result.info
        self.loss += result.loss * info.images
        if result.correct is not None:
            self.correct = (self.correct or 0.0) + result.correct
        self.images += info.images
        self.all_images += info.images

    def end_epoch(self, learning_rate: float, images_per_second: float) -> EpochSummary:
        """Advance to the next epoch, and return the summary of the completed epoch.

        Parameters
        ----------
        learning_rate : float
            Learning rate of the last iteration.
        images_per_second : float
            Number of images in the epoch divided by its seconds, excluding validations and
            checkpoints.

        Returns
        -------
        EpochSummary
            The means over the images of the epoch.
        """
        self.epoch_loss = self.loss / self.images
        means = self.epoch_loss, self.accuracy
        summary = EpochSummary(self.epoch, self.iteration, *means, learning_rate, images_per_second)
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss, self.correct, self.images = 0.0, None, 0
        return summary

    @property
    def rate_factor(self) -> float:
        """Factor by which all learning rates are multiplied. Each rollback halves the factor."""
        return RATE_FACTOR**self.rollbacks

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the current epoch; None if the loss has no classes."""
        return None if self.correct is None else self.correct / self.images

    @property
    def mean_loss(self) -> float:
        """Mean loss of the current epoch so far.

        Before the first mini-batch of an epoch, the value is the mean loss of the previous epoch,
        or NaN if there is no previous epoch.
        """
        if self.images:
            return self.loss / self.images
        return math.nan if self.epoch_loss is None else self.epoch_loss


class Progress(NamedTuple):
    """The argument of an output function.

    Attributes
    ----------
    state : str
        "start" before the first iteration, "iteration" after each iteration, "epoch" after each
        epoch, "done" at the end.
    epoch, iteration : int
        The current epoch and iteration, counted from 1. Before the first iteration, `iteration` is
        0.
    loss, accuracy : float or None
        Means over the mini-batch if `state` is "iteration", otherwise over the images of the epoch.
        None if no mean is available, such as at the start.
    learning_rate : float
        Learning rate of the current iteration.
    seconds : float
        Training time since the start of the run, including the time before a resume.
    validation_loss, validation_accuracy : float or None
        Results of the last validation. None if there was no validation.
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
    """The summary of a completed epoch.

    Attributes
    ----------
    epoch, iteration : int
        The epoch and its last iteration, from 1.
    loss, accuracy : float or None
        Means over the images of the epoch. The accuracy is None if the loss has no classes.
    learning_rate : float
        Learning rate of the last iteration.
    images_per_second : float
        Number of images in the epoch, summed over all ranks, divided by the seconds of the epoch
        excluding validations and checkpoints.
    """

    epoch: int
    iteration: int
    loss: float
    accuracy: float | None
    learning_rate: float
    images_per_second: float


@dataclass
class Result:
    """The result of a training run.

    Attributes
    ----------
    stopped : str or None
        The reason for an early end: the name of a signal, "stop file", "output_function" (also if a
        hook stopped the run) or "validation_patience". None if the run did not end early.
    epochs : int
        Number of complete epochs.
    iterations : int
        Number of iterations, including those before a resume.
    loss : float
        Mean loss over the images of the last epoch, even if the epoch is incomplete.
    images_per_second : float
        Number of images in all epochs divided by `train_seconds`.
    train_seconds : float
        Training time in seconds, including the time before a resume.
    best_iteration : int or None
        The iteration with the lowest validation loss. None if there was no validation.
    validation_loss, validation_accuracy : float or None
        Results of the final validation, of the returned network. If a signal stopped the run, the
        results of the last validation. None if there was no validation.
    rollbacks : int
        Number of times that the run returned to an earlier state; see the option `on_nan`.
    lost_ranks : int
        Number of ranks that were lost; see the option `on_lost_rank`.
    skipped_images : int
        Number of training and validation images that could not be read; see the option
        `on_bad_image`.
    history : History
        Loss, accuracy, learning rate and speed of all iterations, epochs and validations. If the
        run was resumed in a folder, the history includes the records before the resume.
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
    rollbacks: int = 0
    lost_ranks: int = 0
    skipped_images: int = 0
    history: History = field(default_factory=lambda: History.from_records([]), repr=False)
