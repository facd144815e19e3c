"""The panel of the live page that shows how each rank spends its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, Div, InlineStyleSheet, Range1d, Select
from bokeh.plotting import figure

from mpidl.report import elements
from mpidl.report.curves import number
from mpidl.report.live.run import LiveRun

# {phase in a record: (colour, text)}, in the order of the bars from left to right
PHASES = {
    "compute": ("#2c6fbb", "compute"),
    "input": ("#74a85a", "wait for data"),
    "sum": ("#e3b341", "sums"),
    "wait": ("#c8501e", "wait for ranks"),
    "other": ("#c9ced6", "other"),
}
MEGABYTE = 1e6
MAX_ROWS = 256  # maximum number of rows of the table; the bars show all ranks
TABLE_STYLE = """
div { max-height: 260px; overflow-y: auto; }
table { width: 100%; border-collapse: collapse; font: 13px/1.6 system-ui, sans-serif; color: #222;
        font-variant-numeric: tabular-nums; }
th { font-weight: 600; position: sticky; top: 0; background: #fff; }
th, td { text-align: right; padding: 1px 10px; border-bottom: 1px solid #e8eaee; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
"""
MAX_HEIGHT, BAR_HEIGHT = 300, 24  # pixels


class RanksPanel:
    """Bars and a table of the last "ranks" record of one run, which the user selects."""

    def __init__(self, runs: Sequence[LiveRun]) -> None:
        self.runs = runs
        self.source = ColumnDataSource(columns_of({}), name="ranks-data")
        self.select = Select(
            options=[(str(i), run.name) for i, run in enumerate(runs)], value="0", width=260
        )
        self.select.visible = len(runs) > 1
        self.select.on_change("value", lambda attribute, old, new: self.update())
        self.note = Div(text="The run has recorded no times of its ranks yet.", name="ranks-note")
        self.bars = self._bars()
        style = InlineStyleSheet(css=TABLE_STYLE)
        self.table = Div(stylesheets=[style], sizing_mode="stretch_width", name="ranks-table")
        self.record: dict[str, Any] | None = None
        self._show(False)
        self.root = column(
            self.select, self.note, self.bars, self.table, sizing_mode="stretch_width"
        )

    def _bars(self):
        bars = figure(
            sizing_mode="stretch_width",
            tools="",
            x_range=Range1d(0, 100),
            y_range=Range1d(0.5, -0.5),  # rank 0 is at the top
            min_border_left=60,
            tooltips=[
                ("rank", "@rank"),
                *((text, f"@{name}{{0.0}} %") for name, (_, text) in PHASES.items()),
                ("memory", "@memory{0,0} MB"),
                ("device", "@device"),
            ],
            name="ranks-bars",
        )
        for name, (colour, text) in PHASES.items():
            ends = {"left": f"{name}_start", "right": f"{name}_end"}
            bars.hbar(
                y="rank", height=0.8, source=self.source, color=colour, legend_label=text, **ends
            )
        bars.add_layout(bars.legend[0], "right")
        bars.legend[0].border_line_color = None
        bars.toolbar.logo = None
        bars.toolbar_location = None
        bars.grid.visible = False
        bars.outline_line_color = None
        bars.yaxis.axis_label, bars.xaxis.axis_label = "rank", "%"
        bars.axis.axis_label_text_font_style = "normal"
        bars.yaxis.ticker.min_interval = 1
        bars.axis.minor_tick_line_color = None
        return bars

    def _show(self, is_shown):
        self.note.visible = not is_shown
        self.bars.visible = self.table.visible = is_shown

    def update(self) -> None:
        """Show the last record of the selected run, if the record has changed."""
        record = self.runs[int(self.select.value)].ranks
        if record is self.record:
            return
        self.record = record
        self.source.data = columns_of(record or {})
        count = len(self.source.data["rank"])
        self._show(count > 0)
        if not count:
            return
        self.bars.y_range.update(start=count - 0.5, end=-0.5)
        self.bars.height = min(BAR_HEIGHT * count + 120, MAX_HEIGHT)
        self.table.text = _table(self.source.data)


def _table(data):
    """Return the HTML of the table."""
    heads = ["rank", "device", "memory (MB)", *(f"{text} (%)" for _, text in PHASES.values())]
    rows = [
        [str(i), data["device"][i], f"{data['memory'][i]:,.0f}"]
        + [f"{data[name][i]:.1f}" for name in PHASES]
        for i in range(min(len(data["rank"]), MAX_ROWS))
    ]
    text = ElementTree.tostring(elements.table(heads, rows), encoding="unicode", method="html")
    note = f"<p>the first {MAX_ROWS} ranks</p>" if len(data["rank"]) > MAX_ROWS else ""
    return f"{text}{note}"


def columns_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of the table and of the bars for a "ranks" record.

    Times are converted to percentages of the time that the record covers, and memory to MB. The
    columns are empty if the record has no ranks.
    """
    count = len(_list(record, "compute"))
    data: dict[str, Any] = {"rank": np.arange(count)}
    times = {}
    for name in PHASES:
        values = [number(value) for value in _list(record, name)[:count]]
        times[name] = np.nan_to_num(np.array(values + [0.0] * (count - len(values))))
    duration = np.maximum(sum(times.values()), 1e-9)
    end = np.zeros(count)
    for name, values in times.items():
        data[name] = 100 * values / duration
        data[f"{name}_start"], end = end, end + data[name]
        data[f"{name}_end"] = end
    memory = [number(value) / MEGABYTE for value in _list(record, "memory")[:count]]
    data["memory"] = np.array(memory + [np.nan] * (count - len(memory)))
    devices = [str(value) for value in _list(record, "device")[:count]]
    data["device"] = devices + [""] * (count - len(devices))
    return data


def _list(record, name):
    value = record.get(name)
    return value if isinstance(value, list) else []
