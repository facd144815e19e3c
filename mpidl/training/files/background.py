"""Write checkpoints and plots in a separate process of rank 0, while training continues.

A thread would not be enough: h5py and matplotlib hold the interpreter's lock (GIL) for long
periods. For example, a checkpoint of AlexNet would block the training for up to half a second at a
time. The process receives a copy of the arrays through anonymous shared memory, which is freed if
both processes die.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from mpidl import side_process
from mpidl.errors import Fault, LostLock, UserError
from mpidl.training.files import checkpoint, lock_file

CHECKPOINT, PLOT = "checkpoint", "plot"
# Rank 0 itself writes checkpoints of up to this many bytes. Starting a process would take longer.
SMALL = 8 << 20
ALIGNMENT = 64  # alignment of arrays in the shared memory, in bytes

Tables = Mapping[str, Mapping[str, np.ndarray]]


class BackgroundWriter:
    """Writes the large files of a run in a separate process.

    The process is started for the first long job: writing a large checkpoint or a plot. At most
    one checkpoint is written at a time; `save` waits for the previous checkpoint. Only rank 0 calls
    the methods.

    Parameters
    ----------
    starts_process : bool
        Whether a process may be started. If false, rank 0 writes the files itself.

    Attributes
    ----------
    problem : UserError, LostLock or None
        The error of the first file that could not be written. All later calls raise this error.
    process : Popen or None
        The separate process; None before the first long job.
    """

    def __init__(self, *, starts_process: bool = True) -> None:
        self.starts_process = starts_process
        self.problem: UserError | LostLock | None = None
        self.process: subprocess.Popen | None = None
        self._jobs: IO[bytes]  # stdin and stdout of the process
        self._reply_pipe: IO[bytes]
        self._memory = -1  # file descriptor of the shared memory
        self._pending: list[str] = []  # kinds of the jobs to which the process has not replied
        self._replies = b""

    def save(
        self,
        folder: str,
        tables: Tables,
        facts: Mapping[str, Any],
        metrics: str,
        claim: tuple[str, str] | None = None,
        keep: int | None = None,
    ) -> None:
        """Write a checkpoint from a copy of the arrays.

        Parameters
        ----------
        folder, tables, facts
            Arguments of `checkpoint.save`.
        metrics : path
            Path of metrics.jsonl, which is flushed to the disk before the checkpoint is written.
        claim : (folder, token), optional
            The lock that this run must still hold when the new file replaces checkpoint.h5. The run
            may be suspended while it writes, and another job may take over the folder meanwhile.
        keep : int, optional
            The iteration of a checkpoint that the run keeps; see `checkpoint.write`.

        Raises
        ------
        UserError, LostLock
            If this or an earlier file cannot be written.
        """
        while CHECKPOINT in self._pending:
            self._receive()
        self.check()
        attributes = checkpoint.attributes_of(facts)
        nbytes = sum(np.asarray(a).nbytes for arrays in tables.values() for a in arrays.values())
        job = {
            "kind": CHECKPOINT,
            "folder": os.fsdecode(folder),
            "metrics": os.fsdecode(metrics),
            "claim": claim,
            "keep": keep,
        }
        if nbytes > SMALL and not self.process:
            self._start()
        if self.process:
            with contextlib.suppress(OSError):  # not enough memory for a copy
                layout = _copy(tables, self._memory)
                self._send({**job, "layout": layout, "attributes": attributes})
                return
            os.ftruncate(self._memory, 0)
        _save(job, tables, attributes)

    def plot(self, metrics: str, path: str, *, wait: bool) -> None:
        """Draw progress.png, unless the previous plot is still being drawn.

        Parameters
        ----------
        metrics, path : path
            Arguments of `plots.progress`.
        wait : bool
            Whether to return only after the plot is written.

        Raises
        ------
        UserError
            If this or an earlier file cannot be written.
        """
        if wait:
            self.wait()
        self.check()
        if PLOT in self._pending:
            return
        job = {"kind": PLOT, "metrics": os.fsdecode(metrics), "path": os.fsdecode(path)}
        if not wait and not self.process:
            self._start()
        if self.process:
            self._send(job)
        else:
            _draw(job)
        if wait:
            self.wait()

    def check(self) -> None:
        """Raise the error of a file that could not be written, without waiting for other files."""
        while self._pending and self._has_reply():
            self._receive()
        if self.problem is not None:
            raise self.problem

    def wait(self) -> None:
        """Wait until all files are written; raise the error of a file that could not be written."""
        while self._pending:
            self._receive()
        self.check()

    def close(self) -> None:
        """Wait for the files that are being written, and end the separate process."""
        with contextlib.suppress(UserError, Fault):  # the run reports its own error instead
            self.wait()
        self._end()

    def _start(self):
        """Start the separate process. If that fails, rank 0 itself writes the files."""
        if not self.starts_process:
            return
        self._memory = _nameless_memory()
        try:
            self.process = process = side_process.start(
                ["-c", f"from {__name__} import main; main()", str(self._memory)],
                stdout=subprocess.PIPE,
                pass_fds=[self._memory],
            )
        except OSError:  # such as at a limit on the number of processes
            self._end()
        else:
            assert process.stdin is not None and process.stdout is not None
            self._jobs, self._reply_pipe = process.stdin, process.stdout

    def _end(self):
        """End the process, and return its exit code; 0 without a process."""
        code = 0
        if self.process is not None:
            process, self.process = self.process, None
            with contextlib.suppress(OSError):
                self._jobs.close()
            code = process.wait()
            self._reply_pipe.close()
        if self._memory >= 0:
            os.close(self._memory)
        self._memory, self._pending, self._replies = -1, [], b""
        return code

    def _send(self, job):
        # Paths in a job may be relative to the current working folder of rank 0.
        line = json.dumps({**job, "working_folder": os.getcwd()}) + "\n"
        self._pending.append(job["kind"])
        with contextlib.suppress(BrokenPipeError):  # `_receive` will notice if the process ended
            self._jobs.write(line.encode())
            self._jobs.flush()

    def _has_reply(self):
        poll = select.poll()
        poll.register(self._reply_pipe, select.POLLIN)
        return b"\n" in self._replies or bool(poll.poll(0))

    def _receive(self):
        """Wait for the reply to the oldest job, and keep its error."""
        while b"\n" not in self._replies:
            received = os.read(self._reply_pipe.fileno(), 1 << 16)
            if not received:
                raise self._fault()
            self._replies += received
        line, _, self._replies = self._replies.partition(b"\n")
        if self._pending.pop(0) == CHECKPOINT:
            os.ftruncate(self._memory, 0)  # free the memory
        problem = json.loads(line)
        if problem is not None and self.problem is None:
            kind, text = problem
            self.problem = LostLock(text) if kind == LostLock.__name__ else UserError(text)

    def _fault(self):
        """Return the Fault to raise when the separate process has ended unexpectedly."""
        kind, code = self._pending[0], self._end()
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Fault(f"the process that was writing the {kind} {end}; the last checkpoint is kept")


def _nameless_memory():
    """Return the descriptor of anonymous memory or, if unavailable, of an unlinked file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mpidl-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _copy(tables, descriptor):
    """Write arrays to a file, and return their layout {table: {name: [type, shape, offset]}}."""
    layout: dict[str, dict[str, list]] = {}
    with open(descriptor, "wb", closefd=False) as file:
        file.seek(0)
        for table, arrays in tables.items():
            layout[table] = {}
            for name, values in arrays.items():
                array = np.asarray(values)
                file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
                layout[table][name] = [array.dtype.str, array.shape, file.tell()]
                file.write(np.ascontiguousarray(array).data)
        file.truncate(file.tell() + 1)  # an empty file cannot be mapped
    return layout


