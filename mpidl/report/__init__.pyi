from mpidl.report.metrics import Metrics as Metrics
from mpidl.report.progress.console import Console as Console
