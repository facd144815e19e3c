"""Write measurements to JSON files, printed tables, and Markdown for the documentation."""

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks import machine
from mpidl.cli.device_probe import cpu_model
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.text import aligned

# numbers


def median(values) -> float:
    """Return the median of numbers as a Python float."""
    return float(np.median(values))


def spread(values, scale: float = 1.0, digits: int = 2) -> str:
    """Format the median and range of `values * scale`, as in "13.02 (min 12.90, max 14.10)"."""
    values = np.asarray(values) * scale
    low, middle, high = values.min(), np.median(values), values.max()
    return f"{middle:.{digits}f} (min {low:.{digits}f}, max {high:.{digits}f})"


def summary(values, scale: float = 1.0) -> dict[str, float]:
    """Return "median", "min" and "max" of `values * scale`."""
    values = np.asarray(values, float) * scale
    return {"median": median(values), "min": float(values.min()), "max": float(values.max())}


def milliseconds(value: float | None) -> str:
    """Format a time in ms with about three digits, such as "0.0803" or "12.3". None gives ""."""
    if value is None:
        return ""
    digits = 4 if value < 0.1 else 3 if value < 10 else 1
    return f"{value:.{digits}f}"


# JSON


def header(options, versions: Mapping[str, str | None], *names: str) -> dict:
    """Return the first entries of a JSON file: the machine, the versions and some options.

    Parameters
    ----------
    options : argparse.Namespace
        The parsed command line, with the attribute `busy`.
    versions : mapping
        Versions by package, such as {"numpy": "2.4.6"}.
    *names : str
        Names of the options to include.
    """
    return {
        "command": options.command,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "arithmetic": machine.arithmetic(),
        "busy_before": options.busy,
        "versions": versions,
        "platform": platform.platform(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    } | {name: getattr(options, name) for name in names}


def prepare_json(path: str | None) -> None:
    """Raise UserError if `--json PATH` could not be written at the end."""
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if path and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise UserError(f"--json {path}: expected a file in a folder that can be written to")


def write_json(path: str | None, record: Mapping | None) -> None:
    """Write a record to `path`.

    Do nothing if the record or the path is None. On ranks other than 0 the record is None.
    """
    if path and record is not None:
        text = json.dumps(record, indent=1, default=_plain)
        write_whole(path, f"{text}\n".encode())


def _plain(value):
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


# tables


def print_table(rows: Iterable[Sequence[object]], left: int = 1) -> None:
    """Print rows as a table; left-align the first `left` columns and right-align the others."""
    print("\n".join(aligned(rows, left)), flush=True)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with these cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


# reports of stages


class Report:
    """Checks, notes, facts and tables of one stage.

    Every addition is printed and written to the file immediately. Therefore, if a stage runs out of
    time, the file contains everything up to that moment.

    Parameters
    ----------
    stage : str
        Name of the stage.
    folder : str or None
        Folder for the file STAGE.json. With None, no file is written.

    Attributes
    ----------
    record : dict
        Content of the file.
    """

    def __init__(self, stage: str, folder: str | None = None):
        self.path = None if folder is None else os.path.join(folder, f"{stage}.json")
        self.start = time.monotonic()
        self.record: dict = {
            "stage": stage,
            "finished": False,
            "seconds": 0.0,
            "checks": [],
            "notes": [],
            "facts": {},
            "tables": [],
        }

    def check(self, name: str, passed: bool, text: str) -> None:
        """Add a check and a description of its outcome."""
        self.record["checks"].append({"what": name, "passed": bool(passed), "found": text})
        self._print(f"{'ok    ' if passed else 'FAILED'} {name}: {text}")

    def note(self, text: str) -> None:
        """Add a remark."""
        self.record["notes"].append(text)
        self._print(text)

    def fact(self, name: str, value: object) -> None:
        """Add a property of the machine or of the run."""
        self.record["facts"][name] = value
        self._print(f"{name}: {value}")

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table of strings. The table replaces an earlier table with the same title."""
        tables = [table for table in self.record["tables"] if table["title"] != title]
        self.record["tables"] = [*tables, {"title": title, "head": head, "rows": rows}]
        self._save()

    def finish(self) -> None:
        """Mark the stage as complete."""
        self.record["finished"] = True
        self._save()

    @property
    def failed(self) -> list[str]:
        """Names of the failed checks."""
        return [check["what"] for check in self.record["checks"] if not check["passed"]]

    def _print(self, line):
        print(f"  {line}", flush=True)
        self._save()

    def _save(self):
        self.record["seconds"] = round(time.monotonic() - self.start, 2)
        write_json(self.path, self.record)


def load(folder: str, stage: str) -> dict | None:
    """Load the record that the Report of a stage wrote to a folder, or return None."""
    try:
        with open(os.path.join(folder, f"{stage}.json")) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def markdown(records: Iterable[Mapping]) -> str:
    """Format the records of stages as Markdown, one section per stage."""
    return "\n".join(_section(record) for record in records)


def _section(record):
    state = "" if record["finished"] else " (not finished)"
    parts = [f"### {record['stage']}, {record['seconds']:.0f} s{state}", ""]
    if record["facts"]:
        facts = [[name, str(value)] for name, value in record["facts"].items()]
        parts += [markdown_table(["", ""], facts), ""]
    if record["checks"]:
        rows = [
            [check["what"], check["found"], "passed" if check["passed"] else "**failed**"]
            for check in record["checks"]
        ]
        parts += [markdown_table(["check", "found", ""], rows), ""]
    for table in record["tables"]:
        parts += [f"{table['title']}:", "", markdown_table(table["head"], table["rows"]), ""]
    parts += [f"- {note}" for note in record["notes"]]
    return "\n".join(parts).rstrip() + "\n"
