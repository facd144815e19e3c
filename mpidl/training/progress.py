"""How far a run has come: what checkpoints keep of it, what output functions are told, its end."""

import math
from dataclasses import dataclass
from typing import NamedTuple

OUTPUT_FUNCTION, PATIENCE = "output_function", "validation_patience"  # what may end a run early


@dataclass
class Position:
    """How far a run has come; what of it a checkpoint keeps."""

    epoch: int = 1  # the epoch under way, from 1
    batch: int = 0  # mini-batches of it that are done
    iteration: int = 0  # mini-batches done in all
    loss: float = 0.0  # sum over this epoch's images so far
    correct: float | None = None  # images of this epoch classified right, where any can be
    images: int = 0  # of this epoch so far
    seconds: float = 0.0  # spent training, resumed runs included
    all_images: int = 0  # of all epochs
    epoch_loss: float | None = None  # the mean over the images of the last epoch that was completed

    def add(self, result):
        """Count the result of a step."""
        info = result.info
        self.loss += result.loss * info.images
        if result.correct is not None:
            self.correct = (self.correct or 0.0) + result.correct
        self.images += info.images
        self.all_images += info.images

    def end_epoch(self):
        """Go on to the next epoch."""
        self.epoch_loss = self.loss / self.images
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss, self.correct, self.images = 0.0, None, 0

    @property
    def accuracy(self):
        """Of the epoch under way; None where the loss classifies nothing."""
        return None if self.correct is None else self.correct / self.images

    @property
    def mean_loss(self):
        """Of the epoch under way, of the one before where it has not begun, NaN where none has."""
        if self.images:
            return self.loss / self.images
        return math.nan if self.epoch_loss is None else self.epoch_loss


class Progress(NamedTuple):
    """What an output function is told.

    state: "start" before the first iteration, "iteration" after each, "epoch" after each epoch,
    "done" at the end. epoch, iteration: from 1; 0 before the first. loss, accuracy: of the
    iteration's mini-batch, or the means over the epoch's images; None where there is none yet, as
    for those of the last validation. learning_rate: the iteration's. seconds: since the start.
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
    """What a training run came to.

    stopped: what ended it early, or None: a signal's name, "output_function" or
    "validation_patience". epochs: completed; loss: mean over the images of the last one that was
    begun. best_iteration: that of the least validation loss, where there was validation;
    validation_loss, validation_accuracy: of the last one, or, where the network is that of the
    least loss, of that one; None where there was none, or the loss classifies nothing.
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
