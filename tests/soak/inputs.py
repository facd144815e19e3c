"""Feed damaged files to every parser of mpidl.

Input number i of a parser is a valid file that `mutations.hostile` has damaged with random numbers
of the key (seed, parser, i). The parser must accept the input, or raise a UserError of one short
line. Problems are any other exception, a signal, more than MEMORY of address space, more than
CPU_SECONDS of work, and more than WAIT_SECONDS in total. An input with a problem is kept next to
the log, with the traceback.

Forked processes read SHARE inputs each, so a crash ends only one of these processes. Each process
writes the number of its current input to shared memory.
"""

import faulthandler
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import mutations
import parsers

from mpidl.data.formats import hdf5_probe

MEMORY = 600 << 20  # bytes of address space that an input may add
HARD_MEMORY = 8 << 30  # limit of address space in bytes, which protects this machine
CPU_SECONDS, WAIT_SECONDS = 20, 600  # limits of work and of elapsed time
PROBE_SECONDS = 3.0  # limit of the process that checks HDF5 files before mpidl reads them
SHARE, SLOW_SHARE = 8000, 1000
STATE = struct.Struct("<qdd")  # number of the input, and time and CPU time at its start


def content_of(seed, name, number, valid, beginning):
    """Return the bytes of an input."""
    return mutations.hostile(valid, beginning, random.Random(f"{seed} {name} {number}"))


def address_space():
    """Return the peak size of this process's address space in bytes."""
    return 1024 * int(re.search(r"VmPeak:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def cpu_time(pid):
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """A child process that reads the inputs `first` to `last` of one parser."""

    def __init__(self, seed, name, first, last, folder):
        self.seed, self.name, self.first, self.last = seed, name, first, last
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.state = mmap.mmap(-1, STATE.size)
        self.problem = None
        self.state[:] = STATE.pack(first - 1, time.monotonic(), 0.0)  # while preparing the file
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run()

    def _note(self, number):
        self.state[:] = STATE.pack(number, time.monotonic(), time.process_time())

    def _run(self):
        """Read the inputs and end the process, with its errors in the file `error`."""
        code = 1
        try:
            sys.stderr = open(self.folder / "error", "w")
            sys.stdout = open(os.devnull, "w")
            os.dup2(sys.stderr.fileno(), 2)
            os.dup2(sys.stdout.fileno(), 1)
            faulthandler.enable(sys.stderr)
            warnings.simplefilter("ignore")
            self._read_all()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _read_all(self):
        (self.folder / "files").mkdir()
        path, valid, read, parser = parsers.prepared(self.name, self.folder / "files")
        hdf5_probe.SECONDS = PROBE_SECONDS
        start = address_space()
        resource.setrlimit(resource.RLIMIT_AS, (start + HARD_MEMORY,) * 2)
        for number in range(self.first, self.last):
            self._note(number)
            path.write_bytes(content_of(self.seed, self.name, number, valid, parser.beginning))
            read()
            growth = address_space() - start
            assert growth < MEMORY, f"{growth >> 20} MB of address space, expected {MEMORY >> 20}"
        self._note(self.last)

    @property
    def number(self):
        return STATE.unpack(self.state)[0]

    def has_ended(self):
        """Return whether the process has ended. If an input takes too long, kill the process."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code:
                self.problem = self._last_line() if code > 0 else signal.Signals(-code).name
            return True
        _, begin, cpu_begin = STATE.unpack(self.state)
        seconds, cpu_seconds = time.monotonic() - begin, cpu_time(self.pid) - cpu_begin
        if seconds > WAIT_SECONDS or cpu_seconds > CPU_SECONDS:
            self.kill()
            self.problem = f"hang: {seconds:.0f} s, {cpu_seconds:.0f} s of work"
            return True
        return False

    def kill(self):
        os.kill(self.pid, signal.SIGABRT)  # prints the stack
        time.sleep(0.2)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _last_line(self):
        lines = (self.folder / "error").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no message")[:300]

    def keep(self, target):
        """Copy the files of an input with a problem to the folder `target`."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder, target)

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class Fuzzing:
    """The inputs of all parsers, divided into shares, with a log and totals."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.names = options.parser or list(parsers.PARSERS)
        self.log = open(options.log, "w")
        self.counts, self.problems = dict.fromkeys(self.names, 0), []
        self.start_time = self.report_time = time.monotonic()

    def shares(self):
        """Yield shares (parser, first, last), alternating between the parsers."""
        first = {name: self.options.first for name in self.names}
        ends = {name: count + self.options.first for name, count in self._counts().items()}
        while first:
            for name in list(first):
                size = SLOW_SHARE if parsers.PARSERS[name].is_slow else SHARE
                last = min(first[name] + size, ends[name])
                if first[name] < last:
                    yield name, first[name], last
                first[name] = last
                if last == ends[name]:
                    del first[name]

    def _counts(self):
        """Divide the inputs among the parsers; fast parsers get eight times as many."""
        weights = {name: 1 if parsers.PARSERS[name].is_slow else 8 for name in self.names}
        total = sum(weights.values())
        return {name: -(-self.options.count * w // total) for name, w in weights.items()}

    def run(self):
        shares, workers, waiting = self.shares(), [], []
        try:
            while True:
                while len(workers) < self.options.workers:
                    share = waiting.pop() if waiting else next(shares, None)
                    if share is None:
                        break
                    workers.append(Worker(self.options.seed, *share, self.folder))
                if not workers:
                    break
                time.sleep(0.02)
                for worker in [worker for worker in workers if worker.has_ended()]:
                    workers.remove(worker)
                    self._count(worker)
                    if worker.number + 1 < worker.last and worker.problem:
                        waiting.append((worker.name, worker.number + 1, worker.last))
                    worker.close()
        finally:
            for worker in workers:
                worker.kill()
                worker.close()

    def _count(self, worker):
        if worker.number < worker.first:
            sys.exit(f"{worker.name}: {worker.problem}")
        done = worker.number + bool(worker.problem)
        self.counts[worker.name] += done - worker.first
        if worker.problem:
            name = f"{worker.name} {worker.number}"
            folder = f"{self.log.name}-{re.sub('[^A-Za-z0-9.]+', '-', name)}"
            worker.keep(folder)
            self.problems.append(f"{name}: {worker.problem}")
            self._write(
                parser=worker.name, number=worker.number, problem=worker.problem, files=folder
            )
            print(f"{name}: {worker.problem}", flush=True)
        if time.monotonic() - self.report_time > 60:
            self.report_time = time.monotonic()
            print(self._sums(), flush=True)

    def _write(self, **record):
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()

    def _sums(self):
        seconds, count = time.monotonic() - self.start_time, sum(self.counts.values())
        return (
            f"{count} inputs of {len(self.names)} parsers in {seconds:.0f} s, "
            f"{count / seconds:.0f} per second: {len(self.problems)} problems"
        )

    def report(self):
        """Print the totals and return the exit code."""
        self._write(seed=self.options.seed, counts=self.counts, problems=len(self.problems))
        self.log.close()
        print(self._sums())
        return 1 if self.problems else 0


def main(options):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in options.parser or ():
        if name not in parsers.PARSERS:
            sys.exit(f"no parser {name}: expected one of {', '.join(parsers.PARSERS)}")
    # Each input is written to a file. Writing is faster on a file system in memory.
    with tempfile.TemporaryDirectory(prefix="mpidl-inputs-", dir=_memory()) as folder:
        fuzzing = Fuzzing(options, folder)
        try:
            fuzzing.run()
        finally:
            code = fuzzing.report()
        return code


def _memory():
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
