"""How many examples of damaged files the tests try, and what a reader may do with them.

The examples are the same in each run (`derandomize`). MPIDL_FUZZ=100000 tries as many, different
ones each time, as the slow part `fuzz` does.
"""

import os
import resource

import pytest
from hypothesis import HealthCheck, settings

from mpidl.errors import UserError

EXAMPLES = int(os.environ.get("MPIDL_FUZZ", 0))
FUZZ = settings(
    max_examples=EXAMPLES or 10,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
MEMORY = 600 << 20  # bytes that reading hostile files may add to the peak


@pytest.fixture(autouse=True, scope="module")
def bounded():
    """No file makes mpidl allocate gigabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert growth < MEMORY, f"{growth >> 20} MB"


def attempt(function, *args, **keywords):
    """Return the call's result, or None after a UserError of one short line."""
    try:
        return function(*args, **keywords)
    except UserError as error:
        text = str(error)
        assert "\n" not in text and 0 < len(text) < 2000, text
        return None
