"""Define `dl.train`, which checks its arguments and trains in a `Session`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mpidl.data.array_datastore import Arrays, as_datastore
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.evaluation.validation import held_out
from mpidl.matlab_names import explain_arguments
from mpidl.nn import Network
from mpidl.nn.network_check import need_network
from mpidl.ranks.failure import Signals
from mpidl.ranks.world import World
from mpidl.report import Console
from mpidl.training import input_pipeline, tracking
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.hooks import check_hooks
from mpidl.training.optimizers import Optimizer
from mpidl.training.optimizers.checks import CustomOptimizer, check_optimizer
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.progress import Result
from mpidl.training.session import Session


@explain_arguments
def train(
    net: Network,
    datastore: Datastore | Arrays,
    options: TrainingOptions | None = None,
    *,
    world: World | None = None,
    out: str | None = None,
    console: Console | None = None,
    resume: str | tuple[Any, Any] | None = None,
    overwrite: bool = False,
    optimizer: Optimizer | CustomOptimizer | None = None,
    hooks: Iterable[object] = (),
    facts: Mapping[str, Any] | None = None,
    signals: Signals | None = None,
    lock: FolderLock | None = None,
) -> Result:
    """Train a network, updating its parameters and state in place. Collective.

    Parameters
    ----------
    net : Network
        The network to train.
    datastore : Datastore or (images, labels)
        The training images, with the labels or targets that the loss needs. A tuple of arrays must
        be the same on every rank; see `ArrayDatastore`.
    options : TrainingOptions, optional
        The options of the run. The default is `TrainingOptions()`.
    world : World, optional
        The ranks that train the network. The default is all ranks of the job.
    out : path, optional
        Folder for metrics.jsonl, progress.png and the checkpoints. The default is the folder given
        by `resume`. Without either argument, no files are written.
    console : Console, optional
        The console that prints progress. The default is a new console that follows the options
        `verbose` and `verbose_every`.
    resume : path or (arrays, facts), optional
        Folder of the run to resume; or one of its checkpoints, such as
        "runs/a/checkpoints/00000400.h5", to continue in another folder `out`; or a checkpoint as
        `checkpoint.load` returns it.
    overwrite : bool
        Whether to replace another run that `out` may contain.
    optimizer : optional
        A built-in optimizer such as `SGDM(0.05)`, or a custom object. A custom object needs an
        attribute `learning_rate` and a method `__call__(parameters, gradients)` that returns new
        parameters. It also needs the methods `state()` and `load_state(state)` for the arrays that
        checkpoints keep. On a GPU, a custom object also needs the other methods of `Optimizer`.
        This argument replaces the options that describe an optimizer, such as `solver`, `l2` and
        `gradient_threshold`. Schedules start from the optimizer's learning rate.
    hooks : iterable
        Objects with one or more of the methods described in `mpidl.training.hooks`.
    facts : mapping, optional
        Additional facts to store in the checkpoints.
    signals : Signals, optional
        A `Signals` object in whose `with` block this function is called, for callers that also
        watch for signals before and after training. By default, this function watches for signals
        itself.
    lock : FolderLock, optional
        The lock of `out`, for callers that also write to the folder before and after training. By
        default, this function creates the lock.

    Returns
    -------
    Result
        The result of the run. A run ends early if any rank receives the signal USR1, TERM or INT,
        if a hook or an output function requests a stop, or if the validation loss has not improved
        for `validation_patience` validations. The run then completes the current mini-batch, writes
        a checkpoint and ends on all ranks. The attribute `stopped` of the result names the reason.

    Raises
    ------
    UserError
        If an argument is invalid, if `out` holds another run, if another process trains in `out`,
        or if the resumed run has different options, a different network or different images.
    Fault
        If the loss or the weights are not finite, unless the option `on_nan` is "rollback"; if the
        weights differ between ranks; or if another job has taken over the folder, for example while
        this job was suspended. The last good checkpoint is kept.

    Notes
    -----
    The options determine whether the final network is the network of the last iteration or the
    network with the lowest validation loss. The options also determine whether batch normalization
    uses moving or population statistics. Checkpoints always contain the network of the last
    iteration with moving statistics.
    """
    options = TrainingOptions() if options is None else options
    hooks = check_hooks(hooks)
    datastore, options, world = _checked(net, datastore, options, world, optimizer)
    with contextlib.nullcontext(lock) if lock else FolderLock(world) as held_lock:
        session = Session(world, held_lock, out, resume, overwrite=overwrite)
        hooks += tracking.requested(options, present=hooks)
        for line in session.use_options(options, console):
            print(line, file=sys.stderr)
        if options.threads and options.threads != max(world.threads, default=0):
            world.use_threads(options.threads)
        with session.active(hooks, signals):
            return session.train(net, datastore, options, hooks, optimizer=optimizer, facts=facts)


def _checked(net, datastore, options, world, optimizer) -> tuple[Datastore, TrainingOptions, World]:
    """Check what is trained on what; return the training images, the options and the world."""
    if optimizer is not None:
        check_optimizer(optimizer, net)
        options = replace(options, learning_rate=optimizer.learning_rate)
    need_network(net)
    datastore = as_datastore(datastore, "images to train on")
    if not isinstance(options, TrainingOptions):
        hint = ": use TrainingOptions(**options)" if isinstance(options, dict) else ""
        raise UserError(f"expected TrainingOptions, found {type(options).__name__}{hint}")
    if options.validation is not None:
        options = replace(options, validation=as_datastore(options.validation, "validation"))
    world = World(timeout=options.timeout) if world is None else world
    options = options.for_ranks(world.size)
    datastore, options = held_out(datastore, options)
    input_pipeline.check(net, datastore, options)
    return datastore, options, world
