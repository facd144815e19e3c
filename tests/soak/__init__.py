"""Run long trials of mpidl with random faults, as programs; see __main__.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Folders with the helpers of the tests. pytest gets these folders from pyproject.toml.
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("launch", "support", "")]
