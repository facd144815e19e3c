"""Write the results of a run: console lines, the metrics file, plots and arrays."""

from mpidl.report.console import Console
from mpidl.report.metrics import Metrics

__all__ = ["Console", "Metrics"]
