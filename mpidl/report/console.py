"""Show the progress of a run on rank 0: a bar on a terminal, plain lines elsewhere."""

import datetime
import os
import stat
import sys
import time
from typing import Any, Protocol, TextIO

BAR_SECONDS = 0.2  # shortest time between two updates of the bar
LINE_SECONDS = 10.0  # shortest time between two iteration lines in a log
LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted", "orterun"}
LINE_LAUNCHERS = {"prterun", "prted"}  # launchers of Open MPI 5, which forward only whole lines


class Scores(Protocol):
    """Protocol of objects with the scores that the console prints, such as an `Evaluation`."""

    @property
    def loss(self) -> float: ...
    @property
    def accuracy(self) -> float | None: ...
    @property
    def images(self) -> int: ...


class Console:
    """Prints the output of a run to a terminal or a log.

    The methods do nothing on ranks other than 0. A console is a context manager that removes the
    bar on exit.

    Parameters
    ----------
    rank : int
        Rank of this process.
    verbose_every : int
        Number of iterations between two lines in a log, which has at most one such line per 10 s.
        If 0, no iterations are printed in a log.
    progress : bool
        Whether to print iterations, validations and epochs. Other lines are always printed.
    stream : file, optional
        File to write to, by default stdout.
    width : int, optional
        Number of columns for the bar; 0 draws no bar. By default the width of the terminal.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        verbose_every: int = 50,
        progress: bool = True,
        stream: TextIO | None = None,
        width: int | None = None,
    ):
        self.stream = stream or sys.stdout if rank == 0 else None
        self.verbose_every, self.progress = verbose_every, progress
        self.follows_terminal = width is None
        self.width = terminal_width(self.stream) if width is None else width
        self.epochs = 0
        self.bar: Any = None  # a rich Progress, with one task
        self.task: Any = None
        self.last = None  # arguments of the last call of `iteration`
        self.last_printed = None  # arguments of the last call that printed a line
        self.draw_time = self.line_time = time.monotonic()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.stream is None:
            return
        if self.bar is not None:
            self._draw()
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def header(self, **facts: object) -> None:
        """Print a "Name: value" line for each keyword argument, such as network= or data=."""
        for name, fact in facts.items():
            self.line(f"{name.replace('_', ' ').capitalize()}: {fact}")

    def start(self, epochs: int, iterations: float, completed: int = 0) -> None:
        """Show the bar, if the output is a terminal.

        Parameters
        ----------
        epochs, iterations : int
            Number of epochs and number of iterations in the run.
        completed : int
            Number of iterations that were completed before the run was resumed.
        """
        self.epochs = epochs
        if self.stream is None or not self.width or not self.progress:
            return
        self.bar = _bar(self.stream, self.width)
        self.task = self.bar.add_task(
            "", total=iterations, completed=completed, epoch="", values=""
        )
        self.bar.start()
        self.bar.console.show_cursor(True)  # a killed job could not show a hidden cursor again
        self.bar.refresh()

    def iteration(
        self,
        epoch: int,
        iteration: int,
        loss: float,
        images_per_second: float,
        accuracy: float | None = None,
    ) -> None:
        """Show an iteration with the loss and accuracy of its mini-batch.

        The bar is updated at most once per `BAR_SECONDS`. A log gets at most one line per
        `LINE_SECONDS`.
        """
        if self.stream is None or not self.progress:
            return
        now = time.monotonic()
        self.last = epoch, iteration, loss, images_per_second, accuracy
        if self.bar is not None and now - self.draw_time >= BAR_SECONDS:
            self._draw()
        due = self.verbose_every and iteration % self.verbose_every == 0
        if self.bar is None and due and now - self.line_time >= LINE_SECONDS:
            self.last_iteration()

    def last_iteration(self) -> None:
        """Print a line for the last iteration unless it has already been printed."""
        if not self.progress or self.last is None or self.last is self.last_printed:
            return
        self.last_printed, self.line_time = self.last, time.monotonic()
        epoch, iteration, loss, images_per_second, _ = self.last
        self.line(
            f"Iteration: {iteration}, Epoch: {epoch}, Loss: {loss:.4f}, "
            f"Images/s: {images_per_second:.0f}"
        )

    def _draw(self):
        """Update the bar with the loss, accuracy and speed of the last iteration."""
        self.draw_time = time.monotonic()
        if self.last is None:
            return
        epoch, iteration, loss, images_per_second, accuracy = self.last
        if self.follows_terminal:  # the user may have resized the terminal
            self.width = terminal_width(self.stream) or self.width
            self.bar.console.width = self.width
        values = f"loss {loss:.4f}"
        values += "" if accuracy is None else f"  accuracy {accuracy:.4f}"
        values += f"  {images_per_second:.0f} images/s" if self.width >= 80 else ""
        label = f"Epoch {epoch}/{self.epochs}"
        self.bar.update(self.task, completed=iteration, epoch=label, values=values, refresh=True)

    def epoch(
        self,
        epoch: int,
        loss: float,
        images_per_second: float,
        seconds: float,
        accuracy: float | None = None,
        validation: Scores | None = None,
    ) -> None:
        """Print a line for an epoch.

        Parameters
        ----------
        epoch : int
            Number of the epoch, counted from 1.
        loss, accuracy : float
            Mean loss and accuracy over the images of the epoch. The accuracy may be None.
        images_per_second : float
            Training speed.
        seconds : float
            Time since the start of the run.
        validation : Evaluation, optional
            The validation at the end of the epoch.
        """
        if not self.progress:
            return
        parts = [f"Epoch: {epoch}", f"Loss: {loss:.4f}"]
        if accuracy is not None:
            parts.append(f"Accuracy: {accuracy:.4f}")
        if validation is not None:
            parts += _validation_parts(validation)
        parts.append(f"Images/s: {images_per_second:.0f}")
        parts.append(f"Elapsed: {clock(seconds)}")
        self.line_time = time.monotonic()
        self.line(", ".join(parts))

    def validation(self, iteration: int, evaluation: Scores) -> None:
        """Print a line for a validation that does not appear in the line of an epoch."""
        if self.progress:
            self.line(", ".join([f"Iteration: {iteration}", *_validation_parts(evaluation)]))

    def finish(self, out: str, seconds: float, test: Scores | None = None) -> None:
        """Remove the bar and print the results of the run.

        Parameters
        ----------
        out : str
            Folder of the results.
        seconds : float
            Training time in seconds.
        test : Evaluation, optional
            The evaluation on the test set.
        """
        self.close()
        if test is not None and test.accuracy is not None:
            self.line(f"Test accuracy: {test.accuracy:.4f} ({test.images} images)")
        elif test is not None:
            self.line(f"Test loss: {test.loss:.6g} ({test.images} images)")
        self.line(f"Training time: {clock(seconds)}")
        self.line(f"Results: {out}")

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            bar, self.bar = self.bar, None
            bar.stop()


def _validation_parts(evaluation):
    parts = [f"Validation loss: {evaluation.loss:.4f}"]
    if evaluation.accuracy is not None:
        parts.append(f"Validation accuracy: {evaluation.accuracy:.4f}")
    return parts


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 12.3 gives "0:00:12"."""
    return str(datetime.timedelta(seconds=int(seconds)))


