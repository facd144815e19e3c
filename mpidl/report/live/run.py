"""Read the state of a run from the files in its folder, while the run writes them."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from mpidl.errors import UserError
from mpidl.files import json_object
from mpidl.report import run_files, status, stop_file
from mpidl.report.curves import Columns, number
from mpidl.report.history import HistoryRecorder
from mpidl.report.live.folder import Folder
from mpidl.report.live.tail import Tail
from mpidl.report.metrics import FILE
from mpidl.report.progress.rows import clock
from mpidl.text import printable

POLL_SECONDS = 0.5  # shortest time between two checks of a folder
SILENT_SECONDS = 60.0  # after this time without a record, the page says so
RUN_FILES = (FILE, status.NAME, run_files.OPTIONS, "checkpoint.h5", "checkpoint-previous.h5")
RUN_FILES += ("trial.json",)  # folders of a sweep's trials


class LiveRun:
    """A run whose files are read while the run writes them.

    Its folder need not exist yet. `ranks` is the last record of that kind, and `version` increases
    when the records change.
    """

    def __init__(self, path: str, name: str) -> None:
        self.folder, self.name = Folder(path), printable(name)
        self.tail = Tail(self.folder)
        self.version, self.poll_time, self.news_time = 0, -math.inf, -math.inf
        self.status: status.Status | None = None  # the content of status.json
        # The content of summary.json; None until the run has ended and written the file.
        self.summary: dict[str, Any] | None = None
        # The requested stop: `stop_file.NOW`, `EPOCH` or None. The value stays until the
        # run ends.
        self.request: str | None = None
        self._clear()

    def _clear(self):
        self.recorder = HistoryRecorder()
        self.ranks: dict[str, Any] | None = None

    @property
    def iterations(self) -> Columns:
        """The numbers of all iterations."""
        return self.recorder.columns["iteration"]

    @property
    def validations(self) -> Columns:
        """The numbers of all validations."""
        return self.recorder.columns["validation"]

    def poll(self, at_once: bool = False) -> None:
        """Read what the run has written, at most once per POLL_SECONDS unless `at_once` is true."""
        now = time.monotonic()
        if now - self.poll_time < POLL_SECONDS and not at_once:
            return
        self.poll_time = now
        with contextlib.suppress(OSError):  # the file system may answer later
            self._read(now)

    def _read(self, now):
        was_complete = self.tail.is_complete
        records, has_restarted = self.tail.read()
        if has_restarted:
            self._clear()
        for record in records:
            self.recorder.add(record)
            if record.get("kind") == "ranks":
                self.ranks = record
        if records or has_restarted:
            self.version += 1
            self.news_time = now if was_complete else now - self._age()
        self.status = status.parse(self.folder.content(status.NAME))
        self.summary = self._current_summary()
        self.request = stop_file.read(self.folder.path)

    def _age(self):
        """Return the seconds since the last record was written."""
        written = self.folder.read(FILE, lambda descriptor, status: status.st_mtime)
        return max(0.0, time.time() - written) if written is not None else 0.0

    def _current_summary(self):
        """Return the content of summary.json if it describes the current end of the run."""
        summary = json_object(self.folder.content(run_files.SUMMARY))
        if summary is None or self.status is None:
            return None
        last = self.iterations.last("iteration")
        is_current = run_files.is_current(summary, 0 if math.isnan(last) else int(last))
        return summary if is_current and summary.get("stopped") == self.status.stopped else None

    @property
    def has_ended(self) -> bool:
        return self.status is not None and self.status.state in (status.FINISHED, status.FAILED)

    @property
    def is_silent(self) -> bool:
        """Whether the run has written nothing for `SILENT_SECONDS`."""
        return time.monotonic() - self.news_time > SILENT_SECONDS

    @property
    def iterations_per_epoch(self) -> int:
        """Number of iterations per epoch. Without a status, the iterations of epoch 1 so far."""
        if self.status is not None and self.status.iterations_per_epoch:
            return self.status.iterations_per_epoch
        return max(1, int((self.iterations.column("epoch") == 1).sum()))

    def progress(self) -> float:
        """Return the completed fraction of the run; NaN if it is unknown."""
        total = self.status.iterations if self.status else 0
        if not total:
            return math.nan
        last = self.iterations.last("iteration")
        return 0.0 if math.isnan(last) else min(1.0, last / total)

    def seconds_left(self) -> float:
        """Return the estimated time to the end of the run; NaN if it is unknown."""
        total = self.status.iterations if self.status else 0
        seconds = self.iterations.recent_rate("seconds", "iteration")
        return max(0.0, total - self.iterations.last("iteration")) * seconds if total else math.nan

    def describe(self) -> str:
        """Return the state of the run, such as "stopped: SIGUSR1"."""
        if self.status is not None and self.has_ended:
            return self._describe_end(self.status)
        if not len(self.iterations) and self.status is None:
            text = f"waiting for {printable(self.folder.path)}"
        else:
            text = self._describe_progress()
        requests = {stop_file.NOW: "; stop requested", stop_file.EPOCH: "; stops after this epoch"}
        return text + requests.get(self.request or "", "")

    def _describe_progress(self):
        text = "running"
        if self.status is not None:
            ranks = self.status.ranks
            text += f" on {ranks} rank{'' if ranks == 1 else 's'}, {printable(self.status.host)}"
        if self.is_silent and math.isfinite(self.news_time):
            text = f"no record for {clock(time.monotonic() - self.news_time)}, was {text}"
        return text

    def _describe_end(self, end: status.Status) -> str:
        if end.state == status.FAILED:
            return f"failed: {printable(end.error or 'unknown error')}"
        reason = printable(end.stopped or "")
        if reason and self.summary is None:
            return f"stopped: {reason}"
        text = f"done ({reason})" if reason else "done"
        validated = self.recorder.columns["final_validation"].last("accuracy")
        tested = number((self.summary or {}).get("accuracy"))
        for name, accuracy in (("validation", validated), ("test", tested)):
            text += f", {name} accuracy {accuracy:.4f}" if math.isfinite(accuracy) else ""
        return text

    def why_no_stop(self) -> str | None:
        """Return the reason why the page cannot stop the run, or None if the page can."""
        if self.has_ended:
            return "the run has ended"
        return self.folder.why_no_stop()


def runs_of(paths: Sequence[str]) -> list[LiveRun]:
    """Return a `LiveRun` for each folder.

    The folders need not exist yet. Raises UserError if a path is a file, or if a folder has files
    but no files of a run.
    """
    for path in paths:
        _check(path)
    resolved = [os.path.abspath(path) for path in paths]
    unique = list(dict.fromkeys(resolved))
    return [
        LiveRun(path, name)
        for path, name in zip(unique, run_files.short_names(unique), strict=True)
    ]


def _check(path):
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UserError(f"{printable(path)}: expected a run's folder, found a file") from None
    except OSError as error:
        raise UserError(f"{printable(path)}: cannot be read: {error.strerror}") from None
    if not names or any(name in names for name in RUN_FILES):
        return
    inner = sorted(n for n in names if os.path.exists(os.path.join(path, n, FILE)))
    hint = f"; it holds runs, such as {printable(os.path.join(path, inner[0]))}" if inner else ""
    raise UserError(
        f"{printable(path)}: expected a run's folder, with {FILE}, found none in it{hint}"
    )
