"""Hooks that record a run for TensorBoard, MLflow, and Weights & Biases.

The hooks pass to a tracker the options, a gallery of augmented images, and each record of
metrics.jsonl. They also pass histograms of the learnables and their gradients after each epoch, and
the confusion matrix at the end. All ranks call the hooks, but only rank 0 imports the tracker's
library and writes. If rank 0 fails to write, the run writes a checkpoint at the end of the epoch
and ends on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpidl.errors import UserError
from mpidl.report.trackers import tracking

if TYPE_CHECKING:
    from mpidl.evaluation.evaluate import Evaluation
    from mpidl.ranks.world import World
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.tracking_hooks.base import TrackingHook


def of_run(options: TrainingOptions, run: Mapping[str, Any]) -> list[TrackingHook]:
    """Return the hooks that the options of a command request.

    The caller must call the method `conclude` of each hook.

    Parameters
    ----------
    options : TrainingOptions
        The options of the run.
    run : mapping
        The inputs of the run, including the keys "mlflow" and "wandb".
    """
    hooks: list[TrackingHook] = []
    if options.tensorboard == "on":
        from mpidl.training.tracking_hooks.tensorboard import TensorBoardHook

        hooks.append(TensorBoardHook())
    if run["mlflow"] is not None:
        from mpidl.training.tracking_hooks.mlflow import MLflowHook

        hooks.append(MLflowHook(run["mlflow"]))
    if run["wandb"] is not None:
        from mpidl.training.tracking_hooks.wandb import WandbHook

        hooks.append(WandbHook(run["wandb"]))
    for hook in hooks:
        hook.ends_with_training = False
    return hooks


def concluded(
    hooks: Iterable[TrackingHook],
    world: World,
    folder: str | None,
    test: Evaluation | None = None,
    state: str = tracking.FINISHED,
) -> UserError | None:
    """Conclude the records of all hooks, and return the first error, if any. Collective.

    The other arguments are the same as for `TrackingHook.conclude`.
    """
    first_error = None
    for hook in hooks:
        try:
            hook.conclude(world, folder, test, state)
        except UserError as error:
            first_error = first_error or error
    return first_error


def with_tensorboard(hooks: Iterable[Any], options: TrainingOptions, out: object) -> list[Any]:
    """Return the hooks, and add a `TensorBoardHook` if the option `tensorboard` is on.

    Raises
    ------
    UserError
        If a hook must be added and the run has no folder.
    """
    hooks = list(hooks)
    if options.tensorboard != "on":
        return hooks
    from mpidl.training.tracking_hooks.tensorboard import TensorBoardHook

    if any(isinstance(hook, TensorBoardHook) for hook in hooks):
        return hooks
    if out is None:
        raise UserError("tensorboard: expected a folder for the run, dl.train(..., out=FOLDER)")
    return [*hooks, TensorBoardHook()]


@contextlib.contextmanager
def abandoned_on_error(hooks: Iterable[Any]) -> Iterator[None]:
    """Mark the trackers' records of a run as failed if the block raises an exception."""
    try:
        yield
    except BaseException:
        from mpidl.training.tracking_hooks.base import TrackingHook

        for hook in hooks:
            if isinstance(hook, TrackingHook):
                hook.abandon()
        raise
