"""A program that ends ranks of its host that are stopped (SIGSTOP) while they exit.

A rank that waits for another rank notices if that rank is stopped. After the ranks have met at the
end of the program, they wait for nobody: no rank notices one that is stopped then, and mpirun waits
for it forever. Before MPI_Finalize, the first rank of each host therefore starts this file
(`departure.start_exit_guard`). The guard watches the processes of all ranks of the host until they
have ended. If a process stays stopped for the time-out, the guard names it on stderr and kills it,
and the launcher ends the job.

The program imports nothing of mpidl, and only modules that Python has loaded anyway.
"""

from __future__ import annotations

import os
import sys
import time

FIRST_SECONDS, LAST_SECONDS = 0.02, 0.5  # time between two looks: at first, and later
LATER_SECONDS = 1.0  # extra wait: a rank in MPI_Finalize may name the process first
LONGEST_STEP = 1.0  # if more time passes between two looks, all processes were suspended
STOPPED = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger"}
SIGKILL = 9  # the module signal takes longer to import than the others together


def start_tick(pid: int) -> str:
    """Return when a process started; a later process with the same number has another value."""
    return _status(pid)[19]


def watch(ranks: dict[tuple[int, str], str], timeout: float) -> None:
    """Look at processes until they have ended; kill those that stay stopped for the time-out.

    Parameters
    ----------
    ranks : dict
        {(process id, start tick): rank, host and process as the message names them}.
    timeout : float
        Longest time in seconds for which a process may be stopped; it is killed LATER_SECONDS
        later.
    """
    stopped_seconds = dict.fromkeys(ranks, 0.0)
    begin = now = time.monotonic()
    while stopped_seconds:
        time.sleep(min(max(FIRST_SECONDS, (now - begin) / 20), LAST_SECONDS))
        previous, now = now, time.monotonic()
        for process in list(stopped_seconds):
            pid, tick = process
            status = _status(pid)
            state = status[0]
            if state in "ZX" or status[19] != tick:
                del stopped_seconds[process]
            elif state not in STOPPED:
                stopped_seconds[process] = 0.0
            else:
                stopped_seconds[process] += min(now - previous, LONGEST_STEP)
                if stopped_seconds[process] > timeout + LATER_SECONDS:
                    _end(pid, ranks[process], STOPPED[state], timeout)


def _end(pid, name, state, timeout):
    line = (
        f"mpidl: leaving: a process has been stopped for {timeout:g} s (--timeout), and is ended\n"
        f"  {name} does not answer: its process {state}\n"
    )
    os.write(2, line.encode())
    os.kill(pid, SIGKILL)


def _status(pid):
    """Return the fields of /proc/PID/stat after the name; "Z" and no start if it is missing."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["Z"] + [""] * 19


def main(words: list[str]) -> None:
    """Run the program: `words` are the time-out, and "PID TICK NAME" for each rank."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) != 2:  # the launcher waits for the end of stdout and of connections to it
            try:
                os.close(int(name))
            except OSError:
                continue
    ranks = {}
    for text in words[1:]:
        pid, tick, name = text.split(" ", 2)
        ranks[int(pid), tick] = name
    watch(ranks, float(words[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
