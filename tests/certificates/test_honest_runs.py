"""Test that an audit accepts honest runs, whatever their options and interruptions."""

from pathlib import Path

import pytest
from certified_runs import audit, train_run, write_data

NETWORKS = Path(__file__).parents[1] / "launch" / "networks.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "set.npz")


def assert_equal(run, data, *words):
    """Audit a run from its start, and from its checkpoints; assert that nothing differs."""
    for selection in ((), ("--sample", 2)):
        result = audit(run, data, *words, *selection)
        assert (result.code, result.differing) == (0, []), result.lines


def test_a_network_with_several_inputs(data, tmp_path):
    """The names of a layer's inputs are a tuple in Python and a list in JSON."""
    run = train_run(data, tmp_path / "run", "--network", f"{NETWORKS}:bottlenecks", "--epochs", 1)
    assert_equal(run, data)
