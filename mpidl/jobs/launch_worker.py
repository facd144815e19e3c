"""Run a function on a rank that `launch` has started, and exchange files with `launch`.

The launching process creates a folder with mode 0700 for these files. The files are the only
pickles that the package reads from disk. A file gets its final name only when it is complete.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib
import io
import os
import pickle
import platform
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any, BinaryIO

from mpidl.errors import UserError
from mpidl.ranks import failure
from mpidl.report.progress import notebook, notebook_records

MAIN = "__mp_main__"  # name under which ranks run the main program again, as in multiprocessing
LOCK_FILE = "locked"  # the launching process locks this file until it ends
INTERRUPT_FILE = "interrupted"  # the launching process creates this file to interrupt rank 0
INTERRUPT_SECONDS = 0.1  # time between two checks for INTERRUPT_FILE
FAILED_WAIT = 20.0  # seconds until a failed rank exits if the launching process does not end it


def main(folder: str) -> None:
    """Run the launched function on this rank; `folder` contains the files of the launch."""
    faulthandler.enable()
    rank, host = failure.launched_rank(), ""
    listener = None
    try:
        with open(os.path.join(folder, "task"), "rb") as file:
            task = pickle.load(file)
            if task["host"] == platform.node():  # locks may not work across hosts
                threading.Thread(target=_end_with_launcher, args=(folder,), daemon=True).start()
            if rank == 0:
                threading.Thread(target=_interrupt, args=(folder,), daemon=True).start()
            _redirect_output(rank, task["show"])
            sys.path[:], sys.argv[:] = task["path"], task["argv"]
            from mpidl.ranks.world import World

            world = World()
            rank, host = world.rank, world.host
            if task["live"] and rank == 0:
                notebook_records.launch.folder = folder
                world.listeners.append(listener := notebook.LoopListener())
            _run_main_program(task["main"])
            function, arguments = _load_task(file)
        result = function(world, *arguments)
        if listener is not None:
            listener.end(world.signals is not None and world.signals.agreed)
        if rank == 0:
            _write_result(result, os.path.join(folder, "result"))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, PrefixedStream):
                stream.end_line()
    except BaseException as error:  # including SystemExit, which also ends the launch
        _write_error(folder, rank, host, error)
        time.sleep(FAILED_WAIT)
        os._exit(1)


def dump(value: Any, file: BinaryIO, by_value: bool = False) -> None:
    """Pickle a value into a file.

    If cloudpickle is installed, objects without an importable name, such as lambdas, are pickled by
    value.

    Parameters
    ----------
    value : object
        The value to pickle.
    file : binary file
        The file to write to.
    by_value : bool
        Whether to also pickle definitions in `__main__` by value, if cloudpickle is installed.
    """
    by_value_pickler = cloudpickle()
    if by_value and by_value_pickler is not None:
        by_value_pickler.dump(value, file, protocol=5)
        return
    start = file.tell()
    try:
        pickle.dump(value, file, protocol=5)
    except Exception:
        if by_value_pickler is None:
            raise
        file.seek(start)
        file.truncate()
        by_value_pickler.dump(value, file, protocol=5)


class Unpickler(pickle.Unpickler):
    """An Unpickler that looks up definitions of `__mp_main__` in the module `__main__`."""

    def find_class(self, module, name):
        return super().find_class("__main__" if module == MAIN else module, name)


def load(file: BinaryIO) -> Any:
    """Read a value that `dump` wrote on a rank. Only the launching process calls this function."""
    return Unpickler(file).load()


def cloudpickle() -> ModuleType | None:
    """Return the module cloudpickle, or None if it is not installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


def _write_result(result, path):
    """Write the result of rank 0; raise TypeError if it cannot be pickled."""
    try:
        _write_complete(path, result)
    except Exception as error:
        raise TypeError(
            f"launch: rank 0's result, a {type(result).__name__}, cannot be sent back: {error}"
        ) from None


def _write_complete(path, value):
    """Pickle a value to a file that gets its final name only when it is complete."""
    with open(f"{path}.part", "wb") as file:
        dump(value, file)
    os.replace(f"{path}.part", path)


def _write_error(folder, rank, host, error):
    """Write a report of an exception to a file, from which `launch` raises an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next  # skip the frames of the launch itself
    text = "".join(traceback.format_exception(type(error), error, trace))
    report = {"rank": rank, "host": host, "text": text, "line": str(error), "error": None}
    is_named = type(error).__module__ == "mpidl.errors" or isinstance(error, KeyboardInterrupt)
    report["kind"] = type(error).__name__ if is_named else ""
    try:
        file = io.BytesIO()
        dump(error, file)
        report["error"] = file.getvalue()
    except Exception:
        report["error"] = None  # the exception cannot be pickled; the report keeps the traceback
    _write_complete(os.path.join(folder, f"error-{rank}"), report)


def _run_main_program(program):
    """Run the main program of the launching process under the name `MAIN`, to get its definitions.

    `program` is a tuple (kind, name) from `launch`, or None if there is nothing to run.
    """
    if program is None:
        return
    kind, name = program
    module = ModuleType(MAIN)
    sys.modules["__main__"] = sys.modules[MAIN] = module
    run = runpy.run_path if kind == "path" else runpy.run_module
    vars(module).update(run(name, run_name=MAIN))


def _load_task(file):
    """Read the function and its arguments from the task file.

    Raise UserError if the pickle needs a name that the main program does not define when it runs
    under the name `MAIN`.
    """
    try:
        return pickle.load(file)
    except AttributeError as error:
        if MAIN not in str(error) and "__main__" not in str(error):
            raise
        raise UserError(
            f"launch: {error}: the ranks import the script without the code under "
            '`if __name__ == "__main__":`; define it above that line'
        ) from error


def _redirect_output(rank, show):
    """Prefix the output lines of a rank other than 0; drop its stdout unless `show` is "all"."""
    if rank == 0:
        return
    if show != "all":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = (PrefixedStream(f"rank {rank}: ", number) for number in (1, 2))


class PrefixedStream(io.TextIOBase):
    """A text stream that writes complete lines with a prefix to a file descriptor."""

    def __init__(self, prefix: str, descriptor: int) -> None:
        self.prefix, self.descriptor, self._partial_line = prefix, descriptor, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        self._write_lines(lines)
        return len(text)

    def end_line(self) -> None:
        """Write the last line if it is incomplete."""
        if self._partial_line:
            self.write("\n")

    def _write_lines(self, lines):
        text = "".join(f"{self.prefix}{line}\n" for line in lines)
        if text:
            os.write(self.descriptor, text.encode("utf-8", "backslashreplace"))


def _interrupt(folder):
    """When the launching process requests it, interrupt the main thread like Ctrl-C."""
    while not os.path.exists(os.path.join(folder, INTERRUPT_FILE)):
        time.sleep(INTERRUPT_SECONDS)
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        signal.pthread_kill(main_thread, signal.SIGINT)


def _end_with_launcher(folder):
    """End this rank when the launching process ends and thereby releases its lock on LOCK_FILE."""
    with open(os.path.join(folder, LOCK_FILE)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
            except BlockingIOError:
                time.sleep(0.5)
            except OSError:
                return  # the file system does not support locks
