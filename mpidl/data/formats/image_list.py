"""The base class of datastores of image files, which a folder or a table lists."""

from __future__ import annotations

import copy
import os

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Datastore, Indices
from mpidl.data.formats.image_files import KINDS, decode, read_file
from mpidl.data.storage import objects
from mpidl.data.storage.settings import is_remote
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess, Preprocessed
from mpidl.errors import UserError
from mpidl.files import Stamp, changed, digest
from mpidl.text import printable


class ImageList(Datastore):
    """A datastore of image files.

    Subclasses list the files, and set the attributes below as well as the labels or targets.

    Attributes
    ----------
    folder : str
        Base folder of the relative paths in `files`.
    files : list of str
        Paths of the images relative to `folder`.
    sizes, written : ndarray
        Size of each file in bytes, and time of each file's last change in nanoseconds.
    conversion : Preprocess
        Conversion to apply to the images.
    """

    folder: str
    files: list[str]
    sizes: np.ndarray
    written: np.ndarray

    def __init__(self, preprocess: Preprocess | None) -> None:
        self.conversion = preprocess or AS_IT_IS
        self.preprocess = self.conversion or None
        self._pending = objects.ReadAhead()

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Indices) -> np.ndarray:
        # Use memory from the arena: clearing new pages would add a fifth to the decoding time.
        images = arenas.to_read((len(indices), *self.image_shape), np.uint8)
        fetches = self.read_ahead(indices) or [None] * len(indices)
        for image, i, fetch in zip(images, indices, fetches, strict=True):
            path = os.path.join(self.folder, self.files[i])
            content = None if fetch is None else fetch.result()
            pixels, now = decode(path, self.conversion, self.image_shape, image, content)
            self._check_stamp(i, now)
            if isinstance(pixels, tuple):
                raise UserError(shape_error(path, pixels, self.image_shape, self.files[0]))
        return images

    def _check_stamp(self, i, now):
        """Raise UserError if file i has changed. `now` is the file's Stamp, or None if remote."""
        if now is not None and now != (self.sizes[i], self.written[i]):
            raise changed(os.path.join(self.folder, self.files[i]), self._stamp(i), now)

    def _stamp(self, i):
        return Stamp(int(self.sizes[i]), int(self.written[i]))

    def read_ahead(self, indices: Indices) -> list[objects.Fetch] | None:
        if not is_remote(self.folder):
            return None
        return self._pending.start(map(int, indices), self._request)

    def _request(self, i):
        return objects.request(os.path.join(self.folder, self.files[i]), self._stamp(i))

    def encoded_sizes(self) -> np.ndarray | None:
        return None if self.conversion else self.sizes

    def read_encoded(self, indices: Indices) -> list[bytes]:
        if (fetches := self.read_ahead(indices)) is not None:
            return [fetch.result() for fetch in fetches]
        contents = []
        for i in indices:
            content, now = read_file(os.path.join(self.folder, self.files[i]))
            self._check_stamp(i, now)
            contents.append(content)
        return contents

    def name(self, i: int) -> str:
        return printable(os.path.join(self.folder, self.files[i]))

    def fingerprint(self) -> str:
        # Hash relative paths, so that a copy of the folder has the same fingerprint.
        if self.conversion:
            return digest(self.files_fingerprint(), self.conversion)
        targets = self._digested_targets()
        return digest(super().fingerprint(), *self.files, self.sizes, *targets)

    def files_fingerprint(self) -> str:
        """Return a hex digest of the files and labels. It does not depend on image shapes.

        Returns
        -------
        str
            Hexadecimal digits. The fingerprint of converted images depends on this digest.
        """
        facts = [*self.classes, self.labels, *self.files, self.sizes, *self._digested_targets()]
        return digest("files", *facts)

    def _digested_targets(self) -> tuple[object, ...]:
        """Return the arrays that determine the targets, or () if there are no targets."""
        return ()

    def preprocessed(self, preprocess: Preprocess) -> Datastore:
        """Return a datastore of the same files that applies a `Preprocess` during decoding.

        The images in the files may then differ in size (see `mpidl.data.preprocessed`).

        Parameters
        ----------
        preprocess : Preprocess
            The conversion.

        Returns
        -------
        Datastore
            A datastore of the same files.
        """
        if self.preprocess is not None:
            return Preprocessed(self, preprocess)
        store = copy.copy(self)
        store.conversion = store.preprocess = preprocess
        store.image_shape = preprocess.image_shape(self.image_shape)
        return store


def shape_error(
    path: str, shape: tuple[int, ...], expected_shape: tuple[int, ...], first: str
) -> str:
    """Return the error message for an image whose shape differs from the first image.

    `first` is the name of the first image.
    """
    expected, actual = (f"{h}x{w} {KINDS[c]}" for c, h, w in (expected_shape, shape))
    return (
        f"{printable(path)}: expected a {expected} image like the first one "
        f"({printable(first)}), found {actual}; all images must have one size and be "
        "all gray or all RGB: --resize HxW and --colour rgb convert them (in Python "
        "preprocess=dl.Preprocess(...), for a trained network preprocess=net.preprocess)"
    )
