"""What a run shows: console, metrics file, plots."""

from mpidl.report.console import Console
from mpidl.report.metrics import Metrics

__all__ = ["Console", "Metrics"]
