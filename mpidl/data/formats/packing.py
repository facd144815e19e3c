"""Write packed files for `python -m mpidl.pack`. The module `packed` describes the file format.

While packing the file NAME, this module writes to `.NAME.part`. First, HDF5 writes labels and
names, and allocates the images, so that every image has an offset before any image is read. Then
each chunk of images is read and written to its offset; the checksum of the chunk is written last.
If packing is interrupted, the next call continues it and keeps all chunks whose checksums match. At
the end, the file is flushed to disk and renamed to NAME.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np

from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.formats import hdf5, packed
from mpidl.data.loading.workers import Job, prefetch_items
from mpidl.errors import UserError
from mpidl.files import digest, sync_folder, unreadable
from mpidl.text import printable

CHUNK = 4 << 20  # approximate size of a chunk in bytes


def pack(
    parts: Mapping[str, Datastore],
    path: str | os.PathLike[str],
    *,
    threads: int = 1,
    progress: Callable[[int], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> bool:
    """Write datastores to a packed file.

    Parameters
    ----------
    parts : mapping
        The datastores "train" and optionally "test", with the same classes.
    path : path-like
        The file to write, which must not exist. If an earlier call was interrupted, this call
        continues the unfinished file.
    threads : int
        Number of threads that read images.
    progress : callable, optional
        Function that is called after each chunk with the number of images in the chunk.
    stop : callable, optional
        Function that is called after each chunk. If it returns True, packing stops.

    Returns
    -------
    bool
        Whether the file is complete; False if `stop` ended the call.

    Raises
    ------
    UserError
        The file exists or cannot be written, a datastore is empty, or an image cannot be read. The
        message names the file or image. The next call keeps the chunks written so far.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    part_path = os.path.join(folder, f".{name}.part")
    if os.path.lexists(path):
        raise UserError(
            f"{printable(path)}: the file already exists: remove it, or choose another name"
        )
    for part, store in parts.items():
        if not len(store):
            raise UserError(f"{store.describe()}: expected images to pack as {part}, found none")
    try:
        with _locked(part_path) as descriptor:
            plan = _plan(parts)
            offsets = _offsets(part_path, plan)
            if offsets is None:
                _lay_out(part_path, parts, plan)
                offsets = _offsets(part_path, plan)
            progress = progress or (lambda count: None)
            if not _fill(descriptor, parts, plan, offsets, threads, progress, stop):
                return False
            _finish(part_path, path, descriptor)
    except OSError as e:
        raise UserError(f"{printable(path)}: cannot be written: {e.strerror or e}") from None
    return True


