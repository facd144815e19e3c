"""Return a run to its last good state if its loss or its weights are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.errors import Fault, NotFinite
from mpidl.training.files import run_state
from mpidl.training.progress import EpochSummary, Position

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer

LIMIT = 5  # rollbacks per run
PREFIX = "rollback_"  # prefix of a checkpoint's tables that hold an earlier state


class Rollback:
    """The hook that keeps the last good state of a run in memory, and restores it.

    A state is kept at the start, after each epoch and every `checkpoint_every` iterations. A killed
    run resumes from a checkpoint of one of these states, so it rolls back to the same states as an
    uninterrupted run. A checkpoint written at another iteration, for example after a signal,
    also stores the kept state.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, dict[str, np.ndarray]] = {}
        self.facts: dict[str, Any] = {}

    def keep(self, trainer: Trainer) -> None:
        """Keep the current state; raise NotFinite if an array is not finite. Collective."""
        trainer.wait()
        trainer.check_finite(run_state.progress(trainer)[0])
        self.arrays, self.facts = run_state.snapshot(trainer, {})

    def load(self, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Keep the earlier state stored in a checkpoint, if there is one."""
        if "rollback" in facts:
            self.facts = facts["rollback"]
            self.arrays = {
                table.removeprefix(PREFIX): values
                for table, values in arrays.items()
                if table.startswith(PREFIX)
            }

    def stored(self, position: Position) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (tables, facts) of the kept state, to add to a checkpoint.

        Both dictionaries are empty if the kept state is the state of the checkpoint itself.
        """
        if self.facts["position"]["iteration"] == position.iteration:
            return {}, {}
        tables = {f"{PREFIX}{table}": arrays for table, arrays in self.arrays.items()}
        return tables, {"rollback": self.facts}

    def restore(self, trainer: Trainer, problem: NotFinite) -> None:
        """Return to the kept state, and halve all learning rates from then on. Collective.

        Raises
        ------
        Fault
            If the run has already rolled back `LIMIT` times.
        """
        count = trainer.position.rollbacks + 1
        if count > LIMIT:
            raise Fault(f"{problem}; the run has rolled back {LIMIT} times (--on-nan rollback)")
        trainer.writer.wait()
        with trainer.renewed_step():
            run_state.set_progress(trainer, run_state.copied(self.arrays), self.facts)
            trainer.position.rollbacks = count
        trainer.rewind_records()
        trainer.console.line(
            f"warning: {problem.description}: rolled back to iteration "
            f"{trainer.position.iteration}; "
            f"learning rates are now multiplied by {trainer.position.rate_factor:g} (rollback "
            f"{count} of at most {LIMIT})"
        )

    def start(self, trainer: Trainer) -> None:
        if not self.facts:
            self.keep(trainer)

    def step(self, trainer: Trainer) -> None:
        interval, iteration = trainer.options.checkpoint_every, trainer.position.iteration
        if interval and iteration % interval == 0 and not trainer.at_epoch_end:
            self.keep(trainer)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        self.keep(trainer)
