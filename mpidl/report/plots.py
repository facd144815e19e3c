"""Draw progress.png, a plot of loss and accuracy against iterations."""

import io
import os
from typing import Any

from mpidl.files import write_whole
from mpidl.report import run_files
from mpidl.report.run_curves import curves_of

STYLES: dict[str, dict[str, Any]] = {
    "faint": {"linewidth": 0.8, "alpha": 0.4},
    "line": {"linewidth": 1.8, "marker": "o"},
    "dashed": {"linewidth": 1.8, "marker": "s"},
    "points": {"linewidth": 0, "marker": "D"},
}


def progress(metrics_path: str | os.PathLike, png_path: str | os.PathLike) -> bool:
    """Plot the loss and accuracy that a metrics file records to a PNG file; return False if
    matplotlib is not installed. The upper panel shows the loss of each mini-batch, the mean loss of
    each epoch, and the loss of each validation. The lower panel shows the same for the accuracy, in
    per cent. Raises UserError if the file cannot be written.
    """
    try:
        figure = new_figure(9, 6.5)
    except ImportError:
        return False
    history = run_files.history(metrics_path)
    loss_axes, accuracy_axes = figure.subplots(2, 1, sharex=True)

    _draw(loss_axes, curves_of(history, "loss"), "upper right")
    losses = [y for line in loss_axes.lines for y in line.get_ydata() if y > 0]
    if losses and max(losses) > 20 * min(losses) > 0:
        loss_axes.set_yscale("log")
    else:
        loss_axes.set_ylim(bottom=0)
    loss_axes.set_ylabel("loss")

    _draw(accuracy_axes, curves_of(history, "accuracy", 100), "lower right")
    accuracy_axes.set_ylabel("accuracy (%)")
    accuracy_axes.set_xlabel("iteration")
    accuracy_axes.xaxis.get_major_locator().set_params(integer=True)
    _mark_epochs(loss_axes, accuracy_axes, history.epoch)
    loss_axes.set_title("Training progress", loc="left", pad=26)

    write_whole(png_path, png_of(figure))
    return True


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; width and height are in inches.

    Raise ImportError if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def png_of(figure: Any) -> bytes:
    """Render a figure, and return the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def lighten(axes: Any) -> None:
    """Draw horizontal grid lines behind the data, and remove the top and right frame lines."""
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw(axes, curves, place):
    """Draw one panel with its legend."""
    for name, points, colour, style in curves.values():
        axes.plot(
            *zip(*points, strict=True), color=colour, label=name, markersize=4, **STYLES[style]
        )
    lighten(axes)
    if curves:
        # the location "best" checks every point, which takes seconds after a long run
        axes.legend(frameon=False, loc=place)


def _mark_epochs(loss_axes, accuracy_axes, epochs):
    """Mark the end of each epoch. If there are many, mark every second, fifth, ... epoch."""
    ends = dict(zip(epochs.epoch.tolist(), epochs.iteration.tolist(), strict=True))
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if len(ends) <= 12 * s or s == 1000)
    marked = {epoch: iteration for epoch, iteration in ends.items() if epoch % step == 0}
    for axes in (loss_axes, accuracy_axes):
        for iteration in marked.values():
            axes.axvline(iteration, color="#e4e4e4", linewidth=0.8, zorder=0)
    top = loss_axes.secondary_xaxis("top")
    top.set_xticks(list(marked.values()), [str(epoch) for epoch in marked])
    top.tick_params(length=0, labelsize=8, labelcolor="#777777")
    top.set_xlabel("end of epoch", fontsize=8, color="#777777", loc="right")
    top.spines["top"].set_visible(False)
