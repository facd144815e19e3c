"""Set up what a run and its caller share: the folder and its checkpoint, the console, the stops.

`dl.train` and the command `train` prepare a run with a `Session` and train in it; `dl.report_to`
records a custom loop in one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpidl import backends
from mpidl.data.checks import empty_classes_warning
from mpidl.errors import UserError
from mpidl.files import on_rank_0, reason
from mpidl.ranks.failure import Signals
from mpidl.report import Console
from mpidl.training import lost_ranks, status_hooks, tracking
from mpidl.training.files import checkpoint, run_folder
from mpidl.training.files.run_folder import COMMAND_WORDS, PYTHON_WORDS
from mpidl.training.optimizers import Optimizer, of_options
from mpidl.training.optimizers.checks import CustomOptimizer, optimizer_spec
from mpidl.training.trainer import Trainer

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network
    from mpidl.ranks.world import World
    from mpidl.training.files.folder_lock import FolderLock
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.progress import Result


class Session:
    """The ranks, the folder, the console and the requests to stop of one run.

    All methods and the constructor are collective. The constructor locks an existing folder and
    loads the checkpoint, but changes no files of a run. `make_folder` makes the folder ready for
    the files of the run.

    Parameters
    ----------
    world : World
        The ranks.
    lock : FolderLock
        The lock to take for the folder, unless the caller has taken it.
    out, resume, overwrite
        Arguments of `dl.train`.
    words : tuple of str
        `PYTHON_WORDS` or `COMMAND_WORDS`, the spelling of the arguments in error messages.

    Attributes
    ----------
    out : path or None
        The folder to write to; None if the run has no folder, or if `make_folder` will choose one.
    checkpoint : (arrays, facts) or None
        The checkpoint from which the run resumes.
    console : Console
        The console of the run, from `use_options` on.
    signals : Signals
        The requests to stop, from `active` on.

    Raises
    ------
    UserError
        If `resume` is neither a folder nor a checkpoint, if the checkpoint cannot be loaded or has
        another numerics, if `resume` is a file and `out` its folder, if `out` contains another run
        and `overwrite` is false, or if another process uses the folder.
    """

    console: Console
    signals: Signals

    def __init__(
        self,
        world: World,
        lock: FolderLock,
        out: Any = None,
        resume: Any = None,
        *,
        overwrite: bool = False,
        words: tuple[str, str, str] = PYTHON_WORDS,
    ) -> None:
        is_folder = resume is None or isinstance(resume, str | os.PathLike)
        if not is_folder and not isinstance(resume, tuple):
            kind = type(resume).__name__
            raise UserError(f"resume: expected the folder of a run, found {kind}")
        self.world, self.lock, self._words = world, lock, words
        self._resumed = self._folder_to_resume(resume, out) if is_folder else None
        self.out: Any = self._resumed if out is None else out
        self._spelled = words[1 if out is None and resume is not None else 0]
        # A caller that passes a loaded checkpoint has already prepared the folder.
        self._may_hold_a_run = overwrite or not is_folder
        is_command = words == COMMAND_WORDS
        self._is_cleared = is_folder and (overwrite or resume is not None or is_command)
        self._is_made = False
        if self.out is not None:
            lock.take(self.out, self._spelled, create=False)
        self._refuse_a_run()
        self.checkpoint = resume
        if self._resumed is not None:
            self.checkpoint = on_rank_0(world, lambda: checkpoint.load(resume))
        if self.checkpoint is not None:
            spelled = words[1].format(resume) if is_folder else "resume"
            checkpoint.check_numerics(self.checkpoint[1], spelled)

    @property
    def folder(self) -> str:
        """The folder of a run that has one, once `make_folder` has made it."""
        return os.fspath(self.out)

    def make_folder(self, title: str = "run") -> None:
        """Create and lock the folder, and remove the files of an earlier run.

        Without `out` and `resume`, the folder is the first of runs/TITLE, runs/TITLE-2, ... that
        does not exist.

        Raises
        ------
        UserError
            If the folder is in use, contains another run, or cannot be written to.
        """
        if self._is_made:
            return
        out = self.out
        if out is None:
            out = self.out = on_rank_0(self.world, lambda: run_folder.next_folder(title))
        self.lock.take(out, self._spelled)
        self._refuse_a_run()  # another job may have started a run just before the lock was taken
        if self._is_cleared:
            on_rank_0(self.world, lambda: self._clear(out))
        self._is_made = True

    def _folder_to_resume(self, resume, out):
        """Return the folder of the run to resume, of which `resume` may be one checkpoint."""
        if resume is None:
            return None
        folder = on_rank_0(self.world, lambda: checkpoint.folder_of(resume))
        if folder != os.fspath(resume) and (out is None or os.path.abspath(out) == folder):
            raise UserError(
                f"{self._words[1].format(resume)}: expected {self._words[0].format('FOLDER')} with "
                "another folder, because this one would lose the later iterations"
            )
        return folder

    def _refuse_a_run(self):
        out, resumed = self.out, self._resumed
        if out is not None and not self._may_hold_a_run:
            on_rank_0(self.world, lambda: run_folder.refuse_a_run(out, resumed, self._words))

    def _clear(self, out):
        try:
            run_folder.make_folder(out, self._resumed)
        except OSError as error:
            spelled = self._spelled.format(out)
            raise UserError(f"{spelled}: cannot be written: {reason(error)}") from error

    def advice(self, learning_rate: float) -> str:
        """Return advice for an error message about NaN or infinite values. Not collective."""
        has_checkpoint = self.out and checkpoint.exists(self.out)
        return f"lower --learning-rate (now {learning_rate:g}) or check the images" + (
            f"; the last checkpoint is in {self.out}" if has_checkpoint else ""
        )

    def use_options(self, options: TrainingOptions, console: Console | None = None) -> list[str]:
        """Prepare the ranks and the console as the options say; return lines to print.

        A device that the world has already chosen is kept if the option is "auto". Raises UserError
        on all ranks if the device does not have the precision.
        """
        world = self.world
        # The device decides which precisions exist; all devices have fp32.
        backends.configure(winograd=options.winograd, precision="fp32")
        is_settled = world.device_request is not None or world.device is not None
        lines = []
        if options.device != "auto" or not is_settled:
            gpus = None if options.gpus is None else str(options.gpus)
            lines = world.use_device(options.device, gpus)
        backends.configure(precision=options.precision)
        lost_ranks.prepare(options, world)
        self.console = console or Console(
            world.rank, verbose_every=options.verbose_every, progress=options.verbose == "on"
        )
        return lines

    @contextlib.contextmanager
    def active(self, hooks: Iterable[object], signals: Signals | None) -> Iterator[None]:
        """Within the block, the console is open, and signals and the file `stop` end the run.

        An exception marks the records of the hooks' trackers as failed. `signals` are those that
        the caller watches; by default, the block watches for signals itself.
        """
        with (
            self.console,
            contextlib.nullcontext(signals) if signals else Signals() as self.signals,
            status_hooks.watched(self.out, self.world, self.signals, self.lock),
            tracking.abandoned_on_error(hooks),
        ):
            yield

    def train(
        self,
        net: Network,
        datastore: Datastore,
        options: TrainingOptions,
        hooks: Iterable[object],
        *,
        optimizer: Optimizer | CustomOptimizer | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Result:
        """Train a network within `active`. The arguments are checked ones of `dl.train`."""
        self.world.transport.report_folder = self.out
        status_hook = status_hooks.of_run(hooks, self.out, self.world, self.lock)
        hooks = [*hooks, status_hook] if status_hook else hooks
        if (warning := empty_classes_warning(datastore)) is not None:
            self.console.line(warning)
        spec = None if optimizer is None else optimizer_spec(optimizer)
        if optimizer is None:
            optimizer = of_options(options, **net.factors)
        rate = optimizer.learning_rate
        try:
            trainer = Trainer(net, datastore, options, self, optimizer, spec, hooks)
            trainer.facts = dict(facts or {})
            with status_hook or contextlib.nullcontext():
                return trainer.run()
        finally:
            optimizer.learning_rate = rate  # undo the changes of the schedule
