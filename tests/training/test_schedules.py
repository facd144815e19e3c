"""Compare learning-rate schedules and warm-ups with their formulas in float64."""

import math

import pytest

from mpidl.errors import UserError
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.schedules import cosine, rate_of


def rates(count, per_epoch=4, **options):
    """Return the learning rates of iterations 1 to `count`."""
    options = TrainingOptions(**{"learning_rate": 0.5, "epochs": 5} | options)
    return [rate_of(options, 1 + (i - 1) // per_epoch, i, per_epoch) for i in range(1, count + 1)]


def test_a_constant_rate_and_its_scale():
    assert rates(20) == [0.5] * 20
    assert rates(3, learning_rate=0.1, batch_size=512, scale_rate=256) == [0.1 * 512 / 256] * 3
    assert rates(1, learning_rate=0.1, batch_size=128, scale_rate=256) == [0.1 * 128 / 256]


def test_linear_scaling_warms_up_from_the_unscaled_rate():
    """The rate rises linearly to its scaled value during 5 epochs, as in Goyal et al., 2017."""
    scaled = {"learning_rate": 0.1, "batch_size": 512, "linear_scaling": 128, "epochs": 8}
    schedule = rates(32, **scaled)
    assert schedule[:20] == pytest.approx([0.1 + 0.3 * i / 20 for i in range(20)], rel=1e-14)
    assert schedule[20:] == [0.4] * 12
    assert rates(8, **scaled, warmup_epochs=1)[3:] == pytest.approx([0.325, *[0.4] * 4])
    assert rates(8, **scaled, warmup_iterations=2)[:3] == pytest.approx([0.1, 0.25, 0.4])
    lower = scaled | {"batch_size": 64}  # a lower rate has no warm-up unless the options set it
    assert rates(3, **lower) == [0.05] * 3
    assert rates(3, **lower, warmup_iterations=2)[:2] == rates(
        2, learning_rate=0.05, warmup_iterations=2
    )
    with pytest.raises(UserError, match="cannot be combined with warm-up or scaling"):
        TrainingOptions(linear_scaling=128, learn_rate_schedule=lambda epoch, iteration: 0.1)
    with pytest.raises(
        UserError, match="--linear-scaling 128 and --scale-rate 1: expected at most"
    ):
        TrainingOptions(**scaled, scale_rate=1)
    recipe = TrainingOptions.from_recipe("cifar", linear_scaling=256)
    assert (recipe.scale_rate, recipe.linear_scaling) == (None, 256)


def test_piecewise():
    schedule = rates(12, learn_rate_schedule="piecewise", learn_rate_drop_period=2)
    assert schedule == [0.5] * 8 + [0.5 * 0.1] * 4
    schedule = rates(20, learn_rate_schedule="piecewise", learn_rate_drop_period=1, epochs=2)
    assert schedule[16:] == pytest.approx([0.5e-4] * 4, rel=1e-15)


@pytest.mark.parametrize("epochs", ["2,3,5", (2, 3, 5)])
def test_the_rate_drops_after_given_epochs(epochs):
    """Drops after given epochs replace those of the period, as PyTorch's MultiStepLR does."""
    options = {"learn_rate_schedule": "piecewise", "learn_rate_drop_period": 1}
    schedule = rates(6, 1, learn_rate_drop_epochs=epochs, learn_rate_drop_factor=0.5, **options)
    assert schedule == [0.5, 0.5, 0.25, 0.125, 0.125, 0.0625]
    assert rates(2, 1, learn_rate_drop_epochs=1, **options) == [0.5, 0.5 * 0.1]
    with pytest.raises(UserError, match="learn_rate_drop_epochs must be epochs such as 30,60,80"):
        TrainingOptions(learn_rate_drop_epochs="30;60")


def test_matlabs_defaults_drop_to_a_tenth_after_ten_epochs():
    schedule = rates(21, 1, learn_rate_schedule="piecewise", learning_rate=None)
    assert schedule[9:11] == [0.01, 0.01 * 0.1] and schedule[20] == 0.01 * 0.1 * 0.1


def test_cosine():
    schedule = rates(20, learn_rate_schedule="cosine")
    assert schedule == pytest.approx([0.25 * (1 + math.cos(math.pi * i / 20)) for i in range(20)])
    schedule = rates(20, learn_rate_schedule="cosine", learn_rate_final_factor=0.2)
    assert schedule[0] == 0.5 and 0.1 < schedule[-1] < 0.105


@pytest.mark.parametrize("power", [1.0, 2.0, 0.9])
def test_polynomial(power):
    schedule = rates(20, learn_rate_schedule="polynomial", learn_rate_power=power)
    assert schedule == pytest.approx([0.5 * (1 - i / 20) ** power for i in range(20)], rel=1e-14)


def test_warm_ups_before_other_schedules():
    schedule = rates(20, warmup_iterations=5)
    assert schedule[:6] == pytest.approx([0.5 * (0.1 + 0.9 * i / 5) for i in range(6)], rel=1e-15)
    assert schedule[5:] == [0.5] * 15
    assert rates(20, warmup_epochs=1, warmup_factor=0.5)[:5] == [0.25, 0.3125, 0.375, 0.4375, 0.5]
    schedule = rates(20, warmup_epochs=1, learn_rate_schedule="cosine")
    assert schedule[4:] == pytest.approx(
        [0.25 * (1 + math.cos(math.pi * i / 16)) for i in range(16)], rel=1e-15
    )
    assert all(rate > 0 for rate in rates(30, warmup_iterations=25, learn_rate_schedule="cosine"))


def test_both_warm_ups_are_refused():
    with pytest.raises(UserError, match="--warmup-iterations 3 and --warmup-epochs 1: expected"):
        TrainingOptions(warmup_iterations=3, warmup_epochs=1)


def test_a_function():
    options = TrainingOptions(learn_rate_schedule=lambda epoch, iteration: epoch + iteration / 100)
    assert rate_of(options, 2, 7, 4) == 2.07
    assert options.as_dict()["learn_rate_schedule"].startswith("function test_a_function")
    for rate in (None, "x", math.nan, -1, math.inf):
        options = TrainingOptions(learn_rate_schedule=lambda epoch, iteration, rate=rate: rate)
        with pytest.raises(UserError, match=f"for epoch 2, iteration 7, found {rate}"):
            rate_of(options, 2, 7, 4)


def test_the_cosine_is_as_exact_as_the_library():
    for turn in (i / 1000 for i in range(1001)):
        assert abs(cosine(turn) - math.cos(math.pi * turn)) < 5e-16
    assert [cosine(0), cosine(0.5), cosine(1)] == [1, 0, -1]
