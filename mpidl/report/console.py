"""What rank 0 shows while a run goes on: a bar on a terminal, plain lines elsewhere."""

import datetime
import os
import stat
import sys
import time

BAR_SECONDS = 0.2  # between two drawings of the bar
LINE_SECONDS = 10.0  # between two lines of iterations in a log
LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted", "orterun"}
WHOLE_LINES = {"prterun", "prted"}  # those of Open MPI 5 hand on whole lines, and a bar is none


class Console:
    """Progress on rank 0; on the other ranks the same methods do nothing.

    A context manager: leaving it takes the bar away, so that what is printed next stands alone.
    verbose_every: iterations between lines where there is no terminal (0: a line an epoch only);
    however small, there is one in 10 s at most. progress: whether to show that at all, and the
    epochs; the other lines are printed all the same. stream: where to write, stdout; width: draw
    the bar for a terminal of that many columns, found out where None, and no bar where 0.
    """

    def __init__(self, rank=0, *, verbose_every=50, progress=True, stream=None, width=None):
        self.stream = stream or sys.stdout if rank == 0 else None
        self.verbose_every, self.progress = verbose_every, progress
        self.measured = width is None
        self.width = terminal_width(self.stream) if width is None else width
        self.epochs = 0
        self.bar = self.task = self.last = None  # the last iteration: what `iteration` was told
        self.told = None  # that whose line was printed
        self.drawn = self.written = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def line(self, text):
        """Print one line, above the bar."""
        if self.stream is None:
            return
        if self.bar is not None:
            self._draw()
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def header(self, **facts):
        """Print `Name: fact` lines: header(network=..., data=..., ranks=..., results=...)."""
        for name, fact in facts.items():
            self.line(f"{name.replace('_', ' ').capitalize()}: {fact}")

    def start(self, epochs, iterations, done=0):
        """Begin with the progress: of so many iterations in all, so many were done before."""
        self.epochs = epochs
        if self.stream is None or not self.width or not self.progress:
            return
        self.bar = _bar(self.stream, self.width)
        self.task = self.bar.add_task("", total=iterations, completed=done, epoch="", values="")
        self.bar.start()
        self.bar.console.show_cursor(True)  # a job that is killed could not bring it back
        self.bar.refresh()

    def iteration(self, epoch, iteration, loss, images_per_second, accuracy=None):
        """Show the state after an iteration; loss and accuracy of its mini-batch."""
        if self.stream is None or not self.progress:
            return
        now = time.monotonic()
        self.last = epoch, iteration, loss, images_per_second, accuracy
        if self.bar is not None and now - self.drawn >= BAR_SECONDS:
            self._draw()
        due = self.verbose_every and iteration % self.verbose_every == 0
        if self.bar is None and due and now - self.written >= LINE_SECONDS:
            self.last_iteration()

    def last_iteration(self):
        """Print the line of the last iteration, unless it was printed."""
        if not self.progress or self.last is None or self.last is self.told:
            return
        self.told, self.written = self.last, time.monotonic()
        epoch, iteration, loss, images_per_second, _ = self.last
        self.line(
            f"Iteration: {iteration}, Epoch: {epoch}, Loss: {loss:.4f}, "
            f"Images/s: {images_per_second:.0f}"
        )

    def _draw(self):
        """Bring the bar to the last iteration."""
        self.drawn = time.monotonic()
        if self.last is None:
            return
        epoch, iteration, loss, images_per_second, accuracy = self.last
        if self.measured:  # the window may have become another size
            self.width = terminal_width(self.stream) or self.width
            self.bar.console.width = self.width
        values = f"loss {loss:.4f}"
        values += "" if accuracy is None else f"  accuracy {accuracy:.4f}"
        values += f"  {images_per_second:.0f} images/s" if self.width >= 80 else ""
        shown = f"Epoch {epoch}/{self.epochs}"
        self.bar.update(self.task, completed=iteration, epoch=shown, values=values, refresh=True)

    def epoch(self, epoch, loss, images_per_second, seconds, accuracy=None, validation=None):
        """Print the line of an epoch: mean loss and accuracy over its images, seconds so far.

        validation: the `Evaluation` on the validation set, where there was one at its end.
        """
        if not self.progress:
            return
        parts = [f"Epoch: {epoch}", f"Loss: {loss:.4f}"]
        if accuracy is not None:
            parts.append(f"Accuracy: {accuracy:.4f}")
        if validation is not None:
            parts += _validated(validation)
        parts.append(f"Images/s: {images_per_second:.0f}")
        parts.append(f"Elapsed: {clock(seconds)}")
        self.written = time.monotonic()
        self.line(", ".join(parts))

    def validation(self, iteration, found):
        """Print the line of a validation, an `Evaluation`, that no epoch's line tells of."""
        if self.progress:
            self.line(", ".join([f"Iteration: {iteration}", *_validated(found)]))

    def finish(self, out, seconds, test=None):
        """End the progress; print the test's `Evaluation`, the time, where the results are."""
        self.close()
        if test is not None and test.accuracy is not None:
            self.line(f"Test accuracy: {test.accuracy:.4f} ({test.images} images)")
        elif test is not None:
            self.line(f"Test loss: {test.loss:.6g} ({test.images} images)")
        self.line(f"Training time: {clock(seconds)}")
        self.line(f"Results: {out}")

    def close(self):
        """Take the bar away."""
        if self.bar is not None:
            bar, self.bar = self.bar, None
            bar.stop()


def _validated(found):
    parts = [f"Validation loss: {found.loss:.4f}"]
    if found.accuracy is not None:
        parts.append(f"Validation accuracy: {found.accuracy:.4f}")
    return parts


def clock(seconds):
    """12.3 as 0:00:12."""
    return str(datetime.timedelta(seconds=int(seconds)))


def _bar(stream, width):
    import rich.console
    from rich import progress

    console = rich.console.Console(file=stream, force_terminal=True, width=width)
    # Drawn by the calls of `iteration` alone: no thread beside the one that computes.
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


def terminal_width(stream):
    """Columns of the terminal that shows what is written to `stream`; 0 where there is none.

    Under mpirun, stdout leads to the launcher, by a pipe (MPICH) or by a pseudo-terminal of its own
    (Open MPI), and the launcher passes all on to its own stdout: that one counts.
    """
    if stream is None or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return 0
    try:
        handle = stream.fileno()
        terminal = os.isatty(handle)
        # What a script between the launcher and this process pipes on is the script's business.
        launcher = _launcher(os.getppid(), past_scripts=terminal) if handle <= 2 else None
        if launcher is None or stat.S_ISREG(os.fstat(handle).st_mode):
            return os.get_terminal_size(handle).columns or 80 if terminal else 0
        with open(f"/proc/{launcher}/comm") as file:
            if file.read().strip() in WHOLE_LINES:
                return 0
        shown = os.open(f"/proc/{launcher}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(shown).columns or 80
        finally:
            os.close(shown)
    except (OSError, ValueError, AttributeError):  # no terminal, or no file at all
        return 0


def _launcher(pid, past_scripts):
    """The uppermost MPI launcher among `pid` and the processes above it, else None."""
    found = None
    while os.path.exists(f"/proc/{pid}/stat"):
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name in LAUNCHERS:
            found = pid
        elif found or not past_scripts:
            break
        pid = int(rest.split()[1])
    return found
