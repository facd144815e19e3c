"""`python -m mpidl.pack`: write the images of a source to one file that training reads fast."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from mpidl.cli import arguments, remote
from mpidl.cli.parser import Parser
from mpidl.data import registry
from mpidl.data.formats import pack_contents, packed, packing
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.data.urls import check_url, refuse_remote
from mpidl.errors import UserError
from mpidl.options.declaration import one_of
from mpidl.ranks import failure
from mpidl.report.progress.console import LINE_SECONDS
from mpidl.report.progress.rows import clock
from mpidl.report.progress.terminal import terminal_width


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.pack.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; by default the command-line arguments of the process.
    quiet : bool
        Whether --help exits without printing.

    Returns
    -------
    Namespace
        The attributes are source, target, images, shards, shard_mb, preprocess, threads, verify and
        storage. target is None if verify is true; preprocess is a Preprocess; storage is a dict
        {name: value} of the options in `arguments.STORAGE` that the user typed.

    Raises
    ------
    UserError
        If an argument is invalid.
    """
    parsed = _parser(quiet).parse(argv)
    parsed.preprocess = Preprocess.of_options(vars(parsed))
    shapes_file = parsed.shards or parsed.shard_mb or parsed.images != "decoded"
    if parsed.verify and (parsed.target or parsed.preprocess or shapes_file):
        raise UserError("--verify: expected only a packed file")
    if not parsed.verify and parsed.target is None:
        raise UserError("DST.h5: expected the file to write, found none")
    check_url(parsed.source, "SRC")
    refuse_remote(parsed.target, "DST.h5", "a file")
    parsed.threads = parsed.threads or len(os.sched_getaffinity(0))
    parsed.storage = {name: v for name, v in vars(parsed).items() if name in arguments.STORAGE}
    return parsed


def _parser(quiet):
    parser = Parser(
        "mpidl.pack",
        "Write the images of a folder, or of any other source, to one file or to a few shards,\n"
        "which training reads faster, especially from parallel file systems. The file includes\n"
        "labels, class names and the test images of the source. Training on the file gives the\n"
        "same weights as training on the source, byte for byte.\n"
        "After an interruption, the same command continues.",
        quiet,
        epilog=(
            "exit codes: 0 success; 1 error; 2 invalid options or data; 75 stopped by a "
            "signal:\nrun the same command again"
        ),
    )
    parser.add_argument("source", metavar="SRC", help=arguments.DATA_HELP)
    parser.add_argument("target", metavar="DST.h5", nargs="?", help="The file to write")
    parser.text(
        "--images",
        "decoded|encoded",
        "Store pixels, or the contents of the image files, such as JPEG, which need less space and "
        "are decoded during training; default: decoded",
        ("decoded", "encoded"),
        type=one_of("decoded", "encoded"),
        default="decoded",
    )
    parser.number("--shards", "Store the images in N files next to DST.h5; default: in DST.h5")
    parser.number(
        "--shard-mb",
        "Store the images in files of about this size next to DST.h5; default: in DST.h5",
        metavar="MB",
    )
    parser.add_options(*arguments.PREPROCESS, *arguments.STORAGE)
    parser.number("--threads", "Threads that read and decode; default: the number of cores")
    parser.switch("--verify", "Check SRC, a packed file, against its checksums")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    job = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError("pack uses one process with threads: run it without mpirun")
    return run(job)


def run(job: argparse.Namespace) -> int:
    """Pack or verify a file according to the result of `parse`, and return the exit code."""
    remote.configure({"data": job.source, **job.storage})
    with failure.Signals() as signals:
        return _verify(job, signals) if job.verify else _pack(job, signals)


def _pack(job, signals):
    sets = registry.open_sets(job.source, option="SRC", preprocess=job.preprocess)
    train, test = sets.train, sets.test
    parts = {"train": train} if test is None else {"train": train, "test": test}
    if job.images == "decoded" and test is not None and test.image_shape != train.image_shape:
        raise UserError(
            f"{test.describe()}: expected images of shape {train.image_shape}, as in "
            f"{train.describe()}, found {test.image_shape}; --resize converts them"
        )
    for store in parts.values():
        print(f"From: {store.describe()}", flush=True)
    if sets.validation is not None:
        print(f"Not packed: {sets.validation.describe()}, the validation set", flush=True)
    total = sum(len(store) for store in parts.values())
    with Progress("Packed", total) as progress:
        completed = packing.pack(
            parts,
            job.target,
            images=job.images,
            shards=job.shards,
            shard_mb=job.shard_mb,
            threads=job.threads,
            progress=progress.add,
            stop=lambda: signals.name is not None,
        )
    if not completed:
        print(
            f"{signals.name}: stopped after {progress.count} of {total} images; to continue, run "
            "the same command again"
        )
        return arguments.STOPPED
    files = pack_contents.files_of(job.target)
    size = sum(map(os.path.getsize, files))
    shards = "" if len(files) == 1 else f" in {len(files) - 1} shard(s)"
    print(
        f"Packed: {job.target}, {total} images, {size:,} bytes{shards}, in "
        f"{clock(progress.seconds())}"
    )
    return 0


def _verify(job, signals):
    parts = [
        packed.PackedDatastore(job.source, part=part, labelled=False)
        for part in pack_contents.parts_of(job.source)
    ]
    total = sum(len(store) for store in parts)

    class Stop(Exception):
        pass

    def add(count):
        progress.add(count)
        if signals.name is not None:
            raise Stop

    with Progress("Verified", total) as progress:
        try:
            for store in parts:
                store.verify(add)
        except Stop:
            print(f"{signals.name}: stopped after {progress.count} of {total} images")
            return arguments.STOPPED
    print(f"Verified: {job.source}, {total} images match their checksums")
    return 0


class Progress:
    """Displays the number of processed images, as a bar on a terminal and as lines elsewhere.

    Parameters
    ----------
    verb : str
        First word of each line, such as "Packed".
    total : int
        Number of images to process.
    """

    def __init__(self, verb: str, total: int):
        self.verb, self.total, self.count = verb, total, 0
        self.start_time = self.line_time = time.monotonic()
        self.bar: Any = None  # a `rich.progress.Progress` with one task

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

    def add(self, count: int) -> None:
        """Add `count` to the number of processed images, and update the display."""
        self.count += count
        if self.bar is not None:
            self.bar.update(self.task, completed=self.count)
        elif time.monotonic() - self.line_time > LINE_SECONDS:
            self.line_time = time.monotonic()
            print(f"{self.verb}: {self.count} of {self.total} images", flush=True)

    def seconds(self) -> float:
        """Return the time since the start in seconds."""
        return time.monotonic() - self.start_time