@contextlib.contextmanager
def _locked(path):
    """Open the unfinished file, lock it against other processes and yield its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{printable(path)}: another process is packing to this file") from None
        except OSError:
            pass  # the file system has no locks
        yield descriptor
    finally:
        os.close(descriptor)


def _plan(parts):
    """Describe the datastores to pack, as JSON values.

    An unfinished file is continued only if it stores the same plan.
    """
    plan = {}
    for part, store in parts.items():
        size = sum(_entry_bytes(shape, dtype) for shape, dtype in _tables(store).values())
        written = getattr(store, "written", None)
        plan[part] = {
            "fingerprint": store.fingerprint(),
            "written": None if written is None else digest(written),
            "count": len(store),
            "chunk_images": max(1, CHUNK // size),
            "size": size,
        }
    return plan


def _tables(store):
    """Return {name: (shape, dtype)} of one entry in the datasets "images" and "targets"."""
    tables = {"images": (store.image_shape, store.dtype)}
    if store.targets_shape is not None:
        tables["targets"] = store.targets_shape, store.targets_dtype
    return tables


def _entry_bytes(shape, dtype):
    return int(np.prod(shape)) * dtype.itemsize


def _lay_out(path, parts, plan):
    """Write the HDF5 file with labels and names; allocate images, targets and checksums."""
    import h5py

    total_bytes = sum(p["count"] * p["size"] for p in plan.values())
    free = shutil.disk_usage(os.path.dirname(path)).free
    if total_bytes > free:
        raise UserError(
            f"{printable(path)}: expected {total_bytes >> 20} MB of free disk space, found "
            f"{free >> 20} MB"
        )
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_obj_track_times(False)

    with h5py.File(path, "w", libver=("v108", "v108"), locking=False) as file:
        classes = next(iter(parts.values())).classes
        file.attrs["format"] = packed.FORMAT_NAME
        file.attrs["format_version"] = packed.FORMAT_VERSION
        file.attrs["classes"] = json.dumps(list(classes), ensure_ascii=True)
        for part, store in parts.items():
            count, step = len(store), plan[part]["chunk_images"]
            group = file.create_group(part)
            group.attrs["fingerprint"], group.attrs["chunk_images"] = store.fingerprint(), step
            if store.preprocess is not None:
                group.attrs["preprocess"] = json.dumps(asdict(store.preprocess))
            if store.labels is not None:
                group.create_dataset("labels", data=store.labels.astype("<i8"), track_times=False)
            files = getattr(store, "files", None)
            if files is not None:
                names = [os.fsencode(name) for name in files]
                text = np.frombuffer(b"".join(names), np.uint8)
                ends = np.cumsum([len(name) for name in names], dtype=np.int64)
                group.create_dataset("names", data=text, track_times=False)
                group.create_dataset("name_ends", data=ends, track_times=False)
            zeros = np.zeros((-(-count // step), 32), np.uint8)
            group.create_dataset("checksums", data=zeros, track_times=False)
            for name, (shape, dtype) in _tables(store).items():  # `_fill` writes the entries
                space = h5py.h5s.create_simple((count, *shape))
                h5py.h5d.create(group.id, name.encode(), h5py.h5t.py_create(dtype), space, creation)
        file.attrs["plan"] = json.dumps(plan)


def _offsets(path, plan):
    """Return {part: {dataset: offset}} of the unfinished file; None if it has another plan."""
    try:
        with hdf5.opened(path) as file:
            if packed.text_of(hdf5.attribute(file, "plan")) != json.dumps(plan):
                return None
            return {
                part: {
                    name: file[part][name].id.get_offset()
                    for name in ("images", "targets", "checksums")
                    if name in file[part]
                }
                for part in plan
            }
    except UserError:  # the file is empty, or `_lay_out` was interrupted
        return None


def _fill(descriptor, parts, plan, offsets, threads, progress, stop):
    """Write all missing chunks; return False if `stop` returned True."""

    def write(part, first, last):
        store, number = parts[part], first // plan[part]["chunk_images"]
        if not _is_written(descriptor, store, offsets[part], number, first, last):
            indices = np.arange(first, last)
            arrays = []
            for name, read in zip(_tables(store), (read_images, read_targets), strict=False):
                array = read(store, indices)
                array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
                entry = array.nbytes // len(array)
                _write(descriptor, array, offsets[part][name] + first * entry)
                arrays.append(array)
            total = np.frombuffer(packed.checksum(*arrays), np.uint8)
            _write(descriptor, total, offsets[part]["checksums"] + 32 * number)

    def job(part, first):
        last = min(first + plan[part]["chunk_images"], len(parts[part]))
        return Job([lambda: write(part, first, last)], lambda: last - first)

    jobs = (
        job(part, first)
        for part, store in parts.items()
        for first in range(0, len(store), plan[part]["chunk_images"])
    )
    with contextlib.closing(prefetch_items(jobs, threads + 1, threads)) as counts:
        for count in counts:
            progress(count)
            if stop is not None and stop():
                return False
    return True


def _is_written(descriptor, store, offsets, number, first, last):
    """Return whether a chunk has been written, that is, whether its checksum matches."""
    expected = _read(descriptor, 32, offsets["checksums"] + 32 * number)
    if not any(expected):
        return False
    arrays = []
    for name, (shape, dtype) in _tables(store).items():
        entry = _entry_bytes(shape, dtype)
        data = _read(descriptor, (last - first) * entry, offsets[name] + first * entry)
        arrays.append(np.frombuffer(data, np.uint8))
    return packed.checksum(*arrays) == bytes(expected)


def _read(descriptor, count, offset):
    data = bytearray(count)
    view = memoryview(data)
    while len(view) and (count := os.preadv(descriptor, [view], offset)):
        view, offset = view[count:], offset + count
    return data


def _write(descriptor, array, offset):
    view = memoryview(array.reshape(-1).view(np.uint8))
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _finish(part_path, path, descriptor):
    """Store the checksum of the contents, flush the file to disk and rename it."""
    import h5py

    os.fsync(descriptor)
    try:
        with h5py.File(part_path, "r+", libver=("v108", "v108"), locking=False) as file:
            del file.attrs["plan"]
            file.attrs["sha256"] = packed.content(file)
    except OSError as e:
        raise unreadable(part_path, e) from None
    os.fsync(descriptor)
    os.replace(part_path, path)
    sync_folder(os.path.dirname(path))
