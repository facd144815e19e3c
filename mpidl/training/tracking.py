"""The trackers that the options of a run request, and the end of their records.

Trackers are a wing, which is imported only if an option requests one. All ranks call them, but only
rank 0 imports the tracker's library and writes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpidl.errors import UserError
from mpidl.report.status import FINISHED

if TYPE_CHECKING:
    from mpidl.evaluation.evaluate import Evaluation
    from mpidl.ranks.world import World
    from mpidl.trackers.base import Tracker
    from mpidl.training.options.training_options import TrainingOptions


def requested(
    options: TrainingOptions, run: Mapping[str, Any] | None = None, present: Iterable[object] = ()
) -> list[Tracker]:
    """Return the trackers that options request, except those of a class that `present` has.

    Parameters
    ----------
    options : TrainingOptions
        The options of the run.
    run : mapping, optional
        The inputs of a command, with the keys "mlflow" and "wandb".
    present : iterable
        The hooks of the run.
    """
    texts: dict[str, str | None] = {}
    for word in filter(None, map(str.strip, (options.track or "").split(","))):
        name, equals, text = word.partition("=")
        if name in texts:
            raise UserError(f"--track {options.track}: found {name} twice")
        texts[name] = text if equals else None
    if options.tensorboard == "on":
        texts["tensorboard"] = None
    inputs = run or {}
    texts |= {name: inputs[name] for name in ("mlflow", "wandb") if inputs.get(name) is not None}
    if not texts:
        return []
    from mpidl.trackers import load

    present_types = {type(hook) for hook in present}
    classes = {load(name): text for name, text in texts.items()}
    for name, tracker in zip(texts, classes, strict=True):
        if texts[name] is not None and not inspect.signature(tracker).parameters:
            raise UserError(f"--track {name}={texts[name]}: expected {name} without a value")
    return [
        tracker() if text is None else tracker(text)
        for tracker, text in classes.items()
        if tracker not in present_types
    ]


def concluded(
    trackers: Iterable[Tracker],
    world: World,
    folder: str | None,
    test: Evaluation | None = None,
    state: str = FINISHED,
) -> UserError | None:
    """Conclude the records of all trackers, and return the first error, if any. Collective.

    The other arguments are the same as for `Tracker.conclude`.
    """
    first_error = None
    for tracker in trackers:
        try:
            tracker.conclude(world, folder, test, state)
        except UserError as error:
            first_error = first_error or error
    return first_error


@contextlib.contextmanager
def abandoned_on_error(hooks: Iterable[Any]) -> Iterator[None]:
    """Mark the trackers' records of a run as failed if the block raises an exception."""
    try:
        yield
    except BaseException:
        for hook in hooks:
            if hasattr(hook, "abandon"):
                hook.abandon()
        raise
