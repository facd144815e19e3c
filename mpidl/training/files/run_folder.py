"""What a run leaves in its folder while it goes on: metrics.jsonl, checkpoints, progress.png."""

import hashlib
import math
import os
import shutil
import time
from dataclasses import asdict

import numpy as np

from mpidl.errors import Fault, UserError
from mpidl.files import on_rank_0
from mpidl.report import Metrics, plots
from mpidl.training.files import checkpoint

# What a run leaves in its folder, and a later one that overwrites it removes.
RESULTS = (
    checkpoint.CURRENT,
    checkpoint.PREVIOUS,
    "metrics.jsonl",
    "model.h5",
    "options.toml",
    "progress.png",
    "summary.json",
)
PLOT_SECONDS = 10.0  # between two drawings of progress.png, while which training waits
# How the command line and Python say: where to, go on with it, replace it.
COMMAND = ("--out {}", "--resume {}", "--overwrite")
PYTHON = ("out={}", "resume={}", "overwrite=True")


def refuse_a_run(out, resumed=None, words=COMMAND):
    """UserError where the folder holds the checkpoint of a run other than that in `resumed`."""
    if not checkpoint.exists(out) or _same(out, resumed):
        return
    place, go_on, replace = (text.format(out) for text in words)
    try:
        iteration = checkpoint.load(out, warn=lambda line: None)[1]["position"]["iteration"]
        run = f"a run (iteration {iteration})"
    except UserError:
        run = "a run, whose checkpoint cannot be loaded"
    raise UserError(f"{place}: it holds {run}: {go_on} goes on with it, {replace} replaces it")


def make_folder(out, resumed=None):
    """Make the folder for a run's files, and remove an earlier run's. The folder of the run that
    goes on is left as it is; into another one its records are copied. Raises OSError."""
    os.makedirs(out, exist_ok=True)
    if _same(out, resumed):
        return
    for path in (os.path.join(out, name) for name in RESULTS):
        if os.path.lexists(path):
            os.unlink(path)
    if resumed is not None and os.path.exists(metrics := os.path.join(resumed, "metrics.jsonl")):
        shutil.copyfile(metrics, os.path.join(out, "metrics.jsonl"))


def _same(out, resumed):
    return resumed is not None and os.path.exists(out) and os.path.samefile(out, resumed)


class Place:
    """Where `dl.train` writes, and what it goes on from.

    out, resume, overwrite: as `dl.train` takes them. The attributes: out, the folder to write to or
    None; resume, (arrays, facts) or None. Raises UserError, on all ranks, where `out` holds another
    run that is not to be overwritten, having touched nothing. Collective.
    """

    def __init__(self, out, resume, overwrite, world):
        known = resume is None or isinstance(resume, str | os.PathLike)
        if not known and not isinstance(resume, tuple):
            kind = type(resume).__name__
            raise UserError(f"resume: expected the folder of a run, found {kind}")
        self.resumed = resume if known else None  # the folder, where it is known
        self.out, self.resume = self.resumed if out is None else out, resume
        # Who has read the checkpoint, as the command has, has seen to the folder too.
        self.clears = known and (overwrite or resume is not None)
        if known and self.out is not None and not overwrite:
            on_rank_0(world, lambda: refuse_a_run(self.out, resume, PYTHON))
        if self.resumed is not None:
            self.resume = on_rank_0(world, lambda: checkpoint.load(resume))

    def make(self):
        """Make the folder, without an earlier run's files. Raises OSError."""
        if self.clears:
            make_folder(self.out, self.resumed)
        os.makedirs(self.out, exist_ok=True)


class Keeper:
    """Writes a run's files on rank 0, in a folder that it makes; without one (None) it writes
    nothing.

    place: a `Place`. cut: on resume, the checkpoint's iteration: see `Metrics`. What rank 0 cannot
    write all ranks raise as UserError, that of a record at the next checkpoint. All methods but
    `record` and `advice` are collective.
    """

    def __init__(self, place, world, cut=None):
        self.out, self.world = place.out, world
        self.metrics = self.problem = None  # problem: what rank 0 could not write
        self.drawn = -math.inf  # when progress.png was
        if place.out is not None:
            error = None
            try:
                if world.rank == 0:
                    place.make()
                self.metrics = Metrics(os.path.join(self.out, "metrics.jsonl"), world.rank, cut=cut)
            except UserError as problem:
                error = problem
            except OSError as problem:
                error = UserError(f"{self.out}: cannot be made: {problem.strerror or problem}")
            world.raise_if_any(error)

    def record(self, *facts):
        """Write to metrics.jsonl: what `Metrics.record` takes."""
        if self.metrics is None or self.problem:
            return
        try:
            self.metrics.record(*facts)
        except UserError as problem:
            self.problem = problem

    def save(self, tables, position, facts, learning_rate):
        """Write a checkpoint, having seen that all ranks hold the same weights, and finite ones."""
        if self.out is None:
            return
        error = self.problem
        self._compare(tables, position.iteration)
        self._check_finite(tables, position.iteration, learning_rate)
        if self.world.rank == 0 and error is None:
            try:
                self.metrics.flush()
                checkpoint.save(self.out, tables, {"position": asdict(position), **facts})
            except UserError as problem:
                error = problem
        self.world.raise_if_any(error)

    def plot(self, end=False):
        """Draw progress.png, which before the end is done every PLOT_SECONDS at most."""
        error, due = None, end or time.monotonic() - self.drawn >= PLOT_SECONDS
        if self.out is not None and self.world.rank == 0 and due:
            try:
                plots.progress(self.metrics.path, os.path.join(self.out, "progress.png"))
            except UserError as problem:
                error = problem
            self.drawn = time.monotonic()
        self.world.raise_if_any(error)

    def close(self):
        if self.metrics:
            self.metrics.close()

    def advice(self, learning_rate):
        """What a user may do where numbers are not finite."""
        kept = self.out and checkpoint.exists(self.out)
        return f"lower --learning-rate (now {learning_rate:g}) or look at the images" + (
            f"; the last checkpoint is in {self.out}" if kept else ""
        )

    def _compare(self, tables, iteration):
        digest = hashlib.sha256()
        for arrays in tables.values():
            for array in arrays.values():
                digest.update(np.ascontiguousarray(array))
        mine = np.frombuffer(digest.digest(), np.int64)
        if not np.array_equal(self.world.gop("max", mine), self.world.gop("min", mine)):
            raise Fault(
                f"the ranks' weights differ at iteration {iteration}: expected the same bytes on "
                "all ranks (python -m mpidl.info shows what each runs on)"
            )

    def _check_finite(self, tables, iteration, learning_rate):
        """Keep the checkpoint before: from weights that are not finite no run can go on."""
        for arrays in tables.values():
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    raise Fault(
                        f"{name} is not finite after iteration {iteration}, on all ranks; "
                        f"{self.advice(learning_rate)}"
                    )
