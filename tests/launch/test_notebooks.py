"""Test `dl.launch` in a real notebook kernel: the live display and interrupts."""

import asyncio
import uuid
import xml.etree.ElementTree as ElementTree

import pytest
from launcher import environment, marked
from limits import wait_until

nbformat = pytest.importorskip("nbformat", reason="no nbformat: pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="no ipykernel: pip install nbclient ipykernel")

pytestmark = pytest.mark.slow("notebooks")

DEFINITIONS = """
import signal
import time

import numpy as np
import mpidl as dl

def trained(world, epochs):
    pixels = (np.arange(90 * 64).reshape(90, 8, 8) * 31 % 251).astype(np.uint8)
    images = dl.ArrayDatastore(pixels, np.arange(90) % 3)
    net = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)], (1, 8, 8), seed=0)
    options = dl.TrainingOptions(epochs=epochs, batch_size=32, validation=images)
    return net, dl.train(net, images, options, world=world)

def custom_loop(world):
    iteration = 0
    while not world.stop_requested():
        iteration += 1
        world.report(epoch=1, iteration=iteration, loss=1 / iteration, accuracy=0.5)
    return iteration

def ignores_interrupts(world):
    signal.signal(signal.SIGINT, lambda *_: print("is interrupted", flush=True))
    print("waits", flush=True)
    time.sleep(1000)  # longer than the test's limit
"""
TRAINING = """
net, result = dl.launch(trained, {epochs}, ranks=2, plots="live")
print(result.stopped, result.iterations, len(net.parameters))
"""


class Notebook:
    """Executes cells in a kernel, and interrupts the kernel when a message fits a condition."""

    def __init__(self, *cells):
        self.book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        self.client = nbclient.NotebookClient(self.book, timeout=None, kernel_name="python3")
        self.client.allow_errors = True
        self.messages, self.conditions = [], []
        self.process, self.client.process_message = self.client.process_message, self._process

    def run(self, *conditions):
        """Execute all cells. Each condition interrupts the kernel once, in order."""
        self.conditions = list(conditions)
        self.client.execute(env=environment())
        assert not self.conditions
        return [cell.outputs for cell in self.book.cells]

    def _process(self, message, cell, index):
        self.messages.append((message["msg_type"], message["content"]))
        if self.conditions and self.conditions[0](*self.messages[-1]):
            del self.conditions[0]
            asyncio.ensure_future(_interrupt(self.client.km))
        return self.process(message, cell, index)


async def _interrupt(manager):
    answer = manager.interrupt_kernel()
    if asyncio.iscoroutine(answer) or asyncio.isfuture(answer):
        await answer


def texts(outputs):
    return "".join(output.get("text", "") for output in outputs)


def says(text):
    return lambda kind, content: kind == "stream" and text in content["text"]


def shows(text):
    return lambda kind, content: text in content.get("data", {}).get("text/plain", "")


def test_a_training_is_shown_live():
    # This takes several times as long as the time between two drawings.
    notebook = Notebook(DEFINITIONS, TRAINING.format(epochs=2000))
    _, outputs = notebook.run()
    assert texts(outputs).splitlines()[-1] == "None 6000 6"
    updates = [c["data"] for kind, c in notebook.messages if kind == "update_display_data"]
    assert updates and len({data["text/html"] for data in updates}) == len(updates)
    (bundle,) = (output["data"] for output in outputs if output.output_type == "display_data")
    assert bundle["text/plain"].startswith("epoch 2000 of 2000, iteration 6000 of 6000, loss ")
    assert bundle["text/plain"].endswith("elapsed, finished")
    charts = ElementTree.fromstring(bundle["text/html"]).findall("div/figure/svg")
    assert len(charts) == 2 and "<script" not in bundle["text/html"]


def test_an_interrupt_returns_the_network_trained_so_far():
    after = "print('the kernel goes on')"
    notebook = Notebook(DEFINITIONS, TRAINING.format(epochs=10**6), after)
    _, outputs, last = notebook.run(shows("iteration "))
    assert not [output for output in outputs if output.output_type == "error"]
    stopped, iterations, count = texts(outputs).splitlines()[-1].split()
    assert stopped == "SIGINT" and int(iterations) > 0 and count == "6"
    (bundle,) = (output["data"] for output in outputs if output.output_type == "display_data")
    assert bundle["text/plain"].endswith("elapsed, stopped")
    assert texts(last) == "the kernel goes on\n"


def test_a_custom_loop_is_shown_live_and_an_interrupt_stops_it():
    notebook = Notebook(DEFINITIONS, 'dl.launch(custom_loop, ranks=2, plots="live")')
    _, outputs = notebook.run(shows("iteration "))
    (result,) = (o["data"] for o in outputs if o.output_type == "execute_result")
    (bundle,) = (o["data"] for o in outputs if o.output_type == "display_data")
    assert bundle["text/plain"].startswith(f"epoch 1, iteration {result['text/plain']}, loss ")
    assert bundle["text/plain"].endswith("elapsed, stopped")
    charts = ElementTree.fromstring(bundle["text/html"]).findall("div/figure/svg")
    assert len(charts) == 2 and "Iteration" not in texts(outputs)


def test_a_second_interrupt_kills(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MPIDL_TEST_MARK", mark)
    notebook = Notebook(DEFINITIONS, "dl.launch(ignores_interrupts, ranks=2)", "print('goes on')")
    _, outputs, last = notebook.run(says("waits"), says("is interrupted"))
    assert [o.ename for o in outputs if o.output_type == "error"] == ["KeyboardInterrupt"]
    assert texts(last) == "goes on\n"
    wait_until(lambda: not marked(mark))
