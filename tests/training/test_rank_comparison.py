"""Test the comparison of the ranks' weights, and which ranks an error names."""

import numpy as np
import pytest
from short_training import pictures, small, trained

import mpidl as dl
from mpidl.errors import Fault
from mpidl.training.rank_comparison import compare_ranks, difference

pytestmark = pytest.mark.usefixtures("without_plots")
HOSTS = ["n1", "n1", "n2", "n3", "n4"]
GOOD = {"conv1.weight": b"a", "dense1.bias": b"b"}
BAD, WORSE = GOOD | {"conv1.weight": b"x"}, GOOD | {"dense1.bias": b"y"}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([GOOD, GOOD, BAD], "rank 2 on host n2 differs from the other 2 ranks in conv1.weight"),
        ([BAD, GOOD, GOOD], "rank 0 on host n1 differs from the other 2 ranks in conv1.weight"),
        (
            [GOOD, BAD, GOOD, WORSE, GOOD],
            "rank 1 on host n1, rank 3 on host n3 differ from the other 3 ranks in conv1.weight, "
            "dense1.bias",
        ),
        (
            [GOOD, BAD],
            "rank 0 on host n1, rank 1 on host n1 disagree in conv1.weight, and no majority shows "
            "which of them is wrong",
        ),
        (
            [GOOD, GOOD, BAD, BAD],
            "rank 0 on host n1, rank 1 on host n1, rank 2 on host n2 and 1 more disagree in "
            "conv1.weight, and no majority shows which of them is wrong",
        ),
    ],
)
def test_the_majority_names_the_others(ranks, expected):
    assert difference(ranks, HOSTS[: len(ranks)]) == expected


def flip_bit(array, index=0, bit=12):
    """Return a copy of a float32 array in which one bit of one element is flipped."""
    flipped = np.array(array)
    flipped.view(np.uint32).reshape(-1)[index] ^= 1 << bit
    return flipped


def test_a_flipped_bit_is_found(world):
    tables = {"learnables": {"a": np.ones(5, np.float32), "b": np.ones((2, 3), np.float32)}}
    compare_ranks(world, tables, 7)
    last = world.size - 1
    if world.rank == last:
        tables["learnables"]["b"] = flip_bit(tables["learnables"]["b"], index=5)
    if world.size == 1:
        compare_ranks(world, tables, 7)
        return
    with pytest.raises(Fault, match="the ranks' weights differ at iteration 7: ") as caught:
        compare_ranks(world, tables, 7)
    if world.size > 2:
        text = f"rank {last} on host {world.hosts[last]} differs from the other {last} ranks in b;"
        assert text in str(caught.value)


class Flip:
    """A hook that flips a bit of a weight or of a gradient sum on one rank in iteration 4."""

    def __init__(self, rank, place):
        self.rank, self.place = rank, place

    def start(self, trainer):
        self.trainer = trainer
        if self.place == "sum":
            trainer.step.observe_gradients(self.observe)

    def is_due(self):
        position, world = self.trainer.position, self.trainer.world
        return position.iteration == 4 and world.rank == self.rank

    def observe(self, gradients):
        if self.is_due():
            gradient = gradients["dense1.bias"]
            gradient[...] = flip_bit(gradient, bit=22)

    def step(self, trainer):
        if self.place == "weight" and self.is_due():
            name = "conv1.weight"
            weight = trainer.net.parameters[name]
            weight[...] = flip_bit(weight)


@pytest.mark.parametrize("place", ["weight", "sum"])
def test_a_run_ends_at_the_next_comparison(world, place):
    """The comparison finds a flipped bit. A single rank compares nothing and trains to the end."""
    options = dl.TrainingOptions(epochs=4, batch_size=40, compare_ranks_every=5, verbose="off")
    hook = Flip(world.size - 1, place)
    if world.size == 1:
        dl.train(small(), pictures(100), options, world=world, hooks=[hook])
    else:
        with pytest.raises(Fault, match="the ranks' weights differ at iteration 5: ") as caught:
            dl.train(small(), pictures(100), options, world=world, hooks=[hook])
        assert ("differs from the other" in str(caught.value)) == (world.size > 2)
        assert ("conv1.weight" if place == "weight" else "dense1.bias") in str(caught.value)
    # Without comparisons, the flipped bit is not detected.
    options = dl.TrainingOptions(epochs=4, batch_size=40, verbose="off")
    dl.train(small(), pictures(100), options, world=world, hooks=[Flip(world.size - 1, place)])


def test_a_weight_that_is_nan_on_one_rank_is_no_reason_to_roll_back(world):
    """If only some ranks have a bad weight, the run fails. A single rank would roll back."""

    class Spoil:
        def step(self, trainer):
            if trainer.position.iteration == 4 and world.rank == 0:
                trainer.net.parameters["conv1.weight"].flat[0] = np.inf

    options = {"epochs": 4, "batch_size": 40, "checkpoint_every": 4, "on_nan": "rollback"}
    options = dl.TrainingOptions(**options, verbose="off")
    error = "the ranks' weights differ at iteration 4: " if world.size > 1 else "has rolled back 5"
    with pytest.raises(Fault, match=error):
        dl.train(small(), pictures(100), options, world=world, hooks=[Spoil()])


def test_audits_do_not_change_the_weights(world):
    net, _ = trained(world, compare_ranks_every=1)
    assert dl.weights_sha256(net) == dl.weights_sha256(trained(world)[0])
