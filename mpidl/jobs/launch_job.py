"""Run mpirun for `launch`: start it, show its output, pass on interrupts, and end it."""

from __future__ import annotations

import codecs
import collections
import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpidl.jobs import launch_worker
from mpidl.launcher import environment

SIZE_VARIABLE = "MPIDL_LAUNCHED"  # set to the number of ranks for each rank that `launch` starts
ERROR_GRACE = 0.5  # seconds to wait for errors of other ranks and for remaining output
TERMINATION_GRACE = 5.0  # seconds that mpirun has to end its ranks before all processes are killed
KILL_GRACE = 0.5  # the value of TERMINATION_GRACE after a second interrupt
INTERRUPTED = "Interrupted: stopping; interrupt again to end all ranks at once"


class Interrupts:
    """Context manager that counts interrupts (SIGINT) instead of raising an exception at once.

    The second interrupt raises KeyboardInterrupt. In threads other than the main thread, the
    context manager does nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        # None stands for a handler that was not set from Python and could not be restored.
        if is_main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._previous = signal.signal(signal.SIGINT, self._add)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _add(self, number, frame):
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


class Job:
    """A running mpirun and its ranks, in a separate process session.

    Parameters
    ----------
    command : sequence of str
        The command line that starts the ranks.
    ranks : int
        Number of ranks.
    folder : str
        Folder of the files that this process and the ranks exchange.
    show : str
        The ranks whose output is shown, as in `launch`.
    interrupts : Interrupts
        The interrupts of this process. The first interrupt is passed on to rank 0.
    update : function, optional
        Function to call repeatedly while the ranks run.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        folder: str,
        show: str,
        interrupts: Interrupts,
        update: Callable[[], None] | None = None,
    ) -> None:
        self.ranks, self.folder, self.show = ranks, folder, show
        self.interrupts, self.update = interrupts, update
        self.is_interrupted = False
        # The ranks on this host end when the lock is released, for example if this process dies.
        self.lock = open(os.path.join(folder, launch_worker.LOCK_FILE), "w")
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.tail: collections.deque[str] = collections.deque(maxlen=4096)  # characters of stderr
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {SIZE_VARIABLE: str(ranks), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

    def follow(self, deadline: float | None) -> bool:
        """Show the output of the ranks until they end or one of them reports an error.

        Return False if the deadline, a value of `time.monotonic`, passes first. None means no
        deadline.
        """
        error_time = None
        with selectors.DefaultSelector() as pipes:
            for name in ("stdout", "stderr"):
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                pipe = getattr(self.process, name)
                pipes.register(pipe, selectors.EVENT_READ, (name, decoder))
            while pipes.get_map():
                for key, _ in pipes.select(0.05):
                    data, (name, decoder) = os.read(key.fd, 1 << 16), key.data
                    if not data:
                        pipes.unregister(key.fileobj)
                    self._show(name, decoder.decode(data, final=not data))
                self._serve()
                now = time.monotonic()
                if error_time is None and self.failed_ranks():
                    error_time = now
                if error_time is not None and now > error_time + ERROR_GRACE:
                    return True
                if deadline is not None and now > deadline:
                    return bool(self.failed_ranks())
        while self.process.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                return False
            self._serve()
            time.sleep(0.01)
        return True

    def _serve(self):
        """Pass an interrupt on to rank 0, and call `update`."""
        if self.interrupts.count and not self.is_interrupted:
            self.is_interrupted = True
            print(INTERRUPTED, file=sys.stderr, flush=True)  # even if `show` hides output
            with open(os.path.join(self.folder, launch_worker.INTERRUPT_FILE), "w"):
                pass
        if self.update is not None:
            self.update()

    def failed_ranks(self) -> list[int]:
        """Return the ranks that have reported an error, in ascending order."""
        names = os.listdir(self.folder)
        return sorted(int(n[6:]) for n in names if n.startswith("error-") and n[6:].isdigit())

    def _show(self, name, text):
        """Print text from the ranks' stream `name`, and keep the end of stderr for messages."""
        if name == "stderr":
            self.tail.extend(text)
        if text and self.show != "none":
            stream = getattr(sys, name)  # look up the stream now, because notebooks replace it
            stream.write(text)
            stream.flush()

    def end(self) -> None:
        """Terminate all processes of the job."""
        process = self.process
        grace = TERMINATION_GRACE if self.interrupts.count < 2 else KILL_GRACE
        try:
            if process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
        finally:
            self._signal(signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr, self.lock):
                if stream is not None:
                    stream.close()

    def describe_exit(self) -> str:
        """Describe how the ranks ended if none of them reported an error."""
        tail = "".join(self.tail).strip()
        stderr = f"; the end of their stderr:\n{tail}" if tail else ""
        code = self.process.returncode
        return f"the {self.ranks} rank(s) ended with exit code {code} and no result{stderr}"

    def _signal(self, number):
        """Send a signal to all processes of the session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
