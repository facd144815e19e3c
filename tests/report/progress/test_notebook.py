"""Test the live display of a notebook: its records, curves and numbers."""

import sys
import types
import xml.etree.ElementTree as ElementTree

import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.report import Console
from mpidl.report.progress import notebook, notebook_records
from mpidl.report.run_curves import curves_of

START = {"kind": "start", "epochs": 20, "iterations": 1000, "iteration": 0}


@pytest.fixture
def displays(monkeypatch):
    """Replace IPython. Return a list of (object, shown texts), one per display."""
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
def recorded(tmp_path):
    """Make this test's training runs record their progress in a folder. Return the folder."""
    notebook_records.launch.folder = str(tmp_path)
    yield tmp_path
    notebook_records.launch.folder = None


def elements(html, kind):
    return list(ElementTree.fromstring(html).iter(kind))


def trained(world, **options):
    options = {"epochs": 2, "batch_size": 40, "validation_frequency": 0, **options}
    options = dl.TrainingOptions(validation=pictures(50), **options)
    return dl.train(small(), pictures(100), options, world=world, console=Console(1))


def test_the_display_of_a_training(recorded, displays, world):
    result = trained(world, metrics="f1")
    notebook.LiveDisplay(str(recorded)).update()
    ((run, updates),) = displays
    assert len(updates) == 1 and updates[0].startswith("epoch 2 of 2, iteration 6 of 6, loss ")
    assert f"validation loss {result.validation_loss:.4f}" in updates[0]
    assert f"validation f1 {result.history.final_validation.metrics['f1'][-1]:.4f}" in updates[0]
    assert updates[0].endswith("elapsed, finished")
    curves = curves_of(run.recorder.history(), "loss")
    assert [x for x, _ in curves["epoch"].points] == [1.5, 4.5]
    assert [x for x, _ in curves["validation"].points] == [3, 6]
    assert len(curves["iteration"].points) == 6
    html = run._repr_mimebundle_()["text/html"]
    assert len(elements(html, "svg")) == 2 and len(elements(html, "polyline")) == 8
    assert "script" not in html


def test_the_returned_network_is_drawn_at_its_iteration(recorded, displays, world):
    options = {"output_network": "best-validation", "validation_frequency": 1}
    rate = {"learn_rate_schedule": lambda epoch, iteration: 0.01 if iteration < 3 else 10.0}
    result = trained(world, **options, **rate)
    notebook.LiveDisplay(str(recorded)).update()
    ((run, _),) = displays
    (point,) = curves_of(run.recorder.history(), "loss")["final_validation"].points
    final = result.history.final_validation
    assert point == (final.iteration[0], final.loss[0])
    assert point[0] == result.best_iteration < result.iterations


def test_each_training_has_a_display(recorded, displays, world):
    display = notebook.LiveDisplay(str(recorded))
    for _ in range(2):
        trained(world, epochs=1)
        display.draw_time = 0.0
        display.update()
    assert len(displays) == 2
    display.update()  # too soon after the last update
    display.update(is_last=True)  # no more changes
    assert [len(updates) for _, updates in displays] == [1, 1]


def test_a_training_that_runs_or_is_killed(recorded, displays):
    """An incomplete line is read once it is complete, and the last update stops the clock."""
    notebook_records.recorder().write(START)
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
    recorder = notebook_records.recorder()
    recorder.write(START)
    display = notebook.LiveDisplay(str(recorded))
    display.update()
    recorder.write({"kind": "state", "state": "finished"})
    display.update(is_last=True)
    assert displays[0][1][-1].endswith("elapsed, finished")


def test_a_training_without_a_launch_records_nothing(tmp_path):
    assert notebook_records.recorder() is None and not notebook.in_notebook()


def test_a_stopped_training_says_so(recorded, displays, world):
    trained(world, output_functions=lambda info: info.iteration == 2)
    notebook.LiveDisplay(str(recorded)).update()
    assert displays[0][1][0].endswith("elapsed, stopped")
