"""The training loop behind `dl.train` and the command `train`.

    start                                    hooks.start
    each epoch
        each mini-batch                      all ranks agree to continue (`data.agreement`)
            submit the step                  forward, backward, sums over the ranks, update
            results of finished steps        hooks.iteration
                                             hooks.step: validation, checkpoint, ...
        end of the epoch                     hooks.epoch
    no more mini-batches                     hooks.finish
    choose and finish the network            `final_network`
    end                                      hooks.end

A step whose loss is not finite returns to an earlier state if the options say so (`rollback`). If
ranks are lost, the remaining ranks repeat the iteration (`lost_ranks`). Everything else that
happens between steps is a hook (`hooks`).
"""

from __future__ import annotations

import contextlib
import time

import numpy as np

from mpidl import phases
from mpidl.data.agreement import agreed
from mpidl.data.parts import PartedBatch
from mpidl.errors import NotFinite, StorageFault, UserError
from mpidl.ranks import survival
from mpidl.training.files import run_state
from mpidl.training.final_network import finish_network
from mpidl.training.progress import OUTPUT_FUNCTION, Result
from mpidl.training.run import Run
from mpidl.training.steps import StepInfo


class Trainer(Run):
    """The loop of a training run. Hooks receive this object; `Run` documents its attributes."""

    def run(self) -> Result:
        """Train until the run is complete or stopped, and return the result. Collective.

        Returns
        -------
        Result
            The loss, the times, and the reason for an early end.
        """
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                self.iteration_start.keep(self)
                return survival.attempt(
                    self.world, self._run, lambda: self.iteration_start.restore(self)
                )
        finally:
            phases.take_spans()  # discard the spans of a failed run
            self.step.close()
            with contextlib.suppress(UserError):  # show the error of the run instead
                self.writer.close()

    def _run(self):
        if not self._has_started:
            self.hooks.start(self)
            self._has_started = True
        while (problem := self._train_to_the_end()) is not None and self.rollback is not None:
            self.rollback.restore(self, problem)
        self.stopped = finish_network(self)
        self.hooks.end(self)
        self.writer.close()
        self.datastore.close()
        if self.signals.name == OUTPUT_FUNCTION:  # the caller may reuse `signals`
            self.signals.name, self.signals.agreed = None, False
        return self.result()

    def _train_to_the_end(self):
        """Run the remaining epochs. Return None, or the `NotFinite` that requires a rollback."""
        try:
            if self.validation.owed:
                self.validate(announce=not self.at_epoch_end)
            while not self.is_over:
                self._run_epoch()
            self.wait()
            self.check_finite(run_state.progress(self)[0])  # no loss follows the last update
            self.hooks.finish(self)
        except NotFinite as error:
            if self.rollback is None:
                raise
            return error.with_traceback(None)  # the traceback would keep the mini-batch in memory
        return None

    def _run_epoch(self):
        position = self.position
        batches = self.queue.epoch(position.epoch, start=position.batch)
        start_time, images_before = time.monotonic() - self._seconds_apart, position.images
        self.iteration_start.reach()
        with contextlib.closing(batches):
            for images, targets in self._agreed(batches):
                self.iteration_start.keep(self)
                with phases.span("learning rate"):
                    info = self._next_step(images.batch)
                self.report(self.step.submit(images, targets, info))
                del images, targets  # free memory for the next mini-batch
                self.hooks.step(self)
                if self.leaves_epoch:
                    break
                self.iteration_start.reach()
        self.iteration_start.keep(self)  # needed if the ranks have agreed to stop
        self.wait()
        if self.at_epoch_end:
            seconds = time.monotonic() - self._seconds_apart - start_time
            speed = (position.images - images_before) / seconds
            summary = position.end_epoch(self.optimizer.learning_rate, speed)
            self.hooks.epoch(self, summary)

    def _agreed(self, batches):
        """Yield the mini-batches; if one cannot be read, write a checkpoint before raising."""
        try:
            yield from agreed(batches, self.world, self.signals, self.writer.check)
        except (StorageFault, UserError) as error:
            raise self.after_checkpoint(error) from None

    def _next_step(self, batch):
        position, start_time = self.position, time.monotonic()
        position.batch, position.iteration = position.batch + 1, position.iteration + 1
        position.statistics_updates += len(batch.parts) if isinstance(batch, PartedBatch) else 1
        self.optimizer.learning_rate = rate = self.learning_rate(position.iteration)
        self.average.prepare_step(position.iteration, len(self.queue))
        self.world.transport.activity = f"epoch {position.epoch}, iteration {position.iteration}"
        return StepInfo(position.epoch, position.iteration, batch.count, rate, start_time)
