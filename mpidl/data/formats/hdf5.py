"""HDF5 files of images and labels, read a mini-batch at a time and never whole."""

import contextlib
import os
import threading
from typing import NamedTuple

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.data.datastore import Datastore, counted
from mpidl.data.formats import hdf5_probe
from mpidl.data.formats.format import format_of_parts
from mpidl.data.labels import align_labels, check_int32, integer_labels, parse_class_names
from mpidl.errors import UserError
from mpidl.files import Stamp, changed, digest, on_rank_0, stamp, unreadable
from mpidl.text import printable

# How a dataset's dimensions lie, and what order of them is (n, C, H, W), or (n, H, W) of gray ones.
# The last two are MATLAB's H x W x C x N as HDF5 sees it.
LAYOUTS = {
    "NCHW": (0, 1, 2, 3),
    "NHWC": (0, 3, 1, 2),
    "NHW": (0, 1, 2),
    "NCWH": (0, 1, 3, 2),
    "NWH": (0, 2, 1),
}
SIGNATURE = b"\x89HDF\r\n\x1a\n"  # first bytes of an HDF5 file
MOST_OF_A_CHUNK = 256 << 20  # bytes: a chunk is read whole
MOST_OF_A_READ = 16 << 20  # bytes read at once where nothing is chunked
RATIO = 1032  # of what a dataset holds to what is stored of it: no deflate packs tighter


class Rows(NamedTuple):
    """A dataset of an entry an image: its name, an entry's shape, its type, how it is read.

    together: how many rows are read at once.
    """

    name: str
    shape: tuple
    dtype: np.dtype
    layout: str
    together: int


class Found(NamedTuple):
    """What an HDF5 file holds, as rank 0 found it."""

    stamp: Stamp
    count: int
    images: Rows
    labels: np.ndarray | None
    classes: list
    targets: Rows | None


class HDF5Datastore(Datastore):
    """Images in an HDF5 file: a dataset `images`, and `labels` or `targets` beside it.

    images: the name of a dataset of uint8 (pixels 0..255) or floats, (n, H, W, C), (n, C, H, W), or
    (n, H, W) of gray ones. layout: "NHWC" or "NCHW", else the dataset's or the file's attribute
    `layout`, else whichever puts 1 or 3 channels where they can be. labels: the name of (n,) whole
    numbers from 0, with the attribute `classes` of theirs or of the file, a list of texts. targets:
    the name of an array an image, where there are no labels. classes: the names that labels are
    brought to, where another set has fixed them. labelled=False: labels may be missing.

    With a world it is collective: rank 0 looks, the others are told. Each rank opens the file when
    it first reads, without a lock, and reads by chunks, in their order; a chunk is decoded for
    each mini-batch that has an image of it, so chunks of one image, or of few, are best.
    """

    def __init__(
        self,
        path,
        world=None,
        *,
        images="images",
        labels="labels",
        targets="targets",
        layout=None,
        classes=None,
        labelled=True,
    ):
        self.path = os.fspath(path)
        names = images, labels, targets
        found = on_rank_0(world, lambda: look(self.path, names, layout, classes, labelled))
        self._take(found)

    def _take(self, found):
        self.found, self._file, self._opening = found, None, threading.Lock()
        self.image_shape, self.dtype = found.images.shape, found.images.dtype
        self.labels, self.classes = found.labels, found.classes
        if found.targets is not None:
            self.targets_shape, self.targets_dtype = found.targets.shape, found.targets.dtype

    def __len__(self):
        return self.found.count

    def read(self, indices):
        return self._rows(self.found.images, indices)

    def targets(self, indices):
        return self._rows(self.found.targets, indices)

    def _rows(self, rows, indices):
        with failing(self.path):
            return read_rows(self._opened()[rows.name], rows, indices)

    def _opened(self):
        """The open file; a UserError where it has changed."""
        with self._opening:  # several threads may be the first
            if self._file is None:
                import h5py

                self._file = h5py.File(self.path, "r", locking=False)
        now = stamp(os.fstat(self._file.id.get_vfd_handle()))
        if now != self.found.stamp:
            raise changed(self.path, self.found.stamp, now)
        return self._file

    def located(self, i):
        return f"{printable(self.path)}: {self.name(i)}"

    def describe(self):
        return f"{printable(self.path)}: {counted(self)}"

    def fingerprint(self):
        # The size tells most changed files apart; times differ between copies of one file.
        return digest(super().fingerprint(), self.found.stamp.size, self.found.images.layout)


