"""Test the choice of segments: drawn, farthest, around given iterations."""

import collections

import numpy as np
import pytest

from mpidl.certificates import segments
from mpidl.certificates.segments import Selection
from mpidl.errors import UserError

SEGMENTS = segments.all_segments([0, 10, 20, 30, 40], 45)


def test_segments_are_between_starts_and_end_at_the_end():
    assert SEGMENTS == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 45)]
    assert segments.all_segments([0], 7) == [(0, 7)]
    assert segments.all_segments([0, 7], 7) == [(0, 7)]
    assert segments.adjacent([(0, 10), (10, 20), (40, 45)]) == [[(0, 10), (10, 20)], [(40, 45)]]


def test_each_iteration_is_drawn_with_the_same_probability():
    counts = collections.Counter()
    lengths = {(0, 10): 10, (10, 40): 30, (40, 45): 5, (45, 50): 5}
    for seed in range(1000):
        counts.update(segments.draw([*lengths], 1, seed))
        assert len(segments.draw([*lengths], 3, seed)) == 3
    # 5 standard deviations of a binomial distribution are at most 80
    assert all(abs(counts[segment] - 20 * n) < 80 for segment, n in lengths.items())
    assert segments.draw(SEGMENTS, 9, 0) == set(SEGMENTS)
    assert segments.draw(SEGMENTS, 2, 7) == segments.draw(SEGMENTS, 2, 7)


def test_distances_count_per_learning_rate():
    """The weights move by 1 per iteration, by 2 from 20 to 30, and the rate falls after 30."""
    path = np.concatenate([np.arange(20), np.arange(20, 40, 2), np.arange(40, 56)])
    kept_iterations = {0, 10, 20, 30, 40}

    def learnables_at(i):
        return {"a": np.float32([path[i], 0]), "b": np.zeros(3)} if i in kept_iterations else None

    def farthest(count, rate, expected):
        assert segments.farthest(SEGMENTS, count, learnables_at, rate) == set(expected)

    farthest(1, lambda i: 1.0, [(40, 45)])  # the weights at its end are unknown
    farthest(2, lambda i: 1.0, [(40, 45), (20, 30)])
    farthest(2, lambda i: 1.0 if i <= 30 else 0.1, [(40, 45), (30, 40)])
    assert segments.distance_of({"a": np.ones(2)}, {"a": np.ones(3)}) == np.inf
    assert segments.distance_of({"a": np.ones(2)}, {"b": np.ones(2)}) == np.inf
    assert segments.distance_of({"a": np.ones(2)}, {"a": np.float32([np.nan, 1])}) == np.inf
    assert segments.distance_of({"a": np.zeros(2)}, {"a": np.float32([3, 4])}) == 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"steps": (5, 3)}, r"--steps must be A:B with A <= B, such as 400:450, found \(5, 3\)"),
        ({"steps": "1:2:3"}, "--steps must be A:B"),
        ({"steps": "-1:3"}, "--steps must be A:B"),
        ({"sample": 0}, "--sample must be at least 1, found 0"),
        ({"sample": 2.5}, "--sample must be a whole number, at least 1, found 2.5"),
        ({"sample": 2, "seed": -1}, "--seed must be between 0 and"),
        ({"seed": 1}, "--seed 1: expected --sample with it"),
        ({"steps": "1:2", "largest": 1}, "--steps and --largest: expected at most one of them"),
    ],
)
def test_arguments_are_checked(arguments, text):
    with pytest.raises(UserError, match=text):
        Selection.of_arguments(**arguments)
