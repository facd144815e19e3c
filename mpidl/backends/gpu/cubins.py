"""Compiled kernels in files of this node: one of its processes compiles each once.

A file's name is the hash of all that its contents depend on, and the file ends with a hash of its
contents: a truncated file is compiled again. A finished file takes its place by a rename.
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

SIZES = struct.Struct("<QQ")  # bytes of the cubin and of the log; they stand before the hash
HASH = 32
DAYS = 90  # files this old are removed, and compiled again if needed

_warned = False


def folder():
    """Return the folder of the files: in MPIDL_CACHE, else in the temporary folder.

    The temporary folder is local to the node; a cluster's home folders are shared and slow.
    """
    cache = os.environ.get("MPIDL_CACHE")
    if cache:
        return os.path.join(cache, f"cubins-{os.getuid()}")
    return os.path.join(tempfile.gettempdir(), f"mpidl-cubins-{os.getuid()}")


def cached(name, make):
    """Return (cubin, log) of the file `name`, or of make(), which the file then keeps.

    While one process of the node runs make(), the others wait; if it dies, they continue. If no
    file can be kept, each process runs make() itself, after a warning.
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
    """Return (cubin, log) of a file, or None if it is missing or truncated."""
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
    """Return whether only this user can write to the folder, which is created if missing."""
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
        status = os.lstat(place)
    except OSError as error:
        _warn(f"{place}: {error.strerror}")
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        _warn(f"{place} is not a folder that this user alone may write to")
        return False
    return True


@contextlib.contextmanager
def _locked(path):
    """Let one process of the node in at a time; the system releases a dead one's lock."""
    path, file = f"{path}.lock", None
    try:
        file = open(path, "w")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # a file system without locks: several may compile the same
        _warn(f"{path}: {error.strerror}")
    try:
        yield
    finally:
        if file is not None:
            # processes that wait for this very file find the result; later ones find it too
            with contextlib.suppress(OSError):
                os.unlink(path)
            file.close()


def _warn(reason):
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"kernels are compiled anew by every process, for none can be kept: {reason} "
            "(MPIDL_CACHE names another folder)",
            RuntimeWarning,
            stacklevel=2,
        )
