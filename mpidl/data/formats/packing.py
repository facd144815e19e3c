"""Write packed files for `python -m mpidl.pack`. `pack_contents` describes the file format.

While the file NAME is incomplete, this module writes to `.NAME.part`. First, HDF5 writes labels and
names, and allocates space for the images, so every image has an offset before any image is read.
Then each chunk of images is read and written to its offset. The checksum of a chunk is written
after the chunk. If packing is interrupted, the next call continues, and keeps all chunks with
matching checksums. At the end, the file is flushed to disk and renamed to NAME. Shards have their
final names from the start, because a shard without the file NAME is never read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Literal

import numpy as np

from mpidl.data.datastore import Datastore
from mpidl.data.formats import hdf5, pack_contents
from mpidl.data.formats.pack_layout import (
    HEADER,
    Rows,
    chunks,
    describe_header,
    shard_header,
    shard_paths,
)
from mpidl.data.formats.pack_source import shard_count, source_of
from mpidl.data.loading.workers import Job, prefetch_items
from mpidl.data.paths import reading
from mpidl.errors import UserError
from mpidl.files import digest, sync_folder
from mpidl.text import printable

CHUNK = 4 << 20  # approximate size of a chunk in bytes


def pack(
    parts: Mapping[str, Datastore],
    path: str | os.PathLike[str],
    *,
    images: Literal["decoded", "encoded"] = "decoded",
    shards: int | None = None,
    shard_mb: float | None = None,
    threads: int = 1,
    progress: Callable[[int], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> bool:
    """Write datastores to a packed file.

    Parameters
    ----------
    parts : mapping
        {"train": datastore, "test": datastore}, with the same classes. "test" is optional.
    path : path-like
        The file to write. The file must not exist. If an earlier call was interrupted, this call
        continues with the unfinished file.
    images : {"decoded", "encoded"}
        Whether to store pixels ("decoded"), or the contents of image files such as JPEG and PNG
        ("encoded"). Encoded images need less space, but are decoded each time they are read.
        "encoded" requires datastores of image files.
    shards : int, optional
        Number of shards, which are files next to `path` that hold the images and targets. By
        default, `path` itself holds the images and targets.
    shard_mb : float, optional
        Approximate size of a shard in MB (10**6 bytes), instead of `shards`.
    threads : int
        Number of threads that read images.
    progress : callable, optional
        Function to call after each chunk with the number of images in the chunk.
    stop : callable, optional
        Function to call after each chunk. If the function returns True, packing stops.

    Returns
    -------
    bool
        True if the file is complete, and False if `stop` ended the call.

    Raises
    ------
    UserError
        If the file exists or cannot be written, a datastore is empty, or an image cannot be read.
        The message names the file or image. The next call keeps the chunks written so far.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    if os.path.lexists(path):
        raise UserError(
            f"{printable(path)}: the file already exists: remove it, or choose another name"
        )
    for part, store in parts.items():
        if not len(store):
            raise UserError(f"{store.describe()}: expected images to pack as {part}, found none")
    sources = {part: source_of(store, images) for part, store in parts.items()}
    count, part_path = shard_count(sources, shards, shard_mb), os.path.join(folder, f".{name}.part")
    try:
        with _opened(part_path, os.O_CREAT) as descriptor:
            _lock(descriptor, part_path)
            plan = _plan(sources, images, count)
            target = _Target(path, part_path, descriptor, sources, plan, count)
            if not target.open():
                target.lay_out()
            if not target.fill(threads, progress, stop):
                return False
            target.finish()
    except OSError as e:
        raise UserError(f"{printable(path)}: cannot be written: {e.strerror or e}") from None
    return True


