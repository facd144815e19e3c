"""Set how many damaged files the tests try, and limit the time and memory of parsers.

The examples are the same in each run (`derandomize`). With MPIDL_FUZZ=100000, the tests try this
number of examples, which differ in each run, as in the slow part `fuzz`.
"""

import os
import resource

import mutations
import parsers
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpidl.data.formats import hdf5_probe

EXAMPLES = int(os.environ.get("MPIDL_FUZZ", 0))
FUZZ = settings(
    max_examples=EXAMPLES or 10,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MEMORY = 600 << 20  # bytes that reading hostile files may add to the peak memory


@pytest.fixture(autouse=True, scope="module")
def bounded():
    """Check that no damaged file makes mpidl allocate gigabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert growth < MEMORY, f"{growth >> 20} MB"


def fuzz(name, folder):
    """Feed randomly damaged files to a parser of `parsers.PARSERS`."""
    path, valid, read, parser = parsers.prepared(name, folder)
    hdf5_probe.SECONDS = 1.0  # the fixture `impatient` restores it

    @FUZZ
    @given(st.randoms(use_true_random=True))
    def from_random_numbers(numbers):
        path.write_bytes(mutations.hostile(valid, parser.beginning, numbers))
        read()

    from_random_numbers()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """End HDF5's helper process soon, because HDF5 never finishes reading some damaged files.

    `fuzz` sets the shorter limit after the helper process has started and has read a valid file.
    """
    monkeypatch.setattr(hdf5_probe, "SECONDS", 60.0)
