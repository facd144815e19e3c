"""The runs of `run/test`: which there are, one after the other, with how long they should take.

    run/test [PYTEST ARGUMENT ...]            every promise once
    run/test --all [PYTEST ARGUMENT ...]      and every slow cross-check
    run/test --part NAME [...]                one part of the cross-checks
    run/test --budget SECONDS [...]           every promise once, then as many parts as should end
                                              within so many seconds; each day begins with another
    run/test --record                         also write tests/durations.json anew

The first run needs no MPI of its own and uses all cores; the others run under mpirun. A part holds
the tests marked `slow(PART)`.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import progress

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "sanitizers": "the kernels under AddressSanitizer and UBSan",
    "compilers": "kernels compiled by clang, by each compiler that is installed",
    "aarch64": "kernels for AArch64 under qemu",
    "faults": "every planted fault in CUDA kernels",
    "gpu": "more shapes, schedules and transports on the emulated GPU",
    "ranks": "trainings on more ranks, threads and builds",
    "jobs": "more jobs under mpirun: refusals, signals, examples, benchmarks",
    "fuzz": "ten times as many damaged data files",
    "4 ranks": "every test of a world under mpirun on 4 ranks",
}
NOTHING_SELECTED = 5  # pytest's exit code


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="run/test", description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--all", action="store_true", help=argparse.SUPPRESS)
    depth.add_argument("--part", choices=PARTS, action="append", help=argparse.SUPPRESS)
    depth.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_known_args(arguments)


class Suite:
    def __init__(self, options, arguments):
        self.options, self.arguments = options, arguments
        self.cores = min(options.cores, 16)
        self.table = progress.table()
        self.start, self.timings, self.failed, self.ran = time.monotonic(), [], [], False

    def command(self, name):
        pytest = [sys.executable, "-m", "pytest"]
        count, _, unit = name.partition(" ")
        if unit == "ranks":
            return ["mpirun", "-n", count, *pytest, *self.arguments]
        spread = ["-n", str(self.cores), "--dist", "loadfile", "--no-loadscope-reorder"]
        slow = ["--slow", name] if name in PARTS else []
        return [*pytest, *(spread if self.cores > 1 else []), *slow, *self.arguments]

    def parallel(self, name):
        """How many tests of a run run at a time."""
        return 1 if name.endswith(" ranks") else self.cores

    def expected(self, name):
        """Seconds that a run should take on a quiet machine of two cores."""
        files = self.table.get(name, {}).values()
        return sum(seconds for seconds, _ in files) / self.parallel(name)

    def run(self, name, position, later):
        start, command = time.monotonic(), self.command(name)
        seconds = self.expected(name)
        about = f", about {progress.clock(seconds)}" if seconds else ""
        shown = " ".join([Path(command[0]).name, *command[1:]])
        print(f"\n== run {position} ({name}{about}): {shown}", flush=True)
        facts = progress.Run(name, position, later, self.parallel(name), self.options.record)
        environment = os.environ | {"MPIDL_TEST_RUN": json.dumps(facts._asdict())}
        code = subprocess.call(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        self.timings.append(f"{name} {time.monotonic() - start:.0f} s")
        if code == NOTHING_SELECTED:
            print("no test was selected")
        elif code:
            self.failed.append(name)
        self.ran |= code != NOTHING_SELECTED

    def run_all(self, names):
        for i, name in enumerate(names):
            later = sum(map(self.expected, names[i + 1 :]))
            self.run(name, f"{i + 1} of {len(names)}", later)

    def run_within(self, budget):
        """As many parts as should end within the budget, beginning with the part of the day."""
        names, first = list(PARTS), datetime.date.today().toordinal()
        turns = [names[(first + i) % len(names)] for i in range(len(names))]
        pace = (time.monotonic() - self.start) / max(sum(map(self.expected, QUICK)), 1)
        chosen = []
        for name in turns:
            left = self.start + budget - time.monotonic()
            if pace * sum(map(self.expected, [*chosen, name])) <= left:
                chosen.append(name)
        for name in chosen:
            print(f"\nslow part of today: {name}, {PARTS[name]}")
        if not chosen:
            print(f"\nno slow part: none would end within {budget:.0f} s")
        self.run_all(chosen)

    def report(self):
        total = time.monotonic() - self.start
        print(f"\n{', '.join(self.timings)}; total {progress.clock(total)}")
        if not self.ran:
            self.failed.append("no test was run")
        print(f"failed: {', '.join(self.failed)}" if self.failed else "all passed")
        return 1 if self.failed else 0


QUICK = ["1 process per core", "2 ranks", "3 ranks"]


def main():
    options, arguments = parse(sys.argv[1:])
    if not shutil.which("mpirun"):
        sys.exit("run/test: no mpirun on PATH")
    suite = Suite(options, arguments)
    suite.run_all(options.part or [*QUICK, *(PARTS if options.all else ())])
    if options.budget and not suite.failed:
        suite.run_within(options.budget)
    return suite.report()


if __name__ == "__main__":
    sys.exit(main())
