"""What a stage found, kept in a file while it runs: checks, notes, facts, tables; as Markdown."""

import json
import os
import time

from benchmarks import machine


class Report:
    """Of one stage. Each addition is printed and written, so that what a stage found stays when it
    is ended for taking too long."""

    def __init__(self, stage, folder=None):
        self.path = None if folder is None else os.path.join(folder, f"{stage}.json")
        self.began = time.monotonic()
        self.found = {
            "stage": stage,
            "finished": False,
            "seconds": 0.0,
            "checks": [],
            "notes": [],
            "facts": {},
            "tables": [],
        }

    def check(self, what, passed, text):
        """A check and, in words, what was found."""
        entry = {"what": what, "passed": bool(passed), "found": text}
        self.found["checks"].append(entry)
        self._show(f"{'ok    ' if passed else 'FAILED'} {what}: {text}")

    def note(self, text):
        self.found["notes"].append(text)
        self._show(text)

    def fact(self, name, value):
        """Something of the machine or the run, for the JSON and the list at the head."""
        self.found["facts"][name] = value
        self._show(f"{name}: {value}")

    def table(self, title, head, rows):
        """A table of texts; one of the same title takes its place."""
        others = [t for t in self.found["tables"] if t["title"] != title]
        self.found["tables"] = [*others, {"title": title, "head": head, "rows": rows}]
        self.save()

    def finish(self):
        """The stage has done all it had to."""
        self.found["finished"] = True
        self.save()

    @property
    def failed(self):
        """The names of the checks that failed."""
        return [c["what"] for c in self.found["checks"] if not c["passed"]]

    def _show(self, line):
        print(f"  {line}", flush=True)
        self.save()

    def save(self):
        self.found["seconds"] = round(time.monotonic() - self.began, 2)
        machine.write_json(self.path, self.found)


def load(folder, stage):
    """What a stage's Report left, or None."""
    try:
        with open(os.path.join(folder, f"{stage}.json")) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def markdown(found):
    """The text of some stages' reports: a section each."""
    return "\n".join(_section(report) for report in found)


def _section(report):
    state = "" if report["finished"] else " (not finished)"
    parts = [f"### {report['stage']}, {report['seconds']:.0f} s{state}", ""]
    if report["facts"]:
        facts = [[name, str(value)] for name, value in report["facts"].items()]
        parts += [table(["", ""], facts), ""]
    if report["checks"]:
        rows = [
            [check["what"], check["found"], "passed" if check["passed"] else "**failed**"]
            for check in report["checks"]
        ]
        parts += [table(["check", "found", ""], rows), ""]
    for one in report["tables"]:
        parts += [f"{one['title']}:", "", table(one["head"], one["rows"]), ""]
    parts += [f"- {note}" for note in report["notes"]]
    return "\n".join(parts).rstrip() + "\n"


def table(head, rows):
    """A Markdown table of texts."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


def milliseconds(value):
    """0.0803, 1.234, 12.3: three digits that count."""
    if value is None:
        return ""
    digits = 4 if value < 0.1 else 3 if value < 10 else 1
    return f"{value:.{digits}f}"
