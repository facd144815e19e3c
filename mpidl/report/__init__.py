"""Write and read the results of runs: console output, metrics, history, plots, arrays and pages."""

from mpidl.report.metrics import Metrics
from mpidl.report.progress.console import Console

__all__ = ["Console", "Metrics"]
