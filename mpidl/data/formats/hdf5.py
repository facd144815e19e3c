"""Read images, labels and targets from HDF5 files, one mini-batch at a time."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.array_datastore import check_int32
from mpidl.data.datastore import Datastore, Indices, counted
from mpidl.data.formats import hdf5_probe
from mpidl.data.formats.format import World, check_images, format_of_parts
from mpidl.data.labels import align_labels, integer_labels, parse_class_names
from mpidl.data.paths import reading, stamp_of
from mpidl.data.urls import is_remote
from mpidl.errors import UserError
from mpidl.files import Stamp, changed, digest, on_rank_0, open_for_reading, stamp
from mpidl.text import printable

if TYPE_CHECKING:
    import h5py

    from mpidl.data.storage.objects import ByteStream

# {layout of a dataset: permutation of its dimensions to (n, C, H, W), or to (n, H, W) for gray
# images}. The last two layouts are MATLAB's arrays H x W x C x N and H x W x N in HDF5 files.
LAYOUTS = {
    "NCHW": (0, 1, 2, 3),
    "NHWC": (0, 3, 1, 2),
    "NHW": (0, 1, 2),
    "NCWH": (0, 1, 3, 2),
    "NWH": (0, 2, 1),
}
SIGNATURE = b"\x89HDF\r\n\x1a\n"  # first bytes of an HDF5 file
MAX_CHUNK = 256 << 20  # largest chunk in bytes: HDF5 decodes a whole chunk at once
MAX_READ = 16 << 20  # maximum number of bytes read at once from a dataset without chunks
RATIO = 1032  # maximum compression ratio of deflate


class Rows(NamedTuple):
    """Description of a dataset that holds one row per image."""

    name: str  # name of the dataset in the file
    shape: tuple[int, ...]  # shape of each row that `read_rows` returns
    dtype: np.dtype  # type of the rows that `read_rows` returns
    layout: str | None  # layout of a dataset of images (a key of LAYOUTS). None for targets
    rows_per_read: int  # number of rows that are read at once


class Contents(NamedTuple):
    """Description of an HDF5 file. Rank 0 determines and broadcasts the description."""

    stamp: Stamp
    count: int
    images: Rows
    labels: np.ndarray | None
    classes: list[str]
    targets: Rows | None


class HDF5Datastore(Datastore):
    """A datastore of images, with labels or targets, in an HDF5 file.

    With a world, construction is collective: rank 0 inspects the file and broadcasts the contents.

    Parameters
    ----------
    path : path-like
        The file.
    world : World, optional
        The ranks that open the file together.
    images : str
        Name of the dataset of images. The dataset holds uint8 (pixels 0 to 255) or floats, and has
        shape (n, H, W, C), (n, C, H, W), or (n, H, W) for gray images.
    labels : str
        Name of the dataset of labels: n whole numbers of at least 0. An attribute `classes` of this
        dataset or of the file may list the class names.
    targets : str
        Name of the dataset of targets, (n, ...). Targets are used if there are no labels.
    layout : {"NHWC", "NCHW", "NHW"}, optional
        Order of the dimensions of `images`. By default, the attribute `layout` of the dataset or
        the file gives the order. Without this attribute, the order that gives 1 or 3 channels is
        used.
    classes : sequence of str, optional
        Class names of the training set, to which the labels are mapped.
    labelled : bool
        Whether labels or targets are required.

    Raises
    ------
    UserError
        If the file is damaged, a dataset is missing, or a dataset has an unsuitable type or shape.
        `read` also raises UserError if the file has changed since construction.

    Notes
    -----
    Each rank opens the file at its first read, without locking the file. Chunks are read in file
    order. Each mini-batch decodes all chunks that contain its images, so a chunk should hold only
    one or a few images.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world: World = None,
        *,
        images: str = "images",
        labels: str = "labels",
        targets: str = "targets",
        layout: str | None = None,
        classes: Sequence[str] | None = None,
        labelled: bool = True,
    ):
        path, names = os.fspath(path), (images, labels, targets)
        contents = on_rank_0(world, lambda: inspect_file(path, names, layout, classes, labelled))
        self._set_contents(path, contents)

    def _set_contents(self, path: str, contents: Contents) -> None:
        self.path, self.contents, self._lock = path, contents, threading.Lock()
        self._file: Any = None
        self._stream = _stream_of(path, contents.stamp)
        self.image_shape, self.dtype = contents.images.shape, contents.images.dtype
        self.labels, self.classes = contents.labels, contents.classes
        if contents.targets is not None:
            self.targets_shape, self.targets_dtype = contents.targets.shape, contents.targets.dtype

    def __len__(self) -> int:
        return self.contents.count

    def read(self, indices: Indices) -> np.ndarray:
        return self._rows(self.contents.images, indices)

    def targets(self, indices: Indices) -> np.ndarray:
        return self._rows(self.contents.targets, indices)

    def _rows(self, rows, indices):
        stream = self._stream
        with reading(self.path), contextlib.nullcontext() if stream is None else stream.in_hdf5():
            return read_rows(self._opened()[rows.name], rows, indices, stream)

    def _opened(self):
        """Return the open file; raise UserError if the file has changed since construction."""
        with self._lock:  # several threads may read at once
            if self._file is None:
                import h5py

                self._file = h5py.File(self._stream or self.path, "r", locking=False)
        if self._stream is not None:  # each request to the store checks the Stamp
            self._stream.file.check()
            return self._file
        now = stamp(os.fstat(self._file.id.get_vfd_handle()))
        if now != self.contents.stamp:
            raise changed(self.path, self.contents.stamp, now)
        return self._file

    def located(self, i: int) -> str:
        return f"{printable(self.path)}: {self.name(i)}"

    def describe(self) -> str:
        return f"{printable(self.path)}: {counted(self)}"

    def fingerprint(self) -> str:
        # The size of the file reveals most changes. The modification time is left out, because
        # it differs between copies of a file.
        return digest(super().fingerprint(), self.contents.stamp.size, self.contents.images.layout)


