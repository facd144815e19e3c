"""The ranks of the tests of training compute on one thread each."""

import pytest

import mpidl as dl


@pytest.fixture(scope="session")
def world():
    return dl.World(threads=1)
