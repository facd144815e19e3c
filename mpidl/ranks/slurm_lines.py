"""Keep the lines that MPICH sends to Slurm's daemon during MPI_Init short enough for Slurm.

With `srun --mpi=pmi2`, ranks exchange their addresses in lines of text (PMI, version 1). Slurm
reads at most 1024 characters of a line, but offers to store values of 1024 characters. If MPICH
sends a longer line, Slurm answers its first part, and MPI_Init fails or waits forever. The length
of a line depends on the network devices, and on the memory of the process: MPICH sends a whole
buffer, of which an address fills only a part, and abbreviates runs of zeros.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import threading
from collections.abc import Iterator

# A value of this length plus a command, the longest names of a step and of a key fits into 1024.
LONGEST_VALUE = 900
CHUNK = 1 << 16  # more than the longest message


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Return a context manager for MPI_Init: under srun, MPICH divides long values.

    Slurm announces its longest value in the reply to `get_maxes`. A thread relays all messages
    within the block, and lowers this number. MPI_Init must not hold the interpreter's lock.
    """
    connection = _connection()
    if connection is None:
        yield
        return
    slurm = os.dup(connection)
    relay, mpich = socket.socketpair()
    os.dup2(mpich.fileno(), connection)
    mpich.close()
    thread = threading.Thread(
        target=_relay_messages, args=(relay, slurm), name="Slurm lines", daemon=True
    )
    thread.start()
    try:
        yield
    finally:  # MPICH has received the reply to each of its requests
        os.dup2(slurm, connection)
        relay.shutdown(socket.SHUT_RDWR)
        thread.join()
        relay.close()
        os.close(slurm)


def _connection():
    """Return the file descriptor of the socket to Slurm's daemon, or None without this daemon."""
    if "SLURM_LOCALID" not in os.environ or "MPI_LOCALNRANKS" in os.environ:  # mpirun of MPICH
        return None
    number = os.environ.get("PMI_FD", "")
    return int(number) if number.isdigit() else None


def _relay_messages(relay, slurm):
    """Pass messages on in both directions until one side closes its socket."""
    poll = select.poll()
    for number in (relay.fileno(), slurm):
        poll.register(number, select.POLLIN)
    with contextlib.suppress(OSError):
        while True:
            for number, _ in poll.poll():
                message = os.read(number, CHUNK)
                if not message:
                    relay.shutdown(socket.SHUT_RDWR)
                    return
                if number == slurm:
                    relay.sendall(lower_longest_value(message))
                else:
                    _write(slurm, message)


def lower_longest_value(message: bytes) -> bytes:
    """Return Slurm's message with at most `LONGEST_VALUE` as the length of a value."""
    if not message.startswith(b"cmd=maxes "):
        return message
    return re.sub(
        rb"(?<=vallen_max=)\d+",
        lambda match: b"%d" % min(int(match.group()), LONGEST_VALUE),
        message,
    )


def _write(number, message):
    while message:
        message = message[os.write(number, message) :]
