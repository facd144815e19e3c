"""Test `dl.sweep`: the order of results, failures, stops, and weights that match single runs."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import refusal
from limits import wait_until

import mpidl as dl
from mpidl.ranks import groups
from mpidl.sweeps import sweep

PIXELS = np.random.default_rng(0).integers(0, 256, (90, 1, 8, 8), dtype=np.uint8)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(groups, "GRACE", 0.05)


def train(trial, world):
    """Train with the options of a trial. Return the hash of the weights."""
    net = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)], (1, 8, 8))
    store = dl.ArrayDatastore(PIXELS, np.arange(90) % 3)
    options = dl.TrainingOptions(epochs=1, batch_size=33, verbose="off", **trial)
    dl.train(net, store, options, world=world)
    return dl.weights_sha256(net)


def test_weights_are_those_of_trainings_alone(world):
    trials = [{"learning_rate": rate} for rate in (0.1, 0.01, 0.001)] + [{"seed": 1}]
    expected = [train(trial, world) for trial in trials]
    assert len(set(expected)) == 4
    for ranks in {1, world.size}:
        assert dl.sweep(train, trials, ranks_per_model=ranks, world=world) == expected


@pytest.mark.parametrize("size", ["one", "all"])
def test_a_trial_that_fails_has_its_exception_in_the_list(world, size):
    def function(trial, group_world):
        if trial == 1:
            raise dl.UserError("bad options")
        if trial == 2 and group_world.rank == group_world.size - 1:
            raise ArithmeticError("this rank breaks")
        if trial == 3:
            return lambda: None  # not picklable
        group_world.barrier()
        return trial, group_world.size

    ranks = 1 if size == "one" else world.size
    results = dl.sweep(function, range(6), ranks_per_model=ranks, world=world)
    assert [results[i] for i in (0, 4, 5)] == [(i, ranks) for i in (0, 4, 5)]
    assert str(results[1]) == "bad options" and isinstance(results[1], dl.UserError)
    assert isinstance(results[2], ArithmeticError) and isinstance(results[3], Exception)


def test_no_trials_and_a_wrong_number_of_ranks(world):
    assert dl.sweep(train, [], world=world) == []
    too_many = world.size + 1
    text = refusal(dl.sweep, train, [{}], ranks_per_model=too_many, world=world)
    assert f"ranks_per_model {too_many}: " in text


def test_a_signal_to_one_rank_stops_all_groups(world, tmp_path):
    """Training in progress ends in all groups, and no other trial starts."""
    store = dl.ArrayDatastore(PIXELS, np.arange(90) % 3)

    def function(trial, group_world):
        net = dl.Network([dl.Dense(3)], (1, 8, 8))
        options = dl.TrainingOptions(epochs=10**6, batch_size=33, verbose="off")
        if world.rank == world.size - 1:
            hook = signal_after(5)
            return dl.train(net, store, options, world=group_world, hooks=[hook]).stopped
        return dl.train(net, store, options, world=group_world).stopped

    results = dl.sweep(function, range(world.size + 2), world=world)
    assert results[: world.size] == ["SIGUSR1"] * world.size
    assert [str(r) for r in results[world.size :]] == [
        "the sweep was stopped before this trial"
    ] * 2


class signal_after:
    """A hook that sends USR1 to this process after a number of iterations."""

    def __init__(self, iterations):
        self.iterations = iterations

    def step(self, trainer):
        if trainer.position.iteration == self.iterations:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)


def test_a_request_to_stop_without_the_folder_of_claims(tmp_path, monkeypatch):
    """If the folder is missing, the thread that passes on stop requests raises no exception."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(sweep, "STOP_SECONDS", 0.01)
    looks = []
    monkeypatch.setattr(sweep, "_is_stopping", lambda signals: looks.append(signals) or True)
    group = SimpleNamespace(is_leader=True)
    with sweep._stops(tmp_path / "gone", group, None):
        wait_until(lambda: len(looks) > 2)
    assert errors == []
