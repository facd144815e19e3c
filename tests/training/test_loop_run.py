"""Test custom loops that report to a folder, and how they stop. The tests pass on any ranks."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from image_sets import refusal
from short_training import pictures, small

import mpidl as dl
from mpidl.ranks.failure import Signals
from mpidl.report import metrics, run_files, status, stop_file
from mpidl.report.live.run import runs_of

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(autouse=True)
def looks_always(monkeypatch):
    monkeypatch.setattr(stop_file, "SECONDS", 0)


@pytest.fixture
def folder(world, tmp_path):
    """Return a folder that all ranks use."""
    return Path(world.broadcast(str(tmp_path))) / "run"


@pytest.fixture
def job(world):
    """Return a world of the test's ranks whose signals are restored after the test."""
    world.signals = None
    yield world
    if world.signals is not None:
        world.signals.__exit__(None, None, None)
    world.signals = None


def train(world, after=lambda iteration: None, epochs=3):
    """Train in a custom loop that stops on request; return (last iteration, weights, losses)."""
    net, store = small(), pictures(100)
    queue = dl.MinibatchQueue(store, batch_size=40, seed=0, world=world)

    def model_loss(net, images, labels):
        scores = net(images)
        return dl.softmax_cross_entropy(scores, labels), dl.correct_count(scores, labels)

    step, sgdm = dl.value_and_grad(model_loss, reduce=world), dl.SGDM(0.01)
    iteration, losses = 0, []
    for epoch in range(1, epochs + 1):
        for images, labels in queue.epoch(epoch):
            if world.stop_requested():
                return iteration, dl.weights_sha256(net), losses
            (loss, correct), gradients, net.state = step(net, images, labels)
            net.parameters = sgdm(net.parameters, gradients)
            iteration, accuracy = iteration + 1, correct / images.shape[0]
            losses.append(float(loss))
            world.report(epoch=epoch, iteration=iteration, loss=loss, accuracy=accuracy)
            after(iteration)
        world.report(epoch=epoch, loss=loss, accuracy=accuracy)
    return iteration, dl.weights_sha256(net), losses


def read_status(world, folder):
    world.barrier()
    return status.parse((folder / "status.json").read_bytes())


def test_reports_are_the_records_of_a_run(job, folder, capsys):
    with dl.report_to(folder, world=job, epochs=3, iterations=9):
        iteration, sha256, losses = train(job)
    state = read_status(job, folder)
    assert (state.state, state.stopped, state.ranks) == ("finished", None, job.size)
    assert (state.epochs, state.iterations_per_epoch, state.iterations) == (3, 3, 9)
    history = dl.history(folder)
    assert history.iteration.loss.tolist() == losses and len(losses) == 9
    assert history.epoch.iteration.tolist() == [3, 6, 9]
    (run,) = runs_of([str(folder)])
    run.poll()  # the live page
    assert run.describe() == "done" and run.progress() == 1
    assert run_files.read(str(folder)).state == "finished"  # mpidl.report
    printed = capsys.readouterr().out
    if job.rank == 0:
        assert printed.count("Epoch: ") == 3 and "Iteration" not in printed
    # The weights are those of a loop that records nothing, and prints each report.
    assert train(job)[1] == sha256
    assert capsys.readouterr().out.count("Iteration: ") == (9 if job.rank == 0 else 0)


def test_values_that_are_not_recorded_are_printed(job, folder, capsys):
    with dl.report_to(folder, world=job):
        capsys.readouterr()
        job.report(epoch=1, iteration=10, f1=0.8)
        job.report(epoch=1, iteration=11, loss=0.5, f1=0.9, note="fine")
        job.report(epoch=1, iteration=12, validation_loss=0.25)
        job.report(iteration=13)
        job.report(epoch=1, loss=0.125, f1=0.7)
        lines = capsys.readouterr().out.splitlines()
    expected = [
        "Epoch: 1, Iteration: 10, F1: 0.8000",
        "Epoch: 1, Iteration: 11, F1: 0.9000, Note: fine",
        "Iteration: 13",
        "Epoch: 1, Loss: 0.1250, F1: 0.7000",
    ]
    assert lines == (expected if job.rank == 0 else [])
    job.barrier()
    history = dl.history(folder)
    assert history.iteration.iteration.tolist() == [11]
    assert history.validation.loss.tolist() == [0.25]


@pytest.mark.parametrize(("moment", "last"), [(stop_file.NOW, 4), (stop_file.EPOCH, 6)])
def test_the_stop_file_ends_the_loop_on_all_ranks(job, folder, moment, last):
    def request(iteration):
        if iteration == 4 and job.rank == 0:
            stop_file.request(folder, moment)

    with dl.report_to(folder, world=job):
        iterations = job.allgather(train(job, request)[0])
    assert iterations == [last] * job.size
    state = read_status(job, folder)
    assert (state.state, state.stopped) == ("finished", "stop file")
    assert not (folder / stop_file.NAME).exists()
    with dl.report_to(folder, world=job):  # the next loop is not stopped
        assert train(job)[0] == 9
    assert len(metrics.read(folder / "metrics.jsonl")) == 12


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_signal_to_one_rank_ends_the_loop_on_all_ranks(job, folder, has_folder):
    handler = signal.getsignal(signal.SIGUSR1)

    def request(iteration):
        if iteration == 5 and job.rank == job.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    recorded = dl.report_to(folder, world=job) if has_folder else contextlib.nullcontext()
    with recorded:
        assert job.allgather(train(job, request)[0]) == [5] * job.size
        assert job.stop_requested()
    if has_folder:
        assert read_status(job, folder).stopped == "SIGUSR1"
        assert signal.getsignal(signal.SIGUSR1) == handler
        with dl.report_to(folder, world=job):  # a signal is for the whole job
            assert job.allgather(train(job)[0]) == [0] * job.size


