"""Read packed sets, which hold decoded images or the contents of image files.

The HDF5 library reads only the description of the set (`pack_contents`). Images and targets are
read directly from known offsets in the packed file. In a sharded set, they are read from shards in
the same folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Indices, counted
from mpidl.data.formats import hdf5
from mpidl.data.formats.file_set import FileSet, open_raw
from mpidl.data.formats.format import World, opened_by
from mpidl.data.formats.image_files import decode
from mpidl.data.formats.image_list import EncodedImages, shape_error
from mpidl.data.formats.pack_contents import checksum, inspect_part, is_packed, parts_of
from mpidl.data.formats.pack_layout import chunks
from mpidl.data.transforms.preprocess import AS_IT_IS
from mpidl.errors import UserError
from mpidl.files import digest, on_rank_0
from mpidl.text import printable


class PackedDatastore(EncodedImages):
    """A datastore that reads one part of a file written by `python -m mpidl.pack`.

    The images, labels and fingerprint equal those of the original set, so training on either set
    gives the same weights. With a world, construction is collective: rank 0 checks everything
    except images and targets, and broadcasts the description.

    Parameters
    ----------
    path : path-like
        The packed file. The shards of a sharded set must be in the same folder.
    world : World, optional
        The ranks that open the file together. Each rank reads only the images that it needs.
    part : {"train", "test"}
        Part of the file to open.
    classes : sequence of str, optional
        Class names of the training set, to which the labels are mapped.
    labelled : bool
        Whether labels or targets are required.

    Attributes
    ----------
    is_encoded : bool
        Whether the file holds the contents of image files, which `read` decodes.

    Raises
    ------
    UserError
        If the file is damaged or does not have the part, or if a shard is missing or belongs to
        another set. `read` also raises UserError if a file has changed since construction.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world: World = None,
        part: str = "train",
        *,
        classes: Sequence[str] | None = None,
        labelled: bool = True,
    ):
        self.path, self.part = os.fspath(path), part
        self.contents = on_rank_0(world, lambda: inspect_part(self.path, part, classes, labelled))
        self.labels, self.classes = self.contents.labels, self.contents.classes
        self.preprocess = self.contents.preprocess
        self.conversion = AS_IT_IS  # applied to encoded images during decoding
        self.image_shape = self.contents.image_shape
        self.is_encoded = "encoded" in self.contents.rows
        if not self.is_encoded:
            self.dtype = self.contents.rows["images"].dtype
        if (targets := self.contents.rows.get("targets")) is not None:
            self.targets_shape, self.targets_dtype = targets.shape, targets.dtype
        self._files = FileSet(self.contents.files, self.contents.stamps)
        self._index = open_raw(self.path, self.contents.stamp)  # for the names of images

    def __len__(self) -> int:
        return self.contents.count

    def read(self, indices: Indices) -> np.ndarray:
        if not self.is_encoded:
            return self._rows("images", indices)
        contents = self.read_encoded(indices)
        images = arenas.to_read((len(contents), *self.image_shape), np.uint8)
        for k, i in enumerate(np.asarray(indices, np.int64).tolist()):
            content, contents[k] = contents[k], b""  # free the memory
            self._decode(i, content, images[k])
        return images

    def _decode(self, i, content, out):
        """Decode the content of image file i. Only error messages load the name of the image."""
        name = _LazyName(self, i)
        pixels, _ = decode(name, self.conversion, self.image_shape, out, content)
        if isinstance(pixels, tuple):
            raise UserError(shape_error(self.located(i), pixels, self.image_shape, self.name(0)))

    def targets(self, indices: Indices) -> np.ndarray:
        return self._rows("targets", indices)

    def _rows(self, name, indices):
        rows, indices = self.contents.rows[name], np.asarray(indices, np.int64)
        result = arenas.to_read((len(indices), *rows.shape), rows.dtype)
        files, offsets, _ = rows.spans(indices)
        self._files.read_rows(result, files, offsets)
        return result

    def encoded_sizes(self) -> np.ndarray | None:
        if not self.is_encoded or self.preprocess:
            return None
        return self.contents.rows["encoded"].spans(np.arange(len(self)))[2]

    def read_encoded(self, indices: Indices) -> list[bytes]:
        spans = self.contents.rows["encoded"].spans(np.asarray(indices, np.int64))
        return self._files.read_ranges(*spans)

    def read_ahead(self, indices: Indices) -> object:
        if not self._files.is_remote:
            return None
        indices = np.asarray(indices, np.int64)
        tables = self.contents.rows.values()
        return [self._files.read_ahead(*table.spans(indices)) for table in tables]

    def name(self, i: int) -> str:
        if self.contents.names is None:
            return super().name(i)
        start, ends = self.contents.names
        first = int(ends[i - 1]) if i else 0
        self._index.check()
        return printable(self._index.read_range(start + first, int(ends[i]) - first))

    def located(self, i: int) -> str:
        return f"{printable(self.path)}: {self.name(i)}"

    def describe(self) -> str:
        part = ", test" if self.part == "test" else ""
        return f"{printable(self.path)}{part}: {counted(self)}"

    def fingerprint(self) -> str:
        contents = self.contents
        if self.conversion:
            return digest(contents.files_fingerprint or contents.fingerprint, self.conversion)
        return contents.fingerprint

    def files_fingerprint(self) -> str | None:
        """Return the digest of the packed image files, or None.

        Returns
        -------
        str or None
            Hexadecimal digits. None if the set holds decoded images, or only some images of the
            original set.
        """
        return self.contents.files_fingerprint

    def verify(self, progress: Callable[[int], object] | None = None) -> None:
        """Compare all images and targets with their checksums.

        Parameters
        ----------
        progress : callable, optional
            Function to call after each chunk with the number of images in the chunk.

        Raises
        ------
        UserError
            If a checksum differs.
        """
        rows = self.contents.rows
        edges = next(iter(rows.values())).first
        ranges = chunks(edges, len(self), self.contents.chunk_images)
        for (first, stop), expected in zip(ranges, self.contents.checksums, strict=True):
            indices = np.arange(first, stop)
            parts = self.read_encoded(indices) if self.is_encoded else []
            parts += [self._rows(name, indices) for name in rows if name != "encoded"]
            if checksum(*parts) != bytes(expected):
                raise UserError(
                    f"{printable(self.path)}: images {first} to {stop - 1} of {self.part} do not "
                    "match their checksum: pack them again"
                )
            if progress is not None:
                progress(stop - first)


class _LazyName(os.PathLike):
    """The name of an image for error messages, loaded only if a message needs the name."""

    def __init__(self, store, i):
        self.store, self.i = store, i

    def __fspath__(self):
        return self.store.located(self.i)


FORMAT = opened_by(
    PackedDatastore,
    "packed",
    recognizes=lambda path, head, option: head == hdf5.SIGNATURE and is_packed(path),
    parts=parts_of,
)
