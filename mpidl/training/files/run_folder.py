"""Prepare a run's folder, and write metrics.jsonl, checkpoints and progress.png into it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.errors import LostLock, NotFinite, UserError
from mpidl.files import call_together, link_or_copy, on_rank_0, reason
from mpidl.ranks import hang_report
from mpidl.report import Metrics, history, metrics, status
from mpidl.report.run_files import BAD_IMAGES, CLASS_METRICS, CONFUSION, OPTIONS, SUMMARY
from mpidl.training import tracking
from mpidl.training.files import checkpoint, lock_file
from mpidl.training.files.background import BackgroundWriter
from mpidl.training.progress import Position
from mpidl.training.rank_comparison import compare_ranks

if TYPE_CHECKING:
    from mpidl.training.session import Session

TIMELINE = "timeline.json.gz"
# A folder with one of these files belongs to a run.
MARKS = (checkpoint.CURRENT, checkpoint.PREVIOUS, metrics.FILE, status.NAME)
# Files of an earlier run that a new run in the same folder removes, in addition to those of
# recorders. The list does not include the lock, because the new run holds it.
RESULTS = (
    checkpoint.CURRENT,
    checkpoint.PREVIOUS,
    BAD_IMAGES,
    CONFUSION,
    CLASS_METRICS,
    hang_report.NAME,
    metrics.FILE,
    "model.h5",
    OPTIONS,
    "progress.png",
    status.NAME,
    SUMMARY,
    TIMELINE,
)
RECORD = ("kind", "epoch", "iteration", "loss", "learning_rate", "images_per_second", "seconds")
RECORD += ("accuracy",)  # the arguments of `RunWriter.record`
# Before it writes a record, a run checks its lock if the last check is older than this time. Only a
# run that was suspended has not checked for so long.
RECORD_LOOK_SECONDS = 2 * lock_file.RENEW_SECONDS
PLOT_SECONDS = 10.0  # shortest time between two plots, and from the start to the first plot
# The arguments that set the folder, resume a run and replace a run, as shown in error messages.
COMMAND_WORDS = ("--out {}", "--resume {}", "--overwrite")
PYTHON_WORDS = ("out={}", "resume={}", "overwrite=True")


def refuse_a_run(
    out: str, resumed: str | None = None, words: tuple[str, str, str] = COMMAND_WORDS
) -> None:
    """Raise UserError if the folder holds a checkpoint of a run other than the resumed one.

    Parameters
    ----------
    out : path
        The folder.
    resumed : path, optional
        The folder of the resumed run.
    words : tuple of str
        Templates of the arguments that set the folder, resume a run and replace a run, for use in
        the error message.
    """
    if not checkpoint.exists(out) or _is_same_folder(out, resumed):
        return
    folder, resume, overwrite = (text.format(out) for text in words)
    try:
        iteration = checkpoint.load(out, warn=lambda line: None)[1]["position"]["iteration"]
        run = f"a run (iteration {iteration})"
    except UserError:
        run = "a run, whose checkpoint cannot be loaded"
    raise UserError(f"{folder}: it contains {run}: {resume} continues it, {overwrite} replaces it")


def make_folder(out: str, resumed: str | None = None) -> None:
    """Create the folder for a run's files, and remove the files of an earlier run.

    If `out` is the folder of the resumed run, nothing is removed. If a run is resumed in another
    folder, its metrics.jsonl, the checkpoints that it keeps and the files that recorders continue
    are copied to `out`. Files that were not written by a run are kept.

    Raises
    ------
    OSError
        If a file or folder cannot be created, copied or removed.
    """
    os.makedirs(out, exist_ok=True)
    if _is_same_folder(out, resumed):
        return
    paths = [os.path.join(out, name) for name in RESULTS]
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(errno.EISDIR, f"{path}: expected a file, found a folder")
    if any(os.path.lexists(os.path.join(out, name)) for name in MARKS):
        _remove_run(out, paths)
    if resumed is None:
        return
    for iteration, path in checkpoint.kept_paths(resumed).items():
        link_or_copy(path, checkpoint.path_of(out, iteration))
    copied = (name for recorder in tracking.classes() for name in recorder.copied)
    for name in (metrics.FILE, *copied):
        source, target = os.path.join(resumed, name), os.path.join(out, name)
        if os.path.isdir(source):
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif os.path.exists(source):
            shutil.copyfile(source, target)


def _remove_run(out, paths):
    """Remove the files of a run, including files of recorders; keep folders with other files."""
    out = os.fspath(out)
    recorded = [path for recorder in tracking.classes() for path in recorder.written(out)]
    recorded += checkpoint.kept_paths(out).values()
    for path in [*paths, *recorded]:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    for folder in {os.path.dirname(path) for path in recorded} - {out}:
        with contextlib.suppress(OSError):  # the folder contains other files
            os.rmdir(folder)


def _is_same_folder(out, resumed):
    return resumed is not None and os.path.exists(out) and os.path.samefile(out, resumed)


def next_folder(network: str) -> str:
    """Make the first of runs/NETWORK, runs/NETWORK-2, ... that does not exist, and return it.

    Several jobs may call this function at the same time. Raises UserError if the folder cannot be
    made.
    """
    name = os.path.basename(network.rpartition(":")[2]) or "run"
    try:
        os.makedirs("runs", exist_ok=True)
        for number in itertools.count(1):
            path = os.path.join("runs", name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                break
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {reason(error)}") from error
    return path


def _recorded(path):
    return history.HistoryRecorder(metrics.read(path) if os.path.exists(path) else ())


class RunWriter:
    """Collects the records of a run, and writes its files on rank 0 if the run has a folder.

    `save`, `write`, `plot`, `wait` and the constructor are collective. If rank 0 cannot write, all
    ranks raise UserError, or LostLock if another process has taken over the folder. If `record`
    cannot write, all ranks raise the error at the next checkpoint. Checkpoints and plots may be
    written while training continues; `check` then reports their errors.

    Parameters
    ----------
    session : Session
        The run, with its ranks, folder and lock. The constructor makes the folder.
    cut : Cut, optional
        The position of the checkpoint from which the run resumes. Records that the run will repeat
        are removed from metrics.jsonl. By default, the run is new.

    Attributes
    ----------
    recorder : HistoryRecorder
        The history of the run, on every rank. In a resumed run with a folder, the history includes
        the records before the checkpoint.
    listeners : list of functions
        Functions that receive each new record, as a dict with the keys of metrics.jsonl.
    before_checkpoint : list of functions
        Functions without arguments that rank 0 calls before it writes a checkpoint.
    """

    def __init__(self, session: Session, cut: metrics.Cut | None = None) -> None:
        self.session, self.world = session, session.world
        world = self.world
        self.metrics: Metrics | None = None
        self.record_error: UserError | LostLock | None = None
        # If ranks may be lost, start no process for writing: the process of a lost rank 0 could
        # still be writing when the new rank 0 writes.
        self.background = BackgroundWriter(starts_process=not world.outlives_ranks)
        self.plot_time = time.monotonic()
        self.recorder = history.HistoryRecorder()
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.before_checkpoint: list[Callable[[], None]] = []
        self.out = out = session.out
        if out is not None:
            session.make_folder()
            path = os.path.join(out, metrics.FILE)
            self.metrics = call_together(world, lambda: Metrics(path, world.rank, cut=cut))
            if cut is not None:
                on_rank_0(world, lambda: checkpoint.remove_kept(out, after=cut.iteration))
            if cut is not None and cut.iteration:
                self.recorder = on_rank_0(world, lambda: _recorded(path))

    def write(self, function: Callable[[], object]) -> None:
        """Call a function that writes files on rank 0; raise its error on all ranks. Collective."""

        def write():
            self.session.lock.check()
            function()

        call_together(self.world, write if self.world.rank == 0 else lambda: None)

    def record(self, *numbers: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Add a record to the history, call the listeners, and write a line to metrics.jsonl.

        The arguments are the same as for `Metrics.record`.
        """
        record = dict(zip(RECORD, numbers, strict=False))
        if metrics is not None:
            record["metrics"] = metrics
        self.recorder.add(record)
        for listener in self.listeners:
            listener(record)
        self.add(Metrics.record, *numbers, metrics=metrics)

    def add(self, method: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Call a method of `Metrics`, such as `record_ranks`, if the run has a folder.

        If the method fails, `save` raises the error, and later calls do nothing.
        """
        if self.metrics is not None and self.record_error is None:
            try:
                self.session.lock.check(RECORD_LOOK_SECONDS)
                method(self.metrics, *arguments, **keywords)
            except (UserError, LostLock) as error:
                self.record_error = error

    def save(
        self,
        tables: Mapping[str, Mapping[str, np.ndarray]],
        position: Position,
        facts: Mapping[str, Any],
        learning_rate: float,
        keep: bool = False,
    ) -> None:
        """Wait until the previous checkpoint is written, and start to write a new checkpoint.

        The caller may change the arrays once the method returns.

        Parameters
        ----------
        tables : mapping
            {"learnables": {"conv1.weight": array, ...}, ...}
        position : Position
            The progress of the run.
        facts : mapping
            Values to store as JSON; see `checkpoint.save`.
        learning_rate : float
            The current learning rate, for the error message.
        keep : bool
            Whether the run keeps this checkpoint.

        Raises
        ------
        Fault
            If the arrays differ between ranks or are not finite. A run could not continue from such
            arrays, so the previous checkpoint is kept.
        UserError
            If this checkpoint, or an earlier checkpoint, plot or record, could not be written.
        """
        file, out = self.metrics, self.out
        if file is None or out is None:
            return
        compare_ranks(self.world, tables, position.iteration)
        self.check_finite(tables, position.iteration, learning_rate)

        def write():
            self.raise_record_error()
            file.flush()
            for function in self.before_checkpoint:
                function()
            all_facts = {"position": asdict(position), **facts}
            claim = self.session.lock.claim
            iteration = position.iteration if keep else None
            self.background.save(out, tables, all_facts, file.path, claim, iteration)

        self.write(write)

    def raise_record_error(self) -> None:
        """Raise the error of an earlier record that could not be written."""
        if self.record_error is not None:
            raise self.record_error

    def check(self) -> None:
        """On rank 0, raise UserError or LostLock if a checkpoint or plot could not be written."""
        self.background.check()

    def wait(self) -> None:
        """Wait until all checkpoints and plots are written."""
        if self.out is not None:
            call_together(self.world, self.background.wait)

    def rewind(self, cut: metrics.Cut) -> None:
        """Remove the records and the kept checkpoints that the run will repeat.

        The current rank 0 may not be the rank that wrote the records.
        """
        self.recorder.cut(cut)
        if self.world.rank == 0:
            self.add(Metrics.rewind, cut, self.recorder.records())
            self.add(lambda _: checkpoint.remove_kept(self.out, after=cut.iteration))

    def plot(self, end: bool = False) -> None:
        """Start to draw progress.png, at most once per `PLOT_SECONDS`.

        If `end` is true, always draw the plot, and wait until the file is written.
        """

        file = self.metrics
        if file is None:
            return

        def draw():
            if end or time.monotonic() - self.plot_time >= PLOT_SECONDS:
                file.flush()
                path = os.path.join(os.path.dirname(file.path), "progress.png")
                self.background.plot(file.path, path, wait=end)
                self.plot_time = time.monotonic()

        self.write(draw)

    def close(self) -> None:
        """Wait for the files that are being written, and close metrics.jsonl.

        If the lock is lost, discard the records that are not yet written.
        """
        self.background.close()
        if self.metrics is not None:
            self.metrics.close(discard=self.session.lock.is_lost)

    def check_finite(
        self,
        tables: Mapping[str, Mapping[str, np.ndarray]],
        iteration: int,
        learning_rate: float,
    ) -> None:
        """Raise NotFinite if an array in the tables contains NaN or infinite values."""
        for arrays in tables.values():
            for name, array in arrays.items():
                is_float = np.asarray(array).dtype.kind in "fc"  # not an optimizer's other objects
                if is_float and not np.isfinite(array).all():
                    problem = f"{name} is not finite after iteration {iteration}, on all ranks"
                    raise NotFinite(problem, self.session.advice(learning_rate))
