"""Write the records that a notebook draws while a run trains.

`dl.launch` sets `launch.folder` on rank 0. Each training run then writes a file of JSON lines to
this folder. The launching process reads these files (see `notebook`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpidl.report.metrics import finite

FLUSH_SECONDS = 0.3  # longest time that rank 0 buffers a record
PREFIX = "live-"  # a file name is this prefix and a number


@dataclass
class Launch:
    """The launch that started this process. `folder` is for the records, or None."""

    folder: str | None = None


launch = Launch()


def recorder() -> Recorder | None:
    """Return the recorder of a new training run, or None if no notebook shows it."""
    if launch.folder is None:
        return None
    count = sum(name.startswith(PREFIX) for name in os.listdir(launch.folder))
    return Recorder(os.path.join(launch.folder, f"{PREFIX}{count + 1:06}"))


class Recorder:
    """Writes the progress of a training run to a file of JSON lines."""

    def __init__(self, path: str) -> None:
        self.file, self.flush_time = open(path, "w"), 0.0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Write numbers that are not finite as null."""
        self.file.write(json.dumps(finite(record)) + "\n")
        if record["kind"] != "iteration" or time.monotonic() - self.flush_time >= FLUSH_SECONDS:
            self.file.flush()
            self.flush_time = time.monotonic()
