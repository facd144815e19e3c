"""What `launch` runs on each rank, and what travels between the two: files in a folder of theirs.

The folder is the launching process's own, of mode 0700, and these are the only pickles that are
ever read. The files appear whole.
"""

import faulthandler
import fcntl
import importlib
import io
import os
import pickle
import platform
import runpy
import shutil
import sys
import threading
import time
import traceback
from types import ModuleType

from mpidl.comm import failure
from mpidl.errors import UserError

MAIN = "__mp_main__"  # what Python's own multiprocessing calls a main program that is read again
LOCKED = "locked"  # the file on which the launching process has a lock as long as it lives
PATIENCE = 20.0  # seconds that a rank which failed waits to be ended by the launching process


def main(folder):
    """Run the function of a launch on this rank."""
    faulthandler.enable()
    rank, host = failure.launched_rank(), ""
    try:
        with open(os.path.join(folder, "task"), "rb") as file:
            about = pickle.load(file)
            if about["host"] == platform.node():  # locks may mean nothing to other hosts
                threading.Thread(target=_end_with_it, args=(folder,), daemon=True).start()
            _speak(rank, about["show"])
            sys.path[:], sys.argv[:] = about["path"], about["argv"]
            from mpidl.comm.world import World

            world = World()
            rank, host = world.rank, world.host
            _read_main(about["main"])
            function, arguments = _load_task(file)
        result = function(world, *arguments)
        if rank == 0:
            _send(result, os.path.join(folder, "result"))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Headed):
                stream.end_line()
    except BaseException as error:  # SystemExit, too: what it ends is the launch
        _tell(folder, rank, host, error)
        time.sleep(PATIENCE)
        os._exit(1)


def dump(value, file, by_value=False):
    """Pickle a value; what cannot be found by its name (a lambda, or with by_value what __main__
    defines) goes as it is, where cloudpickle is installed."""
    other = cloudpickle()
    if by_value and other is not None:
        other.dump(value, file, protocol=5)
        return
    start = file.tell()
    try:
        pickle.dump(value, file, protocol=5)
    except Exception:
        if other is None:
            raise
        file.seek(start)
        file.truncate()
        other.dump(value, file, protocol=5)


class Unpickler(pickle.Unpickler):
    """Finds what __main__ defines, by whichever name the sender knew it."""

    def find_class(self, module, name):
        return super().find_class("__main__" if module == MAIN else module, name)


def load(file):
    """What `dump` wrote on a rank, where the launching process reads it."""
    return Unpickler(file).load()


def cloudpickle():
    """The module of this name, or None where it is not installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


def _send(result, path):
    try:
        _write(path, result)
    except Exception as error:
        raise TypeError(
            f"launch: rank 0's result, a {type(result).__name__}, cannot be brought back: {error}"
        ) from None


def _write(path, value):
    with open(f"{path}.part", "wb") as file:
        dump(value, file)
    os.replace(f"{path}.part", path)


def _tell(folder, rank, host, error):
    """Leave what happened, for `launch` to raise."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next  # the frames that the launch itself put there
    text = "".join(traceback.format_exception(type(error), error, trace))
    told = {"rank": rank, "host": host, "text": text, "line": str(error), "error": None}
    told["kind"] = type(error).__name__ if type(error).__module__ == "mpidl.errors" else ""
    try:
        file = io.BytesIO()
        dump(error, file)
        told["error"] = file.getvalue()
    except Exception:
        told["error"] = None  # an exception that cannot be pickled: its text is there
    _write(os.path.join(folder, f"error-{rank}"), told)


def _read_main(how):
    """Run what the launching process's main program defines, as a module that is not __main__ to
    itself, so that the functions and classes in it are found; how: (kind, name), or None."""
    if how is None:
        return
    kind, name = how
    made = ModuleType(MAIN)
    sys.modules["__main__"] = sys.modules[MAIN] = made
    run = runpy.run_path if kind == "path" else runpy.run_module
    vars(made).update(run(name, run_name=MAIN))


def _load_task(file):
    """The function and its arguments; a UserError where the script, read again, lacks a name."""
    try:
        return pickle.load(file)
    except AttributeError as error:
        if MAIN not in str(error) and "__main__" not in str(error):
            raise
        raise UserError(
            f"launch: {error}: the ranks read the script again but for what stands under "
            '`if __name__ == "__main__":`; define it above that line'
        ) from error


def _speak(rank, show):
    """Rank 0 speaks as it is. The others' lines are headed by their rank; without `show` "all",
    only what they say of errors."""
    if rank == 0:
        return
    if show != "all":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = Headed(f"rank {rank}: ", 1), Headed(f"rank {rank}: ", 2)


class Headed(io.TextIOBase):
    """Text whose lines are written whole, each after a heading."""

    def __init__(self, heading, handle):
        self.heading, self.handle, self.held = heading, handle, ""

    def writable(self):
        return True

    def write(self, text):
        *lines, self.held = (self.held + text).split("\n")
        self._put(lines)
        return len(text)

    def end_line(self):
        if self.held:
            self.write("\n")

    def _put(self, lines):
        whole = "".join(f"{self.heading}{line}\n" for line in lines)
        if whole:
            os.write(self.handle, whole.encode("utf-8", "backslashreplace"))


def _end_with_it(folder):
    """End this rank when the launching process has gone, with which its lock on a file goes."""
    with open(os.path.join(folder, LOCKED)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
            except BlockingIOError:
                time.sleep(0.5)
            except OSError:
                return  # a file system without locks
