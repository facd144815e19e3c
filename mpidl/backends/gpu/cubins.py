"""Cache compiled kernels (cubins) in files, so only one process per host compiles each kernel.

A file name contains a hash of everything that determines the file's contents. The file ends with a
hash of its contents, so a truncated file is detected, and the kernel is compiled again. A file is
written under a temporary name and renamed when it is complete.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
import struct
import tempfile
import time
import warnings

SIZES = struct.Struct("<QQ")  # sizes of the cubin and the log in bytes, stored before the hash
HASH = 32  # size of the hash in bytes
DAYS = 90  # age in days after which a file is removed; its kernel is compiled again if needed

_warned = False


def folder():
    """Return the path of the cache folder, in $MPIDL_CACHE or else in the temporary folder.

    The temporary folder is local to the host. Home folders of clusters are shared and slow.
    """
    cache = os.environ.get("MPIDL_CACHE")
    if cache:
        return os.path.join(cache, f"cubins-{os.getuid()}")
    return os.path.join(tempfile.gettempdir(), f"mpidl-cubins-{os.getuid()}")


def cached(name, make):
    """Return (cubin, log) from the file `name`; if it is missing, call make() and write the file.

    While one process of the host runs make(), the other processes wait. If that process dies,
    another process runs make(). If files cannot be written, every process warns and runs make().
    """
    place = folder()
    if not _is_ours(place):
        return make()
    path = os.path.join(place, name)
    entry = read(path)
    if entry is None:
        with _locked(path):
            entry = read(path)
            if entry is None:
                entry = make()
                _write(path, *entry)
    return entry


def read(path):
    """Return the contents (cubin, log) of a file, or None if it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    body, digest = data[:-HASH], data[-HASH:]
    if len(body) < SIZES.size or hashlib.sha256(body).digest() != digest:
        return None
    cubin, log = SIZES.unpack(body[-SIZES.size :])
    return body[:cubin], body[cubin : cubin + log].decode()


def _write(path, cubin, log):
    text = log.encode()
    body = cubin + text + SIZES.pack(len(cubin), len(text))
    new = None
    try:
        handle, new = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".new")
        with open(handle, "wb") as file:
            file.write(body + hashlib.sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        _forget(os.path.dirname(path))
    except OSError as error:
        if new is not None:
            with contextlib.suppress(OSError):
                os.unlink(new)
        _warn(f"{os.path.dirname(path)}: {error.strerror}")


def _forget(place):
    with os.scandir(place) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < time.time() - DAYS * 86400:
                    os.unlink(entry)


def _is_ours(place):
    """Create the folder if it is missing. Return whether only this user can write to it."""
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
        status = os.lstat(place)
    except OSError as error:
        _warn(f"{place}: {error.strerror}")
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        _warn(f"{place} is not a folder that only this user can write to")
        return False
    return True


@contextlib.contextmanager
def _locked(path):
    """Hold a file's lock in the `with` block. The system releases the lock if the process dies."""
    path, file = f"{path}.lock", None
    try:
        file = open(path, "w")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # without locks, several processes may compile the kernel
        _warn(f"{path}: {error.strerror}")
    try:
        yield
    finally:
        if file is not None:
            # the lock file is no longer needed: waiting and later processes find the cached file
            with contextlib.suppress(OSError):
                os.unlink(path)
            file.close()


def _warn(reason):
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"every process compiles the kernels again, because they cannot be cached: {reason} "
            "(MPIDL_CACHE sets another folder)",
            RuntimeWarning,
            stacklevel=2,
        )
