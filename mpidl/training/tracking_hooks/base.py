"""Define the base class of the hooks that record a run for an experiment tracker."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mpidl.data import gallery
from mpidl.data.transforms.augment import Augmenter
from mpidl.errors import UserError
from mpidl.evaluation.evaluate import Evaluation
from mpidl.files import call_together
from mpidl.losses import has_class_scores
from mpidl.ranks.world import World
from mpidl.report import confusion
from mpidl.report.run_files import CONFUSION, OPTIONS, SUMMARY
from mpidl.report.trackers import tracking
from mpidl.report.trackers.tracking import Tracker
from mpidl.training.progress import EpochSummary

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer

# Files of a run that trackers copy at the end of the run.
FILES = (OPTIONS, SUMMARY, CONFUSION, "progress.png", "model.h5")


class TrackingHook:
    """Base class of the hooks that record a run for a tracker.

    Attributes
    ----------
    ends_with_training : bool
        Whether the tracker's record ends with the training. If false, the caller must call
        `conclude`, as the command `train` does after the test.
    """

    def __init__(self) -> None:
        self.ends_with_training = True
        self._tracker: Tracker | None = None  # on rank 0, while the run is in progress
        self._error: UserError | None = None  # error of rank 0 that all ranks will raise
        self._trainer: Trainer | None = None
        self._step = 0

    def open(self, trainer: Trainer) -> Tracker:
        """Open the tracker, and return it. Only rank 0 calls this method.

        Parameters
        ----------
        trainer : Trainer
            The run to record.

        Returns
        -------
        Tracker
            The object that receives the records.
        """
        raise TypeError(f"{type(self).__name__} defines no tracker")

    def start(self, trainer: Trainer) -> None:
        """Open the tracker and record the options and the gallery. Collective.

        Parameters
        ----------
        trainer : Trainer
            The run to record.
        """
        self._error = None
        # Show a stage on the console, because importing the tracker's library takes time.
        with trainer.console.stage(f"start of {type(self).__name__}"):
            call_together(
                trainer.world, lambda: self._start(trainer) if not trainer.world.rank else None
            )
        can_draw = has_class_scores(trainer.loss) and _can_draw(trainer.net.output_shape[0])
        if trainer.world.broadcast(can_draw):
            trainer.validation.counts_confusions = True

    def _start(self, trainer):
        position = trainer.position.iteration
        self._trainer, self._step, self._tracker = trainer, position, self.open(trainer)
        if self._record not in trainer.writer.listeners:  # registered already if a rank was lost
            trainer.writer.listeners.append(self._record)
            trainer.writer.before_checkpoint.append(self._flush)
            trainer.step.observe_gradients(self._gradients)
        self._tracker.parameters(_parameters(trainer))
        if not position:
            self._draw_gallery(trainer)

    def _draw_gallery(self, trainer):
        store = trainer.datastore.parent
        if store.image_shape[0] in (1, 3):  # other numbers of channels cannot be shown as colours
            augmenter = Augmenter.of_options(trainer.options)
            png = gallery.gallery(store, augmenter, trainer.options.seed)
            self._tracker.picture("gallery", 0, png)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        """Record the histograms of an epoch, and raise the error of an earlier record. Collective.

        Parameters
        ----------
        trainer : Trainer
            The run.
        summary : EpochSummary
            Summary of the epoch.

        Raises
        ------
        UserError
            On all ranks, after a checkpoint, if rank 0 could not write a record.
        """

        def write():
            if self._tracker is not None:
                with self._deferred():
                    self._histograms("weights", trainer.net.parameters, summary.iteration)
            self._raise()

        try:
            call_together(trainer.world, write)
        except UserError as error:
            raise trainer.after_checkpoint(error) from None

    def lost(self, trainer: Trainer) -> None:
        """After a loss of ranks, continue the record on the new rank 0. Collective.

        Parameters
        ----------
        trainer : Trainer
            The run.
        """
        if not trainer.world.broadcast(self._tracker is not None):
            self.start(trainer)

    def end(self, trainer: Trainer) -> None:
        """Record the final results of the training. Collective.

        Parameters
        ----------
        trainer : Trainer
            The run.
        """
        state = tracking.STOPPED if trainer.signals.agreed else tracking.FINISHED
        validated = trainer.validation.final

        def write():
            if self._tracker is not None and validated is not None:
                with self._deferred():
                    self._draw_confusion("validation", validated)
            if self.ends_with_training:
                self._finish(trainer.writer.out, state)

        call_together(trainer.world, write)

    def conclude(
        self,
        world: World,
        folder: str | None,
        test: Evaluation | None = None,
        state: str = tracking.FINISHED,
    ) -> None:
        """Record the test results and the files of the run, and end the record. Collective.

        The call is needed only if `ends_with_training` is false.

        Parameters
        ----------
        world : World
            The ranks of the run.
        folder : path or None
            The folder of the run; None if the run has no folder.
        test : Evaluation, optional
            The evaluation on the test set. By default, there was no test.
        state : {"finished", "stopped"}
            Whether the run ended as planned or was stopped.

        Raises
        ------
        UserError
            On all ranks, if rank 0 failed to write a record after the last epoch.
        """

        def write():
            if self._tracker is not None and test is not None:
                numbers = {"test/loss": test.loss, "test/accuracy": test.accuracy}
                finite = {name: v for name, v in numbers.items() if v is not None}
                with self._deferred():
                    self._tracker.scalars(self._step, finite)
                    self._draw_confusion("test", test)
            self._finish(folder, state)

        call_together(world, write)

    def abandon(self) -> None:
        """End the record of a failed run on rank 0, without raising an error."""
        with contextlib.suppress(Exception):  # show the error of the run instead
            self._close(None, tracking.FAILED)

    def _record(self, record):
        """Pass a record to the tracker. If that fails, `epoch` or `end` raises the error."""
        if self._tracker is not None:
            self._step = max(self._step, record["iteration"])
            with self._deferred():
                self._tracker.scalars(self._step, tracking.scalars(record))

    def _flush(self):
        """Write all records before a checkpoint, because a resumed run will not repeat them."""
        if self._tracker is not None:
            with self._deferred():
                self._tracker.flush()

    def _gradients(self, gradients: Mapping[str, np.ndarray]) -> None:
        if self._tracker is not None and self._trainer is not None and self._trainer.at_epoch_end:
            with self._deferred():
                self._histograms("gradients", gradients, self._trainer.position.iteration)

    def _histograms(self, group, arrays, step):
        for name, values in arrays.items():
            histogram = tracking.histogram(np.asarray(values))
            self._tracker.histogram(f"{group}/{name}", step, histogram)

    def _draw_confusion(self, name, evaluation):
        table = evaluation.confusion
        if table is not None and _can_draw(len(table.classes)):
            with contextlib.suppress(ImportError):  # treat a broken matplotlib as if not installed
                png = confusion.draw(table.counts, table.classes, table.accuracy)
                self._tracker.picture(f"confusion/{name}", self._step, png)

    def _finish(self, folder, state):
        """End the tracker's record, and raise the first error that occurred."""
        with self._deferred():
            self._close(folder, state)
        self._raise()

    def _close(self, folder, state):
        tracker, self._tracker, self._trainer = self._tracker, None, None
        if tracker is None:
            return
        try:
            for name in FILES if folder is not None and state == tracking.FINISHED else ():
                if os.path.isfile(path := os.path.join(folder, name)):
                    tracker.file(os.path.abspath(path))
        finally:
            tracker.close(state)

    @contextlib.contextmanager
    def _deferred(self):
        """Suppress a UserError in the block, and keep the first error for `_raise`."""
        try:
            yield
        except UserError as error:
            self._error = self._error or error

    def _raise(self):
        if self._error is not None:
            raise self._error


def folder_of_run(trainer: Trainer, subject: str) -> str:
    """Return the folder of the run, or raise a UserError that begins with `subject`."""
    if trainer.writer.out is None:
        raise UserError(f"{subject}: expected a folder for the run, dl.train(..., out=FOLDER)")
    return os.fspath(trainer.writer.out)


def name_of_run(out: str | os.PathLike[str] | None) -> str:
    """Return the name of a run for a tracker: the name of its folder, or "run" without a folder."""
    return "run" if out is None else os.path.basename(os.path.abspath(out))


def _parameters(trainer):
    options = trainer.options.as_dict() | trainer.facts.get("run", {})
    learnables = sum(count for *_, count in trainer.net.table())
    return options | {"learnables": learnables, "ranks": trainer.world.size}


def _can_draw(classes):
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    return has_matplotlib and classes <= confusion.MAX_NAMES
