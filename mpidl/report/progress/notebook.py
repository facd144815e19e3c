"""Show a run in a notebook while it trains: draw the records that rank 0 writes."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from mpidl.report import svg_charts
from mpidl.report.history import HistoryRecorder
from mpidl.report.loop_records import LoopRecords
from mpidl.report.progress import rows
from mpidl.report.progress.notebook_records import PREFIX, Recorder, recorder
from mpidl.report.run_curves import curves_of

DRAW_SECONDS = 0.5  # shortest time between two drawings
CHART_SIZE = 430, 230  # pixels


class LoopListener:
    """A listener of `World.report` that records a custom loop from its first report on."""

    def __init__(self) -> None:
        self._records = LoopRecords(self._write)
        self._recorder: Recorder | None = None

    def __call__(self, facts: Mapping[str, Any]) -> set[str]:
        return self._records(facts)

    def _write(self, record):
        if self._recorder is None and (new := recorder()) is not None:
            new.write({"kind": "start", "epochs": 0, "iterations": 0, "iteration": 0})
            self._recorder = new
        if self._recorder is not None:
            self._recorder.write(record)

    def end(self, is_stopped: bool) -> None:
        """Record the end of the loop."""
        if self._recorder is not None:
            state = "stopped" if is_stopped else "finished"
            self._recorder.write({"kind": "state", "state": state})


class Run:
    """The progress of one training run, as read from its file."""

    def __init__(self, path: str) -> None:
        self.file, self.partial = open(path), ""
        self.start_time, self.end_time = time.monotonic(), 0.0
        self.epochs = self.iterations = self.first = 0.0
        self.last: dict[str, Any] = {}  # the last iteration
        self.recorder = HistoryRecorder()
        self.validation: dict[str, Any] = {}
        self.state = "starting"

    def read(self) -> None:
        """Read the new records."""
        text = self.partial + self.file.read()
        *lines, self.partial = text.split("\n")
        for line in lines:
            self._add(json.loads(line))

    def _add(self, record):
        kind = record["kind"]
        if kind == "start":
            self.epochs, self.iterations = record["epochs"], record["iterations"]
            self.first = record["iteration"]
        elif kind == "state":
            self.state = record["state"]
            if self.state not in ("training", "finishing"):
                self.end()
        else:
            if kind == "iteration":
                self.last, self.state = record, "training"
            elif kind in ("validation", "final_validation"):
                self.validation = record
            self.recorder.add(record)

    def end(self) -> None:
        """Stop the clock, and stop reading."""
        if not self.end_time:
            self.end_time = time.monotonic()
            self.file.close()

    def facts(self) -> list[str]:
        """Return texts about the progress, such as "epoch 3 of 20"."""
        elapsed = (self.end_time or time.monotonic()) - self.start_time
        texts, last = [], self.last
        if last:
            for name, total in (("epoch", self.epochs), ("iteration", self.iterations)):
                texts.append(f"{name} {last[name]:.0f}" + (f" of {total:.0f}" if total else ""))
            for source, prefix in ((last, ""), (self.validation, "validation ")):
                scores = {name: source.get(name) for name in ("loss", "accuracy")}
                texts += [
                    f"{prefix}{name} {rows.decimal(score)}"
                    for name, score in (scores | source.get("metrics", {})).items()
                    if score is not None
                ]
            if last["learning_rate"] is not None:
                texts.append(f"learning rate {last['learning_rate']:g}")
            if last["images_per_second"] is not None:
                texts.append(f"{last['images_per_second']:.0f} images/s")
        texts.append(f"{rows.clock(elapsed)} elapsed")
        iterations = last["iteration"] - self.first if last else 0
        if iterations and self.iterations and not self.end_time and self.state == "training":
            remaining = elapsed / iterations * (self.iterations - last["iteration"])
            texts.append(rows.time_left(remaining))
        else:
            texts.append(self.state)
        return texts

    def html(self) -> str:
        """Return HTML with the curves of loss and accuracy, below a line of numbers."""
        from xml.etree import ElementTree  # ranks do not need it

        x_end = self.last["iteration"] if self.last else 1.0
        if not self.end_time:
            x_end = min(1.25 * x_end, self.iterations or math.inf)  # space for later iterations
        history, charts = self.recorder.history(), []
        for name, y_end in (("loss", None), ("accuracy", 1.0)):
            curves, ends = curves_of(history, name), (x_end, y_end)
            if "iteration" in curves:
                lines, log = list(curves.values()), name == "loss"
                charts.append(svg_charts.chart(name, lines, log=log, ends=ends, size=CHART_SIZE))
        drawn = "".join(ElementTree.tostring(c, "unicode", method="html") for c in charts)
        style = "font-family:sans-serif;font-size:13px;margin:4px 0"
        columns = f"display:grid;grid-template-columns:repeat(auto-fill,{CHART_SIZE[0]}px)"
        facts = " · ".join(self.facts())
        return f'<div style="{style}">{facts}<div style="{columns}">{drawn}</div></div>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": ", ".join(self.facts())}


class LiveDisplay:
    """Shows the training runs of a launch in the output of a notebook cell.

    Rank 0 writes its records to the same folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.draw_time = folder, 0.0
        self.runs: dict[str, tuple[Run, Any]] = {}  # {file: (run, its IPython display)}

    def update(self, is_last: bool = False) -> None:
        """Draw new records, at most once per `DRAW_SECONDS` unless this is the last call."""
        now = time.monotonic()
        if not is_last and now - self.draw_time < DRAW_SECONDS:
            return
        from IPython.display import display

        self.draw_time = now
        for name in sorted(os.listdir(self.folder)):
            if name.startswith(PREFIX) and name not in self.runs:
                run = Run(os.path.join(self.folder, name))
                run.read()
                self.runs[name] = run, display(run, display_id=True)
        for run, handle in self.runs.values():
            if not run.end_time:
                run.read()
                if is_last and not run.end_time:  # the ranks ended without recording an end
                    run.state = "ended"
                    run.end()
                handle.update(run)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
