"""Test runs that return to the start of an iteration after the loss of a rank.

The loss is simulated: all ranks are interrupted, but no rank ends. `tests/launch/test_shrink.py`
kills real ranks.
"""

import json

import numpy as np
import pytest
from short_training import pictures, small

import mpidl as dl
from mpidl.errors import UserError
from mpidl.ranks import survival
from mpidl.ranks.world import LostRank
from mpidl.report import Console, metrics
from mpidl.training import lost_ranks
from mpidl.training.files import run_state

pytestmark = pytest.mark.usefixtures("without_plots")
PER_EPOCH = 3  # iterations per epoch
OPTIONS = {
    "epochs": 3,
    "batch_size": 40,
    "solver": "adam",
    "validation_frequency": 2,
    "output_network": "best-validation",
    "batchnorm_statistics": "population",
    "checkpoint_every": 2,
    "verbose": "off",
}


class Interrupted(Exception):
    pass


class Interrupt:
    """A hook that interrupts this rank once, in a hook method or before the optimizer's update."""

    def __init__(self, event, iteration):
        self.event, self.iteration_of_event, self.lost_calls = event, iteration, 0

    def _interrupt(self, event, trainer):
        if (event, trainer.position.iteration) == (self.event, self.iteration_of_event):
            self.event = None
            trainer.world.lost_ranks.append(LostRank(1, "n1"))
            raise Interrupted

    def start(self, trainer):
        observe = getattr(trainer.step, "observe_gradients", lambda observer: None)
        observe(lambda gradients: self._interrupt("update", trainer))
        self._interrupt("start", trainer)

    def iteration(self, trainer, result):
        self._interrupt("iteration", trainer)

    def step(self, trainer):
        self._interrupt("step", trainer)

    def epoch(self, trainer, summary):
        self._interrupt("epoch", trainer)

    def finish(self, trainer):
        self._interrupt("finish", trainer)

    def end(self, trainer):
        self._interrupt("end", trainer)

    def lost(self, trainer):
        self.lost_calls += 1


@pytest.fixture
def ranks(world, monkeypatch):
    """The world of the session, changed so that an interrupted task is repeated."""

    def attempt(world, task, recover):
        while True:
            try:
                return task()
            except Interrupted:
                recover()

    monkeypatch.setattr(survival, "attempt", attempt)
    monkeypatch.setattr(world, "outlives_ranks", True)
    monkeypatch.setattr(world, "lost_ranks", [])
    return world


def train(world, hooks=(), out=None, console=None, **options):
    net, validation = small(), pictures(50, "validation")
    options = dl.TrainingOptions(**{**OPTIONS, **options}, validation=validation)
    arguments = {"world": world, "hooks": hooks, "out": out, "console": console}
    result = dl.train(net, pictures(100), options, **arguments)
    history = result.history
    numbers = [history.iteration.loss.tolist(), history.validation.loss.tolist()]
    return [dl.weights_sha256(net), *numbers, history.epoch.iteration.tolist()], result


