"""Import the modules of a command with few system calls.

For each module, Python accesses the file system six times: once for the status of the folder, twice
for the status of the file, once to open the bytecode, and twice for the status of the bytecode. For
each package, Python also searches for three extension modules named `__init__`, which hardly any
package has. If thousands of ranks start at the same time, these accesses slow a parallel file
system. In a command, this module reduces the accesses per module to two, and replaces the search by
the list of the package's files, which Python reads anyway to import the modules of the package.

In other programs, this module changes nothing. It imports only modules that Python has already
loaded, because its own imports are usual ones.
"""

import os
import sys

# Private parts of CPython, which exist at least in versions 3.10 to 3.14. If they are missing,
# imports are not changed. On other systems than Linux, `_fill_cache` may ignore case.
_importer = sys.modules.get("_frozen_importlib_external")
_has_parts = (
    sys.platform == "linux"
    and hasattr(_importer, "_path_stat")
    and hasattr(getattr(_importer, "FileLoader", None), "get_data")
    and hasattr(getattr(_importer, "FileFinder", None), "_fill_cache")
)


def _parts():
    finder, loader = _importer.FileFinder, _importer.FileLoader
    return _importer._path_stat, finder._fill_cache, loader.get_data


def _set_parts(path_stat, fill_cache, get_data):
    _importer._path_stat = path_stat  # type: ignore[attr-defined]  # private, see _has_parts
    _importer.FileFinder._fill_cache = fill_cache
    _importer.FileLoader.get_data = get_data


_usual = _parts() if _has_parts else None
_changed = _usual  # the parts that this module has set last
_is_command = False  # whether `begin` has found that this process runs a command


def command() -> str | None:
    """Return the name of the mpidl command that this process runs, or None in another program.

    ``python -m mpidl.train`` imports the package before the module. At that time, sys.argv[0] is
    still "-m".
    """
    program = sys.modules.get("mpidl_command")
    if program is not None and program.command:
        return program.command
    if sys.argv[:1] != ["-m"]:
        return None
    package, _, name = sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")
    if package != "mpidl":
        return None
    if "." in name:  # a side process of a command
        return None
    return name or next(iter(sys.argv[1:]), None)  # "python -m mpidl train"


def begin() -> None:
    """Import with few system calls until `end` if this process runs a command."""
    global _is_command
    _is_command = command() is not None
    if _is_command and _usual is not None:
        _change_imports()


def end() -> None:
    """Restore Python's usual imports, because files may change from now on.

    Parts that another package has replaced in the meantime stay as they are.
    """
    if _is_command and _usual is not None:
        current = zip(_parts(), _changed, _usual, strict=True)
        _set_parts(*(usual if part is changed else part for part, changed, usual in current))


class QuickImports:
    """Context manager that imports with few system calls if this process runs a command.

    If another thread ends its block first, the following imports of this block are usual imports.
    """

    def __enter__(self) -> None:
        if _is_command and _usual is not None:
            _change_imports()

    def __exit__(self, *_: object) -> None:
        end()


def _change_imports():
    """Make imports remember the status of each file and the list of each folder."""
    global _changed
    path_stat, _, _ = _usual
    names = _remembering(_names_in)

    def fill_cache(finder):
        finder._path_cache = set(names(finder.path) or ())

    _changed = _remembering(_with_lists(path_stat, names)), fill_cache, _read_file
    _set_parts(*_changed)


def _remembering(ask):
    """Return a function that caches the result of ask(path). Exceptions are not cached."""
    answers = {}

    def status(path):
        if path not in answers:
            answers[path] = ask(path)
        return answers[path]

    return status


def _names_in(folder):
    """Return the names in a folder, or None if the folder cannot be listed."""
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return None


def _with_lists(ask, names):
    """Return a function like ask(path) that finds missing `__init__` files by names(folder)."""

    def status(path):
        folder, _, name = path.rpartition("/")
        if name.startswith("__init__."):
            listed = names(folder)
            if listed is not None and name not in listed:
                raise FileNotFoundError(path)
        return ask(path)

    return status


def _read_file(loader, path):
    """Return the bytes of a file, as a replacement for the method `get_data` of a loader."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
