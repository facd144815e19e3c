"""`python -m mpidl.report`: compare runs in a table, and write a page about them."""

import argparse
import os
from collections.abc import Sequence

from mpidl.cli.parser import Parser
from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.ranks import failure
from mpidl.report import run_files
from mpidl.report.page import run_page
from mpidl.text import aligned, printable


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.report; `arguments.train` describes parameters and errors."""
    parser = Parser(
        "mpidl.report",
        "Print the results of runs, and write a page about them: curves, options, confusion\n"
        "matrices and devices. The page is one file, which opens offline.",
        quiet,
        epilog="exit codes: 0 success; 1 error; 2 invalid options, or a folder without a run",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="The results folder of a run, finished or not; the folder of a sweep includes all "
        "trials",
    )
    parser.text("--html", "FILE.html", "Write the page to this file", type=_html_path)
    return parser.parse(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError("report uses one process: run it without mpirun")
    runs = [run_files.read(folder) for folder in run_files.folders(parsed.runs)]
    names = run_files.short_names([run.folder for run in runs])
    head, rows = run_page.result_rows(runs, names)
    print("\n".join(aligned([head, *([printable(cell) for cell in row] for row in rows)], left=2)))
    for text in run_page.notes(runs, names):
        print(printable(text))
    if parsed.html is not None:
        write_whole(parsed.html, run_page.render(runs))
        print(f"Report: {parsed.html}")
    return 0


def _html_path(text):
    if os.path.splitext(text)[1].lower() not in (".html", ".htm"):
        raise UserError(f"--html {text}: the page is written as .html")
    return text
