"""Test that any bytes of a run's text files are read, or refused with a one-line error."""

import parsers
import pytest
from fuzzing import bounded, fuzz, impatient

__all__ = ["bounded", "impatient"]


@pytest.mark.parametrize("name", parsers.TEXTS)
def test_damaged_texts(tmp_path, name):
    fuzz(name, tmp_path)
