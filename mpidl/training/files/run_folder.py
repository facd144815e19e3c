"""The folder of a run: metrics.jsonl, checkpoints, progress.png."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from mpidl.comm import World
from mpidl.errors import Fault, UserError
from mpidl.files import call_together, on_rank_0, reason
from mpidl.report import Metrics, plots
from mpidl.training.files import checkpoint
from mpidl.training.progress import Position

# Files of a run that a later run in the same folder removes.
RESULTS = (
    checkpoint.CURRENT,
    checkpoint.PREVIOUS,
    "metrics.jsonl",
    "model.h5",
    "options.toml",
    "progress.png",
    "summary.json",
)
PLOT_SECONDS = 10.0  # between two drawings of progress.png, while training waits
# How the command line and Python spell the folder, a resume and a replacement.
COMMAND_WORDS = ("--out {}", "--resume {}", "--overwrite")
PYTHON_WORDS = ("out={}", "resume={}", "overwrite=True")


def refuse_a_run(
    out: str, resumed: str | None = None, words: tuple[str, str, str] = COMMAND_WORDS
) -> None:
    """Raise UserError if the folder holds the checkpoint of a run other than the resumed one."""
    if not checkpoint.exists(out) or _is_same_folder(out, resumed):
        return
    folder, resume, overwrite = (text.format(out) for text in words)
    try:
        iteration = checkpoint.load(out, warn=lambda line: None)[1]["position"]["iteration"]
        run = f"a run (iteration {iteration})"
    except UserError:
        run = "a run, whose checkpoint cannot be loaded"
    raise UserError(f"{folder}: it holds {run}: {resume} goes on with it, {overwrite} replaces it")


def make_folder(out: str, resumed: str | None = None) -> None:
    """Make the folder for a run's files, and remove an earlier run's.

    The folder of a resumed run stays as it is; a run that resumes in another folder copies its
    metrics there. Raises OSError.
    """
    os.makedirs(out, exist_ok=True)
    if _is_same_folder(out, resumed):
        return
    for path in (os.path.join(out, name) for name in RESULTS):
        if os.path.lexists(path):
            os.unlink(path)
    if resumed is not None and os.path.exists(metrics := os.path.join(resumed, "metrics.jsonl")):
        shutil.copyfile(metrics, os.path.join(out, "metrics.jsonl"))


def _is_same_folder(out, resumed):
    return resumed is not None and os.path.exists(out) and os.path.samefile(out, resumed)


class RunFolder:
    """Where `dl.train` writes, and the checkpoint that it resumes from. Collective.

    Parameters
    ----------
    out, resume, overwrite
        As `dl.train` takes them.
    world : World

    Attributes
    ----------
    out : path or None
        The folder to write to.
    resume : (arrays, facts) or None
        The loaded checkpoint.

    Raises
    ------
    UserError
        On all ranks, if `out` holds another run and `overwrite` is false. Nothing was touched then.
    """

    def __init__(self, out: Any, resume: Any, overwrite: bool, world: World) -> None:
        is_folder = resume is None or isinstance(resume, str | os.PathLike)
        if not is_folder and not isinstance(resume, tuple):
            kind = type(resume).__name__
            raise UserError(f"resume: expected the folder of a run, found {kind}")
        self.resumed = resume if is_folder else None
        self.out, self.resume = self.resumed if out is None else out, resume
        # A caller that loaded the checkpoint itself has already prepared the folder.
        self.is_to_be_cleared = is_folder and (overwrite or resume is not None)
        if is_folder and self.out is not None and not overwrite:
            on_rank_0(world, lambda: refuse_a_run(self.out, resume, PYTHON_WORDS))
        if self.resumed is not None:
            self.resume = on_rank_0(world, lambda: checkpoint.load(resume))

    def make(self) -> None:
        """Make the folder, without an earlier run's files. Raises UserError."""
        try:
            if self.is_to_be_cleared:
                make_folder(self.out, self.resumed)
            os.makedirs(self.out, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.out}: cannot be made: {reason(error)}") from error

    def advice(self, learning_rate: float) -> str:
        """Return what a user may do about numbers that are not finite."""
        has_checkpoint = self.out and checkpoint.exists(self.out)
        return f"lower --learning-rate (now {learning_rate:g}) or look at the images" + (
            f"; the last checkpoint is in {self.out}" if has_checkpoint else ""
        )


