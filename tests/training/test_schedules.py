"""Learning rates: against their formulas in float64, and how they join."""

import math

import pytest

from mpidl.errors import UserError
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.schedules import cosine, rate_of


def rates(count, per_epoch=4, **known):
    """Those of the iterations 1 to `count`."""
    known = TrainingOptions(**{"learning_rate": 0.5, "epochs": 5} | known)
    return [rate_of(known, 1 + (i - 1) // per_epoch, i, per_epoch) for i in range(1, count + 1)]


def test_none():
    assert rates(20) == [0.5] * 20
    assert rates(3, learning_rate=0.1, batch_size=512, scale_rate=256) == [0.1 * 512 / 256] * 3
    assert rates(1, learning_rate=0.1, batch_size=128, scale_rate=256) == [0.1 * 128 / 256]


def test_piecewise():
    found = rates(12, learn_rate_schedule="piecewise", learn_rate_drop_period=2)
    assert found == [0.5] * 8 + [0.5 * 0.1] * 4
    found = rates(20, learn_rate_schedule="piecewise", learn_rate_drop_period=1, epochs=2)
    assert found[16:] == pytest.approx([0.5e-4] * 4, rel=1e-15)


def test_matlabs_defaults_drop_to_a_tenth_after_ten_epochs():
    found = rates(21, 1, learn_rate_schedule="piecewise", learning_rate=None)
    assert found[9:11] == [0.01, 0.01 * 0.1] and found[20] == 0.01 * 0.1 * 0.1


def test_cosine():
    found = rates(20, learn_rate_schedule="cosine")
    assert found == pytest.approx([0.25 * (1 + math.cos(math.pi * i / 20)) for i in range(20)])
    found = rates(20, learn_rate_schedule="cosine", learn_rate_final_factor=0.2)
    assert found[0] == 0.5 and 0.1 < found[-1] < 0.105


@pytest.mark.parametrize("power", [1.0, 2.0, 0.9])
def test_polynomial(power):
    found = rates(20, learn_rate_schedule="polynomial", learn_rate_power=power)
    assert found == pytest.approx([0.5 * (1 - i / 20) ** power for i in range(20)], rel=1e-14)


def test_warm_up_and_what_follows():
    found = rates(20, warmup_iterations=5)
    assert found[:6] == pytest.approx([0.5 * (0.1 + 0.9 * i / 5) for i in range(6)], rel=1e-15)
    assert found[5:] == [0.5] * 15
    assert rates(20, warmup_epochs=1, warmup_factor=0.5)[:5] == [0.25, 0.3125, 0.375, 0.4375, 0.5]
    found = rates(20, warmup_epochs=1, learn_rate_schedule="cosine")
    assert found[4:] == pytest.approx(
        [0.25 * (1 + math.cos(math.pi * i / 16)) for i in range(16)], rel=1e-15
    )
    assert all(rate > 0 for rate in rates(30, warmup_iterations=25, learn_rate_schedule="cosine"))


def test_both_warm_ups_are_refused():
    with pytest.raises(UserError, match="--warmup-iterations 3 and --warmup-epochs 1: expected"):
        TrainingOptions(warmup_iterations=3, warmup_epochs=1)


def test_a_function():
    known = TrainingOptions(learn_rate_schedule=lambda epoch, iteration: epoch + iteration / 100)
    assert rate_of(known, 2, 7, 4) == 2.07
    assert known.as_dict()["learn_rate_schedule"].startswith("function test_a_function")
    for wrong in (None, "x", math.nan, -1, math.inf):
        known = TrainingOptions(learn_rate_schedule=lambda epoch, iteration, found=wrong: found)
        with pytest.raises(UserError, match=f"for epoch 2, iteration 7, found {wrong}"):
            rate_of(known, 2, 7, 4)


def test_the_cosine_is_that_of_the_library():
    places = [i / 1000 for i in range(1001)]
    for turn in places:
        assert abs(cosine(turn) - math.cos(math.pi * turn)) < 5e-16
    assert [cosine(0), cosine(0.5), cosine(1)] == [1, 0, -1]
