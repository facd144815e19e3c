"""The picture of a confusion matrix."""

import importlib.util
import io

from mpidl.errors import UserError

COLOURS = "Blues"
MARKED = 30  # classes: of more, the cells have no room for numbers
NAMED = 60  # classes: of more, the axes have no room for names


def need_matplotlib(path):
    """A UserError where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"{path}: a picture is drawn by matplotlib, which is not installed (pip install "
            "'.[plots]'); a .csv needs none"
        )


def draw(counts, classes, accuracy):
    """The bytes of a PNG: (K, K) counts, rows the true classes, darker by the share of the row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    k = len(classes)
    side = min(max(3.5 + 0.45 * k, 5.0), 16.0)
    figure = Figure(figsize=(side, side), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = [[n / max(int(row.sum()), 1) for n in row] for row in counts]
    axes.imshow(shares, cmap=COLOURS, vmin=0, vmax=1)
    if k <= MARKED:
        for i, row in enumerate(counts):
            for j, n in enumerate(row):
                colour = "white" if shares[i][j] > 0.5 else "#333333" if n else "#bbbbbb"
                axes.text(j, i, str(n), ha="center", va="center", color=colour, fontsize=8)
    if k <= NAMED:
        names = [name if len(name) <= 18 else f"{name[:17]}…" for name in classes]
        axes.set_xticks(range(k), names, rotation=90 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(range(k), names)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    # an image may have many labels, one a pixel
    title = f"accuracy {accuracy:.4f} of {int(counts.sum())} labels"
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
