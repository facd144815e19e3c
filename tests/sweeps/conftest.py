"""Limit each rank to one thread in the tests of `mpidl.sweeps`."""

import pytest

import mpidl as dl


@pytest.fixture(scope="session")
def world():
    return dl.World(threads=1)
