"""Test HDF5 files in a helper process before the main process reads them.

The HDF5 library trusts the structure of a file. With a damaged file, a call may crash the process
or never return, and exception handlers do not help. Therefore, a helper process runs this module
and reads the attributes and the first, middle and last rows of all datasets. If the helper crashes,
does not finish, or allocates more memory than the datasets need, the file is rejected. A process
starts the helper when it opens its first HDF5 file. Usually, only rank 0 opens data sets, models
and checkpoints. If all ranks of a host load the same model at the same time, only one of them
starts a helper. The helper ends after `IDLE` seconds without work. It imports h5py and NumPy, but
no module of mpidl.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import select
import signal
import struct
import subprocess
import sys
from typing import Any

SECONDS = 60.0  # time limit per file
IDLE = 3.0  # the helper ends after this time in seconds without work
STEP_SECONDS = 1.0  # longest step of a wait; if the job is suspended, only one step counts
OBJECTS = 10000  # maximum number of objects that the helper reads per file
MAX_BYTES = 64 << 20  # largest attribute, row, or complete dataset that the helper reads
SERVED_BYTES = 1 << 20  # the same limit for a file that this process sends to the helper
GROWTH = 256 << 20  # address space in bytes that the helper may need in addition to CHUNKS chunks
CHUNKS = 4  # copies of a chunk: one stored, one decoded, two while the decoded copy grows
TOO_LARGE = 9  # exit code of a helper that needed more memory than allowed
READ, REQUEST = b"R", struct.Struct("<QQ")  # the helper's request: offset and number of bytes

_problems: dict[tuple[str, object], str | None] = {}  # results of `problem_of`, the last 16


def problem_of(
    path: str | os.PathLike[str], stamp: object, stream: Any = None, is_shared: bool = False
) -> str | None:
    """Let the helper read an HDF5 file, and describe the problem if reading fails.

    The result is None if the helper can read the file, or cannot be started. `stamp` is a value
    that changes whenever the file changes. If the file is not on a file system, this process sends
    the bytes of `stream` to the helper. `is_shared` tells whether other ranks of this host may open
    the same file at the same time.
    """
    key = os.path.abspath(path) if stream is None else os.fspath(path), stamp
    if key not in _problems:
        while len(_problems) >= 16:
            del _problems[next(iter(_problems))]
        _problems[key] = _ask_once(key) if is_shared else HELPER.ask(key[0], stream)
    return _problems[key]


def _ask_once(key):
    """Return the problem that one rank finds for all ranks of this host, or None."""
    from mpidl.data.formats.shared_answer import shared_answer  # not imported by the helper

    answer = shared_answer(key, lambda: f"problem: {HELPER.ask(key[0]) or ''}", 2 * SECONDS)
    return answer.removeprefix("problem: ") or None


class Helper:
    """The helper process, which is started at the first question and whenever it has ended."""

    def __init__(self) -> None:
        self.process: Any = None  # a subprocess.Popen
        self.owner = -1  # ID of the process that started it; a forked child starts another one

    def ask(self, path: str, stream: Any = None) -> str | None:
        """Send a path, or the size of a stream, to the helper; return the problem or None."""
        request = os.fsencode(path).hex().encode() + b"\n"
        if stream is not None:
            request = b"%d bytes\n" % stream.seek(0, os.SEEK_END)
        for _ in range(2):  # second attempt: an idle helper may end during the first attempt
            try:
                process = self.started()
            except OSError:
                return None
            answer: bytes | None = b""
            try:
                process.stdin.write(request)
                importlib.import_module("h5py")  # use the waiting time: this process needs h5py too
                while (answer := _answer(process)) == READ:
                    _serve(process, stream)
            except OSError:
                pass
            except BaseException:  # the stream itself cannot be read
                self.end(kill=True)
                raise
            if answer:
                return None
            code = self.end(kill=answer is None)
            if answer is None:
                return (
                    f"the HDF5 library did not finish reading it within {SECONDS:g} s: it is "
                    "damaged"
                )
            if code == -signal.SIGKILL:
                continue  # killed by another process, or by the kernel because memory was short
            if code < 0:
                name = signal.Signals(-code).name
                return f"the HDF5 library crashed while reading it ({name}): it is damaged"
            if code == TOO_LARGE:
                return "the HDF5 library needs more memory than the datasets: it is damaged"
            if code > 0:  # h5py is missing, for example; this process will raise the same error
                return None
        return None

    def started(self) -> Any:
        """Return the running helper process. Raise OSError if it cannot be started."""
        from mpidl import side_process  # a local import, because the helper must not import mpidl

        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            self.process = side_process.start(
                [os.path.abspath(__file__), str(IDLE), str(SECONDS)],
                bufsize=0,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self.owner = os.getpid()
        return self.process

    def end(self, kill: bool = False) -> int:
        """Wait until the helper has ended, and return its exit code."""
        process, self.process = self.process, None
        if kill:
            process.kill()
        process.stdin.close()
        code = process.wait()
        process.stdout.close()
        return code


HELPER = Helper()  # of this process


def _answer(process):
    """Return the next byte that the helper writes, or None after a timeout."""
    waited = 0.0
    while waited < SECONDS:
        step = min(STEP_SECONDS, SECONDS - waited)
        if select.select([process.stdout], [], [], step)[0]:
            return process.stdout.read(1)
        waited += step
    return None


def _serve(process, stream):
    """Send the bytes of the stream that the helper requests."""
    start, count = REQUEST.unpack(process.stdout.read(REQUEST.size))
    stream.seek(start)
    content = stream.read(count)
    process.stdin.write(content + bytes(count - len(content)))


# The functions below run in the helper process.


def main(idle: float, seconds: float) -> None:
    """Read paths in hexadecimal form from stdin, one per line, and test the file at each path.

    A line may also be the size of a file whose bytes the main process sends on request. The helper
    writes a byte to stdout after each file. The function returns when no line has arrived for
    `idle` seconds, or when stdin is closed. If a file needs too much memory, the helper exits with
    TOO_LARGE. The main process may be killed during a test. Therefore, a timer signal ends the
    helper if a test takes more than `seconds` of processor time.
    """
    import h5py

    data = b""
    while True:
        while b"\n" not in data:
            ready, _, _ = select.select([0], [], [], idle)
            received = os.read(0, 1 << 16) if ready else b""
            if not received:
                return
            data += received
        line, _, data = data.partition(b"\n")
        signal.setitimer(signal.ITIMER_PROF, seconds)
        (size, peak), chunk = _address_space(), 0
        try:
            source: Any = _Served(int(line.split()[0])) if line.endswith(b" bytes") else None
            max_bytes = MAX_BYTES if source is None else SERVED_BYTES
            source = source or os.fsdecode(bytes.fromhex(line.decode()))
            with h5py.File(source, "r", locking=False) as file:
                chunk = _walk(file, max_bytes)
        except Exception:  # the main process will raise and report the same error
            pass
        _, later_peak = _address_space()
        if later_peak > peak and later_peak - size > GROWTH + CHUNKS * chunk:
            sys.exit(TOO_LARGE)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, b".")


def _address_space():
    """Return the current and largest size of the address space in bytes, or zeros if unknown."""
    try:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file if line.startswith("Vm"))
        return [int(lines[name].split()[0]) << 10 for name in ("VmSize", "VmPeak")]
    except (OSError, KeyError):
        return 0, 0


class _Served(io.RawIOBase):
    """A file whose bytes the main process sends on request."""

    def __init__(self, size):
        self.size, self.position = size, 0

    def seek(self, offset, whence=os.SEEK_SET):
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position}.get(whence, self.size)
        self.position = origin + offset
        return self.position

    def readinto(self, buffer):
        view = memoryview(buffer).cast("B")
        os.write(1, READ + REQUEST.pack(self.position, len(view)))
        self.position += len(view)
        count = 0
        while count < len(view):
            received = os.readv(0, [view[count:]])
            if not received:
                raise EOFError
            count += received
        return count


def _walk(file, max_bytes):
    """Read everything that the main process may read; return the largest chunk size in bytes."""
    import h5py

    waiting, count, largest_chunk = [file], 0, 0
    while waiting and count < OBJECTS:
        stored = waiting.pop()
        count += 1
        with contextlib.suppress(Exception):
            for name in stored.attrs:
                attribute = stored.attrs.get_id(name)
                if _bytes(attribute.shape, attribute.dtype) <= max_bytes:
                    stored.attrs[name]
        with contextlib.suppress(Exception):
            if isinstance(stored, h5py.Group):
                for name in stored:
                    if isinstance(stored.get(name, getlink=True), h5py.HardLink):
                        waiting.append(stored[name])
                    if len(waiting) > OBJECTS:
                        break
            else:
                largest_chunk = max(largest_chunk, _read_numbers(stored, max_bytes))
    return largest_chunk


def _read_numbers(stored, max_bytes):
    """Read a small dataset completely, or the first, middle and last row of a large dataset.

    Return the size of a chunk in bytes. Variable-length strings are skipped, because the main
    process never reads them from datasets.
    """
    import h5py

    is_elsewhere = stored.is_virtual or stored.external or stored.shape is None
    if is_elsewhere or (stored.dtype.kind == "O" and h5py.check_ref_dtype(stored.dtype) is None):
        return 0
    chunk = _bytes(stored.chunks, stored.dtype) if stored.chunks else 0
    stored_bytes, size = stored.id.get_storage_size(), _bytes(stored.shape, stored.dtype)
    is_false = size > 1032 * stored_bytes + (1 << 16)
    if is_false or stored_bytes > stored.file.id.get_filesize() or chunk > 4 * max_bytes:
        return 0  # `hdf5` rejects such a dataset
    if stored.chunks:
        stored.id.get_num_chunks()
    if size <= max_bytes or not stored.shape:
        values = stored[()]
        for reference in values.reshape(-1)[:OBJECTS] if stored.dtype.kind == "O" else ():
            if reference:
                stored.file[reference][()]
    elif _bytes(stored.shape[1:], stored.dtype) <= max_bytes:
        for row in (0, len(stored) // 2, len(stored) - 1):
            stored[row]
    return chunk


def _bytes(shape, dtype):
    count = dtype.itemsize
    for size in shape or ():
        count *= int(size)
    return count


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
