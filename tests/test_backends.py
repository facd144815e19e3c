"""The backends define the same functions with the same arguments."""

import inspect

import pytest

from mpidl.backends import cpu, reference

# What only a backend has that reads activations which are not stored
DEFERRED = {"activation", "activation_sums", "conv2d_moments"}


@pytest.mark.parametrize("name", cpu.__all__)
def test_the_arguments_are_those_of_numpy(name):
    if name in DEFERRED:
        assert not hasattr(reference, name)
        return
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (cpu, reference))
    assert list(ours)[: len(theirs)] == list(theirs)
    extra = list(ours.values())[len(theirs) :]
    assert all(p.default is not inspect.Parameter.empty for p in extra)


def test_what_ops_call_is_in_both():
    """Every function of `reference` that another module uses."""
    shared = set(cpu.__all__) - DEFERRED
    own = {"conv2d_dx", "conv2d_dweight", "pool2d_shape"}  # parts of others, and shapes
    functions = {
        name
        for name, value in vars(reference).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__.startswith("mpidl.backends")
    }
    assert functions - own == shared
