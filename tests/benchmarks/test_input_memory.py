"""Test how the benchmarks measure memory: peaks, and the processes of a job."""

import contextlib
import mmap
import os
import subprocess
import sys

import numpy as np
from limits import wait_until

from benchmarks import arguments, input_memory, machine
from mpidl.data import PackedDatastore


def test_the_peak_of_memory_that_was_freed_again():
    before = machine.start_of_peak()
    # malloc always maps new memory for arrays above 32 MiB, but may reuse memory for smaller ones.
    pixels = np.ones(16 << 20, np.float32)
    del pixels
    assert 62 << 20 < machine.peak() - before < 96 << 20


def test_peaks_beyond_a_training_on_one_mini_batch(monkeypatch, capsys):
    options = arguments.parse("input --memory --batch-size 8 --ranks 2 --side 4".split())
    assert options.memory and options.ranks == [2]
    assert (options.gigabytes, options.cache_mb) == (4, 256)
    assert input_memory.images_in(4 * 10**9, 227) == 25875 and input_memory.images_in(1, 227) == 1
    runs = {}

    def train_peak(options, ranks, data, steps, folder):
        count = len(PackedDatastore(data))
        runs[count] = ranks, steps
        return input_memory.MemoryUse((count - 1) << 20, 1 << 19)

    monkeypatch.setattr(input_memory, "train_peak", train_peak)
    options.gigabytes, options.busy = 48 * 10 / 1e9, 0.0
    mib = input_memory.run(options)["mib"]["2"]
    assert runs == {10: (2, input_memory.CUT_STEPS), 8: (2, input_memory.CUT_STEPS)}
    assert mib["whole"] == {"anonymous": 9, "shared": 0.5} and mib["beyond"] == 2
    assert "difference 2.0 MiB, 2.1 MB" in capsys.readouterr().out


@contextlib.contextmanager
def started(code):
    """Start a Python process and wait for its first line; end it by closing its input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as job:
        job.stdout.readline()
        yield job


def test_the_memory_of_processes():
    """The result is the RssAnon of all live processes, plus shared memory, counted once."""
    code = "import numpy, sys; a = numpy.ones(4 << 20); print(flush=True); sys.stdin.read()"
    with started(code) as job:
        child = input_memory.memory_of([job.pid])
        shared = mmap.mmap(-1, 8 << 20)  # shared by this process and its children
        shared.write(bytes(8 << 20))
        before, both = (
            input_memory.memory_of([os.getpid()]),
            input_memory.memory_of([os.getpid(), job.pid]),
        )
        assert 32 << 20 <= child.anonymous < 64 << 20 and child.shared == 0
        assert before.shared >= 8 << 20 and both.shared - before.shared < 1 << 20
        assert both.anonymous - before.anonymous >= 32 << 20
        job.stdin.close()
    assert input_memory.memory_of([job.pid]) == input_memory.MemoryUse()


def test_ranks_are_found_below_their_launcher():
    """The launcher's variables identify each rank once, even if a rank starts other processes."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    start = f"import subprocess as s, sys; p = [s.Popen([sys.executable, '-c', {code!r}], env={{"
    start += "'PMI_RANK': str(r)}) for r in range(2)]; print(flush=True); [x.wait() for x in p]"
    with started(start) as job:
        wait_until(lambda: len(input_memory.ranks_below(job.pid)) == 2)
        assert job.pid not in input_memory.ranks_below(job.pid)
        job.stdin.close()
    assert input_memory.ranks_below(job.pid) == []
