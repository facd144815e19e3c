"""Read and write status.json: the length of a run, and whether and why the run has ended."""

import json
import os
from dataclasses import asdict, dataclass, fields

from mpidl.files import json_object, write_whole

NAME = "status.json"
RUNNING, FINISHED, FAILED = "running", "finished", "failed"
STOPPED = "stopped"  # state of a tracker's record; in status.json, such a run has "finished"
MAX_NUMBER = 2**53  # larger numbers cannot be from mpidl


@dataclass
class Status:
    """The content of status.json."""

    state: str = RUNNING  # state of the run. A killed run stays "running"
    stopped: str | None = None  # reason for an early end, as in `Result.stopped`
    error: str | None = None  # the error of a failed run, in one line
    ranks: int = 0
    lost_ranks: int = 0  # number of ranks that were lost; see the option on_lost_rank
    host: str = ""  # host of rank 0
    # Number of epochs of the whole run. This number and the following numbers are 0 until the
    # training starts.
    epochs: int = 0
    iterations_per_epoch: int = 0  # number of mini-batches per epoch
    iterations: int = 0  # number of iterations of the whole run, unless it ends early


TYPES = {
    f.name: (str, type(None)) if f.default is None else type(f.default) for f in fields(Status)
}


def write(folder: str | os.PathLike[str], status: Status) -> None:
    """Write status.json; raise UserError if it cannot be written."""
    content = json.dumps(asdict(status), indent=1) + "\n"
    write_whole(os.path.join(folder, NAME), content.encode())


def parse(content: bytes | None) -> Status | None:
    """Parse the content of status.json. Return None if it is not a valid status."""
    values = json_object(content)
    if values is None:
        return None
    values = {name: values[name] for name in TYPES if name in values}
    if not all(isinstance(x, TYPES[name]) and _is_valid(x) for name, x in values.items()):
        return None
    return Status(**values)


def _is_valid(value):
    """Return whether a number is not too large, and a string can be encoded."""
    if isinstance(value, str):
        return not any("\ud800" <= c <= "\udfff" for c in value)
    return value is None or 0 <= value <= MAX_NUMBER
