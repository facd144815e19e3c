"""The emulated GPU that the kernels' tests compute on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # alone.py, emulator

from emulator import compiler, opened  # noqa: E402


@pytest.fixture
def device(request):
    """An EmulatedDevice that is open. Parametrized indirectly, it takes a schedule: `0, 1, 2`."""
    _needs_compiler()
    with opened(getattr(request, "param", 0)) as found:
        yield found


@pytest.fixture
def emulated():
    """Opens emulated GPUs by turns: `with emulated(order, **options) as device`."""
    _needs_compiler()
    return opened


def _needs_compiler():
    if compiler.find() is None:
        pytest.skip("no g++, which the emulated GPU compiles kernels with")