def _save(job, tables, attributes):
    def confirm():
        if job["claim"] is not None:
            lock_file.confirm(*job["claim"])

    _flush(job["metrics"])
    checkpoint.write(job["folder"], tables, attributes, confirm, job["keep"])


def _flush(path):
    """Flush a file to the disk; raise UserError if that fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


# The functions below run in the separate process.


def main() -> None:
    """Perform the jobs that arrive on stdin, one per line; reply to each with an error or null."""
    side_process.give_way()
    replies = os.dup(1)
    os.dup2(2, 1)  # keep output of libraries out of the replies
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_pass_on, args=[jobs], daemon=True).start()
    memory = int(sys.argv[1])
    while True:
        problem = None
        try:
            _perform(json.loads(jobs.get()), memory)
        except (UserError, LostLock) as error:
            problem = type(error).__name__, str(error)
        os.write(replies, f"{json.dumps(problem)}\n".encode())


def _pass_on(jobs):
    """Pass on the jobs from stdin. When stdin ends, end the process immediately.

    At that point, rank 0 has ended, and another job may write to the same files.
    """
    for line in sys.stdin.buffer:
        jobs.put(line)
    os._exit(0)


def _draw(job):
    from mpidl.report import plots

    plots.progress(job["metrics"], job["path"])


def _perform(job, memory):
    os.chdir(job["working_folder"])
    if job["kind"] == PLOT:
        _draw(job)
    else:
        mapped = mmap.mmap(memory, 0, access=mmap.ACCESS_READ)
        tables = {
            table: {
                name: np.ndarray(shape, dtype, mapped, offset)
                for name, (dtype, shape, offset) in arrays.items()
            }
            for table, arrays in job["layout"].items()
        }
        _save(job, tables, job["attributes"])
