"""Run the exit guard, a program that kills ranks on its host if they are stopped while they exit.

A rank that waits for another rank detects if that rank is stopped (SIGSTOP). After all ranks have
reached the end of the program, no rank waits for another rank. If a rank is stopped then, no other
rank detects it, and mpirun would wait forever. Before MPI_Finalize, the first rank of each host
therefore starts this program (`departure.start_exit_guard`). The guard watches the processes of all
ranks on the host until they have ended. If a process stays stopped for longer than the time-out,
the guard names the process on stderr and kills it, after which the launcher ends the job.

The program does not import mpidl. It imports only modules that Python has already loaded.
"""

from __future__ import annotations

import os
import sys
import time

FIRST_SECONDS, LAST_SECONDS = 0.02, 0.5  # shortest and longest time between two checks
LATER_SECONDS = 1.0  # extra time, so that a rank in MPI_Finalize can report the process first
LONGEST_STEP = 1.0  # if more time passes between two checks, all processes were suspended
ENDED_STATES = ("", "X", "Z")  # states of processes, as in /proc/PID/stat
STOPPED_STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger"}
SIGKILL = 9  # as in the module `signal`, which would take too long to import


def start_tick(pid: int) -> str:
    """Return when a process started; the value differs for a later process with the same ID."""
    return status_of(pid)[19]


def watch(ranks: dict[tuple[int, str], str], timeout: float) -> None:
    """Watch processes until they have ended; kill those that stay stopped for too long.

    Parameters
    ----------
    ranks : dict
        {(process ID, start tick): rank, host and process as text for the message}.
    timeout : float
        Longest time in seconds for which a process may be stopped. The process is killed
        `LATER_SECONDS` after this time.
    """
    stopped_seconds = dict.fromkeys(ranks, 0.0)
    begin = now = time.monotonic()
    while stopped_seconds:
        time.sleep(min(max(FIRST_SECONDS, (now - begin) / 20), LAST_SECONDS))
        previous, now = now, time.monotonic()
        for process in list(stopped_seconds):
            pid, tick = process
            status = status_of(pid)
            state = status[0]
            if state in ENDED_STATES or status[19] != tick:
                del stopped_seconds[process]
            elif state not in STOPPED_STATES:
                stopped_seconds[process] = 0.0
            else:
                stopped_seconds[process] += min(now - previous, LONGEST_STEP)
                if stopped_seconds[process] > timeout + LATER_SECONDS:
                    _end(pid, ranks[process], STOPPED_STATES[state], timeout)


def _end(pid, name, state, timeout):
    line = (
        f"mpidl: leaving: a process has been stopped for {timeout:g} s (--timeout), and is now "
        "killed\n"
        f"  {name} does not answer: its process {state}\n"
    )
    os.write(2, line.encode())
    os.kill(pid, SIGKILL)


def status_of(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty fields without this process.

    The first field is the state, a letter. Other modules of this package call this function too.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split() or [""] * 20
    except OSError:
        return [""] * 20


def main(words: list[str]) -> None:
    """Run the program. `words` contains the time-out, then "PID TICK NAME" for each rank."""
    for name in os.listdir("/proc/self/fd"):
        # Close all files except stderr: the launcher waits until stdout and connections are closed.
        if int(name) != 2:
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
