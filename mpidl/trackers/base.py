"""The base of the trackers, which are hooks that write a run's numbers for another program."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.data import gallery
from mpidl.data.transforms.augment import Augmenter
from mpidl.errors import UserError
from mpidl.evaluation.evaluate import Evaluation
from mpidl.files import on_rank_0
from mpidl.losses import has_class_scores
from mpidl.ranks.world import World
from mpidl.report import confusion
from mpidl.report.run_files import CONFUSION, OPTIONS, SUMMARY
from mpidl.report.status import FAILED, FINISHED, STOPPED
from mpidl.trackers import records
from mpidl.trackers.records import Histogram
from mpidl.training.progress import EpochSummary

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer

# Files of a run that trackers copy at the end of the run.
FILES = (OPTIONS, SUMMARY, CONFUSION, "progress.png", "model.h5")


class Tracker:
    """Base class of the hooks that record a run for another program.

    All ranks call a hook, but only rank 0 imports the tracker's library and writes. A subclass
    overrides `open` and the methods for the records that it supports, from `parameters` to `close`;
    they may raise `UserError` if a file cannot be written. The run then writes a checkpoint at the
    end of the epoch, and ends on all ranks.

    Attributes
    ----------
    ends_with_training : bool
        Whether the tracker's record ends with the training. If false, the caller must call
        `conclude`, as the command `train` does after the test.
    copied : tuple of str
        Files or folders in the run's folder that a run needs if it is resumed in another folder.
    """

    copied: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.ends_with_training = True
        self._trainer: Trainer | None = None  # on rank 0, while the run is in progress
        self._error: UserError | None = None  # error of rank 0 that all ranks will raise
        self._step = 0

    @classmethod
    def written(cls, folder: str) -> list[str]:
        """Return the paths that the tracker has written in the folder of a run.

        A new run in the folder removes them.

        Parameters
        ----------
        folder : str
            The folder of the run.

        Returns
        -------
        list of str
        """
        return []

    def open(self, trainer: Trainer) -> None:
        """Open the record of a run, or continue it if the run is resumed.

        Parameters
        ----------
        trainer : Trainer
            The run to record.
        """
        raise TypeError(f"{type(self).__name__} opens no record")

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Record the options of the run.

        Parameters
        ----------
        values : mapping
            {option: value}.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of an iteration.

        Parameters
        ----------
        step : int
            The iteration.
        values : mapping
            Numbers such as {"train/loss": 0.5}.
        """

    def picture(self, name: str, step: int, png: bytes) -> None:
        """Record a picture.

        Parameters
        ----------
        name : str
            Name of the picture, such as "confusion/test".
        step : int
            The iteration.
        png : bytes
            Content of a PNG file.
        """

    def histogram(self, name: str, step: int, values: Histogram) -> None:
        """Record the distribution of an array's values.

        Parameters
        ----------
        name : str
            Name of the array, such as "weights/conv1.weight".
        step : int
            The iteration.
        values : Histogram
            The number of values in each bucket.
        """

    def file(self, path: str) -> None:
        """Record a file of the run.

        Parameters
        ----------
        path : str
            Absolute path of the file.
        """

    def flush(self) -> None:
        """Write the records so far. A resumed run does not repeat those before a checkpoint."""

    def close(self, state: str = FINISHED) -> None:
        """Write all records, and end the record of the run.

        Parameters
        ----------
        state : {"finished", "stopped", "failed"}
            How the run has ended.
        """

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
            on_rank_0(trainer.world, lambda: self._start(trainer))
        can_draw = has_class_scores(trainer.loss) and _can_draw(trainer.net.output_shape[0])
        if trainer.world.broadcast(can_draw):
            trainer.validation.counts_confusions = True

    def _start(self, trainer):
        self.open(trainer)
        self._trainer, self._step = trainer, trainer.position.iteration
        if self._record not in trainer.writer.listeners:  # registered already if a rank was lost
            trainer.writer.listeners.append(self._record)
            trainer.writer.before_checkpoint.append(self._flush)
            trainer.step.observe_gradients(self._gradients)
        learnables = sum(count for *_, count in trainer.net.table())
        options = trainer.options.as_dict() | trainer.facts.get("run", {})
        self.parameters(options | {"learnables": learnables, "ranks": trainer.world.size})
        store = trainer.datastore.parent
        if not self._step and store.image_shape[0] in (1, 3):  # others cannot be shown as colours
            augmenter = Augmenter.of_options(trainer.options)
            self.picture("gallery", 0, gallery.gallery(store, augmenter, trainer.options.seed))

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
            parameters, step = trainer.net.parameters, summary.iteration
            self._try(lambda: self._histograms("weights", parameters, step))
            self._raise()

        try:
            on_rank_0(trainer.world, write)
        except UserError as error:
            raise trainer.after_checkpoint(error) from None

    def lost(self, trainer: Trainer) -> None:
        """After a loss of ranks, continue the record on the new rank 0. Collective.

        Parameters
        ----------
        trainer : Trainer
            The run.
        """
        if not trainer.world.broadcast(self._trainer is not None):
            self.start(trainer)

    def end(self, trainer: Trainer) -> None:
        """Record the final results of the training. Collective.

        Parameters
        ----------
        trainer : Trainer
            The run.
        """

        def write():
            if trainer.validation.final is not None:
                self._draw_confusion("validation", trainer.validation.final)
            if self.ends_with_training:
                self._finish(trainer.writer.out, STOPPED if trainer.signals.agreed else FINISHED)

        on_rank_0(trainer.world, write)

    def conclude(
        self,
        world: World,
        folder: str | None,
        test: Evaluation | None = None,
        state: str = FINISHED,
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
            if test is not None:
                numbers = {"test/loss": test.loss, "test/accuracy": test.accuracy}
                finite = {name: v for name, v in numbers.items() if v is not None}
                self._try(lambda: self.scalars(self._step, finite))
                self._draw_confusion("test", test)
            self._finish(folder, state)

        on_rank_0(world, write)

    def abandon(self) -> None:
        """End the record of a failed run on rank 0, without raising an error."""
        with contextlib.suppress(Exception):  # show the error of the run instead
            self._close(None, FAILED)

    def _record(self, record):
        """Pass a record to the tracker. If that fails, `epoch` or `end` raises the error."""
        self._step = max(self._step, record["iteration"])
        self._try(lambda: self.scalars(self._step, records.scalars(record)))

    def _flush(self):
        self._try(self.flush)

    def _gradients(self, gradients: Mapping[str, np.ndarray]) -> None:
        if self._trainer is not None and self._trainer.at_epoch_end:
            step = self._trainer.position.iteration
            self._try(lambda: self._histograms("gradients", gradients, step))

    def _histograms(self, group, arrays, step):
        for name, values in arrays.items():
            self.histogram(f"{group}/{name}", step, records.histogram(np.asarray(values)))

    def _draw_confusion(self, name, evaluation):
        table = evaluation.confusion

        def draw():
            with contextlib.suppress(ImportError):  # treat a broken matplotlib as not installed
                png = confusion.draw(table.counts, table.classes, table.accuracy)
                self.picture(f"confusion/{name}", self._step, png)

        if table is not None and _can_draw(len(table.classes)):
            self._try(draw)

    def _finish(self, folder, state):
        """End the tracker's record, and raise the first error that occurred."""
        self._try(lambda: self._close(folder, state))
        self._raise()

    def _close(self, folder, state):
        if self._trainer is None:
            return
        self._trainer = None
        try:
            for name in FILES if folder is not None and state == FINISHED else ():
                if os.path.isfile(path := os.path.join(folder, name)):
                    self.file(os.path.abspath(path))
        finally:
            self.close(state)

    def _try(self, write: Callable[[], object]) -> None:
        """While the record is open, call a function, and keep its UserError for `_raise`."""
        if self._trainer is not None:
            try:
                write()
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


def _can_draw(classes):
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    return has_matplotlib and classes <= confusion.MAX_NAMES
