"""Read datastores that are to be packed, and divide their images among shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.formats.image_files import check_image
from mpidl.data.formats.pack_layout import MAX_SHARDS, Rows
from mpidl.errors import UserError


class Source(NamedTuple):
    """A datastore to pack.

    `sizes` holds the sizes of the image files if encoded images are packed, and is None otherwise.
    `tables` is {name: (shape, dtype)} of an entry of "images" and "targets", if these are packed.
    """

    store: Datastore
    sizes: np.ndarray | None
    tables: dict[str, tuple[tuple[int, ...], np.dtype]]

    @property
    def nbytes(self) -> int:
        """Size of all images and targets in bytes."""
        fixed = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.tables.values())
        return fixed * len(self.store) + (0 if self.sizes is None else int(self.sizes.sum()))

    def edges(self, count: int) -> np.ndarray:
        """Divide the images among `count` files of similar size; return each file's first image."""
        places = np.arange(count)
        if self.sizes is None:
            return len(self.store) * places // count
        begins = np.cumsum(self.sizes) - self.sizes
        return np.searchsorted(begins, int(self.sizes.sum()) * places // count)

    def rows(self, first: np.ndarray, starts: Mapping[str, np.ndarray]) -> dict[str, Rows]:
        """Return the Rows of each dataset, given `first` and `starts` of `pack_layout.Rows`."""
        rows = {}
        if self.sizes is not None:
            ends = np.cumsum(self.sizes)
            rows["encoded"] = Rows((), np.dtype(np.uint8), ends, first, starts["encoded"])
        for name, (shape, dtype) in self.tables.items():
            rows[name] = Rows(tuple(shape), np.dtype(dtype), None, first, starts[name])
        return rows

    def entries(self, first: int, stop: int) -> list[bytes | np.ndarray]:
        """Read images first..stop-1 and their targets, in the form in which files store them."""
        indices, parts = np.arange(first, stop), list[bytes | np.ndarray]()
        if self.sizes is not None:
            contents = self.store.read_encoded(indices)
            for i, content in zip(indices.tolist(), contents, strict=True):
                check_image(content, self.store.located(i), self.store.image_shape)
            parts.append(b"".join(contents))
        for name in self.tables:
            array = (read_images if name == "images" else read_targets)(self.store, indices)
            parts.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
        return parts


def source_of(store: Datastore, images: str) -> Source:
    """Return the Source of a datastore; raise UserError if `images` does not apply to it."""
    sizes, tables = None, dict[str, tuple[tuple[int, ...], np.dtype]]()
    if images == "encoded":
        sizes = store.encoded_sizes()
        if sizes is None:
            raise UserError(
                f"{store.describe()}: --images encoded: expected image files as they are (in a "
                "folder, a table or a packed file); training accepts options such as --resize"
            )
        if sizes.min() < 1:
            raise UserError(
                f"{store.located(int(sizes.argmin()))}: expected an image, found 0 bytes"
            )
    elif images == "decoded":
        tables["images"] = store.image_shape, np.dtype(store.dtype)
    else:
        raise UserError(f"images: expected decoded or encoded, got {images}")
    if store.targets_shape is not None:
        tables["targets"] = store.targets_shape, np.dtype(store.targets_dtype)
    return Source(store, sizes, tables)


def shard_count(sources: Mapping[str, Source], shards: int | None, shard_mb: float | None) -> int:
    """Return the number of shards, or 0 if the packed file itself holds the images."""
    if shards is not None and shard_mb is not None:
        raise UserError("--shards and --shard-mb: expected at most one of them")
    images = sum(len(source.store) for source in sources.values())
    limit = min(images, MAX_SHARDS)
    if shard_mb is not None:
        if not shard_mb > 0:
            raise UserError(f"--shard-mb must be above 0, got {shard_mb}")
        nbytes = sum(source.nbytes for source in sources.values())
        return max(1, min(limit, round(nbytes / (shard_mb * 1e6))))
    if shards is None:
        return 0
    if not 1 <= shards <= limit:
        raise UserError(f"--shards {shards}: expected from 1 to {limit} shards of {images} images")
    return int(shards)