def look(path, names, layout, classes, labelled):
    """Found, of an HDF5 file; names: of its images, labels and targets."""
    with opened(path) as file:
        images = rows_of(dataset(file, names[0]), names[0], layout_of(file, names[0], layout))
        count = len(dataset(file, names[0]))
        if names[1] in file:
            held = dataset(file, names[1])
            own = attribute(held, "classes")
            own = attribute(file, "classes") if own is None else own
            own = None if own is None else parse_class_names(own, printable(path))
            hint = f"; numbers that are to be learned go into a dataset {names[2]}"
            values = integer_labels(held[()], count, f"{printable(path)}: {names[1]}", hint)
            labels, classes = align_labels(values, own, classes, f"{printable(path)}: {names[1]}")
            return Found(stamp(os.stat(path)), count, images, labels, classes, None)
        targets = None
        if names[2] in file:
            held = dataset(file, names[2])
            if len(held) != count:
                raise UserError(
                    f"{printable(path)}: expected {count} targets, one an image, found {len(held)}"
                )
            targets = rows_of(held, names[2], None)
        elif labelled:
            raise UserError(
                f"{printable(path)}: expected a dataset {names[1]}, or {names[2]}, beside "
                f"{names[0]}; found {listed(file)}"
            )
        return Found(stamp(os.stat(path)), count, images, None, list(classes or []), targets)


