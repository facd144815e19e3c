"""Find the terminal that shows a process's output, even behind an MPI launcher."""

import os
import stat
from typing import TextIO

LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted", "orterun"}
LINE_LAUNCHERS = {"prterun", "prted"}  # launchers of Open MPI 5, which forward only whole lines


def terminal_width(stream: TextIO | None) -> int:
    """Return the number of columns of the terminal that shows a stream; 0 without a terminal.

    Under mpirun, stdout leads to the launcher through a pipe (MPICH) or a pseudo-terminal (Open
    MPI). The launcher forwards the output to its own stdout, so the function returns the width of
    the launcher's terminal.
    """
    if stream is None or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return 0
    try:
        handle = stream.fileno()
        terminal = os.isatty(handle)
        # A script may filter the output of a pipe. For a pipe, the search ends at the first script.
        launcher = _launcher(os.getppid(), past_scripts=terminal) if handle <= 2 else None
        if launcher is None or stat.S_ISREG(os.fstat(handle).st_mode):
            return os.get_terminal_size(handle).columns or 80 if terminal else 0
        with open(f"/proc/{launcher}/comm") as file:
            if file.read().strip() in LINE_LAUNCHERS:
                return 0
        launcher_stdout = os.open(
            f"/proc/{launcher}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
        )
        try:
            return os.get_terminal_size(launcher_stdout).columns or 80
        finally:
            os.close(launcher_stdout)
    except (OSError, ValueError, AttributeError):  # not a terminal or not a file
        return 0


def _launcher(pid, past_scripts):
    """Return the id of the topmost MPI launcher among a process and its ancestors, or None."""
    launcher = None
    while os.path.exists(f"/proc/{pid}/stat"):
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name in LAUNCHERS:
            launcher = pid
        elif launcher or not past_scripts:
            break
        pid = int(rest.split()[1])
    return launcher
