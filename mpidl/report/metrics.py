"""Read and write metrics.jsonl, which has one JSON object (a record) per line.

There is a record per iteration, epoch and validation. At the end of a run, a record of the kind
"final_validation" has the scores of the returned network. About every two seconds, a record of the
kind "ranks" has the times of each rank. A record of the kind "lost" tells which ranks were lost.
Records of the kinds "certificate_start", "certificate_state" and "certificate_validation" become
the certificate of the run (mpidl/certificates/README.md).
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mpidl.errors import UserError
from mpidl.files import json_object, open_for_reading, reason, write_whole

FILE = "metrics.jsonl"
KINDS = ("iteration", "epoch", "validation", "final_validation")
FLUSH_SECONDS = 2.0


class Cut(NamedTuple):
    """The position to which a run returns, for example when it is resumed."""

    iteration: int  # number of completed iterations
    validation: int  # iteration of the last validation. The run repeats all later validations

    def last(self, kind: str) -> int:
        """Return the last iteration whose record of this kind is kept."""
        if kind == "final_validation":
            return -1
        return min(self) if kind.endswith("validation") else self.iteration

    def keeps(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is kept, because the run will not write it again."""
        return record["iteration"] <= self.last(str(record.get("kind")))


class Metrics:
    """Writer of the records of a metrics file.

    The methods do nothing on ranks other than 0, with one exception: a rank that calls `rewind`
    writes the file from then on. By default, all existing records are removed; `cut` gives the
    records that a resumed run keeps. All methods raise UserError if the file cannot be written.
    """

    def __init__(self, path: str, rank: int = 0, cut: Cut | None = None):
        self.path = path
        self.file = None
        self.flushed = time.monotonic()
        if rank:
            return
        with self._writing():
            if cut is not None:
                self.cut(cut)
            self.file = open(path, "w" if cut is None else "a")

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(
        self,
        kind: str,
        epoch: int,
        iteration: int,
        loss: float | None,
        learning_rate: float,
        images_per_second: float | None,
        seconds: float,
        accuracy: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Append a record of the kind "iteration", "epoch", "validation" or "final_validation".

        Positions count from 1; that of a final validation belongs to the weights of the returned
        network. `seconds` are since the start of the run. Numbers that are not finite are written
        as null. Append all records of an iteration and call `flush` before the checkpoint of the
        same iteration is written.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, found {kind}")
        record: dict[str, Any] = {"kind": kind, "epoch": int(epoch), "iteration": int(iteration)}
        record |= {"loss": loss} | ({} if accuracy is None else {"accuracy": accuracy})
        record |= {"learning_rate": learning_rate, "images_per_second": images_per_second}
        record |= {"seconds": seconds} | ({} if metrics is None else {"metrics": metrics})
        self._append(finite(record))

    def record_ranks(self, epoch: int, iteration: int, fields: Mapping[str, Any]) -> None:
        """Append a record of how the ranks spent their time: "seconds" since the start of the run,
        and lists with one entry per rank. "input", "compute", "wait", "sum" and "other" are the
        seconds since the last record; they add up to the elapsed time on the rank's clock. "memory"
        is the resident memory in bytes, and "device" the device.
        """
        position = {"kind": "ranks", "epoch": int(epoch), "iteration": int(iteration)}
        self._append({**position, **fields})

    def record_lost(self, epoch: int, iteration: int, facts: Mapping[str, Any]) -> None:
        """Append a record of lost "ranks" and their "hosts", the number "ranks_left", and
        "seconds_lost". The position is the one from which the run continues.
        """
        position = {"kind": "lost", "epoch": int(epoch), "iteration": int(iteration)}
        self._append({**position, **facts})

    def record_certificate(self, record: Mapping[str, Any]) -> None:
        """Append a record of a certificate, with "kind" and "iteration"."""
        self._append(record)

    def _append(self, record):
        if self.file is None:
            return
        is_brief = record["kind"] == "iteration"
        with self._writing():
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            if not is_brief or time.monotonic() - self.flushed > FLUSH_SECONDS:
                self.file.flush()
                self.flushed = time.monotonic()

    def flush(self) -> None:
        """Pass all records to the operating system. Call this method before each checkpoint."""
        if self.file is not None:
            with self._writing():
                self.file.flush()

    def close(self, discard: bool = False) -> None:
        """Close the file. If `discard` is true, drop the records that are not yet written."""
        if self.file is not None:
            file, self.file = self.file, None
            if discard:
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), file.fileno())
            with self._writing():
                file.close()

    def cut(self, cut: Cut) -> None:
        """Remove the records that the run will repeat, and lines that are not records."""
        if not os.path.exists(self.path):
            return
        records = [record for record in read(self.path) if cut.keeps(record)]
        write_whole(self.path, "".join(f"{json.dumps(record)}\n" for record in records).encode())

    def rewind(self, cut: Cut, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """Remove the records that the run will repeat, and open the file for more records.

        `records` are all records to keep: those that the lost rank had not written are added.
        """
        self.close()
        with self._writing():
            self.cut(cut)
            written = {_position(record) for record in read(self.path)}
            self.file = open(self.path, "a")
        for record in records:
            if _position(record) not in written:
                self._append(record)

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {reason(error)}") from error


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a metrics file in order.

    Lines that are not records, such as an incomplete last line after an interruption, are skipped.
    """
    with open_for_reading(path) as file:
        records = list(map(parse, file))
    return [record for record in records if record is not None]


def parse(line: str | bytes) -> dict[str, Any] | None:
    """Parse a line of a metrics file. Return None if it is not a record."""
    record = json_object(line)
    return record if record is not None and isinstance(record.get("iteration"), int) else None


def _position(record):
    return record.get("kind"), record.get("epoch"), record["iteration"]


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record for JSON, in which numbers that are not finite are None."""

    def converted(value):
        if isinstance(value, Mapping):
            return finite(value)
        return value if value is None or isinstance(value, str | int) else number(value)

    return {name: converted(value) for name, value in record.items()}


def number(value: float | None) -> float | None:
    """Convert a number for JSON: return a float, or None if the number is None or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None
