"""One MPI communicator as the rest of comm sees it: messages, and a wait that does not hang.

Every wait is a loop of tests, so that signals are seen, exchanges under way go on, and a rank that
stopped answering is found and named instead of being waited for.
"""

import os
import sys
import time

import numpy as np

from mpidl.comm import serial

PING, PONG = 1, 2  # tags of the control communicator


class Net:
    """Point-to-point messages of arrays over `comm`, and patient waiting.

    timeout: seconds a wait may take before the missing ranks are named and the job is aborted.
    """

    def __init__(self, comm, timeout):
        MPI = serial.load()
        self.MPI, self.comm, self.timeout = MPI, comm.Dup(), timeout
        self.control = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self.hosts = comm.allgather(MPI.Get_processor_name())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.crowded = self.hosts.count(self.hosts[self.rank]) > cores
        self.waited = 0.0  # seconds that this rank has waited for others
        self.left = False  # whether this rank has taken leave of the others
        self.doing = "starting"  # what this rank is at, for the message of a time-out

    def isend(self, array, dest, tag):
        return self.comm.Isend(array, dest, tag)

    def irecv(self, array, source, tag):
        return self.comm.Irecv(array, source, tag)

    def iallreduce(self, array, out):
        return self.comm.Iallreduce(array, out, self.MPI.SUM)

    def wait(self, requests, what, progress=None):
        """Return once all requests are complete."""
        testall = self.MPI.Request.Testall
        self.until(lambda: testall(requests), what, progress)

    def until(self, ready, what, progress=None, timeout=None):
        """Return once ready() is true; `what` names the wait, progress() is called meanwhile.

        timeout: seconds until the missing ranks are named; this Net's own where None.
        """
        began = time.monotonic()
        self._wait_until(ready, what, progress, timeout)
        self.waited += time.monotonic() - began

    def _wait_until(self, ready, what, progress, timeout):
        timeout = self.timeout if timeout is None else timeout
        spins, started, deadline, last = 0, None, None, None
        while not ready():
            spins += 1
            if progress:
                progress()
            if self.crowded and spins > 20:
                time.sleep(5e-5)  # a yield would come back at once while the others compute
            elif self.crowded or spins > 1000:
                os.sched_yield()
            if spins % 256:
                continue
            now = time.monotonic()
            if started is None:
                started, deadline, last = now, now + timeout, now
            if now - last > 1:  # this process was stopped for a while, and the others with it
                deadline += now - last
            last = now
            if now - started > 0.02:
                time.sleep(0.0005)  # a long wait: leave the core to whoever has work
            if self._answer(what):
                deadline = max(deadline, now + 30)  # another rank is asking already
            if now > deadline:
                self._name_the_missing(what)

    def _answer(self, what):
        """Answer a rank that asks who is still there; True if one did."""
        if not self.control.Iprobe(tag=PING):
            return False
        status = self.MPI.Status()
        self.control.recv(tag=PING, status=status)
        self.control.isend(f"{self.doing}: waits for {what}", status.source, PONG)
        return True

    def _name_the_missing(self, what):
        """Ask everyone, wait a few seconds for answers, say who is missing, end the job."""
        others = [r for r in range(self.size) if r != self.rank]
        for r in others:
            self.control.isend("", r, PING)
        answers: dict[int, str] = {}
        self._listen(what, answers, 5.0, lambda: len(answers) == len(others))
        # Of several ranks that ask at once, the lowest speaks, and ends the others.
        self._listen(what, answers, 0.3 * min(sum(r < self.rank for r in answers), 10))
        lines = [
            f"mpidl: {self.doing}: {what} did not complete within {self.timeout:g} s (--timeout)."
        ]
        for r in others:
            if r not in answers:
                lines.append(f"  rank {r} on host {self.hosts[r]} does not answer")
        if len(lines) == 1:
            lines.append("  all ranks answer, but they wait for different things:")
            answers[self.rank] = f"{self.doing}: waits for {what}"
            lines += [f"  rank {r}, {answers[r]}" for r in sorted(answers)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        self.abort(1)

    def _listen(self, what, answers, seconds, enough=lambda: False):
        """Answer those who ask and collect answers, {rank: text}, for some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough():
            if self.control.Iprobe(tag=PONG):
                status = self.MPI.Status()
                answer = self.control.recv(tag=PONG, status=status)
                answers[status.source] = answer
            self._answer(what)
            time.sleep(0.001)

    def abort(self, code):
        """End the job on all ranks."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.comm.Abort(code)


def node_room(net):
    """How many bytes `node_array` may still take on this node.

    MPI libraries back the memory that ranks share by files in /dev/shm, and a process that touches
    what does not fit there (64 MB in a container, unless told otherwise) is killed.
    """
    if net.size == 1:
        return sys.maxsize
    try:
        free = os.statvfs("/dev/shm")
    except OSError:
        return sys.maxsize
    return free.f_bavail * free.f_frsize


def node_array(net, shape, dtype):
    """A zeroed array in memory shared by the ranks of this node, and the window that holds it."""
    shape = tuple(int(n) for n in shape)
    count = int(np.prod(shape))
    if net.size == 1:
        return np.zeros(shape, dtype), None
    node = net.comm.Split_type(net.MPI.COMM_TYPE_SHARED)
    nbytes = max(count * np.dtype(dtype).itemsize, 1)
    window = net.MPI.Win.Allocate_shared(nbytes if node.rank == 0 else 0, 1, comm=node)
    memory, _ = window.Shared_query(0)
    array = np.frombuffer(memory, dtype, count).reshape(shape)
    if node.rank == 0:
        array[...] = 0
    node.Barrier()
    return array, window
