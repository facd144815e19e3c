"""What a run leaves in its folder while it goes on: metrics.jsonl, checkpoints, progress.png."""

import hashlib
import os
from dataclasses import asdict

import numpy as np

from mpidl.errors import Fault, UserError
from mpidl.report import Metrics, plots
from mpidl.training import checkpoint


class Keeper:
    """Writes a run's files on rank 0, in a folder that it makes; without one (None) it writes
    nothing.

    cut: on resume, the checkpoint's iteration: see `Metrics`. What rank 0 cannot write all ranks
    raise as UserError, that of a record at the next checkpoint. All methods but `record` and
    `advice` are collective.
    """

    def __init__(self, out, world, cut=None):
        self.out, self.world = out, world
        self.metrics = self.problem = None  # problem: what rank 0 could not write
        if out is not None:
            error = None
            try:
                if world.rank == 0:
                    os.makedirs(out, exist_ok=True)
                self.metrics = Metrics(os.path.join(out, "metrics.jsonl"), world.rank, cut=cut)
            except UserError as problem:
                error = problem
            except OSError as problem:
                error = UserError(f"{out}: cannot be made: {problem.strerror or problem}")
            world.together(error)

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
        self.world.together(error)

    def plot(self):
        """Draw progress.png."""
        error = None
        if self.out is not None and self.world.rank == 0:
            try:
                plots.progress(self.metrics.path, os.path.join(self.out, "progress.png"))
            except UserError as problem:
                error = problem
        self.world.together(error)

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
