"""Test the history that `dl.train` returns, with and without files.

The tests pass on any number of ranks.
"""

import numpy as np
import pytest
from short_training import pictures, small

import mpidl as dl

pytestmark = pytest.mark.usefixtures("without_plots")
OPTIONS = {"epochs": 2, "batch_size": 40, "verbose": "off", "validation_frequency": 2}
REPLICATED = ("epoch", "iteration", "loss", "accuracy", "learning_rate")  # equal on all ranks


def train(world, hooks=(), **arguments):
    options = dl.TrainingOptions(**OPTIONS, validation=pictures(20, "validation"))
    return dl.train(small(), pictures(100), options, world=world, hooks=hooks, **arguments)


def columns(history, kind):
    return {name: getattr(getattr(history, kind), name) for name in REPLICATED}


def assert_same(first, second):
    for kind in ("iteration", "epoch", "validation"):
        for name, column in columns(first, kind).items():
            np.testing.assert_array_equal(column, columns(second, kind)[name], f"{kind}.{name}")


def test_every_rank_has_the_history_without_files(world):
    """The history equals the numbers that a hook collects during training."""
    losses, lengths = [], []

    class Records:
        def iteration(self, trainer, result):
            losses.append((result.info.iteration, result.loss))
            lengths.append(len(trainer.history.iteration))

    result = train(world, [Records()])
    history = result.history
    assert list(zip(history.iteration.iteration, history.iteration.loss, strict=True)) == losses
    assert lengths == [1, 2, 3, 4, 5, 6]
    assert list(history.epoch.iteration) == [3, 6] and list(history.epoch.epoch) == [1, 2]
    assert history.epoch.loss[-1] == result.loss
    assert list(history.validation.iteration) == [2, 4, 6]
    assert list(history.final_validation.iteration) == [6]
    assert history.final_validation.accuracy[-1] == result.validation_accuracy
    assert (np.diff(history.iteration.seconds) >= 0).all()
    root = world.broadcast(history)
    assert_same(root, history)


class StopsAt:
    def __init__(self, iteration):
        self.iteration_to_stop = iteration

    def step(self, trainer):
        if trainer.position.iteration == self.iteration_to_stop:
            trainer.stop()


def test_a_resumed_run_has_the_records_before_the_resume(world, tmp_path):
    out = world.broadcast(str(tmp_path))
    stopped = train(world, [StopsAt(4)], out=out).history
    assert list(stopped.iteration.iteration) == [1, 2, 3, 4]
    resumed = train(world, resume=out).history
    assert_same(resumed, train(world).history)
    if world.rank == 0:
        assert_same(dl.history(out), resumed)
    world.barrier()
