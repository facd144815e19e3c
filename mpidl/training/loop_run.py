"""Define `dl.report_to`, which records a custom training loop in a folder like a run."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

from mpidl.errors import UserError
from mpidl.ranks import failure
from mpidl.ranks.failure import Signals
from mpidl.ranks.world import World
from mpidl.report import stop_file
from mpidl.report.loop_records import LoopRecords
from mpidl.training import live_page, status_hooks
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.files.run_folder import RECORD, RunWriter
from mpidl.training.session import Session


@contextlib.contextmanager
def report_to(
    out: str | os.PathLike[str],
    *,
    world: World,
    epochs: int = 0,
    iterations: int = 0,
    monitor: int | None = None,
    overwrite: bool = False,
) -> Iterator[None]:
    """Record what a custom training loop reports within the block. Collective.

    Within the block, the values of `world.report` are written to a folder, and
    `world.stop_requested()` also returns True if the Stop button of the live page or the file
    `stop` in the folder requests a stop. The folder can be read by `mpidl.monitor`, `mpidl.report`
    and `dl.history`, like the folder of `dl.train`. At the end of the block, progress.png is drawn.

    Parameters
    ----------
    out : path
        The folder.
    world : World
        The ranks of the loop, which call `report` and `stop_requested` of this object.
    epochs, iterations : int, optional
        Number of epochs and of iterations of the whole loop, to show the remaining time.
    monitor : int, optional
        Port on which rank 0 serves the live page of the loop; 0 selects a free port. By default,
        there is no page, but `mpidl.monitor` can show the folder.
    overwrite : bool, optional
        Whether to replace a run with checkpoints that the folder may contain. The records of
        another custom loop are always replaced.

    Yields
    ------
    None

    Raises
    ------
    UserError
        On all ranks, if the folder is in use, cannot be written to or contains a run with
        checkpoints, or if the page cannot be served.

    Examples
    --------
    >>> with dl.report_to("runs/mine", world=world, epochs=20):
    ...     for epoch in range(1, 21):
    ...         loss = train_an_epoch(epoch)
    ...         world.report(epoch=epoch, loss=loss)
    ...         if world.stop_requested():
    ...             break
    """
    for name, value in (("epochs", epochs), ("iterations", iterations), ("monitor", monitor or 0)):
        if not isinstance(value, int) or value < 0:
            raise UserError(f"report_to: {name} must be a whole number, found {value!r}")
    with FolderLock(world) as lock, _signals_of(world) as signals, contextlib.ExitStack() as opened:
        page = live_page.open_page(world, monitor, "monitor")
        if page is not None:
            opened.enter_context(contextlib.closing(page.listener))
        session = Session(world, lock, out, overwrite=overwrite)
        if signals.look is not None:
            raise UserError("report_to: expected one block at a time, found a block in another one")
        writer = RunWriter(session)
        status_hook = status_hooks.StatusHook(out, world, lock)
        status_hook.status.epochs, status_hook.status.iterations = epochs, iterations
        status_hook.status.iterations_per_epoch = iterations // epochs if epochs else 0
        with (
            contextlib.closing(writer),
            status_hooks.watched(out, world, signals, lock),
            live_page.served(page, out, functools.partial(print, flush=True)),
            status_hook,
            _listening(world, signals, writer),
        ):
            yield
            status_hook.status.stopped = failure.agreed_signal(signals, world)
            writer.write(writer.raise_record_error)
            writer.plot(end=True)


@contextlib.contextmanager
def _signals_of(world):
    """Yield the requests to stop, which stay valid for loops after this block.

    `stop_requested` enters their context, so that only loops that call it handle signals. The end
    of the block restores the handlers, unless they were set before the block.
    """
    signals = world.signals = world.signals or Signals()
    with contextlib.ExitStack() as stack:
        if not signals.is_active:
            stack.push(signals)
        try:
            yield signals
        finally:
            if signals.name == stop_file.REASON:  # a request for this loop, not for later loops
                signals.name = None
            signals.agreed = False  # later loops agree again, on signals that stay valid


@contextlib.contextmanager
def _listening(world, signals, writer):
    """Within the block, record the reports of a world."""
    epoch = None

    def write(record):
        nonlocal epoch
        writer.record(*(record[name] for name in RECORD))
        if record["kind"] == "epoch" or (epoch is not None and record["epoch"] > epoch):
            status_hooks.stop_after_epoch(writer.out, signals)
        epoch = record["epoch"]

    listener = LoopRecords(write)
    world.listeners.append(listener)
    try:
        yield
    finally:
        world.listeners.remove(listener)
