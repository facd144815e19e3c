"""Show the progress of a run on rank 0: a bar and a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from mpidl.report.progress import rows
from mpidl.report.progress.bar import BottomLine, Field
from mpidl.report.progress.rows import Scores
from mpidl.report.progress.stage import Stage, Ticker
from mpidl.report.progress.terminal import terminal_width
from mpidl.text import printable

BAR_SECONDS = 0.2  # shortest time between two updates of the bar after iterations
TICK_SECONDS = 0.5  # time between two updates while no iteration ends
LINE_SECONDS = 5.0  # shortest time between two iteration lines in a log
SILENT_SECONDS = 9.0  # after this time without a line, a log gets a line at the next tick


class Console:
    """Prints the output of a run to a terminal or a log.

    The methods do nothing on ranks other than 0. A console is a context manager that removes the
    bar on exit. A log has a line every `verbose_every` iterations, but at most one per 5 s, and
    none if it is 0. Without `progress`, there are no iterations, validations, epochs and stages.
    `width` is that of the terminal by default; 0 draws no bar. During a long stage or iteration, a
    thread prints the elapsed time, so that the output is never silent for more than 10 s.
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
        self.epochs, self.iterations, self.completed, self.has_validation = 0, 0.0, 0, False
        self.metrics: tuple[str, ...] = ()
        self.depth = 0  # number of nested `with` blocks; at 0, the bar is removed
        self.first_epoch = 1
        self.is_started = False  # whether the run has started and not finished
        self.stages: list[Stage] = []  # the current stage is last
        self.bar: BottomLine | None = None
        self.table: rows.Table | None = None
        self.last: tuple[int, int, float, float, float | None] | None = None
        self.last_printed = None  # arguments of the last call that printed a line
        self.pace: tuple[float, int] | None = None  # (time, iteration) after the first iteration
        self.iteration_time = self.draw_time = self.line_time = time.monotonic()
        self.lock = threading.RLock()  # the ticker prints as well
        self.ticker: Ticker | None = None

    def take_over(self) -> None:
        """Start printing after this rank has become rank 0. Do nothing if it already was rank 0."""
        if self.stream is None:
            self.stream = sys.stdout
            self.width = terminal_width(self.stream) if self.follows_terminal else self.width

    def __enter__(self) -> Console:
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.close()

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one. Control characters are escaped."""
        if self.stream is None:
            return
        text = printable(text)
        with self.lock:
            self.line_time = time.monotonic()
            if self.bar is not None:
                self._draw()
                self.bar.print(text)
            else:
                self.stream.write(f"{text}\n")  # one write, which other output cannot split
                self.stream.flush()

    def header(self, **facts: object) -> None:
        """Print a "Name: value" line for each keyword argument, such as network= or data=."""
        for name, fact in facts.items():
            self.line(f"{name.replace('_', ' ').capitalize()}: {fact}")

    def start(
        self,
        epochs: int,
        iterations: float,
        completed: int = 0,
        epoch: int = 1,
        has_validation: bool = False,
        metrics: Sequence[str] = (),
    ) -> None:
        """Record the start of the run, and show the bar if the output is a terminal.

        A resumed run had `completed` iterations, and its first iteration is in `epoch`.
        """
        if self.stream is None or not self.progress:
            return
        with self.lock:
            self.epochs, self.iterations = epochs, iterations
            self.has_validation, self.metrics = has_validation, tuple(metrics)
            self.is_started, self.completed, self.first_epoch = True, completed, epoch
            self.last = self.last_printed = self.pace = self.table = None  # forget an earlier run
            self.iteration_time = time.monotonic()
            self._start_ticker()
            if self.width:
                self._draw()

    @contextlib.contextmanager
    def stage(
        self, name: str, images: int = 0, unit: str = "images"
    ) -> Iterator[Callable[[int], None]]:
        """Show a stage of the run, such as "validation", while the `with` block runs, which calls
        the yielded function with the number of processed images; 0 images are not counted. A
        terminal shows the name, the progress and the time next to the bar. A log gets a line if it
        had none for 9 s.
        """
        stage = Stage(name, images, unit)
        if self.stream is None or not self.progress:
            yield stage.advance
            return
        with self.lock:
            self.stages.append(stage)
            self._start_ticker()
        try:
            yield stage.advance
        finally:
            with self.lock:
                self.stages.remove(stage)
                self.iteration_time = time.monotonic()
            if not self.stages and not self.is_started:
                self.close()

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
        with self.lock:
            now = time.monotonic()
            self.last = epoch, iteration, loss, images_per_second, accuracy
            self.iteration_time = now
            self.pace = self.pace or (now, iteration)
            if self.bar is not None and now - self.draw_time >= BAR_SECONDS:
                self._draw()
            due = self.verbose_every and iteration % self.verbose_every == 0
            if not self.width and due and now - self.line_time >= LINE_SECONDS:
                self.last_iteration()

    def last_iteration(self) -> None:
        """Print a line for the last iteration unless that line has already been printed."""
        if not self.progress or self.last is None or self.last is self.last_printed:
            return
        self.last_printed = self.last
        epoch, iteration, loss, images_per_second, accuracy = self.last
        if self.width:
            self._row(rows.cells(*self.last), None, accuracy is not None)
        else:
            self.line(rows.iteration_line(epoch, iteration, loss, images_per_second))

    def epoch(
        self,
        epoch: int,
        iteration: int,
        loss: float,
        images_per_second: float,
        seconds: float,
        accuracy: float | None = None,
        validation: Scores | None = None,
    ) -> None:
        """Print an epoch: a row of the table on a terminal, lines elsewhere.

        The epoch and its last iteration count from 1. Loss and accuracy are means over its images,
        and `seconds` are since the start of the run.
        """
        if self.stream is None or not self.progress:
            return
        if not self.width:
            if validation is not None:
                self.validation(iteration, validation)
            self.line(rows.epoch_line(epoch, loss, accuracy, images_per_second, seconds))
            return
        cells = rows.cells(epoch, iteration, loss, images_per_second, accuracy)
        self._row({**cells, "seconds": rows.clock(seconds)}, validation, accuracy is not None)

    def validation(self, iteration: int, evaluation: Scores) -> None:
        """Print a validation that does not belong to the end of an epoch."""
        if self.stream is None or not self.progress:
            return
        if not self.width:
            for text in rows.validation_lines(iteration, evaluation):
                self.line(text)
            return
        cells = {"iteration": str(iteration)}
        if self.last is not None:
            cells["epoch"] = str(self.last[0])
        self._row(cells, evaluation, evaluation.accuracy is not None)

    def final_validation(self, evaluation: Scores, note: str | None) -> None:
        """Print the validation of the returned network, and a note if there is one."""
        if self.stream is None or not self.progress:
            return
        self.line(rows.score_line("Validation {} of the returned network", evaluation))
        if note is not None:
            self.line(f"note: {note}")

    def certificate(self, path: str, fact: str) -> None:
        """Print where the certificate of the run is, and a fact about it."""
        if self.progress:
            self.line(f"Certificate: {path}, {fact}")

    def _row(self, cells, validation, has_accuracy):
        """Print a row of the table, with the scores of a validation if there is one."""
        if validation is not None:
            cells["validation_loss"] = rows.decimal(validation.loss)
            if validation.accuracy is not None:
                cells["validation_accuracy"] = f"{validation.accuracy:.4f}"
            for name, text in rows.metric_texts(validation).items():
                cells[rows.VALIDATION + name] = text
        if self.table is None:
            has_validation = self.has_validation or validation is not None
            self.table = rows.Table(self.width, has_accuracy, has_validation, self.metrics)
        with self.lock:
            for text in self.table.lines(cells):
                self.line(text)

    def finish(self, out: str, seconds: float, test: Scores | None = None) -> None:
        """Remove the bar and print the results of the run."""
        self.close()
        if test is not None:
            self.line(rows.score_line("Test {}", test))
            for name, text in rows.metric_texts(test).items():
                self.line(f"Test {name}: {text}")
        self.line(f"Training time: {rows.clock(seconds)}")
        self.line(f"Results: {out}")

    def close(self) -> None:
        """Remove the bar."""
        self.is_started = False
        ticker, self.ticker = self.ticker, None
        if ticker is not None:
            ticker.stop()
        with self.lock:
            if self.bar is not None:
                bar, self.bar = self.bar, None
                bar.close()

    def _start_ticker(self):
        if self.ticker is None:
            self.ticker = Ticker(self._tick, TICK_SECONDS)
            self.ticker.start()

    def _tick(self):
        """Show the time of the current stage or iteration, if nothing was shown recently."""
        with self.lock:
            now = time.monotonic()
            if self.width:
                if now - self.draw_time >= TICK_SECONDS:
                    self._draw()
            elif now - self.line_time >= SILENT_SECONDS:
                self._break_silence(now)

    def _break_silence(self, now):
        """Print the current stage, or the last iteration, to a log."""
        stage = self._stage()
        if stage is not None:
            text = stage.describe()
            self.line(text[0].upper() + text[1:])
        elif self.verbose_every and self.last is not self.last_printed:
            self.last_iteration()
        elif self.verbose_every and self.last is not None:
            is_over = self.last[1] >= self.iterations
            text = "End of the training" if is_over else f"Iteration: {self.last[1] + 1}"
            self.line(f"{text} ({now - self.iteration_time:.0f} s)")

    def _stage(self):
        """Return the current stage or None. The first iteration counts as a stage until it ends."""
        if self.stages:
            return self.stages[-1]
        if not self.is_started or self.last is not None:
            return None
        stage = Stage("first iteration")
        stage.start_time = self.iteration_time
        return stage

    def _draw(self):
        """Draw the bar with the current stage, or with the numbers of the last iteration."""
        now = self.draw_time = time.monotonic()
        if self.follows_terminal:  # the user may have resized the terminal
            self.width = terminal_width(self.stream) or self.width
        if self.bar is None:
            self.bar = BottomLine(self.stream or sys.stdout, self.width)
        stage = self._stage()
        if not self.is_started:
            self.bar.draw(self.width, "", None, [Field(stage.describe() if stage else "")])
            return
        no_iteration = self.first_epoch, self.completed, 0.0, 0.0, None
        epoch, iteration, loss, images_per_second, accuracy = self.last or no_iteration
        label = f"Epoch {epoch}/{self.epochs}"
        fields = [Field(f"{iteration}/{self.iterations}", 3)]
        if stage is not None:
            fields.append(Field(stage.describe()))
        else:
            fields.append(Field(f"loss {rows.decimal(loss)}"))
            fields.append(Field("" if accuracy is None else f"accuracy {accuracy:.4f}", 1))
            fields.append(Field(f"{images_per_second:.0f} images/s", 2))
            fields.append(Field(self._time_left(now, iteration)))
        self.bar.draw(self.width, label, iteration / max(self.iterations, 1), fields)

    def _time_left(self, now, iteration):
        """Return the remaining time of the run at its mean speed, or "" if the speed is unknown."""
        if self.pace is None or iteration <= self.pace[1]:
            return ""
        seconds = (self.iteration_time - self.pace[0]) / (iteration - self.pace[1])
        remaining = seconds * (self.iterations - iteration) - (now - self.iteration_time)
        return rows.time_left(max(remaining, 0.0))
