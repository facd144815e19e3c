"""Test the points of curves against plain loops."""

import math

import numpy as np
import pytest

from mpidl.report.curves import Columns, binned, number, smoothed


def test_columns_hold_the_numbers_of_records():
    columns = Columns(("loss", "seconds"))
    assert len(columns) == 0 and math.isnan(columns.last("loss"))
    assert math.isnan(columns.recent_rate("loss", "seconds"))
    assert math.isnan(columns.recent_mean("loss"))
    columns.append({"loss": 2, "seconds": 1.0, "other": 3})
    columns.append({"loss": None, "seconds": 1.5})
    columns.append({"loss": 4.0, "seconds": 3.0})
    np.testing.assert_array_equal(columns.column("loss"), [2, np.nan, 4])
    assert columns.last("seconds") == 3.0 and columns.recent_mean("loss") == 3.0
    assert columns.recent_rate("loss", "seconds") == 1.0


@pytest.mark.parametrize("value", [None, "1", True, [1], {}, 10**400])
def test_other_values_than_numbers_are_missing(value):
    assert math.isnan(number(value))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 100, 1000])
def test_binned_is_the_mean_of_runs(count):
    values = np.random.default_rng(count).normal(size=count)
    if count > 20:
        values[3:12] = np.nan
    points = binned(values, limit=8)
    length = 1
    while count > 8 * length:
        length *= 2
    assert len(points) == -(-count // length) <= 8
    for i, point in enumerate(points):
        part = [v for v in values[i * length : (i + 1) * length] if math.isfinite(v)]
        expected = sum(part) / len(part) if part else math.nan
        assert point == pytest.approx(expected, nan_ok=True)


def test_points_stay_in_place_while_the_array_grows():
    values = np.arange(200.0)
    for count in range(130, 199):
        np.testing.assert_array_equal(binned(values[:count], 8)[:4], binned(values, 8)[:4])


def test_smoothed_is_a_weighted_mean_of_the_past():
    values = np.array([3.0, 1.0, np.nan, 4.0, 1.0, 5.0])
    averages = smoothed(values, 0.8)
    for i, average in enumerate(averages):
        past = [v for v in values[: i + 1] if math.isfinite(v)]
        weights = 0.8 ** np.arange(len(past))[::-1]
        expected = np.average(past, weights=weights) if math.isfinite(values[i]) else math.nan
        assert average == pytest.approx(expected, nan_ok=True)
    np.testing.assert_array_equal(smoothed(values, 0.0), values)
    assert len(smoothed(np.array([]), 0.9)) == 0
