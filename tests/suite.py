"""Run the tests of `run/test` as a sequence of pytest runs, and show their expected times.

    run/test [ARGUMENT ...]             all tests except slow ones; the arguments go to pytest
    run/test --all [ARGUMENT ...]       also all slow cross-checks
    run/test --part NAME [...]          one part of the slow cross-checks
    run/test --budget SECONDS [...]     all tests except slow ones, then the slow parts that
                                        should end within SECONDS of the start; the first
                                        part changes every day
    run/test --list                     list the runs and the parts, with their expected times
    run/test --record [...]             also record the times in tests/durations.json

The first run works without mpirun and uses all cores. The other runs are jobs of several ranks.
"""

import argparse
import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import progress

ROOT = Path(__file__).resolve().parents[1]
NOTHING_SELECTED = 5  # pytest's exit code if no test was selected
MAX_PROCESSES = 16  # limit per run, because each process needs several hundred MB


class Run(NamedTuple):
    """A run of pytest: under mpirun on `ranks` ranks, or without mpirun on all cores if 0.

    `spread` is pytest-xdist's `--dist`. With "loadfile", each module's fixtures run only once.
    """

    description: str
    ranks: int = 0
    arguments: tuple = ()
    environment: tuple = ()
    spread: str = "loadfile"

    def processes(self, cores):
        """Return the number of pytest processes: one more than cores, because tests also wait."""
        return 1 if self.ranks or cores == 1 else cores + 1

    def expected(self, name, cores):
        """Return the run's expected seconds on an idle machine. `name` is its name in the table."""
        files, processes = progress.seconds_of_files(name), self.processes(cores)
        longest = max(files, default=0) if self.spread == "loadfile" else 0
        return max(sum(files) / processes, longest)

    def command(self, cores, arguments):
        """Return the command line. `arguments` are pytest's arguments, which may select tests."""
        pytest = [sys.executable, "-m", "pytest"]
        if self.ranks:
            start = ["mpirun", "-n", str(self.ranks), *pytest]
        elif cores > 1:
            start = [
                *pytest,
                "-n",
                str(self.processes(cores)),
                "--dist",
                self.spread,
                "--no-loadscope-reorder",
            ]
        else:
            start = pytest
        return [*start, *self.arguments, *arguments]


def marked(description, part, **keywords):
    """Return the run of the tests marked `slow(part)`."""
    return Run(description, arguments=("--slow", part), **keywords)


CORE = (
    "tests/comm",
    "tests/core",
    "tests/ranks",
    "tests/ops/test_batchnorm.py",
    "tests/training/test_trainer.py",
)
KERNELS = ("tests/backends/test_conformance.py", "tests/backends/cpu", "tests/training/optimizers")
QUICK = {
    "one rank": Run("all tests except slow ones"),
    "2 ranks": Run("exchanges on an even number of ranks", 2, CORE),
    "3 ranks": Run("all tests that use a world", 3),
}
PARTS = {
    "jobs": marked("more refusals, signals, exceptions and benchmarks", "jobs", spread="worksteal"),
    "ranks": marked("more ranks, threads and builds; other algorithms of convolutions", "ranks"),
    "gpu": marked("more tests on the emulated GPU; kernels for older GPUs", "gpu"),
    "pages": marked("the live page in a headless Chromium, next to jobs", "pages"),
    "stores": marked("data in an object store, and its faults", "stores"),
    "slurm": marked("jobs on a real Slurm cluster of three nodes", "slurm", spread="worksteal"),
    "files": marked("runs recorded for MLflow and Weights & Biases", "files"),
    "hangs": marked("ranks that hang or are stopped at any moment", "hangs"),
    "soak": marked("trainings that are killed many times; damaged inputs", "soak"),
    "restarts": marked("jobs that die and start again", "restarts"),
    "saves": marked(
        "checkpoints with faults at every system call; memory of long trainings", "saves"
    ),
    "shrink": marked("ranks that end while other ranks continue (Open MPI)", "shrink"),
    "faults": marked("every fault planted in the CUDA kernels", "faults", spread="worksteal"),
    "site": marked("the notebooks, the tutorial's commands, and the site", "site"),
    "notebooks": marked("trainings in a real notebook kernel", "notebooks"),
    "wings": marked("the package and its tests without each wing", "wings"),
    "package": marked("trainings with the installed wheel", "package"),
    "compilers": marked("compilation by gcc and clang without warnings", "compilers"),
    "aarch64": marked("the kernels for AArch64, under qemu", "aarch64"),
    "sanitizers": marked("the kernels under AddressSanitizer and UBSan", "sanitizers"),
    "threads": Run(
        "the kernels on 1, 2, 3 and 5 threads",
        arguments=(*KERNELS, "-k", "not gpu"),
        environment=(("MPIDL_TEST_THREADS", "1,2,3,5"),),
    ),
    "fuzz": Run(
        "damaged data and weight files, with new examples each time",
        arguments=(
            "tests/data/formats/test_fuzz_data.py",
            "tests/interchange/test_fuzz_weights.py",
            "tests/report/test_fuzz_run.py",
        ),
        environment=(("MPIDL_FUZZ", "400"),),
        spread="worksteal",
    ),
    "all on 2 ranks": Run("all tests that use a world", 2, ("--slow", "all")),
    "all on 4 ranks": Run("all tests that use a world", 4, ("--slow", "all")),
}
RUNS = QUICK | PARTS


