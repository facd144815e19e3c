"""The output of a run: console, metrics file, plots, arrays."""

from mpidl.report.console import Console
from mpidl.report.metrics import Metrics

__all__ = ["Console", "Metrics"]
