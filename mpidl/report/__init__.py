"""Write and read the results of runs: console, metrics, history, plots, arrays and pages."""

from mpidl.report.console import Console
from mpidl.report.metrics import Metrics

__all__ = ["Console", "Metrics"]