def _bar(stream, width):
    import rich.console
    from rich import progress

    console = rich.console.Console(file=stream, force_terminal=True, width=width)
    # `iteration` draws the bar, so no rich thread competes with the computation.
    return progress.Progress(
        progress.TextColumn("{task.fields[epoch]}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[values]}"),
        progress.TimeRemainingColumn(compact=True),
        console=console,
        auto_refresh=False,
        transient=True,
        expand=True,
    )


def terminal_width(stream: TextIO | None) -> int:
    """Return the number of columns of the terminal that shows a stream, or 0 if there is none.

    Under mpirun, stdout leads to the launcher through a pipe (MPICH) or a pseudo-terminal (Open
    MPI). The launcher forwards the output to its own stdout, so the function returns the width of
    the launcher's terminal.
    """
    if stream is None or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return 0
    try:
        handle = stream.fileno()
        terminal = os.isatty(handle)
        # A script may filter the output of a pipe, so the search then ends at the first script.
        launcher = _launcher(os.getppid(), past_scripts=terminal) if handle <= 2 else None
        if launcher is None or stat.S_ISREG(os.fstat(handle).st_mode):
            return os.get_terminal_size(handle).columns or 80 if terminal else 0
        with open(f"/proc/{launcher}/comm") as file:
            if file.read().strip() in LINE_LAUNCHERS:
                return 0
        launcher_stdout = os.open(
            f"/proc/{launcher}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
        )
        try:
            return os.get_terminal_size(launcher_stdout).columns or 80
        finally:
            os.close(launcher_stdout)
    except (OSError, ValueError, AttributeError):  # not a terminal or not a file
        return 0


def _launcher(pid, past_scripts):
    """Return the id of the topmost MPI launcher among a process and its ancestors, or None."""
    launcher = None
    while os.path.exists(f"/proc/{pid}/stat"):
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name in LAUNCHERS:
            launcher = pid
        elif launcher or not past_scripts:
            break
        pid = int(rest.split()[1])
    return launcher