def parser():
    parser = argparse.ArgumentParser(
        prog="run/test", usage=__doc__.partition("\n\n")[2], allow_abbrev=False
    )
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--all", action="store_true")
    depth.add_argument("--part", choices=PARTS, action="append")
    depth.add_argument("--budget", type=float)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--cores", type=int, default=1)
    return parser


class Suite:
    """A sequence of runs, with their times and failures."""

    def __init__(self, options, arguments):
        self.options, self.arguments = options, arguments
        self.cores = min(options.cores, MAX_PROCESSES)
        self.start, self.timings, self.failed, self.is_empty = time.monotonic(), [], [], True

    def expected(self, names):
        return sum(RUNS[name].expected(name, self.cores) for name in names)

    def run(self, name, position, later):
        run, start = RUNS[name], time.monotonic()
        command = run.command(self.cores, self.arguments)
        expected = progress.clock(self.expected([name]))
        print(
            f"\n== run {position}: {name}, {run.description}; about {expected} on an idle machine"
        )
        print(" ".join([Path(command[0]).name, *command[1:]]), flush=True)
        facts = progress.Facts(
            name, position, later, run.processes(self.cores), self.options.record
        )
        environment = os.environ | dict(run.environment) | facts.environment()
        code = subprocess.call(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        self.timings.append(f"{name} {time.monotonic() - start:.0f} s")
        if code == NOTHING_SELECTED:
            print("no test was selected")
        elif code:
            self.failed.append(name)
        self.is_empty &= code == NOTHING_SELECTED

    def run_all(self, names):
        for i, name in enumerate(names):
            self.run(name, f"{i + 1} of {len(names)}", self.expected(names[i + 1 :]))

    def run_within(self, budget):
        """Run the parts that should end within the budget. The first part changes every day."""
        names, today = list(PARTS), datetime.date.today().toordinal()
        pace = max((time.monotonic() - self.start) / max(self.expected(QUICK), 1), 1)
        parts, left = [], self.start + budget - time.monotonic()
        for i in range(len(names)):
            name = names[(today + i) % len(names)]
            if pace * self.expected([*parts, name]) <= left:
                parts.append(name)
        print(f"\nslow parts within {budget:.0f} s, today: {', '.join(parts) or 'none'}")
        self.run_all(parts)

    def report(self):
        """Print the times and the failures and return the exit code."""
        if self.is_empty:
            self.failed.append("no test was run")
        print(f"\n{', '.join(self.timings)}; total {progress.clock(time.monotonic() - self.start)}")
        print(f"failed: {', '.join(self.failed)}" if self.failed else "all passed")
        return 1 if self.failed else 0


def main():
    # A background process ignores SIGINT, and the tests' jobs would inherit this setting.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options, arguments = parser().parse_known_args()
    if options.list:
        for name, run in RUNS.items():
            seconds = run.expected(name, options.cores)
            depth = "every time" if name in QUICK else "slow part "
            print(f"{depth}  {progress.clock(seconds):>5}  {name}: {run.description}")
        return 0
    if not shutil.which("mpirun"):
        sys.exit("run/test: no mpirun on PATH")
    suite = Suite(options, arguments)
    suite.run_all(options.part or [*QUICK, *(PARTS if options.all else ())])
    if options.budget and not suite.failed:
        suite.run_within(options.budget)
    return suite.report()


if __name__ == "__main__":
    sys.exit(main())
