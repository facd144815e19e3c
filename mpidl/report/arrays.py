"""An array with an entry for each image, written to a file as it is computed."""

import contextlib
import os

import numpy as np

from mpidl.errors import UserError

ENDINGS = (".npy", ".h5")


def check_path(path, what):
    """A UserError where an array cannot be written to such a file."""
    ending = os.path.splitext(path)[1].lower()
    if ending not in ENDINGS:
        raise UserError(
            f"{what} {path}: an array is written as .npy or .h5, found {ending or path}"
        )


class ArrayFile:
    """FILE.npy, or FILE.h5 with a dataset of this name, of float32; entries come in order.

    It is written under another name, and is there as a whole once it is closed, or not at all. What
    goes wrong in writing is a UserError of `close`, so that whoever computes the entries together
    can go on to the end.

    others: further arrays for FILE.h5, {name: array or list of texts}; FILE.npy has no place for
    them. shape: (n, ...) of all entries.
    """

    def __init__(self, path, name, shape, others):
        self.path, self.at, self.problem = path, 0, None
        folder, last = os.path.split(os.path.abspath(path))
        self.part = os.path.join(folder, f".{last}.part")
        self.file = self.rows = None
        with self._noting():
            if path.lower().endswith(".h5"):
                import h5py

                self.file = h5py.File(self.part, "w", libver=("v108", "v108"))
                self.rows = self.file.create_dataset(name, shape, np.float32)
                for key, values in others.items():
                    self.file.create_dataset(key, data=values)
            else:
                self.file = open(self.part, "wb")
                fields = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
                np.lib.format.write_array_header_1_0(self.file, fields)

    def write(self, values):
        """The next entries, (m, ...)."""
        with self._noting():
            if self.problem is None and self.rows is not None:
                self.rows[self.at : self.at + len(values)] = values
            elif self.problem is None:
                self.file.write(np.ascontiguousarray(values, "<f4"))
        self.at += len(values)

    def close(self):
        """Put the file in its place. UserError, naming it, where it could not be written."""
        with self._noting():
            if self.file is not None:
                self.file.close()
        if self.problem is None:
            with self._noting():
                with open(self.part, "rb") as written:
                    os.fsync(written.fileno())
                os.replace(self.part, self.path)
        if self.problem is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.part)
            why = getattr(self.problem, "strerror", None) or str(self.problem).split("\n")[0]
            raise UserError(f"{self.path}: cannot be written: {why}") from self.problem

    @contextlib.contextmanager
    def _noting(self):
        """Keep the first thing that goes wrong; what h5py makes of a full disk has many types."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self.problem = self.problem or error
