"""Format the results of epochs and validations: lines for a log, rows of a table for a terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

HEADER_ROWS = 20  # rows of the table between two headers
LOG_COLUMNS = 80  # width of the lines of a log
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


def validation_lines(iteration: int, validation: Scores) -> list[str]:
    """Return the lines for a validation in a log, of at most `LOG_COLUMNS` columns if possible."""
    scores = {"loss": decimal(validation.loss)}
    if validation.accuracy is not None:
        scores["accuracy"] = f"{validation.accuracy:.4f}"
    scores |= metric_texts(validation)
    start = f"Iteration: {iteration}"
    texts = [f"Validation {name}: {text}" for name, text in scores.items()]
    return [f"{start}, {line}" for line in _filled(texts, ", ", LOG_COLUMNS - len(start) - 2)]


def score_line(subject: str, scores: Scores) -> str:
    """Return the line for the accuracy, or for the loss without classes; `subject` has a {}."""
    name = "loss" if scores.accuracy is None else "accuracy"
    text = f"{scores.loss:.6g}" if scores.accuracy is None else f"{scores.accuracy:.4f}"
    return f"{subject.format(name)}: {text} ({scores.images} images)"


def metric_texts(validation: Scores) -> dict[str, str]:
    """Return the metrics of a validation as {name: text}."""
    values = {} if validation.metrics is None else validation.metrics.values
    return {name: f"{value:.4f}" for name, value in values.items()}


def _filled(texts, separator, width):
    """Join texts to lines of at most `width` columns, or more if a single text is longer."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + len(separator) + len(text) <= width:
            lines[-1] += separator + text
        else:
            lines.append(text)
    return lines


# {column: (title, width)}. The columns of validation have a common title above them.
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
# Columns that a narrow terminal omits, in this order. Metrics need the place of the first two.
OPTIONAL = ("iteration", "images_per_second", "accuracy", "seconds")
GROUPS = {"loss": "Training", "validation_loss": "Validation"}
VALIDATION = "validation_"  # prefix of the columns of a validation
METRIC_TITLES = {
    "balanced-accuracy": "Balanced",
    "iou": "IoU",
    "subset-accuracy": "Subset",
    "f1-micro": "F1 micro",
    "f1-samples": "F1 samples",
    "roc-auc": "ROC AUC",
    "average-precision": "Avg prec",
}
METRIC_WIDTH = 6  # of a number with 4 decimals


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

    On a narrow terminal, the table has fewer columns, and lines below a row contain the metrics.
    """

    def __init__(
        self,
        width: int,
        has_accuracy: bool,
        has_validation: bool,
        metrics: Sequence[str] = (),
    ) -> None:
        self.width, self.rows = width, 0
        usual = {
            name: column
            for name, column in COLUMNS.items()
            if (has_accuracy or "accuracy" not in name)
            and (has_validation or not name.startswith(VALIDATION))
        }
        self.columns = _with_metrics(usual, metrics)
        for name in OPTIONAL[:2] if metrics else ():
            if len(self._line({})) > width:
                del self.columns[name]
        self.metrics_below: tuple[str, ...] = ()
        if metrics and len(self._line({})) > width:
            self.columns, self.metrics_below = usual, tuple(metrics)
        optional = [name for name in OPTIONAL if name in self.columns]
        while optional and len(self._line({})) > width:
            del self.columns[optional.pop(0)]

    def lines(self, cells: Mapping[str, str]) -> list[str]:
        """Return the lines of a row, given as {column: text}, after the header if it is due."""
        header = [] if self.rows % HEADER_ROWS else self._header()
        self.rows += 1
        names = [name for name in self.metrics_below if VALIDATION + name in cells]
        texts = [f"{name} {cells[VALIDATION + name]}" for name in names]
        indent = " " * (COLUMNS["epoch"][1] + len(SEPARATOR))
        below = [indent + line for line in _filled(texts, SEPARATOR, self.width - len(indent))]
        return [*header, self._line(cells).rstrip(), *below]

    def _line(self, cells):
        texts = (f"{cells.get(name, ''):>{width}}" for name, (_, width) in self.columns.items())
        return SEPARATOR.join(texts)

    def _header(self):
        lines = [self._line({name: title for name, (title, _) in self.columns.items()})]
        if "validation_loss" in self.columns:
            lines.insert(0, self._group_line())
        return lines

    def _group_line(self):
        """Return the line above the header. The titles of `GROUPS` end with their last column."""
        pieces: list[tuple[str, int]] = []
        for name, (_, width) in self.columns.items():
            continues = name == "accuracy" or name.startswith(VALIDATION) and name not in GROUPS
            if continues:
                title, start = pieces.pop()
                pieces.append((title, start + len(SEPARATOR) + width))
            else:
                pieces.append((GROUPS.get(name, ""), width))
        return SEPARATOR.join(f"{title:>{width}}" for title, width in pieces).rstrip()


def _with_metrics(columns, metrics):
    """Return the columns with those of the metrics after the last column of validation."""
    titles = {name: METRIC_TITLES.get(name, name.capitalize()) for name in metrics}
    new = {VALIDATION + n: (title, max(METRIC_WIDTH, len(title))) for n, title in titles.items()}
    last = max((i for i, name in enumerate(columns) if name.startswith(VALIDATION)), default=-1)
    items = list(columns.items())
    return dict([*items[: last + 1], *new.items(), *items[last + 1 :]])
