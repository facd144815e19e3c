"""Let a run that has lost ranks continue on the remaining ranks, with the same results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.report.metrics import Metrics
from mpidl.training import skipped_images
from mpidl.training.files import run_state

if TYPE_CHECKING:
    from mpidl.ranks.world import LostRank, World
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.progress import Result
    from mpidl.training.session import Session
    from mpidl.training.trainer import Trainer


def prepare(options: TrainingOptions, world: World) -> None:
    """Let the world survive the loss of ranks if the option `on_lost_rank` is "shrink".

    Raises
    ------
    UserError
        If the world cannot survive the loss of ranks.
    """
    if options.on_lost_rank == "shrink" and not world.outlives_ranks:
        world.outlive_ranks("--on-lost-rank shrink")


def describe(lost: Sequence[LostRank], world: World) -> str:
    """Return the beginning of the console line about lost ranks."""
    names = ", ".join(f"rank {rank} on host {host}" for rank, host in lost)
    verb = "were" if len(lost) > 1 else "was"
    left = f"{world.size} rank{'s continue' if world.size > 1 else ' continues'}"
    return f"warning: {names} {verb} lost: {left}"


def restart_test(session: Session, result: Result) -> None:
    """After ranks were lost during the test, prepare to repeat it and print a line. Collective.

    `result` is that of the training, with the number of ranks lost before the test.
    """
    world, console = session.world, session.console
    if world.rank == 0:
        console.take_over()
    session.signals.agreed = False  # the remaining ranks must agree on a stop again
    session.lock.take_over()
    lost = world.lost_ranks[result.lost_ranks :]
    console.line(f"{describe(lost, world)} with the test, which starts again")


class IterationStart:
    """A copy of the state in which the current iteration started.

    The loss of a rank interrupts the other ranks at different points, and some ranks may be one
    iteration ahead of other ranks. All ranks then return to the start of the last iteration that
    all of them have reached. A rank reaches the start of an iteration when it asks the other ranks
    whether to continue. Once the rank receives the answer, all ranks have reached this start, so
    the copy of the previous start is no longer needed.

    Parameters
    ----------
    world : World
        The ranks of the run. If the world cannot survive the loss of ranks, no copies are made.

    Attributes
    ----------
    losses : int
        Number of lost ranks that the run has announced.
    """

    def __init__(self, world: World) -> None:
        self.is_kept = world.outlives_ranks
        self.losses, self._losses_before = 0, len(world.lost_ranks)
        self._is_reached = self.is_kept  # whether the trainer is at the start of an iteration
        self._number = self._kept_number = 0  # number of starts; `Rollback` does not decrease it
        self._time = self._kept_time = time.monotonic()
        self._arrays: dict[str, dict[str, np.ndarray]] = {}
        self._facts: dict[str, Any] = {}

    def reach(self) -> None:
        """Record that this rank has completed an epoch, or an iteration including all hooks."""
        self._is_reached = self.is_kept
        self._number, self._time = self._number + 1, time.monotonic()

    def keep(self, trainer: Trainer) -> None:
        """Copy the current state, which all ranks have reached, unless it was copied already."""
        if not self._is_reached:
            return
        self._arrays, self._facts = run_state.snapshot(trainer, self._arrays)
        self._is_reached, self._kept_number, self._kept_time = False, self._number, self._time

    def restore(self, trainer: Trainer) -> None:
        """Return to the start of the last iteration that all ranks have reached. Collective."""
        world, start_time = trainer.world, time.monotonic()
        number = self._number if self._is_reached else self._kept_number
        number = world.gop("min", number)
        if number == self._number:
            self.keep(trainer)
        self._number, self._is_reached = number, False
        repeated_seconds = start_time - self._kept_time
        run_state.set_progress(trainer, run_state.copied(self._arrays), self._facts)
        for _, bad_images in skipped_images.sets_of(trainer).values():
            bad_images.merge(world.allgather(bad_images.reasons))
        trainer.restart()
        self._announce(trainer, start_time, repeated_seconds)

    def _announce(self, trainer, start_time, repeated_seconds):
        """Record the loss of ranks in metrics.jsonl, and print a line."""
        world, position = trainer.world, trainer.position
        times = np.array([repeated_seconds, time.monotonic() - start_time])
        repeated_seconds, seconds = world.gop("max", times)
        lost = world.lost_ranks[self._losses_before + self.losses :]
        self.losses += len(lost)
        facts = {"ranks": [rank for rank, _ in lost], "hosts": [host for _, host in lost]}
        facts |= {"ranks_left": world.size, "seconds_lost": round(repeated_seconds + seconds, 3)}
        trainer.writer.add(Metrics.record_lost, position.epoch, position.iteration, facts)
        trainer.console.line(
            f"{describe(lost, world)} after iteration {position.iteration}; time lost: "
            f"{repeated_seconds:.2f} s of work to repeat and {seconds:.2f} s to restore the state"
        )
