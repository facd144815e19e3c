"""The live page of one browser session: curves of all runs, and a row with buttons per run."""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Sequence
from importlib import resources

import jinja2
import numpy as np
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import (
    Button,
    Checkbox,
    ColumnDataSource,
    CustomJS,
    Div,
    InlineStyleSheet,
    RadioButtonGroup,
    Slider,
)

from mpidl.report import stop_file
from mpidl.report.curves import binned, smoothed
from mpidl.report.live import figures
from mpidl.report.live.ranks_panel import RanksPanel
from mpidl.report.live.run import LiveRun
from mpidl.report.progress.rows import clock

UPDATE_MILLISECONDS = 1000
AXES = {"iteration": "iteration", "epoch": "epoch", "time (s)": "seconds"}
SMOOTHED = ("loss", "accuracy", "images_per_second")
LOG_RATIO = 20  # above this ratio of the largest to the smallest loss, the scale is logarithmic
# JavaScript: show that the connection is lost, and reload the page once the server answers. The
# server of a run ends with the run, so after the end of all runs, this is no fault.
LOST = """
const kind = rows.every(row => row.tags.includes("ended")) ? "ended" : "lost";
document.getElementById(kind).hidden = false;
const reload = (answer) => answer.ok ? location.reload() : retry();
const retry = () => setTimeout(() => fetch(location.href).then(reload, retry), 3000);
retry();
"""
ROW_STYLE = """
.run { display: flex; align-items: center; gap: 10px; flex-wrap: wrap; font: 14px/1.4 system-ui,
       sans-serif; color: #222; }
.swatch { width: 12px; height: 12px; border-radius: 3px; }
.name { font-weight: 600; }
.bar { width: 140px; height: 8px; border-radius: 4px; background: #e1e4e8; overflow: hidden; }
.bar div { height: 100%; }
.note { color: #6b7480; }
"""


class Page:
    """The Bokeh models of a session. `update` refreshes them."""

    def __init__(self, document: Document, runs: Sequence[LiveRun]) -> None:
        self.document, self.runs = document, runs
        self.colours = figures.colours(len(runs))
        self.versions = [-1] * len(runs)
        self.messages = [""] * len(runs)
        self._add_controls()
        self._add_rows()
        self._add_curves()
        self.ranks = RanksPanel(runs)
        self.loss_figures[1].visible = False
        roots = {
            "runs": column(*self.rows, sizing_mode="stretch_width"),
            "controls": row(*self.controls, sizing_mode="stretch_width"),
            "loss": column(*self.loss_figures, sizing_mode="stretch_width"),
            "accuracy": self.figures["accuracy"],
            "learning_rate": self.figures["learning_rate"],
            "speed": self.figures["images_per_second"],
            "ranks": self.ranks.root,
        }
        for name, model in roots.items():
            model.name = name
            document.add_root(model)
        document.template = _template()
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        end = "The run has ended" if len(runs) == 1 else "All runs have ended"
        document.template_variables.update(count=count, end=end, legend=_legend(len(runs)))
        # Bokeh can restore a connection only within minutes, and does not restore the figures'
        # arrays.
        document.config.reconnect_session = False
        document.config.notify_connection_status = False  # LOST does
        document.js_on_event("connection_lost", CustomJS(args={"rows": self.texts}, code=LOST))
        self.update()
        document.add_periodic_callback(self.update, UPDATE_MILLISECONDS)

    def _add_controls(self):
        self.axis = RadioButtonGroup(labels=list(AXES), active=0, name="axis", height=32)
        self.smoothing = Slider(start=0, end=0.99, step=0.01, value=0.9, name="smoothing")
        self.smoothing.update(title="smoothing", width=220, margin=(0, 20, 0, 20))
        self.log_scale = Checkbox(label="loss on a log scale", active=False, name="log")
        self.log_scale.margin = (12, 5, 5, 5)
        self.is_scale_chosen = False
        self.controls = [self.axis, self.smoothing, self.log_scale]
        for widget, attribute in ((self.axis, "active"), (self.smoothing, "value")):
            widget.on_change(attribute, self._redraw)
        self.log_scale.on_change("active", self._choose_scale)

    def _redraw(self, attribute, old, new):
        self.versions = [-1] * len(self.runs)
        axis = list(AXES)[self.axis.active]
        for figure in (*self.figures.values(), *self.loss_figures):
            figure.xaxis.axis_label = axis
        self.update()

    def _choose_scale(self, attribute, old, new):
        self.is_scale_chosen = True
        self._show_scale(new)

    def _show_scale(self, is_logarithmic):
        linear, logarithmic = self.loss_figures
        linear.visible, logarithmic.visible = not is_logarithmic, is_logarithmic

    def _suggest_scale(self):
        """Use the log scale once the losses differ greatly, unless the user has chosen a scale."""
        if self.is_scale_chosen or self.log_scale.active:
            return
        losses = np.concatenate([source.data["loss_smooth"] for source in self.curves])
        losses = losses[losses > 0]
        if len(losses) and losses.max() > LOG_RATIO * losses.min():
            self.log_scale.active = True
            self.is_scale_chosen = False

    def _add_rows(self):
        style = InlineStyleSheet(css=ROW_STYLE)
        self.texts, self.stop_buttons, self.rows = [], [], []
        for i in range(len(self.runs)):
            text = Div(stylesheets=[style], sizing_mode="stretch_width", name=f"run-{i}")
            buttons = []
            for label, moment, kind in (
                ("Stop", stop_file.NOW, "danger"),
                ("Stop after epoch", stop_file.EPOCH, "default"),
            ):
                button = Button(label=label, button_type=kind, height=30, name=f"{moment}-{i}")
                button.update(sizing_mode="fixed", width=70 if moment == stop_file.NOW else 130)
                button.on_click(functools.partial(self._stop, i, moment))
                buttons.append(button)
            self.texts.append(text)
            self.stop_buttons.append(buttons)
            self.rows.append(row(text, *buttons, sizing_mode="stretch_width"))

    def _stop(self, index, moment):
        self.messages[index] = self.runs[index].folder.request_stop(moment) or ""
        self.runs[index].request = None if self.messages[index] else moment
        self._update_row(index)

    def _add_curves(self):
        self.curves = [ColumnDataSource(name=f"curves-{i}") for i in range(len(self.runs))]
        self.validations = [ColumnDataSource(name=f"validation-{i}") for i in range(len(self.runs))]
        for i in range(len(self.runs)):
            self._set_curves(i)
        sources = list(zip(self.curves, self.validations, self.colours, strict=True))
        self.loss_figures = [
            figures.scores("loss", sources, y_axis_type=scale) for scale in ("linear", "log")
        ]
        self.figures = {
            "accuracy": figures.scores("accuracy", sources, unit="%"),
            "learning_rate": figures.learning_rate(sources),
            "images_per_second": figures.speed(sources),
        }

    def update(self) -> None:
        """Read the runs, and send all changes to the browser."""
        self.document.hold("combine")
        for i, run in enumerate(self.runs):
            run.poll()
            if run.version != self.versions[i]:
                self.versions[i] = run.version
                self._set_curves(i)
            self._update_row(i)
        self._suggest_scale()
        self.ranks.update()
        self._set_title()
        self.document.unhold()

    def _set_curves(self, index):
        run = self.runs[index]
        data = {"x": binned(self._positions(run, run.iterations))}
        for name in (*SMOOTHED, "learning_rate"):
            values = binned(run.iterations.column(name))
            values = 100 * values if name == "accuracy" else values
            data[name] = values
            if name in SMOOTHED:
                data[f"{name}_smooth"] = smoothed(values, self.smoothing.value)
        self.curves[index].data = {k: v.astype(np.float32) for k, v in data.items()}
        rows = run.validations
        data = {"x": self._positions(run, rows), "loss": rows.column("loss")}
        data["accuracy"] = 100 * rows.column("accuracy")
        self.validations[index].data = data

    def _positions(self, run, columns):
        """Return the positions of rows on the x axis."""
        name = list(AXES.values())[self.axis.active]
        if name == "epoch":
            return columns.column("iteration") / run.iterations_per_epoch
        return columns.column(name)

    def _update_row(self, index):
        run, colour = self.runs[index], self.colours[index]
        # Bokeh sends only properties whose values change.
        self.texts[index].text = _row_text(run, colour, self.messages[index])
        self.texts[index].tags = ["ended"] if run.has_ended else []
        is_disabled = run.why_no_stop() is not None
        for button in self.stop_buttons[index]:
            button.disabled = is_disabled

    def _set_title(self):
        run = self.runs[0]
        percent = "" if math.isnan(run.progress()) else f"{100 * run.progress():.0f} % "
        self.document.title = f"{percent}{run.name} - mpidl" if len(self.runs) == 1 else "mpidl"


