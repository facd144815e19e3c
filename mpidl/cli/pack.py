"""`python -m mpidl.pack`: the images of any source in one file, for fast reading."""

import argparse
import os
import sys
import time

from mpidl.cli import arguments, start
from mpidl.comm import failure
from mpidl.data import registry
from mpidl.data.formats import packed, packing
from mpidl.errors import UserError
from mpidl.report.console import LINE_SECONDS, clock, terminal_width


def parse(argv=None, quiet=False):
    """Namespace of source, target (None with verify), wanted (Preprocess), threads, verify."""
    parser = arguments.Parser(
        "mpidl.pack",
        "Write the images of a folder, or of any other source, to one file that training reads\n"
        "faster, from parallel file systems above all. Labels, class names and the set's own test\n"
        "images go with them, and training on it gives the same weights, byte for byte. What an\n"
        "interruption leaves, the same command goes on with.",
        quiet,
        epilog="exit codes: 0 done; 1 a fault; 2 unusable options or data; 75 asked to stop: run\n"
        "the same command again",
    )
    parser.add_argument("source", metavar="SRC", help=arguments.DATA_HELP)
    parser.add_argument("target", metavar="DST.h5", nargs="?", help="the file to write")
    arguments.add_preprocess(parser)
    parser.add_argument(
        "--threads",
        type=arguments.count("--threads"),
        metavar="N",
        help="threads that read and decode (as many as there are cores)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="SRC is a packed file: compare it with its checksums"
    )
    chosen = parser.parse(argv)
    wanted = start.preprocess(vars(chosen))
    if chosen.verify and (chosen.target or wanted):
        raise UserError("--verify: expected a packed file and nothing else")
    if not chosen.verify and chosen.target is None:
        raise UserError("DST.h5: expected the file to write, found none")
    return argparse.Namespace(
        source=chosen.source,
        target=chosen.target,
        wanted=wanted,
        threads=chosen.threads or len(os.sched_getaffinity(0)),
        verify=chosen.verify,
    )


def main(argv=None):
    """Run the command; returns its exit code."""
    chosen = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError("pack is one process with threads: run it without mpirun")
    return run(chosen)


def run(chosen):
    """Do what `parse` returned; the exit code."""
    with failure.Signals() as signals:
        return _verify(chosen, signals) if chosen.verify else _pack(chosen, signals)


def _pack(chosen, signals):
    train, test = registry.open_data(chosen.source, option="SRC", preprocess=chosen.wanted)
    parts = {"train": train} if test is None else {"train": train, "test": test}
    if test is not None and test.image_shape != train.image_shape:
        raise UserError(
            f"{test.describe()}: expected images of shape {train.image_shape}, as of "
            f"{train.describe()}, found {test.image_shape}; --resize makes them so"
        )
    for store in parts.values():
        print(f"From: {store.describe()}", flush=True)
    total = sum(len(store) for store in parts.values())
    with Progress("Packed", total) as shown:
        done = packing.pack(
            parts,
            chosen.target,
            threads=chosen.threads,
            progress=shown.add,
            stop=lambda: signals.name is not None,
        )
    if not done:
        print(
            f"{signals.name}: stopped after {shown.done} of {total} images; to go on, run the same "
            "command again"
        )
        return arguments.STOPPED
    size = os.path.getsize(chosen.target)
    print(f"Packed: {chosen.target}, {total} images, {size:,} bytes, in {clock(shown.seconds())}")
    return 0


def _verify(chosen, signals):
    parts = [
        packed.PackedDatastore(chosen.source, part=part, labelled=False)
        for part in packed.parts_of(chosen.source)
    ]
    total = sum(len(store) for store in parts)

    class Stop(Exception):
        pass

    def progress(count):
        shown.add(count)
        if signals.name is not None:
            raise Stop

    with Progress("Verified", total) as shown:
        try:
            for store in parts:
                store.verify(progress)
        except Stop:
            print(f"{signals.name}: stopped after {shown.done} of {total} images")
            return arguments.STOPPED
    print(f"Verified: {chosen.source}, {total} images are what was packed")
    return 0


class Progress:
    """A bar on a terminal, and elsewhere a line now and then: how many images are done."""

    def __init__(self, verb, total):
        self.verb, self.total, self.done = verb, total, 0
        self.began = self.written = time.monotonic()
        self.bar = None

    def __enter__(self):
        width = terminal_width(sys.stdout)
        if width:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            console = Console(file=sys.stdout, width=width, force_terminal=True)
            columns = BarColumn(), MofNCompleteColumn(), "images", TimeRemainingColumn()
            self.bar = Bar(*columns, console=console, transient=True)
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.stop()

    def add(self, count):
        """So many more images are done."""
        self.done += count
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
        elif time.monotonic() - self.written > LINE_SECONDS:
            self.written = time.monotonic()
            print(f"{self.verb}: {self.done} of {self.total} images", flush=True)

    def seconds(self):
        """Since it began."""
        return time.monotonic() - self.began
