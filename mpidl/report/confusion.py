"""Draw confusion matrices with matplotlib."""

import importlib.util
import os
from collections.abc import Sequence

import numpy as np

from mpidl.errors import UserError
from mpidl.report.plots import new_figure, png_of
from mpidl.text import pip_install, printable

COLOURS = "Blues"
MAX_NUMBERS = 30  # with more classes, the cells are too small for numbers
MAX_NAMES = 60  # with more classes, the axes are too short for names


def need_matplotlib(path: str | os.PathLike[str]) -> None:
    """Raise UserError if matplotlib is not installed. The message names the path of the picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"{path}: drawing a picture requires matplotlib, which is not installed "
            f"({pip_install('plots')}); a .csv file does not"
        )


def draw(counts: np.ndarray, classes: Sequence[str], accuracy: float) -> bytes:
    """Return the PNG of a confusion matrix; `counts[i, j]` labels of class i were predicted as
    class j. A cell is darker if it has a larger fraction of the labels in its row.
    """
    k = len(classes)
    side = min(max(3.5 + 0.45 * k, 5.0), 16.0)
    figure = new_figure(side, side)
    axes = figure.subplots()
    fractions = [[n / max(int(row.sum()), 1) for n in row] for row in counts]
    axes.imshow(fractions, cmap=COLOURS, vmin=0, vmax=1)
    if k <= MAX_NUMBERS:
        for i, row in enumerate(counts):
            for j, n in enumerate(row):
                colour = "white" if fractions[i][j] > 0.5 else "#333333" if n else "#bbbbbb"
                axes.text(j, i, str(n), ha="center", va="center", color=colour, fontsize=8)
    if k <= MAX_NAMES:
        names = [printable(name) for name in classes]
        names = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
        axes.set_xticks(range(k), names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(range(k), names)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    # The title counts labels, not images, because an image may have a label per pixel.
    title = f"accuracy {accuracy:.4f} on {int(counts.sum())} labels"
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    return png_of(figure)
