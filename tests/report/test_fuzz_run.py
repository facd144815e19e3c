"""Test that any bytes of metrics.jsonl, options.toml etc. are read, or refused in one line."""

import parsers
import pytest
from fuzzing import bounded, fuzz, impatient

__all__ = ["bounded", "impatient"]


@pytest.mark.parametrize("name", parsers.TEXTS)
def test_damaged_texts(tmp_path, name):
    fuzz(name, tmp_path)
