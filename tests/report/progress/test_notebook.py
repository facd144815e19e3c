"""The live display of a notebook: its records, curves and numbers."""

import math
import sys
import types
import xml.etree.ElementTree as ElementTree

import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.report import Console
from mpidl.report.progress import chart, notebook

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def displays(monkeypatch):
    """Replace IPython; return the list of (object, texts that it showed), one per display."""
    displays = []

    class Handle:
        def __init__(self):
            self.updates = []

        def update(self, run):
            self.updates.append(run._repr_mimebundle_()["text/plain"])

    def display(run, display_id):
        handle = Handle()
        handle.update(run)
        displays.append((run, handle.updates))
        return handle

    module = types.ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return displays


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Let trainings of this test record their progress in a folder; return the folder."""
    monkeypatch.setattr(notebook, "_folder", str(tmp_path))
    return tmp_path


def elements(html, kind):
    return list(ElementTree.fromstring(html).iter(SVG + kind))


def trained(world, **options):
    options = {"epochs": 2, "batch_size": 40, "validation_frequency": 0, **options}
    options = dl.TrainingOptions(validation=pictures(50), **options)
    return dl.train(small(), pictures(100), options, world=world, console=Console(1))


def test_the_display_of_a_training(recorded, displays, world):
    result = trained(world)
    notebook.LiveDisplay(str(recorded)).update()
    ((run, updates),) = displays
    assert len(updates) == 1 and updates[0].startswith("epoch 2 of 2, iteration 6 of 6, loss ")
    assert f"validation loss {result.validation_loss:.4f}" in updates[0]
    assert updates[0].endswith("elapsed, finished")
    assert [x for x, _ in run.curves["epoch loss"]] == [1.5, 4.5]
    assert [x for x, _ in run.curves["validation accuracy"]] == [3, 6]
    assert len(list(run.curves["iteration loss"])) == 6
    html = run._repr_mimebundle_()["text/html"]
    assert len(elements(html, "svg")) == 2 and len(elements(html, "polyline")) == 6
    assert "script" not in html


def test_each_training_has_a_display(recorded, displays, world):
    display = notebook.LiveDisplay(str(recorded))
    for _ in range(2):
        trained(world, epochs=1)
        display.draw_time = 0.0
        display.update()
    assert len(displays) == 2
    display.update()  # too soon
    display.update(is_last=True)  # nothing changes any more
    assert [len(updates) for _, updates in displays] == [1, 1]


def test_a_training_that_runs_or_is_killed(recorded, displays):
    """Half a line is read when it is complete; the last update ends the clock."""
    notebook.recorder().write("start", epochs=20, iterations=1000, iteration=0)
    (path,) = recorded.iterdir()
    display = notebook.LiveDisplay(str(recorded))
    display.update()
    line = '{"kind": "iteration", "epoch": 1, "iteration": 10, "loss": 0.5, "accuracy": null, '
    line += '"learning_rate": 0.01, "images_per_second": 100.0}\n'
    with open(path, "a") as file:
        for part in (line[:20], line[20:]):
            file.write(part)
            file.flush()
            display.draw_time = 0.0
            display.update()
    display.update(is_last=True)
    _, updates = displays[0]
    assert [text.split()[-1] for text in updates] == ["starting"] * 3 + ["left", "ended"]
    assert "accuracy" not in updates[3] and "iteration 10 of 1000" in updates[3]


def test_the_last_update_reads_the_end(recorded, displays):
    recorder = notebook.recorder()
    recorder.write("start", epochs=20, iterations=1000, iteration=0)
    display = notebook.LiveDisplay(str(recorded))
    display.update()
    recorder.write("state", state="finished")
    display.update(is_last=True)
    assert displays[0][1][-1].endswith("elapsed, finished")


def test_a_training_without_a_launch_records_nothing(tmp_path):
    assert notebook.recorder() is None and not notebook.in_notebook()


def test_a_stopped_training_says_so(recorded, displays, world):
    trained(world, output_functions=lambda info: info.iteration == 2)
    notebook.LiveDisplay(str(recorded)).update()
    assert displays[0][1][0].endswith("elapsed, stopped")


def test_a_chart():
    lines = [
        chart.Line("mini-batch", "#abc", [(i, 1 / i) for i in range(1, 401)]),
        chart.Line("epoch", "#123", [(5, 0.5), (6, math.nan), (9, 0.25)], has_markers=True),
        chart.Line("validation", "#f00", []),
    ]
    svg = chart.chart("loss", lines, 400)
    long_line, short_line = elements(svg, "polyline")
    assert len(long_line.get("points").split()) == 400
    assert len(short_line.get("points").split()) == len(elements(svg, "circle")) == 2
    texts = [element.text for element in elements(svg, "text")]
    assert {"loss", "epoch", "mini-batch", "iteration", "0.1", "0.01", "400"} <= set(texts)
    assert "validation" not in texts
    points = [tuple(map(float, pair.split(","))) for pair in long_line.get("points").split()]
    assert all(0 <= x <= chart.WIDTH and 0 <= y <= chart.HEIGHT for x, y in points)
    assert points == sorted(points) and points[0][1] < points[-1][1]  # y grows downwards


@pytest.mark.parametrize("values", [[], [0.0], [2.0], [-1.0, 3.0], [5.0, 5.0], [1e-9, 1e9]])
def test_a_chart_of_unusual_values(values):
    svg = chart.chart("loss", [chart.Line("a", "#000", list(enumerate(values)))], 0)
    assert "nan" not in svg and elements(svg, "text")
    assert elements(chart.chart("accuracy", [], 10, 1.0), "path")


@pytest.mark.parametrize("count", [1, chart.MAX_POINTS // 2, 2 * chart.MAX_POINTS + 3, 100_001])
def test_a_curve_keeps_its_extremes(count):
    """However long it is, it has the same few points in every part, in their order."""
    curve, spikes = chart.Curve(), {count // 3: -1.0, count // 2: 2.0}
    for i in range(count):
        curve.add(i, spikes.get(i, (i % 7) / 7))
    points = list(curve)
    assert points == sorted(points)
    assert set(spikes.items()) <= set(points) or count == 1
    if count <= chart.MAX_POINTS // 2:
        assert [x for x, _ in points] == list(range(count))
    else:
        assert chart.MAX_POINTS // 4 < len(points) <= chart.MAX_POINTS
        gaps = [after - before for (before, _), (after, _) in zip(points, points[1:], strict=False)]
        assert max(gaps) <= 12 * count / chart.MAX_POINTS
