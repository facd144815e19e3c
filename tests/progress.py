"""Report the progress of a test run: a line every few seconds with the remaining time.

The expected times are in tests/durations.json, {run: {file: [seconds, tests]}}. They were measured
on an idle machine with two cores. The completed tests show how much slower this machine is.
`run/test --record` writes the file.
"""

import functools
import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

VARIABLE = "MPIDL_TEST_RUN"
TABLE = Path(__file__).with_name("durations.json")
LINE_PERIOD = 10  # seconds between two lines
PRIOR = 10  # seconds added to the real and expected times, so a few tests hardly change the pace
UNKNOWN = 0.2  # expected seconds of a test whose file is not in the table


class Facts(NamedTuple):
    """Facts about this run that tests/suite.py passes to pytest."""

    name: str = "tests"
    position: str = "1 of 1"
    later: float = 0.0  # expected seconds of the following runs, on an idle machine
    processes: int = 1  # number of tests that run at the same time
    record: bool = False

    @classmethod
    def of_environment(cls):
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def environment(self):
        return {VARIABLE: json.dumps(self._asdict())}


@functools.cache
def table():
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def seconds_of_files(name):
    """Return the expected seconds of each file in the run `name`, on an idle machine."""
    return [seconds for seconds, _ in table().get(name, {}).values()]


def file_of(nodeid):
    return nodeid.partition("::")[0].removeprefix("tests/")


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Progress:
    """The pytest plugin that reports progress, used only in the process that prints."""

    def __init__(self, config):
        self.run = Facts.of_environment()
        self.durations = table().get(self.run.name, {})
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")
        self.quiet = config.option.verbose == 0
        self.terminal.showfspath = not self.quiet
        self.total, self.expected = 0, Counter()  # number of tests; expected seconds
        self.finished, self.failed, self.spent = set(), 0, 0.0
        self.measured = defaultdict(lambda: [0.0, 0])
        self.start = self.last = time.monotonic()

    def weight(self, nodeid):
        seconds, count = self.durations.get(file_of(nodeid), (UNKNOWN, 1))
        return seconds / count

    def expect(self, nodeids):
        """Set the tests of the run, which another process may have collected."""
        self.total = len(nodeids)
        self.expected = sum(map(self.weight, nodeids))
        self.start = self.last = time.monotonic()

    def pytest_collection_finish(self, session):
        if session.items:
            self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        if not self.total:
            self.expect(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        """Print failures immediately, and no dots for other tests."""
        if not self.quiet:
            return None
        if report.passed:
            return ("passed" if report.when == "call" else ""), "", ""
        if report.skipped:
            return "skipped", "", ""
        return ("failed" if report.when == "call" else "error"), "", ""

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        self.measured[file_of(name)][0] += report.duration
        if report.failed:
            self.failed += 1
            self.say(f"FAILED {name} ({report.when})")
        if report.when == "teardown":
            self.finished.add(name)
            self.measured[file_of(name)][1] += 1
            self.spent += self.weight(name)
            if self.quiet and time.monotonic() - self.last > LINE_PERIOD:
                self.last = time.monotonic()
                self.say(self.line())

    def line(self):
        elapsed = time.monotonic() - self.start
        spent, total = self.spent / self.run.processes, self.expected / self.run.processes
        pace = (elapsed + PRIOR) / (spent + PRIOR)  # seconds here per second in the table
        left = pace * max(total - spent, 0)
        text = (
            f"run {self.run.position} ({self.run.name}): {len(self.finished)} of {self.total} tests"
        )
        text += f", {self.failed} failed" if self.failed else ""
        text += f"; {clock(left)} left"
        if self.run.later:
            text += f", {clock(left + pace * self.run.later)} with the following runs"
        return text

    def say(self, text):
        self.terminal.ensure_newline()
        self.terminal.write_line(text)
        self.terminal.flush()  # a pipe or a file should show the line immediately, too

    def pytest_sessionfinish(self, exitstatus):
        if self.run.record and exitstatus == pytest.ExitCode.OK:
            files = {f: [round(s, 2), n] for f, (s, n) in sorted(self.measured.items())}
            write(table() | {self.run.name: files})


def write(durations):
    """Write {run: {file: [seconds, tests]}} to tests/durations.json, one line per file."""
    runs = []
    for name, files in durations.items():
        lines = ",\n".join(f"  {json.dumps(file)}: {json.dumps(v)}" for file, v in files.items())
        runs.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    TABLE.write_text("{\n" + ",\n".join(runs) + "\n}\n")
