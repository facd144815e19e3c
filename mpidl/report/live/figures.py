"""Create the figures of the live page with Bokeh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bokeh.models import (
    BasicTickFormatter,
    ColumnDataSource,
    DataRange1d,
    HoverTool,
    NumeralTickFormatter,
)
from bokeh.palettes import Category10_10
from bokeh.plotting import figure

from mpidl.report.run_curves import TRAINING, VALIDATION

HEIGHT = 260
# Data of a run: (curves, validations, colour).
Sources = tuple[ColumnDataSource, ColumnDataSource, str]


def colours(count: int) -> list[str]:
    """Return a colour for each of `count` runs; a single run gets the colour of progress.png."""
    if count == 1:
        return [TRAINING]
    return [Category10_10[i % len(Category10_10)] for i in range(count)]


def scores(
    name: str, sources: Sequence[Sources], unit: str | None = None, y_axis_type: str = "linear"
) -> Any:
    """Return the figure of the column "loss" or "accuracy", with one `Sources` tuple per run."""
    plot = _figure(y_axis_type, f"{name}-{y_axis_type}")
    _draw_curves(plot, name, sources)
    for _, validations, colour in sources:
        mark = VALIDATION if len(sources) == 1 else colour
        plot.line("x", name, source=validations, line_width=1.5, color=mark, line_dash="dashed")
        points = {"size": 6, "marker": "square", "line_color": "white"}
        plot.scatter("x", name, source=validations, fill_color=mark, **points)
    if unit:
        plot.yaxis.axis_label = unit
    return plot


def learning_rate(sources: Sequence[Sources]) -> Any:
    """Return the figure of the learning rate."""
    plot = _figure("linear", "learning_rate")
    plot.y_range = DataRange1d(start=0)
    for curves, _, colour in sources:
        plot.line("x", "learning_rate", source=curves, line_width=1.5, color=colour)
    return plot


def speed(sources: Sequence[Sources]) -> Any:
    """Return the figure of the images per second."""
    plot = _figure("linear", "images_per_second")
    plot.y_range = DataRange1d(start=0)
    _draw_curves(plot, "images_per_second", sources)
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    return plot


def _draw_curves(plot, name, sources):
    """Draw a column of each run in a faint colour, with its moving average on top."""
    for curves, _, colour in sources:
        alpha = 0.4 if len(sources) == 1 else 0.18
        plot.line("x", name, source=curves, line_width=1, color=colour, alpha=alpha)
    for curves, _, colour in sources:
        plot.line("x", f"{name}_smooth", source=curves, line_width=2, color=colour)


def _figure(y_axis_type, name):
    """Return an empty figure that fills the width of its section on the page."""
    plot = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        y_axis_type=y_axis_type,
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_drag="box_zoom",
        name=name,
        min_border_left=60,
    )
    plot.add_tools(HoverTool(tooltips=[("x", "@x{0.[00]}"), ("", "$y{0.[00000]}")], mode="mouse"))
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.xaxis.axis_label = "iteration"
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    plot.xgrid.visible = False
    plot.ygrid.grid_line_color = "#e4e6ea"
    plot.outline_line_color = None
    return plot
