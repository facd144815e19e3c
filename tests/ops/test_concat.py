"""Test concatenation along the channels."""

import numpy as np
import pytest
from op_references import Case, OpChecks
from single_rank import blocked

import mpidl as dl


class TestConcat(OpChecks):
    cases = {
        "three values": Case(
            dl.concat, lambda *x: np.concatenate(x, axis=1), [(3, 2), (1, 2), (4, 2)]
        ),
        "features": Case(
            dl.concat,
            lambda *x: np.array([[*a, *b] for a, b in zip(*x, strict=True)]),
            [(3,), (5,)],
        ),
        "one value twice": Case(
            lambda x: dl.concat(x, x) + dl.concat(x, -x),
            lambda x: np.concatenate([2 * x, 0 * x], axis=1),
            [(2, 3, 2)],
        ),
    }
    errors = [
        (
            lambda x, f, i: dl.concat(x, dl.flatten(x)),
            ValueError,
            "concat: expected values of one type",
        ),
        (
            lambda x, f, i: dl.concat(x, np.zeros((20, 2, 3))),
            TypeError,
            "expected a value per image",
        ),
    ]


def test_values_of_different_mini_batches_are_refused(world):
    values = (blocked(world, np.zeros((20, 2, 3))) for _ in range(2))
    with pytest.raises(ValueError, match="belong to different mini-batches"):
        dl.concat(*values)