MOMENTS = [
    ("start", 0),
    ("update", 1),
    ("update", 4),
    ("iteration", 5),
    ("step", PER_EPOCH),
    ("epoch", PER_EPOCH),
    ("finish", 3 * PER_EPOCH),
    ("end", 3 * PER_EPOCH),
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_run_has_the_same_weights_and_records(ranks, moment):
    hook = Interrupt(*moment)
    contents, result = train(ranks, [hook])
    assert hook.event is None and hook.lost_calls == (moment[0] != "start")
    assert contents == train(ranks)[0] and result.lost_ranks == 1


def test_without_the_restored_state_the_weights_differ(ranks, monkeypatch):
    expected, _ = train(ranks)
    monkeypatch.setattr(lost_ranks.run_state, "set_progress", lambda *arguments: None)
    assert train(ranks, [Interrupt("update", 4)])[0] != expected


@pytest.mark.parametrize("iteration", [2, 4])
def test_ranks_an_iteration_apart_return_to_the_same_one(ranks, monkeypatch, iteration):
    """Rank 0 has completed an iteration. The other ranks are interrupted in its last hook."""
    expected, _ = train(ranks)
    hook, reach = Interrupt("step", iteration), lost_ranks.IterationStart.reach

    def reach_and_interrupt(self):
        reach(self)
        if self._number == iteration + 1 and hook.event:
            hook.event = None
            raise Interrupted

    if ranks.rank == 0:
        hook.iteration_of_event = None
        monkeypatch.setattr(lost_ranks.IterationStart, "reach", reach_and_interrupt)
    assert train(ranks, [hook])[0] == expected
    assert hook.event is None and hook.lost_calls == 1


def test_a_rollback_between_two_losses(ranks):
    class Spoil(Interrupt):
        def step(self, trainer):
            super().step(trainer)
            if trainer.position.iteration == 5 and not trainer.position.rollbacks:
                weight = np.array(trainer.net.parameters["dense1.weight"])
                weight.flat[0] = np.nan
                trainer.net.parameters["dense1.weight"] = weight

    options = {"on_nan": "rollback", "output_network": "last-iteration"}
    expected, _ = train(ranks, [Spoil(None, 0)], **options)
    hooks = [Spoil("update", 4), Spoil("update", 5)]
    contents, result = train(ranks, hooks, **options)
    assert contents == expected and result.rollbacks == 1


def test_the_loss_is_told_and_recorded(ranks, tmp_path, capsys):
    out = ranks.broadcast(str(tmp_path / "run"))
    _, result = train(ranks, [Interrupt("update", 5)], out=out, console=Console(ranks.rank))
    assert result.lost_ranks == 1
    text, left = capsys.readouterr().out, f"{ranks.size} ranks continue"
    if ranks.rank == 0:
        left = "1 rank continues" if ranks.size == 1 else left
        line = f"warning: rank 1 on host n1 was lost: {left} after iteration 4; time lost: "
        assert line in text
        (record,) = [r for r in metrics.read(f"{out}/metrics.jsonl") if r["kind"] == "lost"]
        assert record.pop("seconds_lost") > 0
        assert record == {
            "kind": "lost",
            "epoch": 2,
            "iteration": 4,
            "ranks": [1],
            "hosts": ["n1"],
            "ranks_left": ranks.size,
        }
        with open(f"{out}/status.json") as file:
            status = json.load(file)
        assert (status["state"], status["lost_ranks"]) == ("finished", len(ranks.lost_ranks))
    ranks.barrier()


def test_the_memory_of_the_copies_is_used_again(ranks):
    class Addresses:
        def __init__(self):
            self.seen_addresses = set()

        def step(self, trainer):
            arrays = trainer.iteration_start._arrays["learnables"]
            self.seen_addresses.add(tuple(array.ctypes.data for array in arrays.values()))

    hook = Addresses()
    train(ranks, [hook])
    assert len(hook.seen_addresses) == 1


def test_without_the_option_nothing_is_copied(world):
    class Check:
        def step(self, trainer):
            assert trainer.iteration_start._arrays == {}

    train(world, [Check()])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampling": "partition"}, "--sampling partition"),
        ({"batchnorm": "local"}, "--batchnorm local"),
        ({"worker_load": "1,2"}, "--worker-load 1,2"),
    ],
)
def test_options_that_depend_on_the_ranks_are_refused(options, text):
    with pytest.raises(UserError) as error:
        dl.TrainingOptions(on_lost_rank="shrink", **options)
    assert str(error.value).startswith(f"--on-lost-rank shrink and {text}: expected ")


def test_copies_are_independent():
    tables = {"learnables": {"weight": np.ones(3, np.float32)}}
    copies = run_state.copied(tables)
    tables["learnables"]["weight"][0] = 5
    assert copies["learnables"]["weight"].tolist() == [1, 1, 1]
