"""Writing packed sets: `python -m mpidl.pack`. The form of the file is that of `packed`.

The file is made under another name, `.NAME.part`: HDF5 lays it out, labels and names are written,
and every image has its place before the first is read. Then chunks of images are read, written to
their places and, after them, their checksums. What an interruption leaves is gone on with: a chunk
whose checksum fits is kept. At the end all is flushed to disk and the file gets its name.
"""

import collections
import concurrent.futures
import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import asdict

import numpy as np

from mpidl.data.datastore import read_images, read_targets
from mpidl.data.formats import hdf5, packed
from mpidl.errors import UserError
from mpidl.files import digest, unreadable
from mpidl.text import printable

CHUNK = 4 << 20  # bytes, nearly


def pack(parts, path, *, threads=1, progress=None, stop=None):
    """Write datastores to a packed file; whether it was done, or stop() ended it early.

    parts: {"train": datastore, "test": datastore}, the second of which may be missing; both with
    the same classes. progress(count): called with the number of images after each chunk of them.
    stop(): asked after each chunk. Raises UserError, naming the file or the image. What was written
    before an interruption or an error is kept for the next call.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    part_path = os.path.join(folder, f".{name}.part")
    if os.path.lexists(path):
        raise UserError(
            f"{printable(path)}: there is a file of this name: remove it, or take another"
        )
    for part, store in parts.items():
        if not len(store):
            raise UserError(f"{store.describe()}: expected images to pack as {part}, found none")
    try:
        with _locked(part_path) as handle:
            plan = _plan(parts)
            places = _places(part_path, plan)
            if places is None:
                _lay_out(part_path, parts, plan)
                places = _places(part_path, plan)
            if not _fill(handle, parts, plan, places, threads, progress or _nothing, stop):
                return False
            _finish(part_path, path, handle)
    except OSError as e:
        raise UserError(f"{printable(path)}: cannot be written: {e.strerror or e}") from None
    return True


def _nothing(count):
    pass


@contextlib.contextmanager
def _locked(path):
    """The descriptor of the unfinished file, which no other process has meanwhile."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{printable(path)}: another process is packing to this file") from None
        except OSError:
            pass  # a file system without locks
        yield handle
    finally:
        os.close(handle)


def _plan(parts):
    """What the unfinished file must be of to be gone on with; JSON keeps it there."""
    plan = {}
    for part, store in parts.items():
        size = int(np.prod(store.image_shape)) * store.dtype.itemsize
        if store.targets_shape is not None:
            size += int(np.prod(store.targets_shape)) * store.targets_dtype.itemsize
        written = getattr(store, "written", None)
        plan[part] = {
            "fingerprint": store.fingerprint(),
            "written": None if written is None else digest(written),
            "count": len(store),
            "chunk_images": max(1, CHUNK // size),
            "size": size,
        }
    return plan


def _lay_out(path, parts, plan):
    """Make the file with everything in it but images, targets and checksums, which have places."""
    import h5py

    needed = sum(p["count"] * p["size"] for p in plan.values())
    free = shutil.disk_usage(os.path.dirname(path)).free
    if needed > free:
        raise UserError(
            f"{printable(path)}: expected {needed >> 20} MB free for it, found {free >> 20} MB"
        )
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_obj_track_times(False)

    def place(group, name, shape, dtype):
        """A dataset whose numbers are written past HDF5."""
        space, kind = h5py.h5s.create_simple(shape), h5py.h5t.py_create(np.dtype(dtype))
        h5py.h5d.create(group.id, name.encode(), kind, space, creation)

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
            place(group, "images", (count, *store.image_shape), store.dtype)
            if store.targets_shape is not None:
                place(group, "targets", (count, *store.targets_shape), store.targets_dtype)
        file.attrs["plan"] = json.dumps(plan)


def _places(path, plan):
    """{part: {dataset: offset}} of the unfinished file; None where it is of another plan."""
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
    except UserError:  # empty, or torn in the laying out
        return None


def _fill(handle, parts, plan, places, threads, progress, stop):
    """Write all chunks that are not there yet; False where stop() ended it."""

    def chunk(part, number):
        store, step = parts[part], plan[part]["chunk_images"]
        first = number * step
        last = min(first + step, len(store))
        if not _is_there(handle, store, places[part], number, first, last):
            indices = np.arange(first, last)
            arrays = {"images": read_images(store, indices).astype(store.dtype, copy=False)}
            if store.targets_shape is not None:
                arrays["targets"] = read_targets(store, indices)
            for name, array in arrays.items():
                array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
                entry = array.nbytes // len(array)
                _write(handle, array, places[part][name] + first * entry)
            total = np.frombuffer(packed.checksum(*arrays.values()), np.uint8)
            _write(handle, total, places[part]["checksums"] + 32 * number)
        return last - first

    jobs = [
        (part, number)
        for part, store in parts.items()
        for number in range(-(-len(store) // plan[part]["chunk_images"]))
    ]
    under_way = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        try:
            for job in jobs:
                under_way.append(pool.submit(chunk, *job))
                while len(under_way) > threads:
                    progress(under_way.popleft().result())
                if stop is not None and stop():
                    return False
            while under_way:
                progress(under_way.popleft().result())
        finally:
            for future in under_way:
                future.cancel()
    return True


def _is_there(handle, store, places, number, first, last):
    """Whether a chunk was written before: its checksum fits."""
    expected = _read(handle, 32, places["checksums"] + 32 * number)
    if not any(expected):
        return False
    arrays = []
    tables = {"images": (store.image_shape, store.dtype)}
    if store.targets_shape is not None:
        tables["targets"] = store.targets_shape, store.targets_dtype
    for name, (shape, dtype) in tables.items():
        entry = int(np.prod(shape)) * dtype.itemsize
        data = _read(handle, (last - first) * entry, places[name] + first * entry)
        arrays.append(np.frombuffer(data, np.uint8))
    return packed.checksum(*arrays) == bytes(expected)


def _read(handle, count, offset):
    data = bytearray(count)
    view = memoryview(data)
    while len(view) and (done := os.preadv(handle, [view], offset)):
        view, offset = view[done:], offset + done
    return data


def _write(handle, array, offset):
    view = memoryview(array.reshape(-1).view(np.uint8))
    while len(view):
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done


def _finish(part_path, path, handle):
    """Check the whole by its sum, and give the file its name once it is on disk."""
    import h5py

    os.fsync(handle)
    try:
        with h5py.File(part_path, "r+", libver=("v108", "v108"), locking=False) as file:
            del file.attrs["plan"]
            file.attrs["sha256"] = packed.content(file)
    except OSError as e:
        raise unreadable(part_path, e) from None
    os.fsync(handle)
    os.replace(part_path, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems have no such call and need none
        os.fsync(folder)
    os.close(folder)