def of_contents(path: str, contents: Contents) -> HDF5Datastore:
    """Return a datastore of a file whose contents are known."""
    store = HDF5Datastore.__new__(HDF5Datastore)
    store._set_contents(path, contents)
    return store


def _stream_of(path: str, now: Stamp) -> ByteStream | None:
    """Return the bytes of an object as a Python file, or None for a local file."""
    if not is_remote(path):
        return None
    from mpidl.data.storage.objects import ByteStream

    return ByteStream(path, now)


def inspect_file(
    path: str,
    names: tuple[str, str, str],
    layout: str | None,
    classes: Sequence[str] | None,
    labelled: bool,
) -> Contents:
    """Inspect an HDF5 file and return its Contents, including all labels.

    `names` holds three names: the datasets of images, labels and targets.
    """
    images_name, labels_name, targets_name = names
    source = printable(path)
    with opened(path) as file:
        stored = dataset(file, images_name)
        images, count = rows_of(stored, images_name, layout_of(stored, layout)), len(stored)
        labels, targets = None, None
        if labels_name in file:
            stored = dataset(file, labels_name)
            hint = f"; store numeric targets in a dataset {targets_name}"
            labels_source = f"{source}: {labels_name}"
            labels = integer_labels(stored[()], count, labels_source, hint)
            labels, classes = align_labels(labels, _class_names(stored), classes, labels_source)
        elif targets_name in file:
            stored = dataset(file, targets_name)
            if len(stored) != count:
                raise UserError(
                    f"{source}: expected {count} targets, one per image, found {len(stored)}"
                )
            targets = rows_of(stored, targets_name, None)
            classes = _class_names(stored) if classes is None else classes
        elif labelled:
            raise UserError(
                f"{source}: expected a dataset {labels_name} or {targets_name} in addition to "
                f"{images_name}; found {listed(file)}"
            )
        return Contents(stamp_of(path), count, images, labels, list(classes or []), targets)


def _attribute_of_both(stored: h5py.Dataset, name: str) -> Any:
    """Return the value of an attribute of a dataset, else of its file, or None."""
    value = attribute(stored, name)
    return attribute(stored.file, name) if value is None else value