def test_each_block_restores_the_handlers_of_signals(job, folder):
    numbers = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    for _ in range(3):
        with dl.report_to(folder, world=job):
            assert not job.stop_requested()
            assert signal.getsignal(signal.SIGTERM) != before[1]
        assert [signal.getsignal(number) for number in numbers] == before
    assert not job.stop_requested()  # from now on, the handlers belong to the loop
    during = [signal.getsignal(number) for number in numbers]
    with dl.report_to(folder, world=job):
        assert not job.stop_requested()
    assert [signal.getsignal(number) for number in numbers] == during


def test_a_stop_file_does_not_hide_the_signal_of_another_rank(job, folder):
    with dl.report_to(folder, world=job):
        assert not job.stop_requested()  # handles signals from now on
        if job.rank == 0:
            stop_file.request(folder, stop_file.NOW)
        if job.rank == job.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert job.stop_requested()
    with dl.report_to(folder, world=job):
        assert job.allgather(train(job)[0]) == [0] * job.size
    assert read_status(job, folder).stopped == "SIGUSR1"


def test_a_stop_file_does_not_outlive_a_block_that_fails(job, folder):
    def request(iteration):
        if iteration == 4 and job.rank == 0:
            stop_file.request(folder, stop_file.NOW)

    with pytest.raises(ZeroDivisionError), dl.report_to(folder, world=job):
        assert train(job, request)[0] == 4
        raise ZeroDivisionError("all ranks fail")
    with dl.report_to(folder, world=job):
        assert train(job)[0] == 9


def test_epochs_from_0_stop_at_the_end_of_the_first(job, folder):
    with dl.report_to(folder, world=job):
        for iteration in range(1, 10):
            if job.stop_requested():
                break
            job.report(epoch=(iteration - 1) // 3, iteration=iteration, loss=0.5)
            if iteration == 2 and job.rank == 0:
                stop_file.request(folder, stop_file.EPOCH)
    assert job.allgather(iteration) == [5] * job.size  # the report of iteration 4 is in epoch 1


def test_a_block_in_a_block_is_refused(job, folder):
    with dl.report_to(folder, world=job):
        assert "one block at a time" in refusal(dl.report_to(folder / "b", world=job).__enter__)
        job.report(epoch=1, loss=0.5)
    assert len(metrics.read(folder / "metrics.jsonl")) == 2


def test_an_invalid_port_is_refused(job, folder):
    for port in (70000, -1, 8080.0):
        assert "monitor" in refusal(dl.report_to(folder, world=job, monitor=port).__enter__)


class Asks:
    """A hook that asks for stops, as a custom loop does."""

    def __init__(self, job):
        self.job = job

    def step(self, trainer):
        assert not self.job.stop_requested()


def test_a_loop_that_asks_within_a_training(job, folder):
    """The handlers that the training installed are gone, and the loop's still work."""
    before = signal.getsignal(signal.SIGTERM)
    options = dl.TrainingOptions(epochs=1, batch_size=40, verbose="off")
    dl.train(small(), pictures(100), options, world=job, hooks=[Asks(job)])
    assert not job.stop_requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert job.stop_requested()
    job.signals.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_reaches_all_nested_contexts():
    before = signal.getsignal(signal.SIGUSR1)
    contexts = [Signals() for _ in range(3)]
    for context in contexts:
        context.__enter__()
    contexts[1].__exit__(None, None, None)  # not the innermost
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [context.name for context in contexts] == ["SIGUSR1", None, "SIGUSR1"]
    contexts[0].__exit__(None, None, None)
    assert contexts[2].is_active and not contexts[0].is_active
    contexts[2].__exit__(None, None, None)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_stop_file_that_comes_too_late_does_not_stop_the_next_loop(job, folder):
    def request(iteration):
        if iteration == 9 and job.rank == 0:
            stop_file.request(folder, stop_file.EPOCH)

    for _ in range(2):
        with dl.report_to(folder, world=job):
            assert train(job, request)[0] == 9


def test_a_loop_that_does_not_ask_keeps_the_handlers_of_signals(job, folder):
    handler = signal.getsignal(signal.SIGTERM)
    with dl.report_to(folder, world=job):
        assert signal.getsignal(signal.SIGTERM) == handler


def test_a_failed_loop_says_so(job, folder):
    with pytest.raises(ZeroDivisionError), dl.report_to(folder, world=job):
        job.report(epoch=1, loss=0.5)
        raise ZeroDivisionError("all ranks fail")
    state = read_status(job, folder)
    assert (state.state, state.error) == ("failed", "ZeroDivisionError: all ranks fail")
    assert job.listeners == [] and len(metrics.read(folder / "metrics.jsonl")) == 2


def test_a_folder_with_checkpoints_is_not_replaced(job, folder):
    options = dl.TrainingOptions(epochs=1, batch_size=40, verbose="off")
    dl.train(small(), pictures(100), options, world=job, out=str(folder))

    def report(**arguments):
        with dl.report_to(folder, world=job, **arguments):
            job.report(epoch=1, loss=0.5)

    assert refusal(report).startswith(f"out={folder}: it contains a run (iteration 3)")
    assert "epochs must be a whole number" in refusal(report, epochs=1.5)
    assert len(dl.history(folder).iteration) == 3
    report(overwrite=True)
    job.barrier()
    assert len(dl.history(folder).iteration) == 1
    assert not (folder / "checkpoint.h5").exists()


def test_a_loop_cannot_use_the_folder_of_a_running_loop(job, folder):
    with dl.report_to(folder, world=job):
        text = refusal(lambda: dl.report_to(folder, world=job).__enter__())
        assert text.startswith(f"out={folder}: in use by ")
