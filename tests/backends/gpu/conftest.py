"""Define the fixture `world` of the GPU tests."""

import pytest


@pytest.fixture
def world(device):
    """Return a world with one rank that computes on the device."""
    from mpidl.backends.gpu.sums import Counts
    from mpidl.ranks.world import World

    world = World(threads=1)
    world.device, world.counts = device, Counts()
    yield world
    world.device = world.counts = None