class RunWriter:
    """Writes the files of a run, on rank 0; without a folder it writes nothing.

    All methods but `record` are collective. If rank 0 cannot write, all ranks raise
    UserError; for a record they do so at the next checkpoint.

    Parameters
    ----------
    folder : RunFolder
        It is made here.
    world : World
    last_iteration : int, optional
        Of the checkpoint that a run resumes from: later records of metrics.jsonl are cut off.
    """

    def __init__(self, folder: RunFolder, world: World, last_iteration: int | None = None) -> None:
        self.folder, self.out, self.world = folder, folder.out, world
        self.metrics: Metrics | None = None
        self.record_error: UserError | None = None
        self.plot_time = -math.inf
        if folder.out is not None:
            self._on_rank_0(folder.make)
            path = os.path.join(self.out, "metrics.jsonl")
            open_metrics = functools.partial(Metrics, path, world.rank, cut=last_iteration)
            self.metrics = call_together(world, open_metrics)

    def _on_rank_0(self, function):
        """Call a function on rank 0; raise its UserError on all ranks. Collective."""
        call_together(self.world, function if self.world.rank == 0 else lambda: None)

    def record(self, *numbers: Any) -> None:
        """Write a line of metrics.jsonl; the arguments are those of `Metrics.record`."""
        if self.metrics is None or self.record_error:
            return
        try:
            self.metrics.record(*numbers)
        except UserError as error:
            self.record_error = error

    def save(
        self,
        tables: Mapping[str, Mapping[str, np.ndarray]],
        position: Position,
        facts: Mapping[str, Any],
        learning_rate: float,
    ) -> None:
        """Write a checkpoint.

        Raises
        ------
        Fault
            If the ranks hold different weights, or weights that are not finite: from those no run
            can go on, so the checkpoint before stays.
        """
        if self.out is None:
            return
        self._compare(tables, position.iteration)
        self._check_finite(tables, position.iteration, learning_rate)

        def write():
            if self.record_error is not None:
                raise self.record_error
            self.metrics.flush()
            checkpoint.save(self.out, tables, {"position": asdict(position), **facts})

        self._on_rank_0(write)

    def plot(self, end: bool = False) -> None:
        """Draw progress.png; before the end of a run at most every PLOT_SECONDS."""

        def draw():
            if end or time.monotonic() - self.plot_time >= PLOT_SECONDS:
                plots.progress(self.metrics.path, os.path.join(self.out, "progress.png"))
                self.plot_time = time.monotonic()

        if self.out is not None:
            self._on_rank_0(draw)

    def close(self) -> None:
        if self.metrics:
            self.metrics.close()

    def _compare(self, tables, iteration):
        sha256 = hashlib.sha256()
        for arrays in tables.values():
            for array in arrays.values():
                sha256.update(np.ascontiguousarray(array))
        digest = np.frombuffer(sha256.digest(), np.int64)
        if not np.array_equal(self.world.gop("max", digest), self.world.gop("min", digest)):
            raise Fault(
                f"the ranks' weights differ at iteration {iteration}: expected the same bytes on "
                "all ranks (python -m mpidl.info shows what each runs on)"
            )

    def _check_finite(self, tables, iteration, learning_rate):
        for arrays in tables.values():
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    raise Fault(
                        f"{name} is not finite after iteration {iteration}, on all ranks; "
                        f"{self.folder.advice(learning_rate)}"
                    )