def _lock(descriptor, path):
    """Lock the unfinished file against other processes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{printable(path)}: another process is packing to this file") from None
    except OSError:
        pass  # the file system has no locks


def _plan(sources, images, shards):
    """Describe the datastores to pack, as JSON values.

    A call continues with an unfinished file only if the file stores the same plan.
    """
    plan = {}
    for part, source in sources.items():
        count, written = len(source.store), getattr(source.store, "written", None)
        plan[part] = {
            "fingerprint": source.store.fingerprint(),
            "written": None if written is None else digest(written),
            "count": count,
            "chunk_images": max(1, CHUNK * count // source.nbytes),
            "bytes": source.nbytes,
        }
    return {"parts": plan, "images": images, "shards": shards}


class _Target:
    """The packed file being written, with its shards."""

    def __init__(self, path, part_path, descriptor, sources, plan, shards):
        self.path, self.part_path, self.descriptor = path, part_path, descriptor
        self.sources, self.plan = sources, plan
        self.identity = hashlib.sha256(json.dumps(plan).encode()).digest()
        self.stem = os.path.splitext(os.path.basename(path))[0]
        self.shards = shard_paths(path, self.stem, shards)
        self.files = self.shards or [part_path]  # the files with images and targets
        self.sizes = [HEADER] * shards
        self.rows: dict[str, dict[str, Rows]] = {}
        self.sums: dict[str, int] = {}  # offset of the checksums of each part
        for part, source in sources.items() if shards else ():
            self.rows[part] = self._shard_rows(source)

    def _shard_rows(self, source):
        """Return the Rows of a part in the shards, and increase the sizes of the shards."""
        count, first = len(source.store), source.edges(len(self.shards))
        stops = np.array([*first[1:], count])
        starts = {}
        for name, rows in source.rows(first, dict.fromkeys(pack_contents.LARGE)).items():
            starts[name] = np.array(self.sizes, np.int64)
            self.sizes = (starts[name] + rows.begins(stops) - rows.begins(first)).tolist()
        return source.rows(first, starts)

    def open(self) -> bool:
        """Read the layout of the unfinished file. Return False if its plan differs."""
        try:
            with hdf5.opened(self.part_path) as file:
                if pack_contents.text_of(file, "plan") != json.dumps(self.plan):
                    return False
                for part, source in self.sources.items():
                    self.sums[part] = file[f"{part}/checksums"].id.get_offset()
                    if not self.shards:
                        starts = {
                            name: np.array([file[part][name].id.get_offset()], np.int64)
                            for name in pack_contents.LARGE
                            if name in file[part]
                        }
                        self.rows[part] = source.rows(np.zeros(1, np.int64), starts)
        except UserError:  # the file is empty, or `lay_out` was interrupted
            return False
        for number, (path, size) in enumerate(zip(self.shards, self.sizes, strict=True)):
            self._make_shard(number, path, size)
        return True

    def _make_shard(self, number, path, size):
        """Create a shard unless it exists. Raise UserError if a file of another set does."""
        header = shard_header(number, self.identity)
        with _opened(path, os.O_CREAT) as descriptor:
            current = bytes(_read(descriptor, HEADER, 0))
            if current != header and os.fstat(descriptor).st_size:
                raise UserError(
                    f"{printable(path)}: expected no file, or shard {number + 1} of this packing, "
                    f"found {describe_header(current)}: remove it"
                )
            if current != header:
                _write(descriptor, header, 0)
            os.ftruncate(descriptor, size)

    def lay_out(self) -> None:
        """Write the HDF5 file with labels and names, and allocate the other datasets."""
        import h5py

        total_bytes = sum(part["bytes"] for part in self.plan["parts"].values())
        free = shutil.disk_usage(os.path.dirname(self.part_path)).free
        if total_bytes > free:
            raise UserError(
                f"{printable(self.part_path)}: expected {total_bytes >> 20} MB of free disk space, "
                f"found {free >> 20} MB"
            )
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        creation.set_layout(h5py.h5d.CONTIGUOUS)
        creation.set_obj_track_times(False)

        def allocate(group, name, shape, dtype):  # `fill` writes the entries
            space, kind = h5py.h5s.create_simple(shape), h5py.h5t.py_create(dtype)
            h5py.h5d.create(group.id, name.encode(), kind, space, creation)

        with h5py.File(self.part_path, "w", libver=("v108", "v108"), locking=False) as file:
            classes = next(iter(self.sources.values())).store.classes
            is_simple = self.plan["images"] == "decoded" and not self.shards
            file.attrs["format"] = pack_contents.FORMAT_NAME
            file.attrs["format_version"] = 1 if is_simple else 2
            file.attrs["classes"] = json.dumps(list(classes), ensure_ascii=True)
            if self.shards:
                file.attrs["shards"], file.attrs["shard_id"] = self.stem, self.identity.hex()
                sizes = np.array(self.sizes, np.int64)
                file.create_dataset(pack_contents.SHARD_SIZES, data=sizes, track_times=False)
            for part, source in self.sources.items():
                group = file.create_group(part)
                self._describe(part, source, group)
                if not self.shards:
                    if source.sizes is not None:
                        allocate(group, "encoded", (int(source.sizes.sum()),), np.dtype(np.uint8))
                    for name, (shape, dtype) in source.tables.items():
                        allocate(group, name, (len(source.store), *shape), dtype)
            file.attrs["plan"] = json.dumps(self.plan)
        if not self.open():
            raise UserError(f"{printable(self.part_path)}: the file was changed while packing")

    def _describe(self, part, source, group):
        """Write everything except images and targets to the group of a part."""
        store, step = source.store, self.plan["parts"][part]["chunk_images"]
        group.attrs["fingerprint"], group.attrs["chunk_images"] = store.fingerprint(), step
        of_files = getattr(store, "files_fingerprint", lambda: None)()
        if source.sizes is not None and of_files is not None:
            group.attrs["files_fingerprint"] = of_files
        if store.preprocess is not None:
            group.attrs["preprocess"] = json.dumps(asdict(store.preprocess))

        def write(name, values):
            group.create_dataset(name, data=values, track_times=False)

        if store.labels is not None:
            write("labels", store.labels.astype("<i8"))
        if source.sizes is not None:
            write("ends", np.cumsum(source.sizes, dtype=np.int64))
        if (files := getattr(store, "files", None)) is not None:
            names = [os.fsencode(name) for name in files]
            write("names", np.frombuffer(b"".join(names), np.uint8))
            write("name_ends", np.cumsum([len(name) for name in names], dtype=np.int64))
        first = np.zeros(1, np.int64)
        if self.shards:
            rows = self.rows[part]
            kinds = {
                name: {"shape": list(shape), "dtype": dtype.name}
                for name, (shape, dtype) in source.tables.items()
            }
            group.attrs["entries"] = json.dumps({"count": len(store), **kinds})
            images = rows.get("images") or rows["encoded"]
            first, targets = images.first, rows.get("targets", images).starts
            write("shard_rows", np.stack([first, images.starts, targets], 1).astype(np.int64))
        count = len(list(chunks(first, len(store), step)))
        write("checksums", np.zeros((count, 32), np.uint8))

    def fill(self, threads, progress, stop) -> bool:
        """Write all missing chunks, and return True. Return False if `stop` returned True."""

        def write(part, number, first, last):
            # (file, offset, size) of the entries of each kind, which are contiguous
            places = [rows.span(first, last) for rows in self.rows[part].values()]
            place = self.sums[part] + 32 * number
            expected = bytes(_read(self.descriptor, 32, place))
            if any(expected):
                written = [self._entries(*place) for place in places]
                if pack_contents.checksum(*written) == expected:
                    return
            entries = self.sources[part].entries(first, last)
            for (file, offset, _), data in zip(places, entries, strict=True):
                with _opened(self.files[file]) as descriptor:
                    _write(descriptor, data, offset)
            _write(self.descriptor, pack_contents.checksum(*entries), place)

        def job(*chunk):
            return Job([lambda: write(*chunk)], lambda: chunk[-1] - chunk[-2])

        jobs = (
            job(part, number, first, last)
            for part, facts in self.plan["parts"].items()
            for number, (first, last) in enumerate(
                chunks(
                    next(iter(self.rows[part].values())).first,
                    facts["count"],
                    facts["chunk_images"],
                )
            )
        )
        with contextlib.closing(prefetch_items(jobs, threads + 1, threads)) as counts:
            for count in counts:
                if progress is not None:
                    progress(count)
                if stop is not None and stop():
                    return False
        return True

    def _entries(self, file, offset, nbytes):
        with _opened(self.files[file]) as descriptor:
            return _read(descriptor, nbytes, offset)

    def finish(self) -> None:
        """Store the checksum of the contents, flush all files and rename the packed file."""
        import h5py

        for path in self.files:
            with _opened(path) as descriptor:
                os.fsync(descriptor)
        options = {"libver": ("v108", "v108"), "locking": False}
        with reading(self.part_path), h5py.File(self.part_path, "r+", **options) as file:
            del file.attrs["plan"]
            file.attrs["sha256"] = pack_contents.content(file)
        os.fsync(self.descriptor)
        os.replace(self.part_path, self.path)
        sync_folder(os.path.dirname(self.path))


@contextlib.contextmanager
def _opened(path, flags=0):
    """Open a file for reading and writing, and yield its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor, count, offset):
    data = bytearray(count)
    view, length = memoryview(data), 0
    while length < count and (n := os.preadv(descriptor, [view[length:]], offset + length)):
        length += n
    return data


def _write(descriptor, data, offset):
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8)
    view = memoryview(data)
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
