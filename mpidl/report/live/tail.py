"""Read a growing metrics.jsonl in pieces."""

import os
from typing import Any

from mpidl.report import metrics
from mpidl.report.live.folder import Folder
from mpidl.report.metrics import FILE

PIECE = 4 << 20  # maximum number of bytes per call, so that a long file does not block the server
MAX_LINE = 64 << 20  # longer lines are skipped
OVERLAP = 256  # bytes before the position; if they change, the file has been rewritten


class Tail:
    """Returns the new records of a metrics file.

    `is_complete` tells whether the last call of `read` reached the end of the file.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._restart()

    def _restart(self):
        self.position, self.before, self.identity, self.rest = 0, b"", None, b""
        self.is_complete = False

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Read the next piece of the file: its new records, and whether they start at the
        beginning, because the file is new or because a resumed run has removed the end of the old
        file. Incomplete and damaged lines are skipped; an incomplete last line is returned after it
        has been completed. Raises OSError if the file cannot be read now. The next call continues.
        """
        answer = self.folder.read(FILE, self._read)
        if answer is None:
            is_new = self.identity is not None
            self._restart()
            return [], is_new
        return answer

    def _read(self, descriptor, status):
        identity = status.st_dev, status.st_ino
        overlap = os.pread(descriptor, len(self.before), self.position - len(self.before))
        has_restarted = self.identity != identity or overlap != self.before
        # If this read fails, the state has not changed.
        piece = os.pread(descriptor, PIECE, 0 if has_restarted else self.position)
        if has_restarted:
            self._restart()
            self.identity = identity
        self.position += len(piece)
        self.before = (self.before + piece)[-OVERLAP:]
        self.is_complete = self.position >= status.st_size or not piece
        complete, newline, rest = piece.rpartition(b"\n")
        if not newline:
            self.rest = (self.rest + piece)[: MAX_LINE + 1]
            return [], has_restarted
        lines = (self.rest + complete).split(b"\n")
        self.rest = rest
        records = (metrics.parse(line) for line in lines if len(line) <= MAX_LINE)
        return [record for record in records if record is not None], has_restarted
