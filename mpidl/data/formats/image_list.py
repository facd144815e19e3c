"""The base class of datastores of image files, which a folder or a table lists."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Datastore, Indices
from mpidl.data.formats.format import World
from mpidl.data.formats.image_files import KINDS, decode, read_file
from mpidl.data.paths import read_whole
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess, Preprocessed
from mpidl.data.urls import is_remote
from mpidl.errors import UserError
from mpidl.files import Stamp, changed, digest, on_rank_0
from mpidl.text import printable

if TYPE_CHECKING:
    from mpidl.data.storage.objects import Fetch, ReadAhead


class LabelSets(NamedTuple):
    """Sets of labels, one per image."""

    labels: np.ndarray  # concatenated labels of all images, int64
    ends: np.ndarray  # for each image, the end of its labels in `labels`, int64 (n,)
    classes: int

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return float32 (len(indices), classes): 1 for the labels of an image, 0 otherwise."""
        rows = np.zeros((len(indices), self.classes), np.float32)
        for row, i in zip(rows, indices.tolist(), strict=True):
            row[self.labels[self.ends[i - 1] if i else 0 : self.ends[i]]] = 1
        return rows


class Listing(NamedTuple):
    """Image files with their labels or targets. Rank 0 determines and broadcasts it."""

    files: list[str]  # paths relative to the folder
    stamps: list[Stamp]
    labels: np.ndarray | None  # label of each image, int64 (n,)
    # Targets: float32 (n,) or (n, R), or sets of labels. None if there are no targets.
    targets: np.ndarray | LabelSets | None
    classes: list[str]  # class names of the labels, or of targets that are 0 or 1
    # Reason why labels or targets are missing. None if they exist or are not to be expected.
    problem: str | None


class EncodedImages(Datastore):
    """The base class of datastores that decode images when they read them.

    Attributes
    ----------
    conversion : Preprocess
        Conversion to apply to the images while they are decoded.
    is_encoded : bool
        Whether images are decoded at all.
    """

    conversion = AS_IT_IS
    is_encoded = True

    def preprocessed(self, preprocess: Preprocess) -> Datastore:
        """Return a datastore of the same images that applies a `Preprocess` during decoding.

        The encoded images may then differ in size (see `mpidl.data.preprocessed`).

        Parameters
        ----------
        preprocess : Preprocess
            The conversion.

        Returns
        -------
        Datastore
            A datastore of the same images.
        """
        if not self.is_encoded or self.preprocess is not None:
            return Preprocessed(self, preprocess)
        store = copy.copy(self)
        store.conversion = store.preprocess = preprocess
        store.image_shape = preprocess.image_shape(self.image_shape)
        return store


class ImageList(EncodedImages):
    """A datastore of image files, which a subclass lists.

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
    unlabelled : str or None
        Reason why there are no labels or targets.
    """

    def __init__(
        self,
        folder: str,
        world: World,
        list_files: Callable[[], Listing],
        preprocess: Preprocess | None,
    ) -> None:
        self.folder, self.conversion = folder, preprocess or AS_IT_IS
        self.preprocess = self.conversion or None

        def read() -> tuple[Listing, tuple[int, ...]]:
            listing = list_files()
            first = os.path.join(folder, listing.files[0])
            content = read_whole(first) if is_remote(folder) else None
            return listing, decode(first, self.conversion, content=content)[0].shape

        self._pending: ReadAhead | None = None
        if is_remote(folder):
            from mpidl.data.storage.objects import ReadAhead

            self._pending = ReadAhead()
        listing, self.image_shape = on_rank_0(world, read)
        self.files, self.unlabelled = listing.files, listing.problem
        self.sizes, self.written = np.array(listing.stamps, np.int64).reshape(-1, 2).T
        self.labels, self.classes, self._targets = listing.labels, listing.classes, listing.targets
        if isinstance(self._targets, LabelSets):
            self.targets_shape = (self._targets.classes,)
        elif self._targets is not None:
            self.targets_shape = self._targets.shape[1:]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Indices) -> np.ndarray:
        # Use memory from the arena: clearing new pages would add a fifth to the decoding time.
        images = arenas.to_read((len(indices), *self.image_shape), np.uint8)
        fetches: Sequence[Fetch | None] = self.read_ahead(indices) or [None] * len(indices)
        for image, i, fetch in zip(images, indices, fetches, strict=True):
            path = os.path.join(self.folder, self.files[i])
            content = None if fetch is None else fetch.result()
            pixels, now = decode(path, self.conversion, self.image_shape, image, content)
            self._check_stamp(i, now)
            if isinstance(pixels, tuple):
                raise UserError(shape_error(path, pixels, self.image_shape, self.files[0]))
        return images

    def targets(self, indices: Indices) -> np.ndarray:
        if self._targets is None:
            return super().targets(indices)
        indices = np.asarray(indices, np.int64)
        if isinstance(self._targets, LabelSets):
            return self._targets.rows(indices)
        return self._targets[indices]

    def _check_stamp(self, i, now):
        """Raise UserError if file i has changed. `now` is the file's Stamp, or None if remote."""
        if now is not None and now != (self.sizes[i], self.written[i]):
            raise changed(os.path.join(self.folder, self.files[i]), self._stamp(i), now)

    def _stamp(self, i):
        return Stamp(int(self.sizes[i]), int(self.written[i]))

    def read_ahead(self, indices: Indices) -> list[Fetch] | None:
        if self._pending is None:
            return None
        from mpidl.data.storage.objects import request

        def request_files(indices):
            paths = {i: os.path.join(self.folder, self.files[i]) for i in indices}
            return {i: request(path, self._stamp(i)) for i, path in paths.items()}

        return self._pending.start(map(int, indices), request_files)

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
        if isinstance(self._targets, LabelSets):
            return self._targets.labels, self._targets.ends
        return () if self._targets is None else (self._targets,)


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