def _row_text(run: LiveRun, colour: str, message: str) -> str:
    """Return the HTML of a run's row."""
    parts = [f'<div class="swatch" style="background:{colour}"></div>']
    parts.append(f'<span class="name">{html.escape(run.name)}</span>')
    progress = run.progress()
    if math.isfinite(progress):
        inner = f'<div style="width:{100 * progress:.1f}%;background:{colour}"></div>'
        parts.append(f'<div class="bar">{inner}</div>')
    parts.append(f"<span>{html.escape(run.describe())}</span>")
    parts.append(f'<span class="note">{html.escape(", ".join(_facts(run)))}</span>')
    reason = message or run.why_no_stop()
    if reason and not run.has_ended:
        parts.append(f'<span class="note">cannot be stopped here: {html.escape(reason)}</span>')
    return f'<div class="run">{"".join(parts)}</div>'


def _facts(run: LiveRun) -> list[str]:
    """Return the position, the speed and the remaining time of a run."""
    rows, status = run.iterations, run.status
    if not len(rows):
        return []
    epochs = f"/{status.epochs}" if status and status.epochs else ""
    iterations = f"/{status.iterations}" if status and status.iterations else ""
    facts = [f"epoch {rows.last('epoch'):.0f}{epochs}"]
    facts.append(f"iteration {rows.last('iteration'):.0f}{iterations}")
    facts.append(f"{clock(_finite(rows.last('seconds')))} elapsed")
    if not run.has_ended:
        speed, left = rows.recent_mean("images_per_second"), run.seconds_left()
        facts += [f"{speed:.0f} images/s"] if math.isfinite(speed) else []
        facts += [f"{clock(left)} left"] if math.isfinite(left) else []
    return facts


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _legend(count: int) -> str:
    if count > 1:
        return "solid: mini-batches, smoothed; squares: validation"
    return "faint: mini-batches; solid: smoothed; squares: validation"


@functools.cache
def _template() -> jinja2.Template:
    return jinja2.Template(resources.files(__package__).joinpath("page.html").read_text())