def _class_names(stored: h5py.Dataset) -> list[str] | None:
    names = _attribute_of_both(stored, "classes")
    return None if names is None else parse_class_names(names, printable(stored.file.filename))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[h5py.File]:
    """Open an HDF5 file for reading without locking it, and yield the open file.

    A helper process tests the file first, because a damaged file may crash the HDF5 library. Raises
    UserError if the file cannot be opened or read.
    """
    import h5py

    with reading(path):
        now = stamp_of(os.fspath(path))
        stream = _stream_of(os.fspath(path), now)
        problem = hdf5_probe.problem_of(path, now, stream)
        if problem is not None:
            raise UserError(f"{printable(path)}: the file cannot be read: {problem}")
        in_hdf5 = contextlib.nullcontext() if stream is None else stream.in_hdf5()
        with in_hdf5, h5py.File(stream or path, "r", locking=False) as file:
            yield file


def listed(file: h5py.Group) -> str:
    """List the first names in a file or group for a message."""
    names = [printable(name) for _, name in zip(range(9), file, strict=False)]
    ellipsis = ", ..." if len(file) > len(names) else ""
    return ", ".join(names) + ellipsis if names else "nothing"


def dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the named dataset of an open file.

    Raises UserError if there is no such dataset, or if the dataset is incomplete, does not hold
    numbers, or stores the numbers in another file.
    """
    import h5py

    source = f"{printable(file.filename)}: {name}"
    stored = file
    for step in name.split("/"):
        link = stored.get(step, getlink=True) if isinstance(stored, h5py.Group) else None
        if link is None:
            raise UserError(
                f"{printable(file.filename)}: expected a dataset {name}; found {listed(file)}"
            )
        if not isinstance(link, h5py.HardLink):  # a soft or external link may lead to another file
            raise UserError(f"{source}: expected a dataset, found a link")
        stored = stored[step]
    if not isinstance(stored, h5py.Dataset):
        raise UserError(f"{source}: expected a dataset, found a group")
    if stored.is_virtual or stored.external:
        raise UserError(
            f"{source}: expected the numbers in this file, found a reference to another file"
        )
    if stored.shape is None or stored.dtype.kind not in "biuf" or stored.dtype.subdtype:
        raise UserError(f"{source}: expected numbers, found {stored.dtype}")
    stored_bytes, file_bytes = stored.id.get_storage_size(), file.id.get_filesize()
    if stored.nbytes > RATIO * stored_bytes + (1 << 16):
        raise UserError(
            f"{source}: expected {stored.nbytes} bytes of numbers, found {stored_bytes} stored: "
            "the dataset is incomplete"
        )
    if stored_bytes > file_bytes:  # HDF5 would allocate the claimed size of a damaged chunk
        raise UserError(
            f"{source}: expected {stored_bytes} stored bytes in the file, found a file of "
            f"{file_bytes}: it is damaged"
        )
    return stored


def layout_of(stored: h5py.Dataset, layout: Any = None) -> str:
    """Return the layout of a dataset of images, a key of LAYOUTS: the caller's, else the attribute
    `layout` of the dataset or the file, else the only layout that gives 1 or 3 channels. Raises
    UserError if the layout contradicts the number of dimensions, or two layouts are possible.
    """
    name = stored.name.lstrip("/")
    source = f"{printable(stored.file.filename)}: {name}"
    layout = _attribute_of_both(stored, "layout") if layout is None else layout
    layout = layout.decode("ascii", "replace") if isinstance(layout, bytes) else layout
    candidates = [text for text in ("NHWC", "NCHW", "NHW") if len(text) == stored.ndim]
    if not candidates:
        raise UserError(
            f"{source}: expected (n, H, W, C), (n, C, H, W) or (n, H, W), found {stored.shape}"
        )
    if layout is None:
        sizes = {text: stored.shape[text.index("C")] if "C" in text else 1 for text in candidates}
        candidates = [text for text, channels in sizes.items() if channels in (1, 3)]
        if len(candidates) != 1:
            raise UserError(
                f"{source}: {stored.shape} may be NHWC or NCHW: set the attribute layout of "
                f'{name} (file["{name}"].attrs["layout"] = "NHWC")'
            )
        return candidates[0]
    if layout not in candidates:
        raise UserError(
            f"{source}: expected {' or '.join(candidates)} as the layout of {stored.shape}, got "
            f"{printable(str(layout)[:40])}"
        )
    return layout


def rows_of(stored: h5py.Dataset, name: str, layout: str | None) -> Rows:
    """Return the Rows that describe a dataset of images, or of targets if `layout` is None.

    Raises UserError if the dataset is empty, its type is unsuitable, or its chunks are too large.
    """
    source = f"{printable(stored.file.filename)}: {name}"
    if layout:
        check_images(stored.shape, stored.dtype, source)
    elif not stored.ndim:
        raise UserError(f"{source}: expected one entry per image, found shape {stored.shape}")
    is_integer, itemsize = stored.dtype.kind in "biu", stored.dtype.itemsize
    axes = LAYOUTS[layout][1:] if layout else range(1, stored.ndim)
    shape = tuple(int(stored.shape[axis]) for axis in axes)
    row_bytes = max(1, math.prod(shape) * itemsize)
    rows_per_read = max(1, MAX_READ // row_bytes)
    if stored.chunks:
        chunk = math.prod(map(int, stored.chunks)) * itemsize
        if chunk > MAX_CHUNK:
            raise UserError(
                f"{source}: expected chunks of {MAX_CHUNK >> 20} MB at most, found "
                f"{chunk >> 20} MB: write smaller chunks (h5repack -l), or use mpidl.pack"
            )
        rows_per_read = max(1, min(int(stored.chunks[0]), MAX_CHUNK // row_bytes))
    shape = (1, *shape) if layout and len(shape) == 2 else shape
    integers = np.uint8 if layout else np.int32
    return Rows(name, shape, np.dtype(integers if is_integer else "f4"), layout, rows_per_read)


def read_rows(
    stored: h5py.Dataset, rows: Rows, indices: np.ndarray, stream: ByteStream | None = None
) -> np.ndarray:
    """Read rows by index, and return an array (n, *rows.shape) of type `rows.dtype`.

    The rows are read in file order and returned in the order of `indices`. If the file is in an
    object store, `stream` is the open file.
    """
    indices = np.asarray(indices, np.int64)
    remote = None
    if stream is not None:
        from mpidl.data.storage.hdf5_rows import RemoteRows

        remote = RemoteRows(stored, indices, stream)
    result = arenas.to_read((len(indices), *rows.shape), rows.dtype)
    order = np.argsort(indices, kind="stable")
    sorted_ = indices[order]
    groups = np.split(order, np.nonzero(np.diff(sorted_ // rows.rows_per_read))[0] + 1)
    for group in groups if len(indices) else ():
        members = indices[group]
        if remote is not None:
            part = remote.take(members)
        else:
            first = int(members[0])
            part = stored[first : int(members[-1]) + 1][members - first]
        if rows.layout:
            part = part.transpose(LAYOUTS[rows.layout]).reshape(len(group), *rows.shape)
        elif rows.dtype == np.int32 and part.dtype.itemsize > 2:
            check_int32(part, f"{printable(stored.file.filename)}: {rows.name}")
        with np.errstate(over="ignore"):  # `read_images` later reports infinities
            result[group] = part
    if remote is not None:
        remote.close()
    return result


def attribute(holder: h5py.Group | h5py.Dataset, name: str) -> Any:
    """Return the value of an attribute, or None if the attribute is missing.

    Raises UserError if the attribute is larger than 64 MiB.
    """
    if name not in holder.attrs:
        return None
    stored = holder.attrs.get_id(name)
    if math.prod(map(int, stored.shape)) * stored.dtype.itemsize > 1 << 26:
        raise UserError(f"{printable(holder.file.filename)}: attribute {name}: too large")
    return holder.attrs[name]


def is_hdf5(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is in HDF5 format, independent of its name."""
    with reading(path), contextlib.suppress(FileNotFoundError), open_for_reading(path) as file:
        return file.read(len(SIGNATURE)) == SIGNATURE
    return False


FORMAT = format_of_parts(
    "hdf5",
    recognizes=lambda path, head, option: head == SIGNATURE,
    open_part=lambda path, part, world, options: HDF5Datastore(
        path, world, classes=options.classes, labelled=options.labelled
    ),
    noun="an HDF5 file",
    suffixes=(".h5", ".hdf5"),
)
