"""Has HDF5 files tried out by another process, before this one reads them.

The HDF5 library trusts a file's inner structure: of a damaged one it may crash or never return,
and no exception handler can help. So a helper process, which this file is the program of, first
takes the same steps: it walks the file, reads its attributes, and the first and the last rows of
what it holds. Should it crash or not come to an end, the file is refused by name.

The helper is started when it is first needed, by rank 0 alone, and ends by itself when there has
been nothing to do for a while. It imports h5py and NumPy, and nothing of mpidl.
"""

import os
import select
import signal
import subprocess
import sys

SECONDS = 60.0  # that a file may take
IDLE = 3.0  # seconds after which the helper ends
OBJECTS = 2000  # of a file that are looked at
LARGEST = 64 << 20  # bytes of an attribute, of a small dataset, or of a row that is read
# A launcher's variables, by which a helper that loads an MPI would take itself for a rank.
LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_", "SLURM_")

_helper = None
_known: dict = {}  # what was found of a (path, size, time); the last few


def problem_of(path, stamp):
    """What is wrong with an HDF5 file, in words, or None. stamp: what tells it from a changed one.

    Where no helper can be started the answer is None.
    """
    key = os.path.abspath(path), stamp
    if key not in _known:
        while len(_known) >= 16:
            del _known[next(iter(_known))]
        _known[key] = _ask(key[0])
    return _known[key]


def _ask(path):
    global _helper
    request = os.fsencode(path).hex().encode() + b"\n"
    for _ in range(2):  # the first may have ended in this moment
        if _helper is None or _helper.poll() is not None:
            try:
                _helper = _start()
            except OSError:
                return None
        answer = b""
        try:
            _helper.stdin.write(request)
            ready, _, _ = select.select([_helper.stdout], [], [], SECONDS)
            answer = _helper.stdout.read(1) if ready else None
        except OSError:
            pass
        if answer:
            return None
        if answer is None:
            _helper.kill()
        code = _end()
        if answer is None:
            return f"the HDF5 library came to no end of it in {SECONDS:g} s: it is damaged"
        if code < 0:
            return f"the HDF5 library failed on it ({signal.Signals(-code).name}): it is damaged"
        if code > 0:  # without h5py, say, which this process will find out by itself
            return None
    return None


def _start():
    kept = {name: v for name, v in os.environ.items() if not name.startswith(LAUNCHERS)}
    return subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), str(IDLE)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=kept,
        start_new_session=True,  # what a terminal's Ctrl-C says is for the ranks
    )


def _end():
    """The exit code of the helper, which has ended or will not go on."""
    global _helper
    helper, _helper = _helper, None
    helper.stdin.close()
    code = helper.wait()
    helper.stdout.close()
    return code


# The helper


def main(idle):
    """Read paths from stdin, a line each in hex, and answer each with a byte once it is walked."""
    import h5py

    data = b""
    while True:
        while b"\n" not in data:
            ready, _, _ = select.select([0], [], [], idle)
            more = os.read(0, 1 << 16) if ready else b""
            if not more:
                return
            data += more
        line, _, data = data.partition(b"\n")
        try:
            with h5py.File(os.fsdecode(bytes.fromhex(line.decode())), "r", locking=False) as file:
                _walk(file)
        except Exception:  # which the process that asked will meet as well, and tell
            pass
        os.write(1, b".")


def _walk(file):
    import h5py

    waiting, seen = [file], 0
    while waiting and seen < OBJECTS:
        held = waiting.pop()
        seen += 1
        for step in (_attributes, _links if isinstance(held, h5py.Group) else _numbers):
            try:
                step(held, waiting)
            except Exception:
                pass


def _attributes(held, _):
    for name in held.attrs:
        known = held.attrs.get_id(name)
        if _bytes(known.shape, known.dtype) <= LARGEST:
            held.attrs[name]


def _links(group, waiting):
    import h5py

    for name in group:
        if isinstance(group.get(name, getlink=True), h5py.HardLink):
            waiting.append(group[name])
        if len(waiting) > OBJECTS:
            return


def _numbers(held, _):
    """The first and the last rows of a dataset, all of a small one."""
    plan = held.id.get_create_plist()
    if held.is_virtual or plan.get_external_count() or held.shape is None:
        return
    chunk = _bytes(held.chunks, held.dtype) if held.chunks else 0
    stored = held.id.get_storage_size()
    size = _bytes(held.shape, held.dtype)
    if size > 1032 * stored + (1 << 16) or chunk > 4 * LARGEST:  # which is refused by its sizes
        return
    if held.chunks:
        held.id.get_num_chunks()
    if size <= LARGEST or not held.shape:
        found = held[()]
        for reference in found.reshape(-1)[:OBJECTS] if held.dtype.kind == "O" else ():
            if reference:
                held.file[reference][()]
        return
    if _bytes(held.shape[1:], held.dtype) <= LARGEST:
        for row in (0, len(held) // 2, len(held) - 1):
            held[row]


def _bytes(shape, dtype):
    count = dtype.itemsize
    for size in shape or ():
        count *= int(size)
    return count


if __name__ == "__main__":
    main(float(sys.argv[1]))
