"""The records of a run that its options request, and their end: trackers, and the certificate.

Trackers and certificates are wings, which are imported only if an option requests them. All ranks
call their hooks, but only rank 0 writes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mpidl.errors import UserError
from mpidl.report.status import FINISHED

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.evaluation.evaluate import Evaluation
    from mpidl.ranks.world import World
    from mpidl.training.options.training_options import TrainingOptions


class Recorder(Protocol):
    """A hook that records a run: a `Tracker`, or the recorder of a certificate.

    `Tracker` documents the attributes and the methods.
    """

    ends_with_training: bool

    def conclude(
        self,
        world: World,
        folder: str | None,
        test: Evaluation | None = None,
        state: str = FINISHED,
    ) -> None:
        """End the record of a run after its test."""


def requested(
    options: TrainingOptions,
    run: Mapping[str, Any] | None = None,
    present: Iterable[object] = (),
    test_images: Datastore | None = None,
) -> list[Recorder]:
    """Return the recorders that options request, except trackers of a class that `present` has.

    Parameters
    ----------
    options : TrainingOptions
        The options of the run.
    run : mapping, optional
        The inputs of a command, with the keys "mlflow" and "wandb".
    present : iterable
        The hooks of the run.
    test_images : Datastore, optional
        The images that the caller will test the network on.
    """
    recorders: list[Recorder] = [*_requested_trackers(options, run or {}, present)]
    if options.certify != "none":
        from mpidl.certificates import recording

        recorders.append(recording.Recorder(test_images))
    return recorders


def classes() -> list[type[Any]]:
    """Return the classes of all recorders. Wings may be missing."""
    recorders: list[type[Any]] = []
    with contextlib.suppress(ModuleNotFoundError):
        from mpidl.trackers import load, names

        recorders += map(load, names())
    with contextlib.suppress(ModuleNotFoundError):
        from mpidl.certificates import recording

        recorders.append(recording.Recorder)
    return recorders


def _requested_trackers(options, inputs, present):
    texts: dict[str, str | None] = {}
    for word in filter(None, map(str.strip, (options.track or "").split(","))):
        name, equals, text = word.partition("=")
        if name in texts:
            raise UserError(f"--track {options.track}: found {name} twice")
        texts[name] = text if equals else None
    if options.tensorboard == "on":
        texts["tensorboard"] = None
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
    recorders: Iterable[Recorder],
    world: World,
    folder: str | None,
    test: Evaluation | None = None,
    state: str = FINISHED,
) -> UserError | None:
    """Conclude the records of all recorders, and return the first error, if any. Collective.

    The other arguments are the same as for `Tracker.conclude`.
    """
    first_error = None
    for recorder in recorders:
        try:
            recorder.conclude(world, folder, test, state)
        except UserError as error:
            first_error = first_error or error
    return first_error


@contextlib.contextmanager
def abandoned_on_error(hooks: Iterable[Any]) -> Iterator[None]:
    """Mark the recorders' records of a run as failed if the block raises an exception."""
    try:
        yield
    except BaseException:
        for hook in hooks:
            if hasattr(hook, "abandon"):
                hook.abandon()
        raise
