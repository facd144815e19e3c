"""Draw progress.png, a plot of loss and accuracy against iterations."""

import io
import os
from typing import Any

from mpidl.files import write_whole
from mpidl.report import run_files

TRAINING, VALIDATION, FAINT = "#2c6fbb", "#c8501e", "#a9c6e6"
FINAL = "#3c8d40"  # the validation of the returned network


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
    records = run_files.read_records(metrics_path)
    loss_axes, accuracy_axes = figure.subplots(2, 1, sharex=True)

    ends = {r["epoch"]: r["iteration"] for r in records if r.get("kind") == "epoch"}
    _draw(loss_axes, records, ends, "loss", 1)
    losses = [r["loss"] for r in records if r.get("loss")]
    if losses and max(losses) > 20 * min(losses) > 0:
        loss_axes.set_yscale("log")
    else:
        loss_axes.set_ylim(bottom=0)
    loss_axes.set_ylabel("loss")

    _draw(accuracy_axes, records, ends, "accuracy", 100)
    accuracy_axes.set_ylabel("accuracy (%)")
    accuracy_axes.set_xlabel("iteration")
    accuracy_axes.xaxis.get_major_locator().set_params(integer=True)
    _mark_epochs(loss_axes, accuracy_axes, ends)
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


def _draw(axes, records, ends, key, factor):
    """Draw one panel. The mean of an epoch is drawn at the middle of its iterations."""
    styles = {
        "iteration": dict(color=FAINT, linewidth=0.8, label="mini-batch"),
        "epoch": dict(
            color=TRAINING, linewidth=1.8, marker="o", label="training, mean over the epoch"
        ),
        "validation": dict(color=VALIDATION, linewidth=1.8, marker="s", label="validation"),
        "final_validation": dict(
            color=FINAL, linewidth=0, marker="D", label="validation of the returned network"
        ),
    }
    for kind, style in styles.items():
        points = [r for r in records if r.get("kind") == kind and r.get(key) is not None]
        iterations = [r["iteration"] for r in points]
        if kind == "epoch":
            iterations = [(ends.get(r["epoch"] - 1, 0) + r["iteration"]) / 2 for r in points]
        if points:
            axes.plot(iterations, [r[key] * factor for r in points], markersize=4, **style)
    lighten(axes)
    if axes.get_legend_handles_labels()[0]:
        # the location "best" checks every point, which takes seconds after a long run
        axes.legend(frameon=False, loc="upper right" if key == "loss" else "lower right")


def _mark_epochs(loss_axes, accuracy_axes, ends):
    """Mark the end of each epoch. If there are many, mark every second, fifth, ... epoch."""
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
