"""Record the training step on the host once per size of mini-batch, and replay it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpidl import phases
from mpidl.backends.cpu import arenas
from mpidl.data.parts import PartedBatch
from mpidl.training import cpu_step
from mpidl.training.cpu_step import StepProgram
from mpidl.training.steps import EagerStep

MOST_SIZES = 5  # largest number of sizes of mini-batches that have a program


class ReplayedStep(EagerStep):
    """A training step on the host that is recorded once and then replayed.

    The first mini-batch of a size is recorded, without computing anything, and then computed
    eagerly. The second one is computed both eagerly and by a replay. If the two gradients do not
    have the same bytes on all ranks, all later steps run eagerly. Steps whose spans are stored for
    a timeline also run eagerly. Eager and replayed steps exchange the same messages.

    All programs use the arrays and the memory of the first one, which is for the largest
    mini-batches, so a larger mini-batch discards all programs. A hook may change settings of the
    network or the optimizer, possibly on one rank only. That rank then runs eagerly until the ranks
    agree to record again, at the first mini-batch of an epoch.

    If mini-batches are computed in parts, a program computes only the gradient of a part. The sum
    of the gradients and the update of the network are computed eagerly.
    """

    includes_update = True  # whether a program updates the network

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.programs: dict[tuple[int, int], StepProgram] = {}  # {size of a mini-batch: program}
        self.can_replay = True  # whether no recording or check has failed
        self._base: StepProgram | None = None  # its arrays are those of the current mini-batch
        self._replayed: StepProgram | None = None  # the program of the last mini-batch
        self._epoch = 0

    @property
    def largest(self) -> StepProgram | None:
        """The program for the largest mini-batches so far, or None."""
        return next(iter(self.programs.values()), None)

    def compute_parts(self) -> None:
        super().compute_parts()
        self.includes_update = False

    def close(self) -> None:
        self.programs, self._base, self._replayed, self._epoch = {}, None, None, 0

    def _compute(self, images, targets, info):
        program = self._replayed
        if (
            program is None
            or not program.checks_loss
            or images.batch.epoch != self._epoch
            or self.observers
            or phases.spans() is not None
            or not (program.fits(images, targets) and program.is_current())
        ):
            return super()._compute(images, targets, info)
        sums, is_updated = program.step(images, targets)
        if not is_updated:
            self._raise_fault(images, targets, sums[0], info)
        return sums

    def _gradient(self, images, targets):
        if not isinstance(images.batch, PartedBatch):
            return self._recorded_gradient(images, targets)
        from mpidl.training import accumulation

        state = {name: np.array(array) for name, array in self.net.state.items()}
        arguments = self.objective, self.net, images, targets
        try:
            return accumulation.accumulated(self._part, *arguments)
        finally:
            self._set_state(state)  # keep the old state until the update

    def _part(self, net, images, targets):
        """Return the results for a part, in memory that later replays do not use."""
        self._set_state(net.state)
        value, *tables = self._recorded_gradient(images, targets)
        copies = [{name: np.array(array) for name, array in table.items()} for table in tables]
        return tuple(map(np.array, value)), *copies

    def _set_state(self, state):
        if self.largest is None:
            self.net.state = dict(state)
        else:
            self.largest.set_state(state)

    def _recorded_gradient(self, images, targets):
        """Return the gradient of a mini-batch or of a part, replayed if possible."""
        self._base = self._replayed = None
        if not self.can_replay or targets is None:
            return super()._gradient(images, targets)
        is_new = self._record_if_new(images, targets)
        program = self.programs.get(_size(images.batch))
        if program is not None and not program.fits(images, targets):
            program = None
        if program is not None and not program.is_checked and not is_new:
            if not self._agree():
                return self._recorded_gradient(images, targets)
            with phases.span("check of the recording"):
                return self._check(program, images, targets)
        base = program or self.largest
        if base is None or not base.is_current():
            return super()._gradient(images, targets)
        self._base = base
        if program is not None and program.is_checked and phases.spans() is None:
            self._replayed = program
            return program.gradient(images, targets)
        with base.planned_memory(program):
            return super()._gradient(images, targets)

    def _record_if_new(self, images, targets):
        """Record the step if the mini-batch has a new size, and return whether it had. Collective.

        If all sizes have a program, one that was not checked gives way.
        """
        batch, size = images.batch, _size(images.batch)
        if self.largest is not None and batch.epoch != self._epoch:
            self._agree()
        self._epoch = batch.epoch
        if self.largest is not None and size > _size(self.largest.batch):
            self.programs = {}
        if size in self.programs:
            return False
        if len(self.programs) == MOST_SIZES:
            _, *smaller = self.programs
            unchecked = [other for other in smaller if not self.programs[other].is_checked]
            if not unchecked:
                return False
            del self.programs[unchecked[0]]
        if self.programs:
            self._agree()
        with phases.span("recording"):
            program = StepProgram(
                self.net,
                self.optimizer,
                self.objective,
                self.world,
                images,
                targets,
                largest=self.largest,
                includes_update=self.includes_update,
            )
        self.programs[size] = program
        if not self.world.gop("and", program.problem is None):
            self._stop_replaying()
        return True

    def _agree(self):
        """Discard the programs unless they are current on all ranks; return whether they are."""
        is_current = all(program.is_current() for program in self.programs.values())
        is_agreed = self.world.gop("and", is_current)
        if not is_agreed:
            self.programs = {}
        return is_agreed

    def _stop_replaying(self):
        self.programs, self._base, self.can_replay = {}, None, False

    def _check(self, program, images, targets):
        """Compute the gradient eagerly and by a replay; stop replaying if they differ."""
        self._base = program
        with program.planned_memory(program):
            expected = cpu_step.digest(*super()._gradient(images, targets))
        results = program.gradient(images, targets)
        if self.world.gop("and", expected == cpu_step.digest(*results)):
            program.is_checked, self._replayed = True, program
            return results
        if self.world.rank == 0:
            text = "warning: replayed and eager training steps differ; please report"
            print(f"{text} this. The training continues with eager steps.", file=sys.stderr)
        self._stop_replaying()
        return super()._gradient(images, targets)

    def _update(self, gradients, state):
        if self._replayed is not None and self.includes_update:
            self._replayed.update()
        elif self._base is None:
            super()._update(gradients, state)
        else:  # update the arrays of the programs eagerly
            with arenas.through(self._base.memory):
                parameters = self.optimizer(self.net.parameters, gradients)
            cpu_step.copy_into(self.net.parameters, parameters)
            cpu_step.copy_into(self.net.state, state)


def _size(batch):
    """Return the number of images in a batch, and in the mini-batch that contains the batch."""
    return batch.count, batch.total or 0
