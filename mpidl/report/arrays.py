"""Write an array with one entry per image to a file, while mpidl computes the entries."""

import contextlib
import os
from collections.abc import Mapping, Sequence

import numpy as np

from mpidl.errors import UserError

ENDINGS = (".npy", ".h5")


def check_path(path: str, option: str) -> None:
    """Raise UserError unless the path ends in .npy or .h5; the message names the option."""
    ending = os.path.splitext(path)[1].lower()
    if ending not in ENDINGS:
        raise UserError(
            f"{option} {path}: an array is written as .npy or .h5, found {ending or path}"
        )


class ArrayFile:
    """A file FILE.npy or FILE.h5 to which a float32 array of shape (n, ...) is written in parts:
    entries in order, or rows of images in any order. FILE.h5 also gets `arrays`, {name: array or
    list of str}. The file has a temporary name until `close` renames it. Only `close` raises an
    error if writing has failed, so that all ranks finish computing the entries together.
    """

    def __init__(
        self,
        path: str,
        name: str,
        shape: Sequence[int],
        arrays: Mapping[str, np.ndarray | list[str]],
    ):
        self.path, self.shape = path, tuple(shape)
        self.count = 0  # number of written entries
        self.problem: Exception | None = None
        folder, base = os.path.split(os.path.abspath(path))
        self.part = os.path.join(folder, f".{base}.part")
        self.file = self.dataset = None
        with self._deferred_errors():
            if path.lower().endswith(".h5"):
                import h5py

                self.file = h5py.File(self.part, "w", libver=("v108", "v108"))
                self.dataset = self.file.create_dataset(name, shape, np.float32)
                for key, values in arrays.items():
                    self.file.create_dataset(key, data=values)
            else:
                self.file = open(self.part, "wb")
                fields = {"descr": "<f4", "fortran_order": False, "shape": self.shape}
                np.lib.format.write_array_header_1_0(self.file, fields)
                self.start = self.file.tell()

    def write(self, values: np.ndarray) -> None:
        """Append the next m entries; `values` has the shape (m, ...)."""
        with self._deferred_errors():
            if self.problem is None and self.dataset is not None:
                self.dataset[self.count : self.count + len(values)] = values
            elif self.problem is None and self.file is not None:
                self.file.write(np.ascontiguousarray(values, "<f4"))
        self.count += len(values)

    def write_rows(self, entry: int, first: int, rows: np.ndarray) -> None:
        """Write rows (K, m, W) of an entry (K, H, W), from row `first`."""
        with self._deferred_errors():
            if self.problem is None and self.dataset is not None:
                self.dataset[entry, :, first : first + rows.shape[1]] = rows
            elif self.problem is None and self.file is not None:
                _, planes, height, width = self.shape
                for plane, values in enumerate(np.ascontiguousarray(rows, "<f4")):
                    row = (entry * planes + plane) * height + first
                    self.file.seek(self.start + 4 * row * width)
                    self.file.write(values)

    def close(self) -> None:
        """Close the file and rename it to `path`.

        Raises UserError if the file could not be written.
        """
        with self._deferred_errors():
            if self.file is not None:
                self.file.close()
        if self.problem is None:
            with self._deferred_errors():
                with open(self.part, "rb") as written:
                    os.fsync(written.fileno())
                os.replace(self.part, self.path)
        if self.problem is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.part)
            text = str(self.problem).split("\n")[0]
            reason = getattr(self.problem, "strerror", None) or text
            raise UserError(f"{self.path}: cannot be written: {reason}") from self.problem

    @contextlib.contextmanager
    def _deferred_errors(self):
        """Record the first error in `problem` instead of raising it.

        If the disk is full, h5py raises errors of several types.
        """
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self.problem = self.problem or error
