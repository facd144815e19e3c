"""An array with an entry per image, written to a file while it is computed."""

import contextlib
import os
from collections.abc import Mapping, Sequence

import numpy as np

from mpidl.errors import UserError

ENDINGS = (".npy", ".h5")


def check_path(path: str, option: str) -> None:
    """Raise UserError, naming the option, if an array cannot be written to such a file."""
    ending = os.path.splitext(path)[1].lower()
    if ending not in ENDINGS:
        raise UserError(
            f"{option} {path}: an array is written as .npy or .h5, found {ending or path}"
        )


class ArrayFile:
    """A file that receives a float32 array in parts, in order.

    The file is written under another name. `close` gives it its name once it is complete. Errors in
    writing are raised by `close`, so that ranks that compute the entries together reach the end.

    Parameters
    ----------
    path : str
        FILE.npy or FILE.h5.
    name : str
        Name of the dataset in FILE.h5.
    shape : tuple of int
        Shape of the whole array, (n, ...).
    arrays : mapping
        Further arrays for FILE.h5, {name: array or list of str}. FILE.npy has no place for them.
    """

    def __init__(
        self,
        path: str,
        name: str,
        shape: Sequence[int],
        arrays: Mapping[str, np.ndarray | list[str]],
    ):
        self.path = path
        self.count = 0  # entries so far
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
                fields = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
                np.lib.format.write_array_header_1_0(self.file, fields)

    def write(self, values: np.ndarray) -> None:
        """Write the next entries, (m, ...)."""
        with self._deferred_errors():
            if self.problem is None and self.dataset is not None:
                self.dataset[self.count : self.count + len(values)] = values
            elif self.problem is None:
                self.file.write(np.ascontiguousarray(values, "<f4"))
        self.count += len(values)

    def close(self) -> None:
        """Close the file and give it its name.

        Raises
        ------
        UserError
            If the file could not be written.
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
        """Record the first error; h5py raises several types for a full disk."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self.problem = self.problem or error
