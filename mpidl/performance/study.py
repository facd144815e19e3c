"""Train on several numbers of ranks, one after another, and read the results."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from mpidl.errors import UserError
from mpidl.files import reason, write_whole
from mpidl.launcher import environment, launcher
from mpidl.performance.results import (
    COMPLETE,
    FAILED,
    STOPPED,
    add_efficiency,
    last_error,
    last_line,
    other_load_line,
    read_json,
    row_of,
)
from mpidl.ranks.thread_budget import OtherLoad
from mpidl.report import run_files
from mpidl.report.progress.rows import clock
from mpidl.training.files import checkpoint

if TYPE_CHECKING:
    from mpidl.ranks.failure import Signals

STOPPED_CODE = 75  # exit code of mpidl.train after a stop with a checkpoint
POLL_SECONDS = 0.2
SHOW_SECONDS = 10.0  # seconds between two lines of progress about a process
FILE = "study.json"
RUN_NAME = re.compile(r"ranks-(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Plan:
    """The runs of a study."""

    out: str
    counts: tuple[int, ...]
    words: tuple[str, ...]
    repeat: int = 1  # number of runs per number of ranks
    is_weak: bool = False  # whether the mini-batch grows with the number of ranks (weak scaling)
    uses_srun: bool = False  # whether to start the runs with srun instead of mpirun
    # Values that the study chose for missing options. A continued study uses the same values.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def runs(self) -> list[Run]:
        """Return the runs in order: one run on each number of ranks, then the repetitions."""
        return [Run(self, n, turn) for turn in range(1, self.repeat + 1) for n in self.counts]

    def identity(self) -> dict[str, Any]:
        """Return the content of study.json."""
        return {"train": list(self.words), "weak": self.is_weak, **self.defaults}


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    plan: Plan
    ranks: int
    turn: int  # number of the repetition, from 1

    @property
    def name(self) -> str:
        """Name of the run's folder in the folder of the study."""
        return f"ranks-{self.ranks}" + (f"-{self.turn}" if self.turn > 1 else "")

    @property
    def folder(self) -> str:
        return os.path.join(self.plan.out, self.name)

    @property
    def log(self) -> str:
        return os.path.join(self.plan.out, f"{self.name}.log")

    def is_done(self) -> bool:
        """Return whether the run has ended with a result."""
        return run_files.has_ended(self.folder)

    def command(self) -> list[str]:
        """Return the command line that starts or resumes the run."""
        words = [*launcher(self.ranks, self.plan.uses_srun), sys.executable, "-m", "mpidl.train"]
        words += [*self.plan.words, "--out", self.folder]
        return [*words, *(["--resume", self.folder] if checkpoint.exists(self.folder) else [])]


def earlier_start(out: str) -> dict[str, Any]:
    """Return the content of study.json in a folder, or an empty dict if the file is missing."""
    path = os.path.join(out, FILE)
    return read_json(path) if os.path.exists(path) else {}


@dataclass
class Study:
    """A study in progress."""

    plan: Plan
    signals: Signals  # signals that have requested a stop
    errors: dict[str, str] = field(default_factory=dict)  # {name of a failed run: error message}
    # Function that is called with a line of progress about every ten seconds.
    show: Callable[[str], object] = lambda line: None

    def start(self, overwrite: bool = False) -> None:
        """Create the folder of the study, or continue an earlier study in this folder.

        Raises UserError if the folder contains a study with other arguments, or cannot be written.
        `overwrite` deletes the runs of an earlier study.
        """
        out, identity = self.plan.out, self.plan.identity()
        path = os.path.join(out, FILE)
        is_study = os.path.exists(path)
        if is_study and not overwrite:
            earlier = earlier_start(out)
            if any(earlier.get(name) != identity[name] for name in ("train", "weak")):
                before = " ".join(map(str, earlier.get("train", [])))
                raise UserError(
                    f"--out {out}: it holds a study of other runs (mpidl.train {before}"
                    f"{', --weak' if earlier.get('weak') else ''}); expected the same arguments, "
                    "--overwrite to replace it, or another --out"
                )
        try:
            os.makedirs(out, exist_ok=True)
            if overwrite and is_study:
                for name in sorted(os.listdir(out)):
                    if RUN_NAME.fullmatch(name.removesuffix(".log")):
                        target = os.path.join(out, name)
                        shutil.rmtree(target) if os.path.isdir(target) else os.unlink(target)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written: {reason(error)}") from error
        if overwrite or not is_study:
            write_whole(path, (json.dumps(identity, indent=1) + "\n").encode())

    def run(self, run: Run) -> str:
        """Start or resume a run, and return the state of the run.

        Raises UserError if mpidl.train rejects its options or data, and no run of the study has
        finished.
        """
        load = OtherLoad()
        with open(run.log, "a") as log:
            code = self.execute(run.name, run.command(), log)
            if code == 0 and not self.plan.uses_srun:  # srun's ranks are not children
                log.write(other_load_line(load.share()))
        if code == STOPPED_CODE:
            return STOPPED
        if code == 0 and run.is_done():
            self.errors.pop(run.name, None)
            return COMPLETE
        message = last_error(run.log) or f"exit code {code}"
        if code == 2 and not any(other.is_done() for other in self.known_runs()):
            raise UserError(message)
        if self.signals.name:
            return STOPPED
        self.errors[run.name] = message
        return FAILED

    def execute(self, name: str, words: Sequence[str], log: IO[str]) -> int:
        """Run a command that starts ranks, wait for its end, and return the exit code.

        If a signal requests a stop, the command receives the signal USR1, once. `name` is that of
        the process in the lines that `show` receives, followed by the last line of the log.
        """
        process = subprocess.Popen(
            words,
            env=None if self.plan.uses_srun else environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that signals of the terminal do not reach the command
        )
        try:
            return self._wait(process, name, log.name)
        except BaseException:
            process.kill()
            process.wait()
            raise

    def _wait(self, process, name, log):
        """Wait for a process, show its log, pass on a request to stop, and return the exit code."""
        start = shown_time = time.monotonic()
        is_asked, previous = False, last_line(log)
        while True:
            try:
                return process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if self.signals.name and not is_asked:
                    is_asked = True
                    process.send_signal(signal.SIGUSR1)
            now = time.monotonic()
            if now - shown_time >= SHOW_SECONDS:
                line, shown_time = last_line(log), now
                running = f"running for {clock(now - start)}"
                self.show(f"{name}: {running if line == previous else line}")
                previous = line

    def known_runs(self) -> list[Run]:
        """Return the runs of the plan, and other runs whose folders exist from earlier starts."""
        names = [(run.turn, run.ranks) for run in self.plan.runs()]
        for name in os.listdir(self.plan.out):
            match = RUN_NAME.fullmatch(name)
            if match and os.path.isdir(os.path.join(self.plan.out, name)):
                names.append((int(match[2] or 1), int(match[1])))
        return [Run(self.plan, ranks, turn) for turn, ranks in sorted(set(names))]

    def rows(self) -> list[dict[str, Any]]:
        """Return the results for each number of ranks, as `results.row_of` returns them."""
        by_count: dict[int, list[Run]] = {}
        for run in self.known_runs():
            by_count.setdefault(run.ranks, []).append(run)
        rows = [row_of(ranks, runs, self.errors) for ranks, runs in sorted(by_count.items())]
        add_efficiency(rows)
        return rows
