"""Access the files in one folder, and no file outside of it."""

import errno
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from mpidl.files import reason
from mpidl.report import stop_file

T = TypeVar("T")
MAX_BYTES = 1 << 20  # maximum size of a small file
NO_FILE = errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO  # the last two: link, socket


class Folder:
    """A folder, which need not exist yet.

    Only the folder itself may be a symbolic link: links inside it are not followed.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self, name: str, use: Callable[[int, os.stat_result], T]) -> T | None:
        """Open a file and return `use(descriptor, status)`.

        Return None if the file does not exist, or if it is not a regular file, such as a symbolic
        link. Raise OSError if the file cannot be read now.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC
        descriptors = []
        try:
            descriptors.append(os.open(self.path, flags | os.O_DIRECTORY))
            # O_NONBLOCK: opening a pipe does not wait for a writer.
            inner = flags | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptors.append(os.open(name, inner, dir_fd=descriptors[0]))
            status = os.fstat(descriptors[1])
            return use(descriptors[1], status) if stat.S_ISREG(status.st_mode) else None
        except OSError as error:
            if error.errno in NO_FILE:
                return None
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def content(self, name: str) -> bytes | None:
        """Return the first MAX_BYTES of a file; see `read` for errors."""
        return self.read(name, lambda descriptor, status: os.read(descriptor, MAX_BYTES))

    def why_no_stop(self) -> str | None:
        """Return the reason why this process cannot request a stop, or None if it can."""
        if not os.path.isdir(self.path):
            return "the folder does not exist yet"
        if not os.access(self.path, os.W_OK | os.X_OK):
            return f"no permission to write in {self.path}"
        return None

    def request_stop(self, moment: str) -> str | None:
        """Request a stop at `stop_file.NOW` or `EPOCH`. Return the reason if the request fails."""
        try:
            stop_file.request(self.path, moment)
        except OSError as error:
            return f"{self.path}: cannot be written: {reason(error)}"
        return None
