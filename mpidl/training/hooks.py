"""Hooks, which the trainer calls between training steps, for example to validate the network.

A hook is an object with one or more of the methods below. The trainer calls these methods on every
rank, so a hook may use collective operations. The hooks are called in list order, except for
`end`, which is called in reverse order.

    start(trainer)              before the first iteration
    iteration(trainer, result)  for the `StepResult` of each iteration, in order; on a GPU, up
                                to four iterations after the mini-batch was submitted
    step(trainer)               after each submitted mini-batch; on a GPU, a hook that reads the
                                network must call `trainer.wait()` first
    epoch(trainer, summary)     after the last mini-batch of an epoch, with an `EpochSummary`
    finish(trainer)             after the last mini-batch of the run, before the network is
                                finalized (choice of the best network, population statistics)
    end(trainer)                after the network is finalized; the run's files are then complete
    lost(trainer)               after ranks were lost, before the remaining ranks repeat the
                                iteration

`trainer.stop()` ends the run after the current mini-batch, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import phases
from mpidl.errors import UserError
from mpidl.report.progress import notebook_records
from mpidl.training.progress import EpochSummary, Progress
from mpidl.training.rank_times import RankTimesHook
from mpidl.training.status_hooks import StopFileHook

if TYPE_CHECKING:
    from mpidl.ranks.world import World
    from mpidl.training.load_balancing import LoadBalancer
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.rollback import Rollback
    from mpidl.training.steps import StepResult
    from mpidl.training.trainer import Trainer

EVENTS = ("start", "iteration", "step", "epoch", "finish", "end", "lost")


def check_hooks(hooks: Any) -> list[Any]:
    """Return the hooks as a list; raise UserError if an element is not a hook."""
    if isinstance(hooks, str) or not isinstance(hooks, Iterable):
        raise UserError(f"hooks: expected a list of hooks, found {type(hooks).__name__}")
    hooks = list(hooks)
    for hook in hooks:
        if isinstance(hook, type):
            raise UserError(f"hooks: expected an object, found the class {hook.__name__} itself")
        if not any(callable(getattr(hook, event, None)) for event in EVENTS):
            raise UserError(
                f"hooks: {type(hook).__name__} has none of the methods of a hook: "
                f"{', '.join(EVENTS)}"
            )
    return hooks


class Hooks:
    """All hooks of a run. Each method, such as `step`, calls the hooks that have this method.

    `all` is the list of the hooks.
    """

    start: Callable[..., None]
    iteration: Callable[..., None]
    step: Callable[..., None]
    epoch: Callable[..., None]
    finish: Callable[..., None]
    end: Callable[..., None]
    lost: Callable[..., None]

    def __init__(self, hooks: Iterable[Any]) -> None:
        self.all = hooks = list(hooks)
        for event in EVENTS:
            # Hooks that write files are last in the list; `end` calls them first, before hooks
            # that announce the result.
            order = reversed(hooks) if event == "end" else hooks
            methods = [
                (type(hook).__name__, getattr(hook, event))
                for hook in order
                if hasattr(hook, event)
            ]
            setattr(self, event, _call_each(methods))


def _call_each(methods):
    def call(*arguments):
        for name, method in methods:
            if phases.spans() is None:
                method(*arguments)
            else:
                with phases.span(name):
                    method(*arguments)

    return call


class MetricsHook:
    """Writes a record of each iteration and each epoch to metrics.jsonl."""

    def iteration(self, trainer: Trainer, result: StepResult) -> None:
        info, seconds = result.info, trainer.position.seconds
        numbers = result.loss, info.learning_rate, result.images_per_second, seconds
        numbers += (result.accuracy,)
        trainer.writer.record("iteration", info.epoch, info.iteration, *numbers)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        numbers = summary.loss, summary.learning_rate, summary.images_per_second
        numbers += trainer.position.seconds, summary.accuracy
        trainer.writer.record("epoch", summary.epoch, summary.iteration, *numbers)


class ValidationHook:
    """Validates at the interval of `validation_frequency`, or at the end of each epoch."""

    def step(self, trainer: Trainer) -> None:
        if trainer.validation.due(trainer.position.iteration):
            trainer.validate(announce=not trainer.at_epoch_end)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        if trainer.validation.due_at_end():
            trainer.validate(announce=False)


class ConsoleHook:
    """Prints progress on rank 0."""

    def start(self, trainer: Trainer) -> None:
        numbers = trainer.options.epochs, trainer.total_iterations, trainer.position.iteration
        validation, metrics = trainer.validation, ()
        if validation.store is not None:
            from mpidl.evaluation import class_metrics

            loss = validation.loss_function
            metrics = class_metrics.requested(validation.metrics, loss, trainer.net)
        has_validation = validation.store is not None
        trainer.console.start(*numbers, trainer.position.epoch, has_validation, metrics)

    def lost(self, trainer: Trainer) -> None:
        if not trainer.console.is_started:  # if this rank has become rank 0
            self.start(trainer)

    def iteration(self, trainer: Trainer, result: StepResult) -> None:
        info, numbers = result.info, (result.loss, result.images_per_second, result.accuracy)
        trainer.console.iteration(info.epoch, info.iteration, *numbers)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        validation, seconds = trainer.validation, trainer.position.seconds
        evaluation = validation.last if validation.last_iteration == summary.iteration else None
        numbers = summary.loss, summary.images_per_second, seconds, summary.accuracy
        trainer.console.epoch(summary.epoch, summary.iteration, *numbers, evaluation)

    def finish(self, trainer: Trainer) -> None:
        if trainer.position.batch:
            trainer.console.last_iteration()


class OutputFunctionsHook:
    """Calls the output functions; the run ends if one of them returns True on any rank."""

    def start(self, trainer: Trainer) -> None:
        rate = trainer.learning_rate(max(trainer.position.iteration, 1))
        self._call(trainer, "start", trainer.position.epoch, trainer.position.iteration, rate)

    def iteration(self, trainer: Trainer, result: StepResult) -> None:
        info, numbers = result.info, (result.loss, result.accuracy)
        self._call(trainer, "iteration", info.epoch, info.iteration, info.learning_rate, *numbers)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        numbers = summary.learning_rate, summary.loss, summary.accuracy
        self._call(trainer, "epoch", summary.epoch, summary.iteration, *numbers)

    def end(self, trainer: Trainer) -> None:
        position, rate = trainer.position, trainer.optimizer.learning_rate
        numbers = position.iteration, rate, position.mean_loss
        self._call(trainer, "done", position.epoch, *numbers)

    def _call(self, trainer, state, epoch, iteration, learning_rate, loss=None, accuracy=None):
        if not trainer.options.output_functions:
            return
        last = trainer.validation.last
        progress = Progress(
            state,
            epoch,
            iteration,
            loss,
            accuracy,
            learning_rate,
            trainer.position.seconds,
            last.loss if last else None,
            last.accuracy if last else None,
        )
        for function in trainer.options.output_functions:
            answer = function(progress)
            if isinstance(answer, bool | np.bool_) and answer:
                trainer.stop()


class CheckpointHook:
    """Writes checkpoints at the intervals of the options, after each epoch and after a stop."""

    def start(self, trainer: Trainer) -> None:
        if trainer.options.checkpoint_keep and not trainer.position.iteration:
            trainer.save(wait=False)

    def step(self, trainer: Trainer) -> None:
        options, iteration = trainer.options, trainer.position.iteration
        intervals = filter(None, (options.checkpoint_every, options.checkpoint_keep))
        if any(iteration % n == 0 for n in intervals) and not trainer.leaves_epoch:
            trainer.save(wait=False)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        trainer.save(wait=False)

    def finish(self, trainer: Trainer) -> None:
        if trainer.signals.agreed or trainer.position.batch:
            trainer.save(wait=False)

    def end(self, trainer: Trainer) -> None:
        with trainer.console.stage("checkpoint"):
            trainer.writer.wait()


class PlotHook:
    """Draws progress.png after epochs and at the end of the run."""

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        with trainer.console.stage("plot"):
            trainer.writer.plot()

    def end(self, trainer: Trainer) -> None:
        with trainer.console.stage("plot"):
            trainer.writer.plot(end=True)


def rollback_of(options: TrainingOptions) -> Rollback | None:
    """Return the hook that keeps states to return to, or None if NaN ends the run."""
    if options.on_nan != "rollback":
        return None
    from mpidl.training.rollback import Rollback

    return Rollback()


def balancer_of(options: TrainingOptions, world: World) -> LoadBalancer | None:
    """Return the hook that measures the ranks' speed, or None if shares do not depend on it."""
    if options.worker_load != "measured":
        return None
    from mpidl.training.load_balancing import LoadBalancer

    return LoadBalancer(world)