@contextlib.contextmanager
def failing(path):
    """Whatever HDF5 makes of a damaged file, as a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:  # OSError, KeyError, RuntimeError, ValueError, MemoryError, ...
        raise unreadable(path, e) from None


@contextlib.contextmanager
def opened(path):
    """The HDF5 file, opened without a lock; a UserError naming it where that fails.

    It has been tried out by a process beside this one before.
    """
    import h5py

    with failing(path):
        problem = hdf5_probe.problem_of(path, stamp(os.stat(path)))
    if problem is not None:
        raise UserError(f"{printable(path)}: the file cannot be read: {problem}")
    with failing(path), h5py.File(os.fspath(path), "r", locking=False) as file:
        yield file


def listed(file):
    """The names in a file or group, for a message."""
    names = [printable(name) for _, name in zip(range(9), file, strict=False)]
    more = ", ..." if len(file) > len(names) else ""
    return ", ".join(names) + more if names else "nothing"


def dataset(file, name):
    """The dataset of this name, its numbers in the file itself. UserError else."""
    import h5py

    where = printable(file.filename)
    held = file
    for step in name.split("/"):
        link = held.get(step, getlink=True) if isinstance(held, h5py.Group) else None
        if link is None:
            raise UserError(f"{where}: expected a dataset {name}; found {listed(file)}")
        if not isinstance(link, h5py.HardLink):  # it may lead to any other file
            raise UserError(f"{where}: {name}: expected a dataset, found a link")
        held = held[step]
    if not isinstance(held, h5py.Dataset):
        raise UserError(f"{where}: {name}: expected a dataset, found a group")
    plan = held.id.get_create_plist()
    if held.is_virtual or plan.get_external_count():
        raise UserError(f"{where}: {name}: expected the numbers in this file, found another's")
    if held.shape is None or held.dtype.kind not in "biuf" or held.dtype.subdtype:
        raise UserError(f"{where}: {name}: expected numbers, found {held.dtype}")
    if held.nbytes > RATIO * held.id.get_storage_size() + (1 << 16):
        raise UserError(
            f"{where}: {name}: expected {held.nbytes} bytes of numbers, found "
            f"{held.id.get_storage_size()} stored: it was not written to its end"
        )
    return held


def layout_of(file, name, layout=None):
    """How the dimensions of a dataset of images lie: a key of LAYOUTS."""
    held = dataset(file, name)
    where = f"{printable(file.filename)}: {name}"
    for holder in (held, file):
        layout = attribute(holder, "layout") if layout is None else layout
    layout = layout.decode("ascii", "replace") if isinstance(layout, bytes) else layout
    known = [text for text in ("NHWC", "NCHW", "NHW") if len(text) == held.ndim]
    if not known:
        raise UserError(
            f"{where}: expected (n, H, W, C), (n, C, H, W) or (n, H, W), found {held.shape}"
        )
    if layout is not None and layout not in known:
        raise UserError(
            f"{where}: expected {' or '.join(known)} as the layout of {held.shape}, got "
            f"{printable(str(layout)[:40])}"
        )
    if layout is None:
        fits = [text for text in known if "C" not in text or held.shape[text.index("C")] in (1, 3)]
        if len(fits) != 1:
            raise UserError(
                f"{where}: {held.shape} may be NHWC or NCHW: say which by the attribute layout of "
                f'{name} (file["{name}"].attrs["layout"] = "NHWC")'
            )
        layout = fits[0]
    return layout


def rows_of(held, name, layout):
    """Rows, of a dataset of images (layout), or of targets (None)."""
    where = f"{printable(held.file.filename)}: {name}"
    if not held.ndim or (layout and not held.size):
        raise UserError(f"{where}: expected an entry an image, found {held.shape}")
    whole = held.dtype.kind in "biu"
    if layout and whole and held.dtype != np.uint8:
        raise UserError(f"{where}: expected uint8 (pixels 0 to 255) or floats, found {held.dtype}")
    shape = tuple(int(size) for size in held.shape[1:])
    if layout:
        order = LAYOUTS[layout]
        shape = tuple(int(held.shape[at]) for at in order[1:])
        shape = (1, *shape) if len(shape) == 2 else shape
    dtype = np.dtype(np.float32)
    if whole:
        dtype = np.dtype(np.uint8 if layout else np.int32)
    size = max(1, int(np.prod(held.shape[1:])) * held.dtype.itemsize)
    together = max(1, MOST_OF_A_READ // size)
    if held.chunks:
        chunk = int(np.prod([int(n) for n in held.chunks], dtype=object)) * held.dtype.itemsize
        if chunk > MOST_OF_A_CHUNK:
            raise UserError(
                f"{where}: expected chunks of {MOST_OF_A_CHUNK >> 20} MB at most, found "
                f"{chunk >> 20} MB: write smaller ones (h5repack -l), or python -m mpidl.pack"
            )
        together = max(1, min(int(held.chunks[0]), MOST_OF_A_CHUNK // size))
    return Rows(name, shape, dtype, layout, together)


def read_rows(held, rows, indices):
    """The entries of these indices, (n, *rows.shape) of rows.dtype, read in their stored order."""
    indices = np.asarray(indices, np.int64)
    found = arenas.to_read((len(indices), *rows.shape), rows.dtype)
    order = np.argsort(indices, kind="stable")
    sorted_ = indices[order]
    groups = np.split(order, np.nonzero(np.diff(sorted_ // rows.together))[0] + 1)
    for group in groups if len(indices) else ():
        wanted = indices[group]
        first = int(wanted[0])
        part = held[first : int(wanted[-1]) + 1][wanted - first]
        if rows.layout:
            part = part.transpose(LAYOUTS[rows.layout]).reshape(len(group), *rows.shape)
        elif rows.dtype == np.int32 and part.dtype.itemsize > 2:
            check_int32(part, f"{printable(held.file.filename)}: {rows.name}")
        with np.errstate(over="ignore"):  # an infinity is told of where images are checked
            found[group] = part
    return found


def attribute(holder, name):
    """An attribute's value, None where there is none; a UserError where it is too large."""
    if name not in holder.attrs:
        return None
    held = holder.attrs.get_id(name)
    if int(np.prod(held.shape, dtype=object)) * held.dtype.itemsize > 1 << 26:
        raise UserError(f"{printable(holder.file.filename)}: attribute {name}: too large")
    return holder.attrs[name]


FORMAT = format_of_parts(
    "hdf5",
    recognizes=lambda path, head, option: head == SIGNATURE,
    open_part=lambda path, part, world, options: HDF5Datastore(
        path, world, classes=options.classes, labelled=options.labelled
    ),
    noun="an HDF5 file",
    suffixes=(".h5", ".hdf5"),
)
