"""Write the records that a notebook draws while a run trains.

`dl.launch` calls `record_in` on rank 0. Each training run then writes a file of JSON lines to the
folder of the launch. The launching process reads these files (see `notebook`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from mpidl.report.metrics import number

FLUSH_SECONDS = 0.3  # longest time that rank 0 buffers a record
PREFIX = "live-"  # a file name is this prefix and a number

_folder: str | None = None


def record_in(folder: str | None) -> None:
    """Make the next training runs of this process write their progress to a folder, if any."""
    global _folder
    _folder = folder


def recorder() -> Recorder | None:
    """Return the recorder of a new training run, or None if `record_in` has not been called."""
    if _folder is None:
        return None
    count = sum(name.startswith(PREFIX) for name in os.listdir(_folder))
    return Recorder(os.path.join(_folder, f"{PREFIX}{count + 1:06}"))


class Recorder:
    """Writes the progress of a training run to a file of JSON lines."""

    def __init__(self, path: str) -> None:
        self.file, self.flush_time = open(path, "w"), 0.0

    def write(
        self, kind: str, metrics: Mapping[str, float] | None = None, **values: float | str | None
    ) -> None:
        """Append a record. Write numbers that are not finite as null."""
        record: dict[str, Any] = {"kind": kind}
        record |= {k: v if isinstance(v, str) else number(v) for k, v in values.items()}
        if metrics:
            record["metrics"] = {name: number(value) for name, value in metrics.items()}
        self.file.write(json.dumps(record) + "\n")
        if kind != "iteration" or time.monotonic() - self.flush_time >= FLUSH_SECONDS:
            self.file.flush()
            self.flush_time = time.monotonic()