def of_run(
    user_hooks: Iterable[Any],
    options: TrainingOptions,
    balancer: LoadBalancer | None,
    rollback: Rollback | None,
) -> Hooks:
    """Return the built-in and custom hooks of a run, in the order in which they are called."""
    hooks: list[Any] = [MetricsHook(), ValidationHook(), ConsoleHook()]
    if (recorder := notebook_records.recorder()) is not None:
        from mpidl.training.notebook_hook import NotebookHook

        hooks.append(NotebookHook(recorder))
    user_hooks = list(user_hooks)
    at_checkpoints = [hook for hook in user_hooks if getattr(hook, "sees_state", False)]
    hooks += [OutputFunctionsHook(), *(h for h in user_hooks if h not in at_checkpoints)]
    hooks += [balancer] if balancer is not None else []
    if options.on_bad_image == "skip":
        from mpidl.training.skipped_images import SkippedImagesHook

        hooks.append(SkippedImagesHook())
    if options.compare_ranks_every:
        from mpidl.training.rank_comparison import RankComparisonHook

        hooks.append(RankComparisonHook())
    hooks += [rollback] if rollback is not None else []
    hooks += [RankTimesHook(), *at_checkpoints, CheckpointHook(), StopFileHook()]
    if options.plots != "none":
        hooks.append(PlotHook())
    if options.timeline:
        from mpidl.training.timeline import TimelineHook

        hooks.append(TimelineHook(options))
    return Hooks(hooks)
