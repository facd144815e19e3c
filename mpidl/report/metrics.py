"""metrics.jsonl: one JSON object a line, for each iteration, epoch and validation."""

import json
import math
import os
import time

from mpidl.errors import UserError

KINDS = ("iteration", "epoch", "validation")
FLUSH_SECONDS = 2.0


class Metrics:
    """Appends records to `path` on rank 0; on the other ranks the same methods do nothing.

    cut: on resume, the checkpoint's iteration: records of later ones, which the run that stopped
    left behind, are removed first. Without it the file starts empty. Raises UserError, naming the
    path, where it cannot be written.
    """

    def __init__(self, path, rank=0, cut=None):
        self.path = path
        self.file = None
        self.flushed = time.monotonic()
        if rank:
            return
        try:
            if cut is not None:
                self.cut(cut)
            self.file = open(path, "w" if cut is None else "a")
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def record(
        self,
        kind,
        epoch,
        iteration,
        loss,
        learning_rate,
        images_per_second,
        seconds,
        accuracy=None,
    ):
        """Append one record; seconds since the run began; images_per_second: None of a validation.

        A number that is not finite, which JSON has no word for, is written as null. The records of
        an iteration must be written, and flushed, before its checkpoint is.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, found {kind}")
        if self.file is None:
            return
        record = {"kind": kind, "epoch": int(epoch), "iteration": int(iteration)}
        record["loss"] = number(loss)
        if accuracy is not None:
            record["accuracy"] = number(accuracy)
        record["learning_rate"] = number(learning_rate)
        record["images_per_second"] = number(images_per_second)
        record["seconds"] = number(seconds)
        try:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            if kind != "iteration" or time.monotonic() - self.flushed > FLUSH_SECONDS:
                self.file.flush()
                self.flushed = time.monotonic()
        except OSError as error:
            raise self._refused(error) from error

    def flush(self):
        """Put all records on disk: before each checkpoint."""
        if self.file is not None:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
            except OSError as error:
                raise self._refused(error) from error

    def close(self):
        if self.file is not None:
            file, self.file = self.file, None
            try:
                file.close()
            except OSError as error:
                raise self._refused(error) from error

    def cut(self, iteration):
        """Remove the records after `iteration`, and what is no record, such as a torn last line."""
        if not os.path.exists(self.path):
            return
        part = f"{self.path}.part"
        with open(part, "w") as file:
            for record in read(self.path):
                if record["iteration"] <= iteration:
                    file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)

    def _refused(self, error):
        return UserError(f"{self.path}: cannot be written: {error.strerror or error}")


def read(path):
    """The records of a metrics file, in order; lines that are none are passed over."""
    records = []
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("iteration"), int):
                records.append(record)
    return records


def number(value):
    """A number as JSON has it: None where it is not finite, or None."""
    return float(value) if value is not None and math.isfinite(value) else None
