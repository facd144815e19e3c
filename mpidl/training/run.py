"""The parts of a training run, and what hooks may ask of the run."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.data import MinibatchQueue, NodeCache
from mpidl.data.loading.bad_images import BadImages
from mpidl.errors import NotFinite, StorageFault, UserError
from mpidl.evaluation.validation import Validation
from mpidl.report.metrics import Cut
from mpidl.training import hooks as hook_classes
from mpidl.training import (
    input_pipeline,
    lost_ranks,
    memory_budget,
    skipped_images,
)
from mpidl.training.files import run_state
from mpidl.training.files.run_folder import RunWriter
from mpidl.training.final_network import validated_network
from mpidl.training.progress import OUTPUT_FUNCTION, Position, Result
from mpidl.training.rank_comparison import compare_ranks
from mpidl.training.schedules import rate_of
from mpidl.training.step_selection import make_step
from mpidl.training.weight_average import WeightAverage

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network
    from mpidl.ranks.failure import Signals
    from mpidl.report.history import History
    from mpidl.training.gpu_step import GPUStep
    from mpidl.training.optimizers import Optimizer
    from mpidl.training.optimizers.checks import CustomOptimizer
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.session import Session
    from mpidl.training.steps import EagerStep, StepResult


class Run:
    """A training run: its parts, its position, and what hooks may ask of it.

    The subclass `Trainer` runs the loop. Hooks receive it as their first argument.

    Parameters
    ----------
    session : Session
        The ranks, the folder and the checkpoint, the console and the requests to stop.
    spec : list or None
        Description of the transforms of an optimizer that the caller of `train` passed. A resumed
        run must have the same description. None if the options describe the optimizer.
    hooks : iterable of object
        The user's hooks.

    Attributes
    ----------
    net, options, world, console, optimizer
        The arguments of `train`, with defaults filled in.
    datastore : NodeCache
        The training set, with a cache of decoded images.
    queue : MinibatchQueue
        The queue that delivers the mini-batches.
    step : EagerStep or GPUStep
        The object that runs the training steps.
    average : WeightAverage
        The average of the weights over iterations, if the options request one.
    position : Position
        The progress of the run, such as the current epoch and iteration.
    validation : Validation
        The validation results and the best network so far.
    writer : RunWriter
        The object that writes the files of the run.
    signals : Signals
        The requests to stop the run.
    bad_images : BadImages or None
        Training images that could not be read and were skipped. None if such an image ends the run.
    rollback : Rollback or None
        The state to which the run returns if the loss is not finite. None if such a loss ends the
        run.
    initial_state : dict
        {name: array} of the network's state before the first iteration. After a resume, only the
        statistics that still contain a relevant part of their initial values.
    iteration_start : IterationStart
        The state to which the run returns if ranks are lost.
    stopped : str or None
        The reason for an early end, as in `Result`. None during training.
    """

    def __init__(
        self,
        net: Network,
        datastore: Datastore,
        options: TrainingOptions,
        session: Session,
        optimizer: Optimizer | CustomOptimizer,
        spec: list[Any] | None,
        hooks: Iterable[object],
    ) -> None:
        self.net, self.options, self.optimizer, self.optimizer_spec = net, options, optimizer, spec
        self.session, self.world, self.console = session, session.world, session.console
        self.signals = session.signals
        world = self.world
        self.average = WeightAverage(options, optimizer)
        self.stopped: str | None = None
        self.facts: dict[str, Any] = {}
        self._seconds_apart = 0.0  # time for validations and checkpoints, excluded from the speed
        self._results: collections.deque[StepResult] = collections.deque()
        load = options.load(world.size)
        cache_bytes = memory_budget.for_images(options, datastore, world)
        self.datastore = NodeCache(datastore, world, cache_bytes)
        self.loss = options.loss_for(net, datastore, world)
        self.position, self.validation = Position(), Validation(options, world, self.loss)
        self.bad_images = BadImages.of_options(options)
        self.rollback = hook_classes.rollback_of(options)
        net.batchnorm = options.batchnorm
        self.initial_state = {name: np.array(a) for name, a in net.state.items()}
        is_resumed = session.checkpoint is not None
        if is_resumed:
            run_state.restore(self, *session.checkpoint)
            if self.rollback is not None:
                self.rollback.load(*session.checkpoint)
        queue_options = self._prepare_input(session.checkpoint[0] if is_resumed else None, load)
        balancer = hook_classes.balancer_of(options, world)
        self.queue: MinibatchQueue
        self.step: EagerStep | GPUStep
        self._make_step = functools.partial(make_step, self, queue_options, balancer)
        self.queue, self.step = self._make_step()
        self._per_epoch = len(self.queue)  # `finalize_network` replaces the queue
        self.start_time = time.monotonic() - self.position.seconds
        if is_resumed and self.position.iteration:
            optimizer.learning_rate = self.learning_rate(self.position.iteration)
        self.writer = RunWriter(session, self._cut() if is_resumed else None)
        self.writer.recorder.reserve(self.total_iterations)
        self.hooks = hook_classes.of_run(hooks, options, balancer, self.rollback)
        self.iteration_start = lost_ranks.IterationStart(world)
        self._has_started = False

    def _prepare_input(self, arrays, load):
        """Measure the training images, and return options of the queue. Collective.

        A resumed run takes the statistics from the checkpoint's arrays.
        """
        options = self.options
        with self.console.stage("statistics of the training images"):
            queue_options = input_pipeline.prepare(
                self.net, self.datastore, options, self.world, arrays, self.bad_images
            )
        queue_options |= {"load": load, "sampling": options.sampling}
        queue_options["partial_minibatch"] = options.partial_minibatch
        return queue_options

    @property
    def history(self) -> History:
        """A snapshot of the records of the run so far."""
        return self.writer.recorder.history()

    @property
    def max_iterations(self) -> float:
        """Largest number of iterations that the options allow; infinite if there is no limit."""
        return self.options.max_iterations or math.inf

    @property
    def total_iterations(self) -> float:
        """Number of iterations of the whole run, unless it ends early."""
        return min(self.options.epochs * len(self.queue), self.max_iterations)

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last mini-batch of the epoch has been submitted."""
        return self.position.batch == len(self.queue)

    @property
    def leaves_epoch(self) -> bool:
        """Whether the run will submit no more mini-batches in this epoch."""
        is_last = self.position.iteration >= self.max_iterations or self.at_epoch_end
        return is_last or not self._continues()

    @property
    def is_over(self) -> bool:
        """Whether the run will submit no more mini-batches at all."""
        position = self.position
        is_complete = position.epoch > self.options.epochs
        is_complete = is_complete or position.iteration >= self.max_iterations
        return is_complete or not self._continues()

    @property
    def returned_iteration(self) -> int:
        """Iteration whose weights the run returns if it ends now."""
        return self.validation.iteration if self.validation.best else self.position.iteration

    def learning_rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration.

        Parameters
        ----------
        iteration : int
            Iteration of the run, from 1.

        Returns
        -------
        float
            The learning rate of the schedule, lowered if the run has rolled back.
        """
        rate = rate_of(self.options, self._epoch_of(iteration), iteration, self._per_epoch)
        return rate * self.position.rate_factor

    def _epoch_of(self, iteration):
        return (max(iteration, 1) - 1) // self._per_epoch + 1

    def result(self) -> Result:
        """Return the result of the run, which has ended.

        Returns
        -------
        Result
            The losses, the times, and the reason for an early end.
        """
        position, validation = self.position, self.validation
        loss, accuracy = validation.of_the_result()
        skipped = [bad_images for _, bad_images in skipped_images.sets_of(self).values()]
        return Result(
            stopped=self.stopped,
            epochs=position.epoch - 1,
            iterations=position.iteration,
            loss=position.mean_loss,
            images_per_second=position.all_images / max(position.seconds, 1e-9),
            train_seconds=position.seconds,
            best_iteration=validation.iteration or None,
            validation_loss=loss,
            validation_accuracy=accuracy,
            rollbacks=position.rollbacks,
            lost_ranks=self.iteration_start.losses,
            skipped_images=sum(map(len, skipped)),
            history=self.history,
        )

    def stop(self) -> None:
        """End the run after the current mini-batch, on all ranks, with a checkpoint."""
        self.signals.name = self.signals.name or OUTPUT_FUNCTION

    def after_checkpoint(self, error: StorageFault | UserError) -> StorageFault | UserError:
        """Save the run before an error ends it, and return the error to raise. Collective.

        No checkpoint is written if the run has no folder or has completed no iteration.

        Parameters
        ----------
        error : StorageFault or UserError
            The error that will end the run.

        Returns
        -------
        StorageFault or UserError
            The error to raise. If a checkpoint was written, the message says how to continue.
        """
        if self.writer.out is None or self.position.iteration == 0:
            return error
        self.save()
        return type(error)(
            f"{error}; checkpoint written; to continue, run again with --resume {self.writer.out}"
        )

    def report(self, results: Iterable[StepResult]) -> None:
        """Add step results to the position, then pass the results to the `iteration` hooks.

        If the iterator `results` raises a Fault because a loss is not finite, the hooks still
        receive all earlier results. A hook that calls `wait` or `save` causes a nested call to this
        method. A nested call only adds its results to the position; the outermost call passes all
        results to the hooks.

        Parameters
        ----------
        results : iterable of StepResult
            The results that a step has returned.
        """
        is_outermost = not self._results
        try:
            for result in results:
                self.position.add(result)
                self._results.append(result)
            self.position.seconds = time.monotonic() - self.start_time
        finally:
            while is_outermost and self._results:
                self.hooks.iteration(self, self._results[0])
                self._results.popleft()

    def wait(self) -> None:
        """Wait for the submitted training steps, and report their results.

        On a GPU, the network is up to date only after this call.
        """
        self.report(self.step.drain())

    def _continues(self):
        return not self.signals.agreed and not self.validation.exhausted

    def validate(self, announce: bool = True, interruptible: bool = True) -> None:
        """Evaluate the network on the validation set. Collective.

        Parameters
        ----------
        announce : bool
            Whether to print a line about the validation. At the end of an epoch this is not needed,
            because the line about the epoch includes the validation.
        interruptible : bool
            Whether a signal may interrupt the validation. A stop requested by a hook never
            interrupts it.

        Raises
        ------
        UserError
            If the run has no validation images.
        """
        signals = self.signals if interruptible else None
        if self.validation.store is None:
            raise UserError("trainer.validate: the run has no validation images")
        self.wait()
        if self.validation.last_iteration == self.position.iteration and not self.validation.owed:
            return
        position, stop_requested = self.position, self.signals.name == OUTPUT_FUNCTION
        if stop_requested and signals is not None:
            signals.name = None
        with self._apart():
            net = validated_network(self, signals)
        evaluation, self.validation.owed = None, net is None
        if net is not None:
            with self._apart("validation", len(self.validation.store)) as progress:
                evaluation = self.validation.run(net, position.iteration, signals, progress)
        if stop_requested:
            self.stop()
        if evaluation is None:
            return
        self._record_validation("validation", position.iteration, evaluation)
        if announce:
            self.console.validation(position.iteration, evaluation)

    def validate_final(self, signals: Signals | None) -> None:
        """Evaluate the finalized network on the validation set. Collective.

        Parameters
        ----------
        signals : Signals or None
            Signals that interrupt the validation.
        """
        validation = self.validation
        with self._apart("final validation", len(validation.store)) as progress:
            evaluation = validation.run_final(self.net, signals, progress)
        if evaluation is None:
            return
        self._record_validation("final_validation", self.returned_iteration, evaluation)
        self.console.final_validation(evaluation, self.history.disagreement())

    def _record_validation(self, kind, iteration, evaluation):
        rate, seconds = self.optimizer.learning_rate, self.position.seconds
        numbers = evaluation.loss, rate, None, seconds, evaluation.accuracy
        values = None if evaluation.metrics is None else evaluation.metrics.values
        epoch = self._epoch_of(iteration)
        self.writer.record(kind, epoch, iteration, *numbers, metrics=values)

    @contextlib.contextmanager
    def _apart(self, *stage):
        """Enter a console stage if one is given; exclude the time from the speed of the epoch."""
        start_time = time.monotonic()
        with self.console.stage(*stage) if stage else contextlib.nullcontext() as progress:
            yield progress
        self._seconds_apart += time.monotonic() - start_time

    def check_finite(self, tables: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Raise NotFinite if an array of the run's state is not finite. Collective.

        Parameters
        ----------
        tables : dict of dict of ndarray
            The state's tables of arrays.
        """
        problem = None
        try:
            rate = self.optimizer.learning_rate
            self.writer.check_finite(tables, self.position.iteration, rate)
        except NotFinite as error:
            problem = error
        if self.world.gop("or", problem is not None):
            self.compare_ranks()  # raise a Fault if only some of the ranks have this problem
        if problem is not None:
            raise problem

    def compare_ranks(self) -> None:
        """Raise Fault if the weights differ between ranks. Collective."""
        self.wait()
        with self.console.stage("comparison of the ranks"):
            compare_ranks(self.world, run_state.progress(self)[0], self.position.iteration)

    @contextlib.contextmanager
    def renewed_step(self) -> Iterator[None]:
        """Let the `with` block replace the arrays of the network and the optimizer.

        Yields
        ------
        None
            Within the block, no training step uses the arrays.
        """
        self.step.close()
        self._results.clear()
        yield
        if self.world.device is not None:  # a recorded step has its own memory
            self.queue, self.step = self._make_step()

    def _cut(self):
        return Cut(self.position.iteration, self.validation.last_iteration)

    def rewind_records(self) -> None:
        """Remove the records that the run will repeat after it returned to an earlier state."""
        self.writer.rewind(self._cut())

    def restart(self) -> None:
        """Prepare the run to continue on the ranks that remain after a loss. Collective."""
        self._results.clear()
        self.signals.agreed = False
        if self.world.device is None:
            self.step.close()  # a recorded step still includes the lost ranks
        # Create a new queue, because measured shares include the shares of lost ranks.
        self.queue, _ = self._make_step()
        self.session.lock.take_over()
        self.rewind_records()
        if self.world.rank == 0:
            self.console.take_over()
        self._has_started = self.world.gop("and", self._has_started)
        if self._has_started:
            self.hooks.lost(self)

    def save(self, wait: bool = True) -> None:
        """Write a checkpoint if the run has a folder. Collective.

        Parameters
        ----------
        wait : bool
            Whether to return only after the file is written. If false, a large checkpoint is
            written while training continues. If writing fails, all ranks raise the error before a
            later mini-batch.
        """
        if self.writer.out is None:
            return
        self.wait()
        interval = self.options.checkpoint_keep
        is_kept = interval > 0 and self.position.iteration % interval == 0
        with self._apart("checkpoint"):
            tables, facts = run_state.collect(self)
            rate = self.optimizer.learning_rate
            self.writer.save(tables, self.position, facts, rate, keep=is_kept)
            if wait:
                self.writer.wait()
