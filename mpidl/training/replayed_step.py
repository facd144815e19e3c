"""Record the training step on the host once, and replay it for later mini-batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidl import phases
from mpidl.backends.cpu import arenas
from mpidl.data.parts import PartedBatch
from mpidl.training import accumulation, cpu_step
from mpidl.training.steps import EagerStep

MOST_SMALLER = 4  # largest number of programs for smaller mini-batches


class _Recorded:
    """A recorded program, and whether a replay has had the bytes of an eager step."""

    def __init__(self, program: cpu_step.StepProgram) -> None:
        self.program, self.is_checked = program, False


class ReplayedStep(EagerStep):
    """A training step on the host that is recorded once and then replayed.

    The first mini-batch is recorded while it is computed eagerly. The second mini-batch is computed
    both eagerly and by replay. If the two gradients do not have the same bytes on all ranks, all
    later steps run eagerly. Steps whose spans are stored for a timeline also run eagerly. Eager and
    replayed steps exchange the same messages.

    Smaller mini-batches, such as the last of each epoch, have a program of their own, which uses
    the same memory. It is recorded when a mini-batch has the same size as an earlier one, for up to
    `MOST_SMALLER` sizes.

    A hook may change settings of the network or the optimizer, possibly on one rank only. That rank
    then runs eagerly until the ranks agree to record again, at the first mini-batch of an epoch.

    Replays update the arrays of the network and the optimizer in place. The constructor takes the
    same arguments as `EagerStep`.
    """

    records_smaller = True  # whether smaller mini-batches are recorded, too

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._largest: _Recorded | None = None
        self._smaller: dict[tuple[int, int], _Recorded | None] = {}  # None: seen once
        self._current: _Recorded | None = None  # the program of the last mini-batch
        self._recording: cpu_step.StepProgram | None = None
        self._is_off, self._epoch = False, 0
        self._finish: Callable[[Any, Any], None] = super()._update

    @property
    def program(self) -> cpu_step.StepProgram | None:
        """The program for the largest mini-batches so far, or None."""
        return None if self._largest is None else self._largest.program

    def close(self) -> None:
        self._largest, self._current, self._recording, self._epoch = None, None, None, 0
        self._smaller.clear()
        self._is_off = False

    def _compute(self, images, targets, info):
        current = self._current
        if (
            current is not None
            and current.is_checked
            and (program := current.program).includes_update
            and images.batch.epoch == self._epoch
            and not self.observers
            and phases.spans() is None
            and program.fits(images, targets)
            and program.is_current()
        ):
            sums, is_updated = program.step(images, targets)
            if not is_updated:
                self._raise_fault(images, targets, sums[0], info)
            return sums
        return super()._compute(images, targets, info)

    def _gradient(self, images, targets):
        if self._is_off or targets is None:
            return self._eager_gradient(images, targets)
        if self._largest is not None and images.batch.epoch != self._epoch:
            self._agree()
        self._epoch = images.batch.epoch
        if self._largest is None or _size(images.batch) > _size(self._largest.program.batch):
            self.close()
            return self._record(images, targets)
        recorded = self._recorded(images, targets)
        if recorded is None and self._is_worth_recording(images.batch):
            self._agree()
            return self._record(images, targets)
        if recorded is not None and not recorded.is_checked:
            with phases.span("check of the recording"):
                self._check(recorded, images, targets)
            return self._gradient(images, targets)
        program = (recorded or self._largest).program
        if not program.is_current():
            return self._eager_gradient(images, targets)
        self._current = recorded or self._largest
        if recorded is not None and phases.spans() is None:
            self._finish = self._replay_update
            return program.gradient(images, targets)
        self._finish = self._update_in_place
        with program.memory(self.objective, images, targets):
            return super()._gradient(images, targets)

    def _recorded(self, images, targets):
        """Return the `_Recorded` whose program fits the mini-batch, or None."""
        smaller = self._smaller.get(_size(images.batch))
        for recorded in self._largest, smaller:
            if recorded is not None and recorded.program.fits(images, targets):
                return recorded
        return None

    def _is_worth_recording(self, batch):
        """Return whether a mini-batch without a program is to be recorded; remember its size."""
        size = _size(batch)
        if not self.records_smaller or size == _size(self._largest.program.batch):
            return False
        if size not in self._smaller:
            self._smaller[size] = None
            return False
        recorded = [r for r in self._smaller.values() if r is not None]
        return self._smaller[size] is None and len(recorded) < MOST_SMALLER

    def _eager_gradient(self, images, targets):
        self._finish = super()._update
        return super()._gradient(images, targets)

    def _update(self, gradients, state):
        self._finish(gradients, state)

    def _agree(self):
        """Discard the programs unless they are current on all ranks. Collective."""
        programs = [r.program for r in (self._largest, *self._smaller.values()) if r is not None]
        if not self.world.gop("and", all(program.is_current() for program in programs)):
            self.close()

    def _record(self, images, targets):
        """Record a step, in the memory of the largest program if there is one."""
        arguments = self.net, self.optimizer, self.world, images, targets, self.program
        self._recording, self._finish = cpu_step.StepProgram(*arguments), self._record_update
        with phases.span("recording"):
            return self._recording.record_gradient(self.objective, images, targets)

    def _record_update(self, gradients, state):
        self._end_recording(self._recording.record_update(gradients, state))

    def _end_recording(self, problem):
        recorded, self._recording = _Recorded(self._recording), None
        if not self.world.gop("and", problem is None):
            self.close()
            self._is_off = True
        elif self._largest is None:
            self._largest = self._current = recorded
        else:
            self._smaller[_size(recorded.program.batch)] = recorded

    def _check(self, recorded, images, targets):
        """Compare the bytes of an eager and a replayed gradient; stop replaying if they differ."""
        self._agree()
        if self._largest is None:
            return
        program = recorded.program
        with program.memory(self.objective, images, targets):
            expected = cpu_step.digest(*super()._gradient(images, targets))
        value, gradients, _ = program.gradient(images, targets)
        is_equal = expected == cpu_step.digest(value, gradients, program.state)
        recorded.is_checked = self.world.gop("and", is_equal)
        if not recorded.is_checked:
            self.close()
            self._is_off = True
            if self.world.rank == 0:
                text = "warning: replayed and eager training steps differ; please report"
                print(f"{text} this. The training continues with eager steps.", file=sys.stderr)

    def _update_in_place(self, gradients, state):
        with arenas.through(self._current.program.arena):
            parameters = self.optimizer(self.net.parameters, gradients)
            for news, olds in ((parameters, self.net.parameters), (state, self.net.state)):
                for name, old in olds.items():
                    if news[name] is not old:
                        np.copyto(old, news[name])

    def _replay_update(self, gradients, state):
        self._current.program.update()


class ReplayedParts(ReplayedStep):
    """A training step on the host that replays the gradients of the parts of mini-batches.

    The program computes only the gradient of a part. The sum of the gradients and the update of the
    network are computed eagerly, as are smaller parts. The constructor takes the same arguments as
    `EagerStep`.
    """

    records_smaller = False

    def _gradient(self, images, targets):
        if not isinstance(images.batch, PartedBatch):
            return super()._gradient(images, targets)
        state = {name: np.array(array) for name, array in self.net.state.items()}
        results = accumulation.accumulated(self._part, self.objective, self.net, images, targets)
        self._set_state(state)  # keep the old state until the update
        return results

    def _part(self, net, images, targets):
        """Return the results for a part, in memory that later replays do not use."""
        self._set_state(net.state)
        value, gradients, state = super()._gradient(images, targets)
        copies = [
            {name: np.array(array) for name, array in table.items()} for table in (gradients, state)
        ]
        result = tuple(map(np.array, value)), *copies
        if self._recording is not None:
            self._end_recording(self._recording.finish())
        return result

    def _set_state(self, state):
        if self.program is None:
            self.net.state = dict(state)
        else:
            self.program.set_state(state)

    def _record_update(self, gradients, state):
        self._replay_update(gradients, state)

    def _replay_update(self, gradients, state):
        if self.program is None:
            EagerStep._update(self, gradients, state)
        else:
            self._update_in_place(gradients, state)


def _size(batch):
    """Return the number of images in a batch, and in the mini-batch that contains the batch."""
    return batch.count, batch.total or 0
