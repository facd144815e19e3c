"""Format the results of epochs and validations: lines for a log, rows of a table for a terminal."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

HEADER_ROWS = 20  # rows of the table between two headers
SEPARATOR = "  "


class Scores(Protocol):
    """Protocol of objects with scores that the console prints, such as `Evaluation`."""

    @property
    def loss(self) -> float: ...
    @property
    def accuracy(self) -> float | None: ...
    @property
    def images(self) -> int: ...
    @property
    def metrics(self) -> Any: ...


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 12.3 gives "0:00:12"."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def time_left(seconds: float) -> str:
    """Format a remaining time: 12.3 gives "0:12 left", two hours give "2:00:00 left"."""
    text = clock(math.ceil(seconds))
    return f"{text[2:].removeprefix('0') if text.startswith('0:') else text} left"


def decimal(value: float) -> str:
    """Format a number with 4 decimals, or with an exponent if it needs more than 8 characters."""
    text = f"{value:.4f}"
    return text if len(text) <= 8 else f"{value:.1e}"


def iteration_line(epoch: int, iteration: int, loss: float, images_per_second: float) -> str:
    """Return the line for an iteration in a log."""
    return (
        f"Iteration: {iteration}, Epoch: {epoch}, Loss: {decimal(loss)}, "
        f"Images/s: {images_per_second:.0f}"
    )


def epoch_line(
    epoch: int, loss: float, accuracy: float | None, images_per_second: float, seconds: float
) -> str:
    """Return the line for an epoch in a log."""
    parts = [f"Epoch: {epoch}", f"Loss: {decimal(loss)}"]
    parts += [] if accuracy is None else [f"Accuracy: {accuracy:.4f}"]
    parts += [f"Images/s: {images_per_second:.0f}", f"Elapsed: {clock(seconds)}"]
    return ", ".join(parts)


def validation_line(iteration: int, validation: Scores) -> str:
    """Return the line for a validation in a log."""
    parts = [f"Iteration: {iteration}", f"Validation loss: {decimal(validation.loss)}"]
    if validation.accuracy is not None:
        parts.append(f"Validation accuracy: {validation.accuracy:.4f}")
    return ", ".join(parts)


# {column: (title, width)}. The two columns of validation have a common title above them.
COLUMNS = {
    "epoch": ("Epoch", 5),
    "iteration": ("Iteration", 9),
    "loss": ("Loss", 8),
    "accuracy": ("Accuracy", 8),
    "validation_loss": ("Loss", 8),
    "validation_accuracy": ("Accuracy", 8),
    "images_per_second": ("Images/s", 8),
    "seconds": ("Elapsed", 8),
}
# Columns that a narrow terminal omits, in this order.
OPTIONAL = ("iteration", "images_per_second", "accuracy", "seconds")
GROUPS = {"loss": "Training", "validation_loss": "Validation"}


def cells(
    epoch: int, iteration: int, loss: float, images_per_second: float, accuracy: float | None
) -> dict[str, str]:
    """Return the texts of a row of the table as {column: text}."""
    return {
        "epoch": str(epoch),
        "iteration": str(iteration),
        "loss": decimal(loss),
        "accuracy": "" if accuracy is None else f"{accuracy:.4f}",
        "images_per_second": f"{images_per_second:.0f}",
    }


class Table:
    """The table on a terminal, with a row per epoch and per validation within an epoch.

    Parameters
    ----------
    width : int
        Number of columns of the terminal. On a narrow terminal, the table has fewer columns.
    has_accuracy, has_validation : bool
        Whether the run has an accuracy, and whether it has validations.
    """

    def __init__(self, width: int, has_accuracy: bool, has_validation: bool) -> None:
        self.columns = [
            name
            for name in COLUMNS
            if (has_accuracy or "accuracy" not in name)
            and (has_validation or "validation" not in name)
        ]
        self.rows = 0
        optional = [name for name in OPTIONAL if name in self.columns]
        while optional and len(self._line({})) > width:
            self.columns.remove(optional.pop(0))

    def lines(self, cells: Mapping[str, str]) -> list[str]:
        """Return the line of a row, given as {column: text}, after the header if it is due."""
        header = [] if self.rows % HEADER_ROWS else self._header()
        self.rows += 1
        return [*header, self._line(cells).rstrip()]

    def _line(self, cells):
        return SEPARATOR.join(f"{cells.get(name, ''):>{COLUMNS[name][1]}}" for name in self.columns)

    def _header(self):
        lines = [self._line({name: COLUMNS[name][0] for name in self.columns})]
        if "validation_loss" in self.columns:
            lines.insert(0, self._group_line())
        return lines

    def _group_line(self):
        """Return the line above the header, with the titles of `GROUPS`."""
        pieces = []
        for name in self.columns:
            width, partner = COLUMNS[name][1], name.replace("loss", "accuracy")
            if name in GROUPS and partner in self.columns:
                width += len(SEPARATOR) + COLUMNS[partner][1]
            if not name.endswith("accuracy"):
                pieces.append(f"{GROUPS.get(name, ''):>{width}}")
        return SEPARATOR.join(pieces).rstrip()
