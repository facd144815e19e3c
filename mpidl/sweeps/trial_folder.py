"""Read and write the folders of a sweep's trials.

Each trial has the folder of a run, which also contains trial.json and console.log.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mpidl.errors import UserError
from mpidl.files import json_object, reason, write_whole
from mpidl.report import run_files
from mpidl.sweeps.sweep_file import Sweep, changed_options
from mpidl.training.files import checkpoint

RECORD, LOG = "trial.json", "console.log"
WAITING, RUNNING, COMPLETE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
PRUNED = "pruned"  # ended early by the pruner of a search
FINAL_STATES = (COMPLETE, FAILED, PRUNED)
STATES = (WAITING, RUNNING, STOPPED, *FINAL_STATES)
# Columns of the table whose values are in summary.json; "seconds" is called "train_seconds" there.
FIGURES = """
accuracy loss validation_accuracy validation_loss epochs iterations seconds weights_sha256
""".split()


class TrialFolder(NamedTuple):
    """The folder of a trial, which need not exist yet.

    Attributes
    ----------
    path : str
        The folder.
    number : int
        Number of the trial, from 1.
    options : dict
        All options that the sweep file sets for the trial.
    """

    path: str
    number: int
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def state(self) -> str:
        """Return the state of the trial, one of `STATES`. A killed trial stays "running"."""
        return self._record().get("state", WAITING)

    def row(self) -> dict[str, Any]:
        """Return the row of the trial in the table of the sweep, without the options."""
        record, state = self._record(), self.state()
        summary: dict[str, Any] = {}
        with contextlib.suppress(UserError):  # a damaged file leaves the row without results
            summary = run_files.read_summary(self.path) if state == COMPLETE else {}
        summary |= {"seconds": summary.get("train_seconds")}
        if state == PRUNED:
            summary = self._last_validation()
        figures = {name: summary.get(name) for name in FIGURES}
        error = record.get("error") if state == FAILED else None
        return {"trial": self.number, "state": state, **figures, "error": error}

    def validations(self, metric: str) -> list[float]:
        """Return a score of each validation, up to the one after which the trial was pruned.

        `metric` is "validation_accuracy" or "validation_loss". A score is NaN if it is missing.
        """
        count = self._record().get("validations")
        series = run_files.history(self.path).validation
        return getattr(series, metric.removeprefix("validation_")).tolist()[:count]

    def _last_validation(self):
        """Return the figures of a pruned trial."""
        try:
            series = run_files.history(self.path).validation
        except UserError:
            return {}
        end = self._record().get("validations") or 0
        if not 0 < end <= len(series):
            return {}
        names = {"validation_accuracy": "accuracy", "validation_loss": "loss"}
        names |= {"iterations": "iteration", "seconds": "seconds"}
        figures = {name: getattr(series, field)[end - 1].item() for name, field in names.items()}
        return {name: value for name, value in figures.items() if math.isfinite(value)}

    def recorded(self, names: Iterable[str]) -> dict[str, Any] | None:
        """Return the values of options with which the trial has begun; None if it has not."""
        options = self._record().get("options", {})
        return {name: options[name] for name in names} if options.keys() >= {*names} else None

    def write(self, state: str, error: str | None = None, validations: int | None = None) -> None:
        """Write the state of the trial to trial.json.

        Parameters
        ----------
        state : str
            One of `STATES`.
        error : str, optional
            Error message of a failed trial.
        validations : int, optional
            Number of validations after which the trial was pruned.
        """
        record = {"trial": self.number, "options": self.options, "state": state, "error": error}
        if validations is not None:
            record["validations"] = validations
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as problem:
            raise UserError(f"{self.path}: cannot be created: {reason(problem)}") from problem
        content = (json.dumps(record, indent=1) + "\n").encode()
        write_whole(os.path.join(self.path, RECORD), content)

    def can_resume(self) -> bool:
        """Return whether the trial has a checkpoint and its options are unchanged."""
        return checkpoint.exists(self.path) and not self.changes()

    def changes(self) -> list[str]:
        """Return "NAME was OLD, is NEW" for each option that has changed in the sweep file."""
        record = self._record()
        old = record.get("options", self.options)
        names = changed_options(old, self.options)
        new = self.options
        return [
            f"{name} was {old.get(name, 'unset')}, is {new.get(name, 'unset')}" for name in names
        ]

    @contextlib.contextmanager
    def log(self) -> Iterator[None]:
        """Within the block, append the output of this process to console.log.

        All ranks of a trial may append to the file.
        """
        try:
            file = open(os.path.join(self.path, LOG), "a", buffering=1, errors="backslashreplace")
        except OSError:  # another host may not see the folder yet
            file = open(os.devnull, "w")
        with file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield
            sys.stdout.flush()

    def _record(self):
        """Return the content of trial.json; {} if the file is missing or damaged."""
        try:
            with open(os.path.join(self.path, RECORD), "rb") as file:
                record = json_object(file.read()) or {}
        except OSError:
            return {}
        is_valid = isinstance(record.get("options", {}), dict) and record.get("state") in STATES
        is_valid = is_valid and isinstance(record.get("validations"), int | None)
        return record if is_valid else {}


def folders_of(sweep: Sweep, out: str) -> list[TrialFolder]:
    """Return the folders of all trials of a sweep in the folder `out`.

    The options of a trial of a search are those with which it has begun.
    """
    folders = [  # the names do not depend on the number of trials, which may grow
        TrialFolder(os.path.join(out, f"trial-{i + 1:03}"), i + 1, sweep.options(i))
        for i in range(len(sweep.trials))
    ]
    if sweep.search is None:
        return folders
    return [f._replace(options=sweep.train | (f.recorded(sweep.varied) or {})) for f in folders]
